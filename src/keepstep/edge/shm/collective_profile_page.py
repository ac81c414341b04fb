"""Collective profile page: what a rank's network does, in shared memory, so that its keeper
knows it without a message.

`rank-00000/rhythm` of the job directory: the pulse (what the network does now), and a ring of the
last gaps and steps. The rank writes, a few microseconds a collective; anybody reads. The pulse is a
seqlock: its counter is odd while it is written, and a writer killed in mid-write leaves it odd,
which reads as nothing.

    0     8 bytes `KEEPBEAT`, u32 format, u32 records in the ring,
          32 bytes: the network interface, if it is known; u32 queued: 1 where a device does it
    64    u64 counter; i64 step; u32 begun, u32 pending; i64 since; u64 records ever written
    128   records: i64 step, u32 kind and index, u32 zero, i64 began, i64 ended
    ...   on a page of its own, u32 reached: how many of the states below the device has come by
    ...   on the next page, states: i64 step, u32 begun, u32 pending

A step's record comes behind those of its gaps; its index is how many collectives it had.

**A device** does later what its trainer orders now. So the trainer writes which states its network
will be in, one after the other, and has the device itself write, as it comes by, how many of them
that were: no thread of the trainer's process has to look (`QueuedProfileWriter`). The pulse of such
a page is the state that was reached last, as long as the trainer's own says that it trains. When
that began nobody writes: a reader knows when it looked before (`Pulse.doubt_ns`). The records are
written when the device's own times are known.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from keepstep.edge.shm.slot import rank_dir
from keepstep.edge.shm.text_file import read_as, write_text
from keepstep.model.decoding import a_record, from_json
from keepstep.model.rhythm import NO_STEP, Gap, Interleaved, Pulse, StepSeen, Told
from keepstep.model.units import PAGE_BYTES, round_up
from keepstep.ports import Memory

# of the job directory: what the keeper has made of its ranks' pages, for people
PLAN_FILE = "interleave.json"
COUNT_FILE = "interleaved.json"  # and what came of it, for metrics
MAGIC, FORMAT = b"KEEPBEAT", 2
RECORDS = 8192
STATES = 4096  # a divisor of all the numbers there are: they begin anew behind 2**32
_NUMBERS = 1 << 32
_HEAD = struct.Struct("<8sII32sI")
_COUNTER = struct.Struct("<Q")
_PULSE = struct.Struct("<qIIqQ")
_RECORD = struct.Struct("<qIIqq")
_PULSE_AT, _RING_AT = 64, 128
_STEP = 1 << 31  # in a record's index: it is a step's
_REACHED = struct.Struct("<I")
_STATE = struct.Struct("<qII")
NBYTES = _RING_AT + RECORDS * _RECORD.size
_REACHED_AT = round_up(NBYTES, PAGE_BYTES)
_STATES_AT = _REACHED_AT + PAGE_BYTES
QUEUED_NBYTES = _STATES_AT + STATES * _STATE.size


def profile_path(job_dir: Path, rank: int) -> Path:
    """Where a rank's page lies."""
    return rank_dir(job_dir, rank) / "rhythm"


Word = TypeVar("Word", Told, Interleaved)


def write_word(memory: Memory, path: Path, word: Told | Interleaved) -> None:
    """For other processes, whole or not at all: not when it does not fit."""
    write_text(memory, path, json.dumps(asdict(word)).encode())


def read_word(memory: Memory, path: Path, kind: type[Word]) -> Word | None:
    """None when there is none, or one of another release."""
    return read_as(memory, path, lambda text: a_record(kind, from_json(text)))


