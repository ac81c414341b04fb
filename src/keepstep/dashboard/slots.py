"""Slots: what is in memory, by the headers.

Comes in: a job directory. Goes out: one row for each slot. Never looks at a payload, never waits
for a writer: a header that is being written is read again for a moment, and then counts as damaged.
"""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path

from keepstep.dashboard.document import finite
from keepstep.dashboard.moment import Moment
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import ranks_in, slot_paths
from keepstep.edge.shm.slot_header import parse_page
from keepstep.edge.shm.slot_store import SHELVES
from keepstep.edge.shm.status_pages import TRIES, TRY_EVERY_S
from keepstep.errors import DamageError
from keepstep.model.shares import blocks_of
from keepstep.model.snapshot import SlotHeader, SlotState
from keepstep.model.units import PAGE_BYTES

# How opening or reading says that there is something, and that it is no file.
_NO_FILE = (errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ESPIPE)


@dataclass(frozen=True, slots=True)
class SlotRow:
    """A slot by its header.

    kind: own, copy (of another node's rank), or parity (of the stripe group that `rank` of this
        node belongs to).
    state: sealed, writing, empty or damaged. why: what is damaged.
    loss: as the rank reported it. kept_bytes: of the payload, what is not with other ranks.
    """

    kind: str
    rank: int
    slot: int
    path: Path
    state: str
    step: int | None = None
    epoch: int | None = None
    incarnation: int | None = None
    payload_bytes: int = 0
    kept_bytes: int = 0
    blocks: int = 0
    sealed_wall_ns: int | None = None
    age_ns: int | None = None
    loss: float | None = None
    why: str = ""


def slot_rows(directory: Path, now: Moment, kind: str = "own") -> tuple[SlotRow, ...]:
    """Every slot of the ranks below that directory, rank by rank."""
    rows = []
    for rank in ranks_in(MEMORY, directory):
        for path in slot_paths(MEMORY, directory, rank):
            try:
                rows.append(slot_row(path, rank, now, kind))
            except FileNotFoundError:  # the job ended while we looked
                continue
    return tuple(rows)


def held_rows(job_dir: Path, now: Moment) -> tuple[SlotRow, ...]:
    """What the keeper here holds for other nodes: copies, then parities."""
    return tuple(
        row for kind, below in SHELVES.items() for row in slot_rows(job_dir / below, now, kind)
    )


def slot_row(path: Path, rank: int, now: Moment, kind: str = "own") -> SlotRow:
    """What a slot's header says. Raises OSError when there is no slot."""
    index = int(path.name.split("-")[1])
    try:
        header = read_header(path)
    except DamageError as error:
        return SlotRow(kind, rank, index, path, "damaged", why=str(error))
    state = header.state.name.lower()
    if header.state is SlotState.EMPTY:
        return SlotRow(kind, rank, index, path, state)
    is_sealed = header.state is SlotState.SEALED
    return SlotRow(
        kind=kind,
        rank=rank,
        slot=index,
        path=path,
        state=state,
        step=header.stamp.step,
        epoch=header.stamp.epoch,
        incarnation=header.incarnation,
        payload_bytes=header.payload_bytes if is_sealed else 0,
        kept_bytes=_kept_bytes(header) if is_sealed else 0,
        blocks=header.block_count if is_sealed else 0,
        sealed_wall_ns=header.sealed_wall_ns if is_sealed else None,
        age_ns=max(0, now.wall_ns - header.sealed_wall_ns) if is_sealed else None,
        loss=finite(header.loss) if is_sealed else None,
    )


def _kept_bytes(header: SlotHeader) -> int:
    lacking = len(blocks_of(header.lacking))
    return max(0, header.payload_bytes - lacking * header.block_bytes)


def read_header(path: Path) -> SlotHeader:
    """Raises DamageError when the header is not as written, OSError when there is no slot."""
    for _ in range(TRIES - 1):
        try:
            return parse_page(_first_page(path), path)
        except DamageError:
            time.sleep(TRY_EVERY_S)
    return parse_page(_first_page(path), path)


def _first_page(path: Path) -> bytes:
    """Read, not mapped: a map of a slot keeps its memory when it is removed, and costs more than
    the page."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            page = os.pread(fd, PAGE_BYTES, 0)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        raise DamageError(f"{path}: expected a slot, found none: {error}") from error
    if len(page) < PAGE_BYTES:
        raise DamageError(f"{path}: expected a slot, found {len(page)} bytes")
    return page
