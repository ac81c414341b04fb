"""Slot header: the first page of a slot, as bytes.

Comes in: a header, or a page. Goes out: the page, or what it says. Its last 8 bytes are the
checksum of the others.

Invariant: a page whose checksum does not hold says nothing.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

from keepstep.coding.checksum import BLOCK_BYTES, checksum
from keepstep.errors import DamageError
from keepstep.model.shares import Share
from keepstep.model.snapshot import SlotHeader, SlotState, Stamp
from keepstep.model.units import PAGE_BYTES

MAGIC = b"KEEPSLOT"
FORMAT = 2
LACKING_FORMAT = 3  # of a slot that lacks blocks: who knows nothing of that must not read it
DIGESTED_FORMAT = 4  # likewise, where the table has digests in place of some checksums
_HEADER = struct.Struct("<8sIIQ16s16sIIQqqQQIQQQqdQQ")
_REPLICAS = struct.Struct("<QQ")  # behind it; zeros where a release before wrote the page
_SHARE = struct.Struct("<QiI")  # digest, ranks (-1: none), bytes of the bitmap behind it
_SHARE_AT = _HEADER.size + _REPLICAS.size
_UNSHARED = -1
_CHECK = struct.Struct("<Q")
CHECK_AT = PAGE_BYTES - _CHECK.size  # its last bytes
MOST_BLOCKS = 8 * (CHECK_AT - _SHARE_AT - _SHARE.size)  # of a snapshot that may lack some
_CAPACITY = struct.Struct("<QQ")  # and again
_STATES = tuple(SlotState)  # by their numbers
_CLAIM = struct.Struct("<12xI56xqq")  # of a header: state, step, epoch
_SEQUENCE = struct.Struct("<16xQ")  # likewise
EMPTY = SlotHeader(
    SlotState.EMPTY,
    0,
    bytes(16),
    bytes(16),
    0,
    0,
    0,
    Stamp(-1, 0),
    0,
    0,
    BLOCK_BYTES,
    0,
    0,
    0,
    0,
    math.nan,
)


def parse_page(page: bytes, path: Path) -> SlotHeader:
    """What a header page says; `path` is named when it is damaged. Raises DamageError."""
    found, want = checksum(memoryview(page)[:CHECK_AT]), _check_of(page)
    if found != want:
        raise DamageError(
            f"{path}: header damaged: checksum expected {want:016x}, found {found:016x}"
        )
    magic, fmt, state, *rest = _HEADER.unpack_from(page)
    if magic != MAGIC or fmt not in (FORMAT, LACKING_FORMAT, DIGESTED_FORMAT):
        raise DamageError(f"{path}: expected slot format {FORMAT}, found {fmt}")
    sequence, job, layout, rank, world, incarnation, step, epoch, *sizes, wall, loss, _, _ = rest
    who = (job, layout, rank, world, incarnation, Stamp(step, epoch))
    if state >= len(_STATES):
        raise DamageError(f"{path}: expected a state of {len(_STATES)}, found {state}")
    share, lacking = None, b""
    if fmt != FORMAT:
        digest, ranks, nbytes = _SHARE.unpack_from(page, _SHARE_AT)
        share = None if ranks == _UNSHARED else Share(digest, ranks)
        bitmap = _SHARE_AT + _SHARE.size
        lacking = page[bitmap : bitmap + nbytes]
    told = (share, lacking, *_REPLICAS.unpack_from(page, _HEADER.size), fmt == DIGESTED_FORMAT)
    return SlotHeader._make((_STATES[state], sequence, *who, *sizes, wall, loss, *told))


def is_unchanged(view: memoryview, check: bytes) -> bool:
    """Whether the page ends with this checksum, and has it: proven where it lies."""
    return view[CHECK_AT:PAGE_BYTES] == check and (_CHECK.pack(checksum(view[:CHECK_AT])) == check)


def _check_of(page: bytes) -> int:
    """What its last bytes say."""
    (said,) = _CHECK.unpack_from(page, CHECK_AT)
    return int(said)


def would_be_sound(page: bytes, capacity: int) -> bool:
    """Whether the page would be sound with its magic and this capacity in it."""
    words = _CAPACITY.pack(capacity, capacity)
    sound = MAGIC + page[8 : _HEADER.size - 16] + words + page[_HEADER.size : -8]
    return _CHECK.pack(checksum(sound)) == page[-8:]


def capacities_of(page: bytes | memoryview) -> tuple[int, int]:
    """The payload capacity, and again, of a page that may be damaged."""
    capacity, again = _CAPACITY.unpack_from(page, _HEADER.size - 16)
    return int(capacity), int(again)


def claim_of(page: bytes | memoryview) -> tuple[int, int, int]:
    """State, step and epoch of a page that may be damaged."""
    state, step, epoch = _CLAIM.unpack_from(page)
    return int(state), int(step), int(epoch)


def sequence_of(page: bytes | memoryview) -> int:
    """The sequence of a page that may be damaged."""
    return int(_SEQUENCE.unpack_from(page)[0])


def capacity_of(page: bytes) -> int:
    """The payload capacity a header page tells."""
    return int(struct.unpack_from("<Q", page, _HEADER.size - 16)[0])


def page_of(header: SlotHeader, capacity: int) -> bytes:
    share, lacking = header.share, header.lacking
    is_usual = share is None and not lacking
    shared = DIGESTED_FORMAT if header.is_digested else LACKING_FORMAT
    body = _HEADER.pack(
        MAGIC,
        FORMAT if is_usual else shared,
        header.state,
        header.sequence,
        header.job_hash,
        header.layout_hash,
        header.rank,
        header.world_size,
        header.incarnation,
        header.stamp.step,
        header.stamp.epoch,
        header.payload_bytes,
        header.manifest_bytes,
        header.block_bytes,
        header.block_count,
        header.table_checksum,
        header.manifest_checksum,
        header.sealed_wall_ns,
        header.loss,
        capacity,
        capacity,
    )
    body += _REPLICAS.pack(header.replica_group, header.digest)
    if not is_usual:
        digest, ranks = (0, _UNSHARED) if share is None else share
        body += _SHARE.pack(digest, ranks, len(lacking)) + lacking
        assert len(body) <= CHECK_AT, f"{len(lacking)} bytes of bitmap"
    body = body.ljust(CHECK_AT, b"\0")
    return body + _CHECK.pack(checksum(body))
