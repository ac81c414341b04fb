"""One pass: bytes copied into a slot and hashed where they were written, while they are cached.

Comes in: what lies where, by address. Goes out: the bytes in the slot, and the checksums of the
blocks that were hashed, for `Slot.write_table`. When somebody waits for the copy, the rest of it is
copied alone: its hash is nothing to wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from keepstep.coding.checksum import running_checksum
from keepstep.edge.shm.memory import copy_all
from keepstep.edge.shm.slot import Slot
from keepstep.model.units import MIB

# Half of a usual second-level cache. Smaller ones gain nothing, and each costs the GIL twice.
WINDOW_BYTES = MIB


class SlotCopy(NamedTuple):
    """So many bytes from an address to an offset in the payload."""

    offset: int
    source: int
    nbytes: int


def copy_and_hash(
    slot: Slot,
    copies: Iterable[SlotCopy],
    payload_bytes: int,
    not_yet: Collection[int],
    is_awaited: Callable[[], bool],
) -> dict[int, int]:
    """Make these copies, which do not overlap. Returns the checksums of payload blocks, by their
    number, of which all bytes are there then.

    `not_yet`: blocks that somebody else still writes. `is_awaited`: whether somebody waits for the
    copies; asked again and again.
    """
    rest = deque(sorted(copies))
    payload, base = slot.payload, slot.payload_address
    known: dict[int, int] = {}
    for block, begin in enumerate(range(0, payload_bytes, slot.block_bytes)):
        end = min(begin + slot.block_bytes, payload_bytes)
        running = running_checksum()
        for at in range(begin, end, WINDOW_BYTES):
            if is_awaited():
                copy_all((base + offset, source, nbytes) for offset, source, nbytes in rest)
                return known
            stop = min(at + WINDOW_BYTES, end)
            copy_all((base + o, source, nbytes) for o, source, nbytes in _before(rest, stop))
            if block not in not_yet:
                running.update(payload[at:stop])
        if block not in not_yet:
            known[block] = running.intdigest()
    return known


def _before(rest: deque[SlotCopy], stop: int) -> Iterator[SlotCopy]:
    """Takes from the front what goes to offsets before `stop`."""
    while rest and rest[0].offset < stop:
        whole = rest.popleft()
        nbytes = min(whole.nbytes, stop - whole.offset)
        if nbytes < whole.nbytes:
            left = whole.nbytes - nbytes
            rest.appendleft(SlotCopy(whole.offset + nbytes, whole.source + nbytes, left))
        yield SlotCopy(whole.offset, whole.source, nbytes)
