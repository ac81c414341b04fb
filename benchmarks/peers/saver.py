"""What a contender must be able to do, and how it is found by its name.

A contender is one module in `contenders/` with a class `Contender`. It saves and restores a
workload by its project's own documented calls, and measures nothing. Where a project has no road
for a measure, or none was built here, the reason stands in this module and goes into the table.

Invariant: `save` returns when training may overwrite the state; after `wait` the last save would
survive what the contender promises to survive.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # it imports torch
    from benchmarks.peers.workload import Workload

NAMES = (
    "torch_save",
    "dcp_async",
    "keepstep",
    "torchsnapshot",
    "dlrover",
    "lm_resiliency",
    "nvrx",
    "orbax",
    "torchft",
    "fastpersist",
)

NOT_BUILT = {  # why a peer takes no part anywhere
    "torchft": "it saves no state: a live replica heals one that is lost, and there is no second "
    "replica here",
}
COMPANIONS = ("dlrover",)  # whose modules have `companion`: what outlives the trainer
PAIRS = ("keepstep", "lm_resiliency", "nvrx")  # whose copy in a peer's memory is measured
# Why the others have no figure for it.
NO_PEER_COPY = {
    "torch_save": "a file: copies are the file system's business",
    "dcp_async": "files: its replicating stager is private to torch",
    "torchsnapshot": "files: there is none in its API",
    "dlrover": "needs several nodes under its job master: not built here",
    "orbax": "its peer-to-peer tier is for JAX on several hosts",
    "torchft": "its transports need a second replica: not built here",
    "fastpersist": "files: there is none in its API",
}


class Contender(Protocol):
    def __init__(self, workload: Workload, room: Path) -> None:
        """Sets up what saving needs; `room` is a folder that outlives the process."""

    def save(self, step: int) -> None: ...

    def wait(self) -> None: ...

    def restore(self) -> bool:
        """Loads the newest state into the workload; False when there is none."""

    def skipped(self) -> int:
        """Steps that `save` was called for and let go by, so far."""

    def close(self) -> None: ...


def contender(name: str) -> type[Contender]:
    found: type[Contender] = importlib.import_module(
        f"benchmarks.peers.contenders.{name}"
    ).Contender
    return found
