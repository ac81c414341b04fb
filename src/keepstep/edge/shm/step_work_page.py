"""Step work page: what a rank has done in its steps, in shared memory, so that its agent knows it
without a message.

`rank-00000/work` of the job directory: a ring of sums, one record a step. Who reads takes the
difference of two records, as far apart as it likes. The rank writes, some microseconds a step;
anybody reads.

    0     8 bytes `KEEPWORK`, u32 format, u32 records in the ring, u32 timing
    64    u64 records ever written
    128   records: i64 step, i64 epoch, i64 ended; by section 7 i64 own time, 7 i64 processor time
          and 7 i64 delay; i64 wait, i64 collectives, i64 tokens, i64 micro-batches; by section 7
          i64 device time; of 8 process groups i64 number (0: none), i64 collectives, i64 messages

Invariant: a record that is found has the step it was asked for; one that was overwritten meanwhile
reads as nothing, and so does one whose numbers no rank can have written: anybody of the same user
may write there, and nobody is to be judged by that.
"""

from __future__ import annotations

import struct
from pathlib import Path

from keepstep.edge.shm.slot import rank_dir
from keepstep.model.step_work import MOST_GROUPS, GroupEntries, Section, StepWork, Timing
from keepstep.model.units import S_NS
from keepstep.ports import Memory

MAGIC, FORMAT = b"KEEPWORK", 6
RECORDS = 1024
SECTIONS = len(Section)
_HEAD = struct.Struct("<8sIII")
_WRITTEN = struct.Struct("<Q")
GROUP = len(GroupEntries._fields)
_RECORD = struct.Struct(f"<{3 + 4 * SECTIONS + 4 + MOST_GROUPS * GROUP}q")
_NO_GROUP = (0,) * GROUP
_WRITTEN_AT, _RING_AT = 64, 128
_SLACK_NS = S_NS  # a device's clock is not the processor's
_SPARE = 8  # what is about to be overwritten is not worth a race
NBYTES = _RING_AT + RECORDS * _RECORD.size


def work_path(job_dir: Path, rank: int) -> Path:
    """Where a rank's page lies."""
    return rank_dir(job_dir, rank) / "work"


class StepWorkWriter:
    """The rank's own hand."""

    def __init__(self, memory: Memory, path: Path) -> None:
        """Makes the page, or begins anew on one that is there. Raises OSError,
        MemoryBudgetError."""
        self._region = memory.ensure(path, NBYTES)
        self._view = self._region.view
        self._written = 0
        _WRITTEN.pack_into(self._view, _WRITTEN_AT, 0)

    def begin(self, timing: Timing) -> None:
        """timing: what the records say of what is computed."""
        _HEAD.pack_into(self._view, 0, MAGIC, FORMAT, RECORDS, timing)

    def write(self, work: StepWork) -> None:
        at = _RING_AT + self._written % RECORDS * _RECORD.size
        by_section = (*work.own_ns, *work.cpu_ns, *work.delay_ns)
        counts = work.collectives, work.tokens, work.micro_batches
        entered = [number for entries in work.groups for number in entries]
        entered += _NO_GROUP * (MOST_GROUPS - len(work.groups))
        measured = *by_section, work.wait_ns, *counts, *work.device_ns
        _RECORD.pack_into(self._view, at, *work[:3], *measured, *entered)
        self._written += 1
        _WRITTEN.pack_into(self._view, _WRITTEN_AT, self._written)

    def close(self) -> None:
        self._view = memoryview(bytearray(NBYTES))  # what comes now nobody reads
        self._region.close()


class StepWorkReader:
    """Anybody's eye."""

    def __init__(self, memory: Memory, path: Path) -> None:
        """Raises OSError or ValueError when there is no such page."""
        self._region = memory.open(path)
        view = self._region.view
        if not self._is_one():
            nbytes, begin = len(view), bytes(view[: len(MAGIC)])
            self._region.close()
            raise ValueError(
                f"{path}: expected a step work page of format {FORMAT} with {RECORDS} records, "
                f"found {nbytes} bytes that begin {begin!r}"
            )

    def _is_one(self) -> bool:
        view = self._region.view
        if len(view) != NBYTES:
            return False
        magic, form, records, timing = _HEAD.unpack_from(view, 0)
        is_known = timing in iter(Timing)
        return is_known and (magic, form, records) == (MAGIC, FORMAT, RECORDS)

    @property
    def timing(self) -> Timing:
        """See `StepWorkWriter.begin`."""
        told = _HEAD.unpack_from(self._region.view, 0)[3]
        return Timing(told) if told in iter(Timing) else Timing.UNSEEN

    def is_there(self) -> bool:
        """Whether the page still is what its name leads to, and one."""
        return self._region.is_there() and self._is_one()

    def newest(self) -> StepWork | None:
        """None before the first step of this life."""
        written = self._count()
        return None if written == 0 else self._record(written - 1)

    def at(self, step: int, newest: StepWork) -> StepWork | None:
        """The record of an older step of the same life, whose newest record is that; None when it
        is not there any more, or steps were done twice in between."""
        written = self._count()
        number = written - 1
        last = self._record(number)
        if last is None or last.epoch != newest.epoch or last.step < newest.step:
            return None
        number -= last.step - step
        if number < max(0, written - RECORDS + _SPARE):
            return None
        found = self._record(number)
        if found is None or (found.step, found.epoch) != (step, newest.epoch):
            return None
        return found

    def _count(self) -> int:
        count: int = _WRITTEN.unpack_from(self._region.view, _WRITTEN_AT)[0]
        return count

    def _record(self, number: int) -> StepWork | None:
        values = _RECORD.unpack_from(self._region.view, _RING_AT + number % RECORDS * _RECORD.size)
        if self._count() - number > RECORDS - _SPARE:
            return None
        own, cpu, delay, rest = (3 + count * SECTIONS for count in range(4))
        sections = values[own:cpu], values[cpu:delay], values[rest], values[delay:rest]
        counts, device = values[rest + 1 : rest + 4], values[rest + 4 : rest + 4 + SECTIONS]
        entered = values[rest + 4 + SECTIONS :]
        times = *values[own : rest + 1], *device
        if not _can_be(values[2], times, (*counts, *entered)):
            return None
        groups = tuple(
            GroupEntries(*entered[at : at + GROUP])
            for at in range(0, len(entered), GROUP)
            if entered[at]
        )
        return StepWork._make((*values[:3], *sections, *counts, device, groups))

    def close(self) -> None:
        self._region.close()


def _can_be(ended_ns: int, times_ns: tuple[int, ...], counts: tuple[int, ...]) -> bool:
    """Whether a rank can have counted so. No sum of its times is longer than the machine runs."""
    return (
        min(times_ns) >= -_SLACK_NS and max(times_ns) <= ended_ns + _SLACK_NS and min(counts) >= 0
    )
