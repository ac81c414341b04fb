"""Slots: what is in memory, by the headers.

Comes in: a job directory. Goes out: one row for each slot. Never looks at a payload, never waits
for a writer: a header that is being written is read again for a moment, and then counts as damaged.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from keepstep.dashboard.document import finite
from keepstep.dashboard.moment import Moment
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot, ranks_in, slot_paths
from keepstep.edge.shm.slot_store import SHELVES
from keepstep.edge.shm.status_pages import TRIES, TRY_EVERY_S
from keepstep.errors import DamageError
from keepstep.model.snapshot import SlotHeader, SlotState


@dataclass(frozen=True, slots=True)
class SlotRow:
    """A slot by its header.

    kind: own, copy (of another node's rank), or parity (of the stripe group that `rank` of this
        node belongs to).
    state: sealed, writing, empty or damaged. why: what is damaged.
    loss: as the rank reported it.
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
        blocks=header.block_count if is_sealed else 0,
        sealed_wall_ns=header.sealed_wall_ns if is_sealed else None,
        age_ns=max(0, now.wall_ns - header.sealed_wall_ns) if is_sealed else None,
        loss=finite(header.loss) if is_sealed else None,
    )


def read_header(path: Path) -> SlotHeader:
    """Raises DamageError when the header is not as written, OSError when there is no slot."""
    slot = Slot(MEMORY, path)
    try:
        for _ in range(TRIES - 1):
            try:
                return slot.header()
            except DamageError:
                time.sleep(TRY_EVERY_S)
        return slot.header()
    finally:
        slot.close()
