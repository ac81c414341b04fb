"""How long does a training stand still when one of its ranks is killed?

Jobs of some ranks on this machine: a small MLP under DDP over gloo, every step 20 ms of sleep and
an all-reduce. A rank gets SIGKILL at a random moment of a step, again and again, the ranks in turn.
Interleaved: each job is started `--rounds` times, the order turned each time.

    python benchmarks/recovery.py           # 20 kills each: about a quarter of an hour on two cores
    python benchmarks/recovery.py --quick   # 5 kills each
    python benchmarks/recovery.py --ranks 2 --mib 1024 --only "prebuilt,standby,no standby"
    python benchmarks/recovery.py --json

With `--mib` each rank has so much state of its own beside the network, changed by every step.
Behind the first step after each restore all of it is compared with what that step makes of it; a
difference ends the benchmark with an error.

standby     keepstep run, `with step:`: the others stay in their process, the one that stands by
            takes the dead one's place.
prebuilt    With --mib: the same with --prebuild; the process that stands by has made the large
            state, too.
no standby  The same with --standby 0: a new process takes the place, and imports torch first.
restart     keepstep run of a program that knows neither `with step:` nor keepstep's groups: all
            ranks start anew, from memory.
torchrun    torchrun --max-restarts, its defaults. A checkpoint is the program's own: here rank 0
            does torch.save into memory after every step, in the trainer, and all ranks load it, so
            that as many steps are kept as with keepstep. It keeps no random states.

Measured from outside. `next step`: from the kill until the last rank has finished the first step
that the dead rank's successor takes part in, by what every rank writes after each of its steps.
`knew`: from the kill until a survivor heard of it, each one counted. Both clocks are
CLOCK_MONOTONIC. The standby job is killed only when a process stands by. Every line names the load
averages it was measured at.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import harness  # beside this file: it is started as a script

from keepstep.edge.os.journal import JournalTail
from keepstep.model.events import Event

RECORD = struct.Struct("<qqq")  # step, when it was finished (ns), process
PATIENCE_S = 180.0
CALM_STEPS = 20  # between the end of a recovery and the next kill
FOREVER = 1 << 40
NEXT_STEP_TARGET_S = {"standby": 1.5, "no standby": 3.0}
LARGE_TARGET_S = {"prebuilt": 1.0, "standby": 1.0, "no standby": 4.0}  # of 1 GiB a rank
KNEW_TARGET_S = 0.5
MIB = "RECOVERY_MIB"  # of large_state.py
VARIANTS = ("prebuilt", "standby", "no standby", "restart", "torchrun")
STANDING_BY = ("prebuilt", "standby")


# -- what is killed


class Ballast:
    """A large state: after step n each of its numbers is -(n + 1), exactly."""

    def __init__(self, mib: int) -> None:
        import torch

        import keepstep

        if not mib:
            self.state: dict[str, Any] = {}
            return
        self._weights = keepstep.prebuilt("large_state:weights")
        self._gradient = torch.ones(1).expand_as(self._weights)  # takes no memory, nor time
        self.optimizer = torch.optim.SGD([self._weights], lr=1.0)
        self.state = {"weights": self._weights, "weights_optimizer": self.optimizer}

    def check(self, step: int) -> None:
        """Behind `step`, which may be the first one after a restore: it added the same to all."""
        if not bool((self._weights == -float(step + 1)).all()):
            raise SystemExit(f"what was restored is not what step {step - 1} left")

    def update(self) -> None:
        self._weights.grad = self._gradient
        self.optimizer.step()
        self._weights.grad = None  # else it were part of the state


def train(variant: str, room: Path, step_s: float, mib: int) -> None:
    """One rank, until it is ended. Tells every step it has finished."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    stays = variant in (*STANDING_BY, "no standby")
    if stays:
        import keepstep

        keepstep.init_process_group()
    else:
        dist.init_process_group("gloo")
    torch.manual_seed(7)
    mlp = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64))
    model = torch.nn.parallel.DistributedDataParallel(mlp)
    optimizer = torch.optim.AdamW(model.parameters())
    ballast = Ballast(mib)
    told = open(room / f"rank-{dist.get_rank()}", "ab", buffering=0)  # noqa: SIM115

    def body(step: int) -> None:
        optimizer.zero_grad()
        time.sleep(step_s)  # what a device would compute meanwhile
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        if mib:
            ballast.update()
        told.write(RECORD.pack(step, time.monotonic_ns(), os.getpid()))

    if variant == "torchrun":
        checkpoint = room / "checkpoint.pt"
        first = 0
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            first = saved["step"] + 1
        for step in range(first, FOREVER):
            body(step)
            if dist.get_rank() == 0:
                torch.save(
                    {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "step": step,
                    },
                    room / "coming.pt",
                )
                os.replace(room / "coming.pt", checkpoint)
        return

    import keepstep

    last = -2
    for step in keepstep.protect(model=model, optimizer=optimizer, **ballast.state).steps(FOREVER):
        if stays:
            with step:
                body(step)
        else:
            body(step)
        if mib and step != last + 1:
            ballast.check(step)  # when the step has been told: no program would do this
        last = int(step)


