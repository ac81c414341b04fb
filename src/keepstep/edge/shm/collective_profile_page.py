"""Collective profile page: what a rank's network does, in shared memory, so that its keeper
knows it without a message.

`rank-00000/rhythm` of the job directory: the pulse (what the network does now), and a ring of the
last gaps and steps. The rank writes, a few microseconds a collective; anybody reads. The pulse is a
seqlock: its counter is odd while it is written, and a writer killed in mid-write leaves it odd,
which reads as nothing.

    0     8 bytes `KEEPBEAT`, u32 format, u32 records in the ring,
          32 bytes: the network interface, if it is known
    64    u64 counter; i64 step; u32 begun, u32 pending; i64 since; u64 records ever written
    128   records: i64 step, u32 kind and index, u32 zero, i64 began, i64 ended

A step's record comes behind those of its gaps; its index is how many collectives it had.
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
from keepstep.ports import Memory

# of the job directory: what the keeper has made of its ranks' pages, for people
PLAN_FILE = "interleave.json"
COUNT_FILE = "interleaved.json"  # and what came of it, for metrics
MAGIC, FORMAT = b"KEEPBEAT", 1
RECORDS = 8192
_HEAD = struct.Struct("<8sII32s")
_COUNTER = struct.Struct("<Q")
_PULSE = struct.Struct("<qIIqQ")
_RECORD = struct.Struct("<qIIqq")
_PULSE_AT, _RING_AT = 64, 128
_STEP = 1 << 31  # in a record's index: it is a step's
NBYTES = _RING_AT + RECORDS * _RECORD.size


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


class CollectiveProfileWriter:
    """The rank's own hand. Safe from any thread: collectives end on the transport's."""

    def __init__(
        self, memory: Memory, path: Path, clock_ns: Callable[[], int], interface: str = ""
    ) -> None:
        """Makes the page, or begins anew on one that is there. Raises OSError,
        MemoryBudgetError."""
        self._region = memory.ensure(path, NBYTES)
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._counter = _COUNTER.unpack_from(self._region.view, _PULSE_AT)[0] | 1
        self._written = 0
        self._pulse = Pulse(NO_STEP, 0, 0, clock_ns())
        self._began_ns = 0
        self._closed = False
        self._publish()
        _HEAD.pack_into(self._region.view, 0, MAGIC, FORMAT, RECORDS, interface.encode()[:31])

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
                self._closed = True
                self._pulse = Pulse(NO_STEP, 0, 0, self._clock_ns())
                self._publish()
                self._region.close()

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


class CollectiveProfileReader:
    """Anybody's eye: the pulse at any time, the steps as they end."""

    def __init__(self, memory: Memory, path: Path) -> None:
        """Raises OSError or ValueError when there is no such page."""
        self._region = memory.open(path)
        nbytes = len(self._region.view)
        magic, form, records, interface = (
            _HEAD.unpack_from(self._region.view, 0) if nbytes >= _HEAD.size else (b"", 0, 0, b"")
        )
        if (magic, form, nbytes) != (MAGIC, FORMAT, _RING_AT + records * _RECORD.size):
            self._region.close()
            raise ValueError(
                f"{path}: expected a collective profile page of format {FORMAT}, found "
                f"{nbytes} bytes that begin {magic!r}"
            )
        self._records = records
        self.interface = interface.rstrip(b"\0").decode(errors="replace")
        self._read = 0
        self._gaps: list[Gap] = []
        self._is_partial = False  # the ring has lost the beginning of the step that is read now

    def is_there(self) -> bool:
        """Whether the page still is what its name leads to."""
        return self._region.is_there()

    def pulse(self) -> Pulse | None:
        """None when nothing whole can be read."""
        found = self._look()
        return None if found is None else found[0]

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
        oldest = max(0, written - self._records + 64)
        # another life of the rank writes here, or we were too slow
        if self._read > written or self._read < oldest:
            self._read, self._gaps, self._is_partial = oldest, [], oldest > 0
        seen = []
        for number in range(self._read, written):
            at = _RING_AT + number % self._records * _RECORD.size
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
