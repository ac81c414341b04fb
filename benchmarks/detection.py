"""How much silent corruption is found, where, how soon, and at what price?

Real ranks over gloo train a small model with DistributedDataParallel and AdamW. What finds a wrong
number is the product's own: digests of snapshots compared over replicas
(`core/detection/replicas.py`) and a buddy that computes a rank's local gradient a second time
(`edge/torch/buddy.py`).

    python benchmarks/detection.py                    # all of it: some minutes
    python benchmarks/detection.py --clean-steps 0    # recall and cost alone
    python benchmarks/detection.py --slow             # slow ranks alone: benchmarks/slow_ranks.py
    python benchmarks/detection.py --links            # link-slow, link-loss: links.py
    python benchmarks/detection.py --faults           # quota, heat, disk, blindness: sickness.py
    python benchmarks/detection.py --parts            # what probing parts costs: parts.py
    python benchmarks/detection.py --diagnose         # 100 MB of logs: diagnose.py
    python benchmarks/detection.py --defaults         # what all of it costs: defaults.py
    python benchmarks/detection.py --json

**Recall.** For each site 96 flips of one bit, three of each of the 32, on a rank and an element
drawn from the seed. Each is a step done three times from the same state: as it should be, with the
flip, and compared. A flip counts when it changes a bit of any rank's state; what it does not change
nobody has to find. The buddy is asked about the rank that is wrong: how likely it is to be asked in
that very step is another column. The same by magnitude, in ranges of bits (`magnitude.py`).
Intervals are Wilson's, 95 %.

**False alarms.** So many clean steps, each with one comparison of digests and one of a buddy.

**Cost.** A job under `keepstep.protect`, in blocks of steps that compare digests and blocks that do
not, in turn: the median of each round's ratio. Bitwise comparison has no threshold, so there is
nothing to fit.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness  # beside this file: it is started as a script
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from magnitude import by_magnitude
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepstep
from keepstep.core.detection.buddies import Pair
from keepstep.core.detection.replicas import blame, first_difference, marked
from keepstep.core.resume.cut import Holding
from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.replica_digest import replica_digest
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch import buddy as buddies
from keepstep.edge.torch.capture import TensorCopy
from keepstep.edge.torch.replicas import ReplicaFinder
from keepstep.edge.torch.state import Protected
from keepstep.model.snapshot import Stamp
from keepstep.sim.economics.confidence import share_interval
from keepstep.testing.faults import BITFLIP, SITES, Fault
from keepstep.testing.number_faults import NumberFaults, flip

BESIDE = {
    "--slow": "slow_ranks",
    "--links": "links",
    "--faults": "sickness",
    "--parts": "parts",
    "--diagnose": "diagnose",
    "--defaults": "defaults",
}
SITE_NAMES = [site for site in SITES[BITFLIP] if site != "batch"]
BITS = 32
PER_BIT = 3
WARM_STEPS = 5
BATCH, FEATURES = 16, 32
SEES = {
    "grad": "buddy",
    "activation": "buddy",
    "reduced": "digests",
    "weight": "digests",
    "optimizer": "digests",
}


class Heard:
    """What the buddy says, as `BuddyHost`."""

    def __init__(self) -> None:
        self.step = 0
        self.pair: Pair | None = None
        self.found: buddies.Found | None = None

    def buddy_step(self) -> int:
        return self.step

    def buddy_pair(self, size: int) -> Pair | None:
        return self.pair

    def buddy_peers(self) -> None:
        """Nobody is lost here."""

    def buddy_heard(self, found: buddies.Found) -> None:
        self.found = found if found.names else None


class OneFlip(NumberFaults):
    """The product's hooks, for one flip at a time that is said here."""

    def __init__(self) -> None:
        self._mine = {n: Fault(BITFLIP, 0, 0, site=site) for n, site in enumerate(SITE_NAMES)}
        self._due = {}
        self._place, self._told = random.Random(0), False

    def arm(self, site: str, bit: int, seed: str) -> None:
        number = SITE_NAMES.index(site)
        self._due = {number: Fault(BITFLIP, 0, 0, site=site, bit=bit)}
        self._seed, self._told = seed, False

    def disarm(self) -> bool:
        """Whether it was done."""
        self._due = {}
        return self._told

    def _rng(self, number: int) -> random.Random:
        return random.Random(self._seed)

    def _do(self, number: int, fault: Fault, name: str, tensor: torch.Tensor) -> None:
        del self._due[number]
        assert fault.bit is not None
        flip(tensor, random.Random(f"{self._seed}/place").randrange(tensor.numel()), fault.bit)
        self._told = True


