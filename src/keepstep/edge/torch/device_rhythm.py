"""Device rhythm: when a device's collectives use the network, told to the node's keeper.

    the trainer orders step 7, a collective, another one
    -> the page: next the device will be in step 7; within its first collective; behind it; ...
    -> a stream of our own: behind what the collective waits for, and behind its end, the device
       writes how many of these states it has reached (`cuStreamWriteValue32`)
    -> timing events behind each of these: what a step looked like, told when the device has done it

A collective that is queued uses the network later, when the device comes by. A thread that looked
for that would take Python's lock from the trainer a thousand times a second, so the device itself
tells: it writes to a page that it shares with the keeper, which looks when it has something to send
(`edge/shm/collective_profile_page.py`).

One stream tells of all collectives, in the order in which they were queued. Of two groups whose
collectives overlap the network counts as busy until the later one of them is over; one that waits
for its peer hides what comes behind it, and the network counts as busy. That errs on the safe side,
and what stands still for long is told by the gate (`core/pacing/gate.py`).

CUDA has fewer queues than a program has streams. Streams that share one wait for each other, and
this one waits for collectives: a trainer behind it would not compute meanwhile. So it has a
priority that no other stream has, which held up none in 40 tries on an H200 (docs/gpu.md).

Called on the thread that orders collectives, and on the trainer's; never waits for the device. What
is captured into a CUDA graph, and each replay of it, is not told.

Invariant: the page stays mapped and locked until the device has written all that was ordered.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from keepstep.edge.shm.collective_profile_page import QueuedProfileWriter
from keepstep.edge.torch.cuda_pages import CudaPages
from keepstep.edge.torch.cuda_runtime import SPARED_PRIORITY, own_stream, written_by
from keepstep.edge.torch.device_marks import CudaMarks
from keepstep.edge.torch.page_locks import PageLocker
from keepstep.model.rhythm import NO_STEP, Gap, StepSeen
from keepstep.model.units import PAGE_BYTES

# A trainer whose device is that far behind tells of no more until it has caught up.
MOST_MARKS = 4096

WriteFrom = Callable[[Any, int], bool]  # have this stream write this number; whether it will


@dataclass(frozen=True, slots=True)
class _Mark:
    """Of a moment on the device: from there on it is in that state. is_boundary: a step begins."""

    event: Any
    is_boundary: bool
    step: int
    entered: int
    pending: int


class _Stretches:
    """What marks come to, in the device's own time: a step at a time."""

    def __init__(self) -> None:
        self._at: _Mark | None = None
        self._began_ns = self._idle_from_ns = 0
        self._gaps: list[Gap] = []
        self._is_whole = False

    def reached(self, mark: _Mark, now_ns: int) -> StepSeen | None:
        """The device is there. The step that ended with that, if one did."""
        at, self._at = self._at, mark
        was_idle = at is not None and not at.pending
        if was_idle and now_ns > self._idle_from_ns and (mark.pending or mark.is_boundary):
            assert at is not None
            self._gaps.append(Gap(at.entered, self._idle_from_ns, now_ns))
        if not was_idle or mark.is_boundary:
            self._idle_from_ns = now_ns
        if not mark.is_boundary:
            return None
        ended = None
        if at is not None and self._is_whole and at.step != NO_STEP != mark.step:
            ended = StepSeen(at.step, self._began_ns, now_ns, at.entered, tuple(self._gaps))
        self._began_ns, self._gaps, self._is_whole = now_ns, [], True
        return ended

    def lacks(self) -> None:
        """Something of the present step is not known."""
        self._is_whole = False