# -- killing it


@dataclass(frozen=True, slots=True)
class Told:
    step: int
    at_ns: int
    pid: int


@dataclass(frozen=True, slots=True)
class Recovery:
    """What followed one kill. `stayed`: ranks that are still the same process. `lost_steps`:
    finished by all ranks, and done again."""

    rank: int
    next_step_s: float
    knew_s: list[float]
    stayed: int
    lost_steps: int
    load: float


class Ranks:
    """A running job, seen from outside."""

    def __init__(self, variant: str, ranks: int, room: Path, step_s: float, mib: int) -> None:
        self.variant, self.room = variant, room
        room.mkdir()
        self.told: list[list[Told]] = [[] for _ in range(ranks)]
        self._files = [open(room / f"rank-{rank}", "a+b", buffering=0) for rank in range(ranks)]  # noqa: SIM115
        for file in self._files:
            file.seek(0)
        self.events: list[Event] = []
        self._journal = JournalTail(room / "j" / "journal.jsonl")
        program = [__file__, "--train", variant, str(room), str(step_s), str(mib)]
        if variant == "torchrun":
            command = [
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(ranks),
                "--max-restarts",
                "10000",
                *program,
            ]
        else:
            command = [
                "keepstep.cli.main",
                "run",
                "--nproc-per-node",
                str(ranks),
                "--max-restarts",
                "10000",
                "--job",
                "j",
            ]
            command += [
                "--standby",
                str(int(variant in STANDING_BY)),
                *(["--prebuild", "large_state:weights"] if variant == "prebuilt" else []),
                "--arena-dir",
                str(room),
                "--state-dir",
                str(room),
                *program,
            ]
        # torchrun keeps one store over its restarts and then meets a dead rank 0's address
        # (pytorch#135712).
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            MIB: str(mib),
        }
        with open(room / "log", "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command], stdout=log, stderr=log, env=environ
            )

    def look(self) -> None:
        self.events += self._journal.read()
        for told, file in zip(self.told, self._files, strict=True):
            told += [Told(*record) for record in RECORD.iter_unpack(file.read())]

    def until(self, true: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        self.look()
        while not true():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(
                    f"{self.variant}: expected {what} within {PATIENCE_S:.0f} s; {self._log()}"
                )
            time.sleep(0.02)
            self.look()

    def _log(self) -> str:
        return (self.room / "log").read_text(errors="replace")[-3000:]

    def until_all_reached(self, step: int) -> None:
        self.until(
            lambda: all(told and told[-1].step >= step for told in self.told),
            f"all ranks at step {step}",
        )

    def until_calm(self) -> None:
        self.until(lambda: all(self.told), "a step of every rank")
        self.until_all_reached(max(told[-1].step for told in self.told) + CALM_STEPS)
        if self.variant in STANDING_BY:
            count = lambda kind: sum(event.kind == kind for event in self.events)  # noqa: E731
            self.until(
                lambda: count("standby-ready") > count("rank-respawned"), "a process that stands by"
            )

    def kill(self, rank: int) -> Recovery:
        before = [told[-1].pid for told in self.told]
        load = os.getloadavg()[0]
        killed_ns = time.monotonic_ns()
        os.kill(before[rank], signal.SIGKILL)

        def successor() -> list[Told]:
            told = self.told[rank]
            return [t for t in told if t.at_ns > killed_ns and t.pid != before[rank]]

        self.until(lambda: bool(successor()), f"a step of rank {rank}'s successor")
        step = successor()[0].step
        self.until_all_reached(step + CALM_STEPS)
        # Survivors may have finished this step before, and have done it again: what counts is the
        # last time.
        finished_ns = max(max(t.at_ns for t in told if t.step == step) for told in self.told)
        newest_of_all = min(max(t.step for t in told if t.at_ns <= killed_ns) for told in self.told)
        heard = [
            event
            for event in self.events
            if event.kind == "lost-notice" and event.mono_ns > killed_ns
        ]
        stayed = sum(told[-1].pid == pid for told, pid in zip(self.told, before, strict=True))
        knew_s = [(event.mono_ns - killed_ns) / 1e9 for event in heard]
        return Recovery(
            rank,
            (finished_ns - killed_ns) / 1e9,
            knew_s,
            stayed,
            max(0, newest_of_all + 1 - step),
            load,
        )

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(60)
        for file in self._files:
            file.close()


# -- the table


@dataclass
class Line:
    """What all kills of one variant took."""

    variant: str
    ranks: int
    recoveries: list[Recovery] = field(default_factory=list)

    def figures(self) -> dict[str, object]:
        steps = [r.next_step_s for r in self.recoveries]
        knew = sorted(s for r in self.recoveries for s in r.knew_s)
        loads = [r.load for r in self.recoveries]
        found: dict[str, object] = {"variant": self.variant, "ranks": self.ranks, "n": len(steps)}
        found |= {"median_s": statistics.median(steps), "min_s": min(steps), "max_s": max(steps)}
        found |= {
            "stayed": min(r.stayed for r in self.recoveries),
            "lost_steps": max(r.lost_steps for r in self.recoveries),
        }
        if knew:
            found |= {
                "knew_n": len(knew),
                "knew_median_s": statistics.median(knew),
                "knew_p99_s": knew[math.ceil(0.99 * len(knew)) - 1],
            }
        return found | {
            "load_min": min(loads),
            "load_max": max(loads),
            "recoveries": [asdict(r) for r in self.recoveries],
        }


def show(lines: list[Line], step_ms: float, is_large: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    cores = len(os.sched_getaffinity(0))
    title = (
        f"{lines[0].ranks} ranks on {cores} cores, steps of {step_ms:g} ms: SIGKILL of a rank "
        "until all have done the next step"
    )
    table = Table(title=title, box=box.SIMPLE, title_justify="left")
    for name in (
        "",
        "n",
        "median s",
        "min",
        "max",
        "target",
        "knew ms, median",
        "p99",
        "target",
        "stayed",
        "lost steps",
        "load",
    ):
        table.add_column(name, justify="right" if name else "left")
    for line in lines:
        f = line.figures()
        target_s = (LARGE_TARGET_S if is_large else NEXT_STEP_TARGET_S).get(line.variant)
        knew = ["", "", ""]
        if "knew_n" in f:
            knew = [
                f"{1e3 * f['knew_median_s']:.1f}",  # type: ignore[operator]
                f"{1e3 * f['knew_p99_s']:.1f}",  # type: ignore[operator]
                f"{1e3 * KNEW_TARGET_S:.0f}",
            ]
        row = [
            line.variant,
            str(f["n"]),
            f"{f['median_s']:.2f}",
            f"{f['min_s']:.2f}",
            f"{f['max_s']:.2f}",
        ]
        row += [
            f"{target_s:g}" if target_s else "",
            *knew,
            f"{f['stayed']} of {line.ranks}",
            str(f["lost_steps"]),
        ]
        table.add_row(*row, f"{f['load_min']:.1f} to {f['load_max']:.1f}")
    Console(width=140).print(table)


def measure(args: argparse.Namespace, room: Path) -> list[Line]:
    lines = [Line(variant, args.ranks) for variant in VARIANTS if variant in args.only.split(",")]
    phase = random.Random(args.seed)
    for turn in range(args.rounds):
        kills = args.kills // args.rounds + (turn < args.kills % args.rounds)
        for line in lines[::-1] if turn % 2 else lines:
            ranks = Ranks(
                line.variant,
                args.ranks,
                room / f"{line.variant.replace(' ', '-')}-{turn}",
                args.step_ms / 1e3,
                args.mib,
            )
            try:
                for _ in range(kills):
                    ranks.until_calm()
                    time.sleep(phase.uniform(0, args.step_ms / 1e3))
                    line.recoveries.append(ranks.kill(len(line.recoveries) % args.ranks))
                    print(".", end="", file=sys.stderr, flush=True)
            finally:
                ranks.end()
    print(file=sys.stderr)
    return [line for line in lines if line.recoveries]


def main() -> None:
    if sys.argv[1:2] == ["--train"]:
        return train(sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="5 kills of each in one round")
    parser.add_argument("--kills", type=int, default=20, help="of each job")
    parser.add_argument("--rounds", type=int, default=2, help="over which the kills are spread")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--mib", type=int, default=0, help="more state of each rank")
    parser.add_argument("--only", default=",".join(VARIANTS), help="comma separated")
    parser.add_argument("--seed", type=int, default=0, help="of the moments within a step")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.mib:
        args.only = args.only.removeprefix("prebuilt,")
    elif "torchrun" in args.only:
        parser.error("--mib: torchrun's checkpoint has no room for it; name others with --only")
    if args.quick:
        args.kills, args.rounds = 5, 1
    watch = harness.watch()
    room = Path(tempfile.mkdtemp(prefix="recovery-", dir="/dev/shm"))
    try:
        lines = measure(args, room)
    finally:
        shutil.rmtree(room, ignore_errors=True)
    report = {"lines": [line.figures() for line in lines]}
    is_large = args.mib >= 1024
    harness.tell(watch.end(), report, args.json, lambda _: show(lines, args.step_ms, is_large))


if __name__ == "__main__":
    main()
