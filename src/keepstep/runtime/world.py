"""World: everything a keeper touches, in one value. `runtime/keeper/process.py` makes the real one,
`sim/` one of virtual time.

Who runs a `Keeper(settings, world)` tells it what happens, always in its one loop: `hear(box,
message)` and `gone(box)` of the boxes of this node, `hear_peers()` after `wake`, `preempted()`, and
`tick()` at least every `tick_ns`, until that says that all is over; then `close()`. A keeper may be
left at any moment without another word: that is how one dies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from keepstep.ports import Checkpoints, Clock, Executor, Journal, Memory, OpenLinks, Writer


@dataclass(frozen=True, slots=True)
class World:
    """`wake`, from any thread: have the loop call `Keeper.hear_peers` soon. `pid` and `uid` are the
    keeper's own."""

    clock: Clock
    memory: Memory
    journal: Journal
    workers: Executor
    open_links: OpenLinks
    wake: Callable[[], None]
    checkpoints: Checkpoints | None  # None: the job has no store
    writer: Writer | None  # likewise
    pid: int
    uid: int