class Training:
    """One rank's, and all that looks at it."""

    def __init__(self, rank: int, size: int, directory: Path) -> None:
        torch.manual_seed(7)
        network = nn.Sequential(
            *(nn.Linear(FEATURES, 64), nn.LayerNorm(64), nn.ReLU(), nn.Dropout(0.1)),
            *(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, FEATURES)),
        )
        self.rank, self.size = rank, size
        self.model = DistributedDataParallel(network)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.heard = Heard()
        self.buddy = buddies.Buddy(self.heard, self.model, self.compute, rank)
        self.flips = OneFlip()
        self.flips.attach(self.model, self.optimizer)
        self.optimizer.register_step_pre_hook(self.buddy.before_update)
        self.protected = Protected.of({"model": self.model, "optimizer": self.optimizer}, lazy=True)
        self.finder = ReplicaFinder(rank, size)
        self.slot = Slot.create(MEMORY, directory / f"slot-{rank}", 4 << 20, 1 << 20)
        torch.manual_seed(100 + rank)

    @staticmethod
    def compute(network: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (network(batch) - batch).square().mean()

    def step(self, batch: torch.Tensor) -> None:
        self.heard.step += 1
        self.optimizer.zero_grad()
        self.buddy(batch).backward()
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        found = [p.detach() for p in self.model.parameters()]
        for parameter in self.model.parameters():
            found += self.optimizer.state[parameter].values()
        return found

    def save(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        return [t.clone() for t in self.tensors()], torch.get_rng_state()

    def restore(self, saved: tuple[list[torch.Tensor], torch.Tensor]) -> None:
        for tensor, value in zip(self.tensors(), saved[0], strict=True):
            tensor.copy_(value)
        torch.set_rng_state(saved[1])

    def holdings(self, step: int) -> dict[int, Holding]:
        """Of all ranks: what their pages would tell of a snapshot of this moment."""
        state = self.protected.gather()
        copy = TensorCopy(state, self.slot)
        self.slot.begin(bytes(16), self.rank, self.size, 1, Stamp(step, 1))
        copy.copy_moving()
        run_acts(copy.copy_still())
        header = self.slot.write_table(state.payload_bytes, b"{}", copy.sums)
        replicas = self.finder.find(self.protected, state)
        assert replicas is not None and replicas.is_claimed
        digest = marked(replica_digest(self.slot, header, replicas.spans), True, True)
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, (replicas.group, digest))
        stamp = Stamp(step, 1)
        return {
            rank: Holding(frozenset({stamp}), None, step, group, ((stamp, one),))
            for rank, (group, one) in enumerate(told)
        }

    def any_rank(self, here: bool) -> bool:
        flag = torch.tensor([int(here)])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Bit for bit; what is not a number, too."""
    return all(
        ctypes.string_at(a.data_ptr(), a.nbytes) == ctypes.string_at(b.data_ptr(), b.nbytes)
        for a, b in zip(one, other, strict=True)
    )


def recall(training: Training, seed: int, trials_per_bit: int) -> list[dict[str, Any]]:
    """Every trial: site, bit, whether it changed the state, and who saw it."""
    rows = []
    number = 0
    for site in SITE_NAMES:
        for bit in range(BITS):
            for _ in range(trials_per_bit):
                number += 1
                draw = random.Random(f"{seed}/{number}")
                wrong = draw.randrange(training.size)
                further = draw.randrange(1, training.size)
                training.heard.pair = Pair(wrong, (wrong + further) % training.size)
                batch = torch.randn(BATCH, FEATURES)
                before = training.save()
                training.step(batch)
                assert training.heard.found is None, "a clean step accuses somebody"
                clean = training.save()
                training.restore(before)
                if training.rank == wrong:
                    training.flips.arm(site, bit, f"{seed}/{number}/where")
                training.step(batch)
                done = training.any_rank(training.flips.disarm())
                changed = training.any_rank(not same(training.save()[0], clean[0]))
                told = training.holdings(number)
                stamp = first_difference(list(told.values()), [Stamp(number, 1)])
                found, training.heard.found = training.heard.found, None
                named = None if stamp is None else blame(told, stamp).ranks
                rows.append(
                    {
                        "site": site,
                        "bit": bit,
                        "done": done,
                        "changed": changed,
                        "digests": stamp is not None,
                        "buddy": found is not None,
                        "named": named == (wrong,)
                        or (found is not None and found.checked == wrong),
                    }
                )
                training.restore(clean)
    training.heard.pair = None
    return rows


def false_alarms(training: Training, steps: int) -> dict[str, int]:
    """Clean steps, each looked at by both."""
    alarms = {"digests": 0, "buddy": 0, "steps": steps}
    for number in range(steps):
        checked = number % training.size
        training.heard.pair = Pair(checked, (checked + 1 + number) % training.size)
        if training.heard.pair.checked == training.heard.pair.buddy:
            training.heard.pair = Pair(checked, (checked + 1) % training.size)
        if number % 1000 == 500:  # a learning rate that jumps is nothing wrong
            for group in training.optimizer.param_groups:
                group["lr"] *= 3 if number % 2000 == 500 else 1 / 3
        training.step(torch.randn(BATCH, FEATURES))
        told = training.holdings(number)
        stamp = first_difference(list(told.values()), [Stamp(number, 1)])
        alarms["digests"] += stamp is not None
        alarms["buddy"] += training.heard.found is not None
        training.heard.found = None
    return alarms


def cost(rank: int, size: int, rounds: int, width: int) -> dict[str, float]:
    """Steps with digests and without, in turn, in one job."""
    network = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    job = keepstep.protect(model=model, optimizer=optimizer)
    watch = job._rank._capture._watch
    compares = watch._options
    options = {"with": compares, "without": replace(compares, digest_every_steps=0)}
    taken: dict[str, list[float]] = defaultdict(list)
    block, warm = 12, 4
    order = [name for row in harness.turns(list(options), rounds) for name in row]
    ratios = []
    steps = iter(job.steps(len(order) * block))
    digest_s: list[float] = []
    plain = watch.digest

    def timed(*given: Any) -> tuple[int, int]:
        began = time.perf_counter()
        found = plain(*given)
        digest_s.append(time.perf_counter() - began)
        return found

    watch.digest = timed
    medians: dict[str, float] = {}
    for turn, name in enumerate(order):
        watch._options = options[name]
        spans = []
        for number in range(block):
            began = time.perf_counter()
            next(steps)
            x = torch.randn(32, width)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if number >= warm:
                spans.append(time.perf_counter() - began)
        medians[name] = statistics.median(spans)
        taken[name] += spans
        if turn % 2:
            ratios.append(medians["with"] / medians["without"])
    state_bytes = sum(p.nbytes for p in model.parameters()) * 3
    job.close(ok=False)
    step_s = statistics.median(taken["without"])
    return {
        "ratio": statistics.median(ratios),
        "step_ms": 1e3 * step_s,
        "digest_ms": 1e3 * statistics.median(d for d in digest_s if d > 0),
        "state_mb": state_bytes / 1e6,
        "rounds": len(ratios),
    }


def worker(rank: int, args: argparse.Namespace, directory: Path, what: str) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(args.ranks if what != "cost" else 2),
        LOCAL_WORLD_SIZE=str(args.ranks if what != "cost" else 2),
        MASTER_ADDR="127.0.0.1",
    )
    torch.set_num_threads(1)
    size = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(directory / f"store-{what}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    found: Any
    if what == "cost":
        os.environ["KEEPSTEP_JOB"] = f"bench-{os.path.basename(directory)}"
        os.environ["KEEPSTEP_STATE_DIR"] = str(directory)
        os.environ["KEEPSTEP_GRACE_S"] = "0"
        found = cost(rank, size, args.rounds, args.width)
    else:
        training = Training(rank, size, directory)
        training.heard.pair = Pair(0, 1)
        for _ in range(WARM_STEPS):
            training.step(torch.randn(BATCH, FEATURES))
        if what == "recall":
            found = recall(training, args.seed, args.per_bit)
        else:
            found = false_alarms(training, args.clean_steps)
    if rank == 0:
        (directory / f"{what}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def run(what: str, args: argparse.Namespace, directory: Path) -> Any:
    size = 2 if what == "cost" else args.ranks
    mp.spawn(worker, (args, directory, what), nprocs=size)
    return json.loads((directory / f"{what}.json").read_text())


def share(hits: int, trials: int) -> str:
    low, high = share_interval(hits, trials)
    return f"{hits}/{trials} ({100 * low:.1f} to {100 * high:.1f} %)"


def table(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By site: of the flips that changed the state, how many each saw."""
    found: dict[str, dict[str, Any]] = {}
    for site in SITE_NAMES:
        of_site = [row for row in rows if row["site"] == site]
        changing = [row for row in of_site if row["changed"]]
        seen = [row for row in changing if row["digests"] or row["buddy"]]
        found[site] = {
            "flips": len(of_site),
            "done": sum(row["done"] for row in of_site),
            "changing": len(changing),
            "digests": sum(row["digests"] for row in changing),
            "buddy": sum(row["buddy"] for row in changing),
            "either": len(seen),
            "named": sum(row["named"] for row in seen),
            "missed_bits": sorted(row["bit"] for row in changing if row not in seen),
            "interval": share_interval(len(seen), len(changing)),
            "by_magnitude": by_magnitude(changing),
        }
    return found


def show(report: dict[str, Any]) -> None:
    print(f"{report['ranks']} ranks, seed {report['seed']}")
    for site, row in report["recall"].items():
        total = row["changing"]
        print(f"\n{site}: {row['flips']} flips, {total} of them change the state")
        for who in ("digests", "buddy", "either"):
            print(f"  {who:8} {share(row[who], total)}")
        print(f"  the right rank named by who saw it: {row['named']} of {row['either']}")
        for name, part in row["by_magnitude"].items():
            told = share(part["either"], part["changing"]) if part["changing"] else "none"
            print(f"    {name}: {told}")
        if row["missed_bits"]:
            print(f"  missed at bits {row['missed_bits']}")
    if alarms := report.get("clean"):
        print(f"\n{alarms['steps']} clean steps: {alarms['digests']} alarms of digests, ", end="")
        print(f"{alarms['buddy']} of buddies")
    if price := report.get("cost"):
        print(
            f"\ncost: {100 * (price['ratio'] - 1):+.2f} % of a step of {price['step_ms']:.1f} ms "
        )
        print(
            f"({price['rounds']} rounds; a digest takes {price['digest_ms']:.3f} ms beside it, of "
        )
        print(f"{price['state_mb']:.1f} MB of state)")


def main() -> None:
    if name := next((BESIDE[given] for given in sys.argv if given in BESIDE), None):
        module = importlib.import_module(name)  # with options of its own
        sys.argv = [str(module.__file__), *(g for g in sys.argv[1:] if g not in BESIDE)]
        module.main()
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--per-bit", type=int, default=PER_BIT)
    parser.add_argument("--clean-steps", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=12, help="of cost; 0: none")
    parser.add_argument("--width", type=int, default=512, help="of the model whose steps are timed")
    parser.add_argument("--json", action="store_true")
    for given, name in BESIDE.items():
        text = f"benchmarks/{name}.py instead, with its options"
        parser.add_argument(given, action="store_true", help=text)
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="keepstep-detection-", dir="/dev/shm"))
    report: dict[str, Any] = {"ranks": args.ranks, "seed": args.seed}
    watch = harness.watch()
    try:
        rows = run("recall", args, directory)
        report["recall"] = table(rows)
        if args.clean_steps:
            report["clean"] = run("clean", args, directory)
        if args.rounds:
            report["cost"] = run("cost", args, directory)
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(directory)
    harness.tell(watch.end(), report, args.json, show)


if __name__ == "__main__":
    main()
