"""One of several ranks on one device that share one snapshot.

    KEEPSTEP_SHARE_REPLICAS=node keepstep run --nproc-per-node 2 benchmarks/gpu/sharing.py

Started by tests and by `lab.py`. Prints the hash of what it has trained and figures of its
snapshots: whole ones first, then shares (`SHARES_FROM`: the step from which replicas are looked
for). `DIES_AT`: the step in which rank 1 kills itself in its first life. `ALIKE=1`: all ranks train
on the same, so that no gradient goes over the host. `WIDTH`, `LAYERS`, `STEPS`, `PAUSE_S`: of the
training. Without a device it trains on the host.
"""

from __future__ import annotations

import hashlib
import os
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import keepstep
from keepstep.edge.torch.live_state import TorchState
from keepstep.runtime.rank.sharing import Sharing

RANK = int(os.environ["RANK"])
WIDTH = int(os.environ.get("WIDTH", "1536"))
LAYERS = int(os.environ.get("LAYERS", "3"))
STEPS = int(os.environ.get("STEPS", "24"))
PAUSE_S = float(os.environ.get("PAUSE_S", "0.1"))
SHARES_FROM = int(os.environ.get("SHARES_FROM", "0"))
IS_ALIKE = os.environ.get("ALIKE") == "1"
SETTLED = 3  # steps before times count
ON = "cuda" if torch.cuda.is_available() else "cpu"


def watch_copies() -> list[Any]:
    """The newest snapshot's copy, which knows how many bytes leave the device."""
    make, newest = TorchState.copy, []

    def copy(self: TorchState, *given: Any) -> Any:
        newest[:] = [make(self, *given)]
        return newest[0]

    TorchState.copy = copy  # type: ignore[method-assign]
    return newest


def hold_shares() -> None:
    boundary = Sharing.boundary

    def held(self: Sharing, step: int, *given: Any) -> None:
        if step >= SHARES_FROM:
            boundary(self, step, *given)

    Sharing.boundary = held  # type: ignore[method-assign]


@dataclass
class Told:
    """At the end of a step: `left` the device for its snapshot; `stall_ns`, of all steps so far."""

    at_s: float
    stall_ns: int
    left: int
    is_shared: bool
    memory: int


def phase(name: str, steps: Sequence[Told]) -> dict[str, int]:
    """Medians."""
    pairs = list(pairwise(steps))
    if not pairs:
        return {}
    middle = statistics.median
    return {
        f"{name}_left": int(middle(step.left for step in steps)),
        f"{name}_memory": steps[-1].memory,
        f"{name}_stall_us": int(middle(b.stall_ns - a.stall_ns for a, b in pairs)) // 1000,
        f"{name}_step_us": int(1e6 * middle(b.at_s - a.at_s for a, b in pairs)),
    }


def summed_on_host(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        host = parameter.grad.cpu()
        dist.all_reduce(host)
        parameter.grad.copy_(host / dist.get_world_size())


def hashed(*states: dict[Any, Any]) -> str:
    digest = hashlib.sha256()
    for state in states:
        for value in state.values():
            if isinstance(value, torch.Tensor):
                digest.update(value.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def slot_files() -> list[Path]:
    arena = Path(os.environ["KEEPSTEP_ARENA_DIR"])
    return [path for path in arena.rglob(f"rank-{RANK:05d}/slot-*") if path.name[-1].isdigit()]


def memory_of(files: Sequence[Path]) -> int:
    return sum(path.stat().st_blocks * 512 for path in files)


def main() -> None:
    copies = watch_copies()
    hold_shares()
    if ON == "cuda":
        torch.cuda.set_device(0)
    keepstep.init_process_group()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).to(ON)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    job = keepstep.protect(model=model, optimizer=optimizer)
    dies = RANK == 1 and os.environ.get("KEEPSTEP_ATTEMPT") == "0" and "DIES_AT" in os.environ
    told: list[Told] = []
    for step in job.steps(STEPS):
        with step:
            seed = 1000 * int(step) + (0 if IS_ALIKE else RANK)
            x = torch.randn(64, WIDTH, device=ON, generator=torch.Generator(ON).manual_seed(seed))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if dies and int(step) == int(os.environ["DIES_AT"]):
                os.kill(os.getpid(), signal.SIGKILL)
            if IS_ALIKE:
                dist.barrier()
            else:
                summed_on_host(model)
            time.sleep(PAUSE_S)
            optimizer.step()
        if ON == "cuda":
            torch.cuda.synchronize()
        stall_ns, memory = job._rank._page.read().stall_ns_total, memory_of(slot_files())
        copy = copies[0] if copies else None
        left, is_shared = (0, False) if copy is None else (copy.device_bytes, bool(copy.lacking))
        told.append(Told(time.perf_counter(), stall_ns, left, is_shared, memory))
    page = job._rank._page.read()
    figures = {
        "kept": page.kept_bytes,
        "payload": page.payload_bytes,
        "left": told[-1].left,
        "memory": told[-1].memory,
        "slots": len(slot_files()),
        "captured": page.captured_steps,
        "skipped": page.skipped_steps,
        **phase("whole", [one for one in told if not one.is_shared][SETTLED:]),
        **phase("shared", [one for one in told if one.is_shared][SETTLED:]),
    }
    print("figures", RANK, " ".join(f"{name}={value}" for name, value in figures.items()))
    print("hash", RANK, hashed(model.state_dict(), *optimizer.state.values()), flush=True)


if __name__ == "__main__":
    main()
