"""Flips: one bit of a slot or a file turned over, as failing memory and disks do it.

Comes in: a path and a seeded generator. Goes out: which bit of which region it was. Only bits that
mean something are turned: a slot's spare capacity holds nothing.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path

from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot
from keepstep.errors import DamageError
from keepstep.model.snapshot import SlotState
from keepstep.model.units import PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Flip:
    """A bit that was turned. Turning it again undoes it."""

    path: Path
    offset: int
    bit: int
    region: str

    def __str__(self) -> str:
        return f"bit {self.bit} of byte {self.offset} of {self.path} ({self.region})"

    def turn(self) -> None:
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            (byte,) = os.pread(fd, 1, self.offset)
            os.pwrite(fd, bytes([byte ^ (1 << self.bit)]), self.offset)
        finally:
            os.close(fd)


def regions(path: Path) -> dict[str, range]:
    """The byte ranges of a sealed slot that are in use. Raises LookupError when it holds no
    snapshot, DamageError when it is damaged."""
    slot = Slot(MEMORY, path)
    try:
        header = slot.header()
        if header.state is not SlotState.SEALED:
            raise LookupError(f"{path} holds no sealed snapshot ({header.state.name})")
        table = PAGE_BYTES + slot.capacity
        manifest = path.stat().st_size - slot.manifest_capacity
        return {
            "header": range(PAGE_BYTES),
            "payload": range(PAGE_BYTES, PAGE_BYTES + header.payload_bytes),
            "checksum table": range(table, table + 8 * header.block_count),
            "manifest": range(manifest, manifest + header.manifest_bytes),
        }
    finally:
        slot.close()


def draw_in_slot(path: Path, rng: random.Random) -> Flip:
    """Any bit in use; small regions are met as often as large ones. Raises as `regions`."""
    name, within = rng.choice([(name, r) for name, r in regions(path).items() if r])
    return Flip(path, rng.choice(within), rng.randrange(8), name)


def draw_in_file(path: Path, rng: random.Random) -> Flip:
    return Flip(path, rng.randrange(path.stat().st_size), rng.randrange(8), "file")


def sealed_slots(paths: list[Path]) -> list[Path]:
    """Those that hold a snapshot, newest first."""
    found = []
    for path in paths:
        try:
            slot = Slot(MEMORY, path)
        except (DamageError, OSError):
            continue
        try:
            header = slot.header()
            if header.state is SlotState.SEALED:
                found.append((header.stamp, path))
        except DamageError:
            pass
        finally:
            slot.close()
    return [path for _, path in sorted(found, reverse=True)]