class DeviceRhythm:
    """Of one rank. `write`: see `cuda_runtime.written_by`."""

    def __init__(
        self,
        page: QueuedProfileWriter,
        write: WriteFrom,
        device: Any,
        stream: Any,
        cuda: Any = torch.cuda,
        let_go: Callable[[], object] = lambda: None,
    ) -> None:
        """stream: nobody else's. cuda: torch's module of that name, or what stands for it. let_go:
        called before the page is closed."""
        self._page, self._write, self._device = page, write, device
        self._stream, self._cuda, self._let_go = stream, cuda, let_go
        self._lock = threading.Lock()
        self._marks: deque[_Mark | None] = deque()  # None: some are missing here
        self._last: Any = None  # the one that was read last: what follows is counted from it
        self._now_ns = 0
        self._seen = _Stretches()
        self._step, self._entered, self._pending = NO_STEP, 0, 0
        self._timing = CudaMarks(cuda, device, stream)
        self._ordered = cuda.Event()
        self._has_failed = False

    def step(self, step: int) -> None:
        """The trainer has ordered all of the step before; `NO_STEP`: none begins."""
        with self._lock:
            self._page.trains(step)
            if not self._can_order():
                return
            try:
                self._read()
                self._follow_trainer()
                self._step, self._entered = step, 0
                self._reach(is_boundary=True)
            except RuntimeError:  # of the device: the program will hear of it
                self._has_failed = True

    def begins(self) -> bool:
        """A collective is about to be queued; False where that is not told."""
        with self._lock:
            if self._step == NO_STEP or not self._can_order():
                return False
            try:
                self._follow_trainer()
                self._entered, self._pending = self._entered + 1, self._pending + 1
                self._reach()
            except RuntimeError:
                self._has_failed = True
            return True

    def queued(self, end: Any) -> None:
        """One of which that was told is queued; `end`: an event behind it, None where it failed."""
        with self._lock:
            self._pending -= 1
            if self._has_failed:
                return
            try:
                if end is not None:
                    self._stream.wait_event(end)
                self._reach()
            except RuntimeError:
                self._has_failed = True

    def close(self) -> None:
        """Nothing is told any more. Where the device still has something to write the page stays
        mapped, and locked, for as long as the process."""
        with self._lock:
            self._page.end()
            last = next((mark for mark in reversed(self._marks) if mark is not None), None)
            try:
                is_over = last is None or self._timing.is_over(last.event)
            except RuntimeError:
                is_over = False
            self._has_failed = True
            if is_over:
                self._let_go()
                self._page.close()
            else:
                _left.append(self)

    def _can_order(self) -> bool:
        return not self._has_failed and not self._cuda.is_current_stream_capturing()

    def _follow_trainer(self) -> None:
        """What is ordered from here on is behind what this thread has queued. The event may be
        recorded anew at once: a wait is for what was recorded when it was ordered."""
        self._ordered.record(self._cuda.current_stream(self._device))
        self._stream.wait_event(self._ordered)

    def _reach(self, is_boundary: bool = False) -> None:
        is_full = len(self._marks) >= MOST_MARKS
        at = self._step, self._entered, self._pending
        number = None if is_full else self._page.state(*at)
        is_written = number is not None and self._write(self._stream, number)
        event = self._timing.make() if is_written else None
        if event is not None:
            self._marks.append(_Mark(event, is_boundary, *at))
        elif not self._marks or self._marks[-1] is not None:
            self._marks.append(None)

    def _read(self) -> None:
        """As far as the device has come."""
        while self._marks:
            mark = self._marks[0]
            if mark is None:
                self._seen.lacks()
                self._marks.popleft()
                continue
            if not self._timing.is_over(mark.event):
                return
            self._marks.popleft()
            if self._last is not None:
                self._now_ns += self._timing.between_ns(self._last, mark.event)
                self._timing.take_back(self._last)
            self._last = mark.event
            ended = self._seen.reached(mark, self._now_ns)
            if ended is not None:
                self._page.saw(ended)


_left: list[DeviceRhythm] = []  # whose pages a device may still write to


def device_rhythm(
    page: QueuedProfileWriter, device: torch.device, locker: PageLocker | None = None
) -> DeviceRhythm | None:
    """None, with the page closed, where the device cannot write to the host's memory."""
    locker = locker or CudaPages(device)
    address = page.reached_address
    if locker.register(address, PAGE_BYTES) is not None:
        page.close()
        return None
    write = written_by(device, address)
    stream = own_stream(device, SPARED_PRIORITY)
    if write is None or not write(stream, 0):
        locker.unregister(address)
        page.close()
        return None
    return DeviceRhythm(page, write, device, stream, let_go=lambda: locker.unregister(address))
