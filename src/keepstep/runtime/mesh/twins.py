"""Twins: blocks of a snapshot that this node has already, because one of its own ranks holds the same bytes.

Data-parallel replicas agree in nearly all of their state, so a holder need not be sent what its own ranks computed. Two blocks are taken
for equal when their tables name the same checksum and length; what is copied is hashed again, so that a bit which flipped here at rest is
not taken over but asked for. Done beside the loop, at memory speed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from keepstep.coding.checksum import BLOCK_BYTES
from keepstep.errors import DamageError
from keepstep.model.snapshot import Stamp
from keepstep.model.wire import Part
from keepstep.ports import Memory
from keepstep.runtime.mesh.receiving import Range, Whole
from keepstep.runtime.pins import pin_one, unpin


def take_over(memory: Memory, whole: Whole, table: tuple[int, ...], job_dir: Path, ranks: Iterable[int], stamp: Stamp) -> list[Range]:
    """Fill `whole` from these ranks' own snapshots of that stamp. Returns the payload ranges that have to come from elsewhere."""
    wanted: dict[tuple[int, int], list[Range]] = {}  # by checksum and length: a block of zeros may be wanted often
    for part, at, nbytes in whole.missing():
        if part is Part.PAYLOAD:
            wanted.setdefault((table[at // BLOCK_BYTES], nbytes), []).append((part, at, nbytes))
    for rank in ranks:
        slot = pin_one(memory, job_dir, stamp, rank) if wanted else None
        if slot is None:
            continue
        try:
            header = slot.header()
            for block, found in enumerate(slot.table(header)):
                at = block * BLOCK_BYTES
                nbytes = min(BLOCK_BYTES, header.payload_bytes - at)
                for range_ in wanted.pop((found, nbytes), ()):
                    whole.put(range_, slot.part(Part.PAYLOAD, header)[at : at + nbytes], expected=found)
        except DamageError:
            continue  # scrubbing will find it too
        finally:
            unpin([slot])
    return [r for r in whole.missing() if r[0] is Part.PAYLOAD]


def in_runs(ranges: list[Range], most: int) -> list[list[Range]]:
    """In lists of at most `most`: a message has room for so many."""
    return [ranges[at : at + most] for at in range(0, len(ranges), most)]