class _Writer:
    """What both hands of a rank do."""

    def __init__(
        self,
        memory: Memory,
        path: Path,
        clock_ns: Callable[[], int],
        interface: str,
        is_queued: bool,
    ) -> None:
        self._region = memory.ensure(path, QUEUED_NBYTES if is_queued else NBYTES)
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._counter = _COUNTER.unpack_from(self._region.view, _PULSE_AT)[0] | 1
        self._written = 0
        self._pulse = Pulse(NO_STEP, 0, 0, clock_ns())
        self._closed = False
        if is_queued:
            _REACHED.pack_into(self._region.view, _REACHED_AT, 0)
            _STATE.pack_into(self._region.view, _STATES_AT, NO_STEP, 0, 0)
        self._publish()
        _HEAD.pack_into(
            self._region.view, 0, MAGIC, FORMAT, RECORDS, interface.encode()[:31], is_queued
        )

    def _record(self, step: int, index: int, began_ns: int, ended_ns: int) -> None:
        at = _RING_AT + self._written % RECORDS * _RECORD.size
        _RECORD.pack_into(self._region.view, at, step, index, 0, began_ns, ended_ns)
        self._written += 1

    def _publish(self) -> None:
        view, pulse = self._region.view, self._pulse
        _COUNTER.pack_into(view, _PULSE_AT, self._counter)
        _PULSE.pack_into(
            view,
            _PULSE_AT + 8,
            pulse.step,
            pulse.entered,
            pulse.pending,
            pulse.since_ns,
            self._written,
        )
        _COUNTER.pack_into(view, _PULSE_AT, self._counter + 1)
        self._counter += 2

    def _end(self) -> None:
        self._closed = True
        self._pulse = Pulse(NO_STEP, 0, 0, self._clock_ns())
        self._publish()


class CollectiveProfileWriter(_Writer):
    """The rank's own hand. Safe from any thread: collectives end on the transport's."""

    def __init__(
        self, memory: Memory, path: Path, clock_ns: Callable[[], int], interface: str = ""
    ) -> None:
        """Makes the page, or begins anew on one that is there. Raises OSError,
        MemoryBudgetError."""
        super().__init__(memory, path, clock_ns, interface, is_queued=False)
        self._began_ns = 0

    def step(self, step: int) -> None:
        """A step begins, and with it ends the one before; `NO_STEP`: none begins."""
        now_ns = self._clock_ns()
        with self._lock:
            if self._closed:
                return
            before = self._pulse
            if before.trains:
                if not before.pending:
                    self._record(before.step, before.entered, before.since_ns, now_ns)
                if step != NO_STEP:  # else it was given up
                    self._record(before.step, before.entered | _STEP, self._began_ns, now_ns)
            self._began_ns = now_ns
            self._pulse = Pulse(step, 0, before.pending, now_ns)
            self._publish()

    def began(self) -> None:
        """A collective is under way."""
        now_ns = self._clock_ns()
        with self._lock:
            if self._closed:
                return
            before = self._pulse
            if before.trains and not before.pending:
                self._record(before.step, before.entered, before.since_ns, now_ns)
            since_ns = before.since_ns if before.pending else now_ns
            self._pulse = Pulse(before.step, before.entered + 1, before.pending + 1, since_ns)
            self._publish()

    def ended(self, count: int = 1) -> None:
        """So many are over."""
        now_ns = self._clock_ns()
        with self._lock:
            if self._closed:
                return
            before = self._pulse
            pending = max(0, before.pending - count)
            since_ns = before.since_ns if pending or not before.pending else now_ns
            self._pulse = Pulse(before.step, before.entered, pending, since_ns)
            self._publish()

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._end()
                self._region.close()


class QueuedProfileWriter(_Writer):
    """The hand of a rank whose device does it. Used under its caller's lock."""

    def __init__(
        self, memory: Memory, path: Path, clock_ns: Callable[[], int], interface: str = ""
    ) -> None:
        """See `CollectiveProfileWriter`."""
        super().__init__(memory, path, clock_ns, interface, is_queued=True)
        self._number = 0

    @property
    def reached_address(self) -> int:
        """Of what the device writes: 4 bytes, at the beginning of a page of their own."""
        return self._region.address + _REACHED_AT

    def trains(self, step: int) -> None:
        """The trainer orders this step; `NO_STEP`: nobody trains now, whatever the device still
        does."""
        if not self._closed:
            self._pulse = Pulse(step, 0, 0, self._clock_ns())
            self._publish()

    def state(self, step: int, entered: int, pending: int) -> int | None:
        """The device will be there next: the number that it is to write then. None when it is too
        far behind to be told of more."""
        reached = _REACHED.unpack_from(self._region.view, _REACHED_AT)[0]
        number = (self._number + 1) % _NUMBERS
        if self._closed or (number - reached) % _NUMBERS >= STATES:
            return None
        at = _STATES_AT + number % STATES * _STATE.size
        _STATE.pack_into(self._region.view, at, step, entered, pending)
        self._number = number
        return number

    def saw(self, step: StepSeen) -> None:
        """The device has done it."""
        if self._closed:
            return
        for gap in step.gaps:
            self._record(step.step, gap.index, gap.began_ns, gap.ended_ns)
        self._record(step.step, step.collectives | _STEP, step.began_ns, step.ended_ns)
        self._publish()

    def end(self) -> None:
        """Nothing more is written here but by the device."""
        if not self._closed:
            self._end()

    def close(self) -> None:
        """When the device will not write to it any more."""
        self.end()
        self._region.close()


