"""Probe: what every probe of parts is: a function that reads and says whether it could see.

Comes in: a machine, and what the look before left. Goes out: readings, or why they are worth
nothing. A probe may hang, and may kill its process: it runs in one that is made for it.

Invariant: a probe that has read nothing says so. Each reads a canary along with its readings:
something that is there on every machine, or that it has just put there itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from keepstep.edge.doctor.host import Host
from keepstep.model.parts import PartReading


@dataclass(frozen=True, slots=True)
class Targets:
    """What is probed. `disk_dir`: where checkpoints or, without a store that is a directory, the
    journals go. `pid`: whose control groups count. `traces`: a directory of recorded looks that are
    played in the place of the machine's (`traces.py`), None: there is none."""

    arena_dir: Path
    disk_dir: Path
    pid: int
    traces: Path | None = None


@dataclass(frozen=True, slots=True)
class PartLook:
    """What a probe saw. `blind`: why it saw nothing, empty: it did. `cursor`: from where the next
    look reads on, for those that do."""

    readings: tuple[PartReading, ...] = ()
    blind: str = ""
    cursor: int = -1


# (the machine, what is probed, the cursor of the look before or -1)
Probe = Callable[[Host, Targets, int], PartLook]
