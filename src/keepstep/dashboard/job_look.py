"""Job look: a job looked at again and again, so cheaply that it may go on for hours.

Comes in: a job directory and journals. Goes out: the same `JobView` that one look would give, with
two differences: pages stay mapped, and slots are taken from what the ranks say of them in their
pages. The headers themselves are read when a rank has a newer snapshot, for its age, and every
HEADERS_EVERY_NS all of them, which is when a damaged one is seen. Never writes, never waits for
anybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from keepstep.dashboard.finding import FoundJob
from keepstep.dashboard.history import History, by_time
from keepstep.dashboard.journals import Journals
from keepstep.dashboard.moment import Moment
from keepstep.dashboard.slots import SlotRow, held_rows, slot_row, slot_rows
from keepstep.dashboard.view import JobFacts, JobView, Pages, pending, tempos_of, view_of
from keepstep.edge.shm.keeper_look import KeeperLook, keeper_look
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import ranks_in, slot_path
from keepstep.edge.shm.status_page import StatusPages
from keepstep.model.events import Event
from keepstep.model.snapshot import RankStatus, SlotState, Stamp
from keepstep.model.units import S_NS

HEADERS_EVERY_NS = 10 * S_NS


class JobLook:
    """For one thread at a time."""

    def __init__(self, job: FoundJob, journals: Sequence[Path] = ()) -> None:
        """`journals`: other nodes' of the same job."""
        self._job = job
        self._journals = Journals([job.journal_path, *journals], job.owner)
        self._events: list[Event] = []
        self.history = History(of_several=self._journals.are_several)
        self._pages = StatusPages(MEMORY, job.job_dir)
        self._headers_ns: int | None = None  # when all were read last
        self._damaged: dict[tuple[int, int], SlotRow] = {}
        self._held: tuple[SlotRow, ...] = ()
        # by rank: when what it says is sealed was sealed, by slot and stamp
        self._sealed: dict[int, dict[tuple[int, Stamp], int]] = {}

    def has_news(self) -> bool:
        """Whether something was added to a journal since the last look."""
        return self._journals.have_grown()

    def read_journals(self) -> None:
        """Take in what was added to them."""
        added = self._journals.read()
        if not added:
            return
        events = [*self._events, *added]
        self._events = by_time(events) if self._journals.are_several else events
        self.history.add(added)

    def view(self, now: Moment) -> JobView:
        """The job as it is now."""
        self.read_journals()
        job_dir = self._job.job_dir
        has_memory = job_dir.is_dir()
        pages = self._read_pages() if has_memory else {}
        self._read_headers(now, has_memory)
        runs = self.history.runs
        tempos = tempos_of(pages)
        at = (now.wall_ns, now.mono_ns, now.boot) if tempos else None
        looked = JobFacts(
            job=replace(self._job, has_memory=has_memory),
            events=self._events,
            pages=pages,
            slots=self._slots(pages, now),
            held=self._held,
            keeper=keeper_look(job_dir, now.mono_ns, now.boot) if has_memory else KeeperLook(False),
            incident=pending(runs[-1]) if runs else None,
            account=self.history.account(len(runs) - 1, tempos, at) if runs else None,
        )
        return view_of(looked, now)

    def close(self) -> None:
        """Give the maps up."""
        self._pages.close()

    def _read_pages(self) -> Pages:
        """As `read_pages` does, of pages that stay mapped."""
        found: dict[int, tuple[bool, RankStatus | None]] = {}
        for rank in ranks_in(MEMORY, self._job.job_dir):
            status = self._pages.read(rank)
            alive = self._pages.alive(rank)
            if alive or status is not None:
                found[rank] = alive, status
        return found

    def _read_headers(self, now: Moment, has_memory: bool) -> None:
        if not has_memory:
            self._damaged, self._held, self._headers_ns = {}, (), None
            return
        if self._headers_ns is not None and now.mono_ns - self._headers_ns < HEADERS_EVERY_NS:
            return
        self._headers_ns = now.mono_ns
        rows = slot_rows(self._job.job_dir, now)
        self._damaged = {(row.rank, row.slot): row for row in rows if row.state == "damaged"}
        self._held = held_rows(self._job.job_dir, now)

    def _slots(self, pages: Pages, now: Moment) -> tuple[SlotRow, ...]:
        """What the ranks say of their slots."""
        rows: list[SlotRow] = []
        for rank, (_, status) in pages.items():
            if status is None:
                continue
            known, self._sealed[rank] = self._sealed.get(rank, {}), {}
            for index, slot in enumerate(status.slots):
                damaged = self._damaged.get((rank, index))
                sealed_wall_ns = 0
                if slot.state is SlotState.SEALED and damaged is None:
                    sealed_wall_ns = known.get((index, slot.stamp), 0) or self._sealed_wall_ns(
                        rank, index, slot.stamp, now
                    )
                    self._sealed[rank][index, slot.stamp] = sealed_wall_ns
                rows.append(
                    damaged or _row(self._job.job_dir, rank, status, index, sealed_wall_ns, now)
                )
        return tuple(rows)

    def _sealed_wall_ns(self, rank: int, index: int, stamp: Stamp, now: Moment) -> int:
        """0 where that cannot be told: the slot holds another one already, or the job has ended."""
        try:
            row = slot_row(slot_path(self._job.job_dir, rank, index), rank, now)
        except OSError:
            return 0
        is_same = (row.step, row.epoch) == (stamp.step, stamp.epoch)
        return row.sealed_wall_ns or 0 if is_same else 0


def _row(
    job_dir: Path, rank: int, status: RankStatus, index: int, sealed_wall_ns: int, now: Moment
) -> SlotRow:
    slot = status.slots[index]
    state = slot.state.name.lower()
    path = slot_path(job_dir, rank, index)
    if slot.state is SlotState.EMPTY:
        return SlotRow("own", rank, index, path, state)
    is_sealed = slot.state is SlotState.SEALED
    return SlotRow(
        kind="own",
        rank=rank,
        slot=index,
        path=path,
        state=state,
        step=slot.stamp.step,
        epoch=slot.stamp.epoch,
        incarnation=status.incarnation,
        payload_bytes=status.payload_bytes if is_sealed else 0,
        kept_bytes=status.kept_bytes if is_sealed else 0,
        sealed_wall_ns=sealed_wall_ns or None,
        age_ns=max(0, now.wall_ns - sealed_wall_ns) if sealed_wall_ns else None,
    )