class CollectiveProfileReader:
    """Anybody's eye: the pulse at any time, the steps as they end."""

    def __init__(self, memory: Memory, path: Path) -> None:
        """Raises OSError or ValueError when there is no such page."""
        self._region = memory.open(path)
        nbytes = len(self._region.view)
        magic, form, records, interface, is_queued = (
            _HEAD.unpack_from(self._region.view, 0) if nbytes >= _HEAD.size else (b"", 0, 0, b"", 0)
        )
        expected = QUEUED_NBYTES if is_queued else NBYTES
        if (magic, form, records, nbytes) != (MAGIC, FORMAT, RECORDS, expected):
            self._region.close()
            raise ValueError(
                f"{path}: expected a collective profile page of format {FORMAT}, found "
                f"{nbytes} bytes that begin {magic!r}"
            )
        self._is_queued = bool(is_queued)
        self._looked_ns = 0
        self._state: Pulse | None = None  # of a device, as it was when somebody last looked
        self.interface = interface.rstrip(b"\0").decode(errors="replace")
        self._read = 0
        self._gaps: list[Gap] = []
        self._is_partial = False  # the ring has lost the beginning of the step that is read now

    def is_there(self) -> bool:
        """Whether the page still is what its name leads to."""
        return self._region.is_there()

    def pulse(self, now_ns: int) -> Pulse | None:
        """None when nothing whole can be read."""
        found = self._look()
        if found is None:
            return None
        pulse = found[0]
        return self._queued_pulse(now_ns) if self._is_queued and pulse.trains else pulse

    def _queued_pulse(self, now_ns: int) -> Pulse:
        reached = _REACHED.unpack_from(self._region.view, _REACHED_AT)[0]
        at = _STATES_AT + reached % STATES * _STATE.size
        step, entered, pending = _STATE.unpack_from(self._region.view, at)
        known = self._state
        if known is None or (known.step, known.entered, known.pending) != (step, entered, pending):
            known = self._state = Pulse(step, entered, pending, now_ns, now_ns - self._looked_ns)
        self._looked_ns = now_ns
        return known

    def _look(self) -> tuple[Pulse, int] | None:
        """The pulse, and how many records were ever written."""
        view = self._region.view
        for _ in range(100):
            before = _COUNTER.unpack_from(view, _PULSE_AT)[0]
            step, entered, pending, since_ns, written = _PULSE.unpack_from(view, _PULSE_AT + 8)
            if before % 2 == 0 and _COUNTER.unpack_from(view, _PULSE_AT)[0] == before:
                return Pulse(step, entered, pending, since_ns), written
        return None

    def steps(self) -> list[StepSeen]:
        """Those that have ended since the last call, as far as the ring still has all of them."""
        found = self._look()
        if found is None:
            return []
        written = found[1]
        # what is about to be overwritten is not worth a race
        oldest = max(0, written - RECORDS + 64)
        # another life of the rank writes here, or we were too slow
        if self._read > written or self._read < oldest:
            self._read, self._gaps, self._is_partial = oldest, [], oldest > 0
        seen = []
        for number in range(self._read, written):
            at = _RING_AT + number % RECORDS * _RECORD.size
            step, index, _, began_ns, ended_ns = _RECORD.unpack_from(self._region.view, at)
            if not index & _STEP:
                self._gaps.append(Gap(index, began_ns, ended_ns))
                continue
            gaps = tuple(
                gap
                for gap in self._gaps
                if gap.began_ns >= began_ns and gap.ended_ns > gap.began_ns
            )
            if not self._is_partial:
                seen.append(StepSeen(step, began_ns, ended_ns, index & ~_STEP, gaps))
            self._gaps, self._is_partial = [], False
        self._read = written
        return seen

    def close(self) -> None:
        self._region.close()
