"""KeeperWorld: everything a keeper touches, in one value. `runtime/keeper/process.py` makes the
real one, `sim/` one of virtual time.

Who runs a `KeeperRun(settings, world, ...)` (`runtime/keeper/run.py`) calls it from the one loop
that also brings all answers of these ports. A keeper may be left at any moment without another
word: that is how one dies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from keepstep.ports import (
    Checkpoints,
    Clock,
    Executor,
    Journal,
    Memory,
    OpenLinks,
    Persisters,
    ServeBoxes,
    Timers,
)


@dataclass(frozen=True, slots=True)
class KeeperWorld:
    """`aside`: for what may never come back, as a store on a dead mount does not: it keeps neither
    the workers from other work nor the process from its end. `wake`, from any thread: have the loop
    call `KeeperRun.hear_peers` soon. `pid` and `uid` are the keeper's own."""

    clock: Clock
    timers: Timers
    memory: Memory
    journal: Journal
    workers: Executor
    aside: Executor
    serve_boxes: ServeBoxes
    open_links: OpenLinks
    wake: Callable[[], None]
    checkpoints: Checkpoints | None  # None: the job has no store
    persisters: Persisters | None  # likewise
    pid: int
    uid: int
