"""Loop: what drives the thread-free objects of one process, or of one thread of it.

Comes in: descriptors that are ready, timers, and calls that other threads post. Goes out: all of
these as calls, one after the other, on the thread that runs the loop. What is there at the same
time comes in this order: descriptors in the order in which they were added, posted calls, timers.
What comes of a call has to wait for the next turn, so nobody starves.

What a call raises ends `run` and loses nothing else: a loop that is run again goes on with the next
call. Only `post` is for other threads, unless the loop has a `guard`: whoever holds that may call
everything else, too. Signals are `signals.py`.

poll, not epoll: a forked child shares an epoll set with its parent, and what it unregisters there
would be lost here.
"""

from __future__ import annotations

import itertools
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from heapq import heappop, heappush

from keepstep.edge.os.eventfd import Waker
from keepstep.model.units import S_NS

Call = Callable[[], None]
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
LONGEST_S = 24 * 3600.0  # in one sleep: poll takes 24 days at most


class LoopTimer:
    """See `ports.Timer`."""

    __slots__ = ("call",)

    def __init__(self, call: Call) -> None:
        self.call: Call | None = call

    def cancel(self) -> None:
        self.call = None


class Loop:
    """See `ports.Timers` for `after`."""

    def __init__(self, guard: AbstractContextManager[object] | None = None) -> None:
        """guard: a lock, which is held around every call and while the loop looks at what it has
        to do, and not while it sleeps."""
        self._guard = nullcontext() if guard is None else guard
        self._thread: int | None = None  # that runs it
        self._selector = selectors.PollSelector()
        self._waker = Waker()
        self._posted: deque[Call] = deque()
        self._timers: list[tuple[int, int, LoopTimer]] = []  # a heap: due, number, timer
        self._numbers = itertools.count()
        self._posting = threading.RLock()  # a signal handler may post in the middle of a post
        self._is_closed = False
        self.add_reader(self._waker.fileno(), self._waker.rest)

    def after(self, delay_ns: int, call: Call) -> LoopTimer:
        """See `ports.Timers`."""
        timer = LoopTimer(call)
        due_ns = time.monotonic_ns() + max(0, delay_ns)
        heappush(self._timers, (due_ns, next(self._numbers), timer))
        if self._thread not in (None, threading.get_ident()):
            self._waker.wake()  # it sleeps until an earlier look's timers
        return timer

    def post(self, call: Call) -> None:
        """From any thread: have the loop make this call soon. Nothing once it is closed."""
        with self._posting:
            if not self._is_closed:
                self._posted.append(call)
                self._waker.wake()

    # -- descriptors

    def add_reader(self, fd: int, call: Call) -> None:
        """Make this call whenever there is something to read, or the other end is gone. Remove it
        before the descriptor is closed."""
        self._listen(fd, READ, call)

    def add_writer(self, fd: int, call: Call) -> None:
        """Make this call whenever something can be written."""
        self._listen(fd, WRITE, call)

    def remove_reader(self, fd: int) -> None:
        """No call any more, not even for what is ready already. Nothing if there is no reader."""
        self._listen(fd, READ, None)

    def remove_writer(self, fd: int) -> None:
        """The same for a writer."""
        self._listen(fd, WRITE, None)

    def _listen(self, fd: int, event: int, call: Call | None) -> None:
        key = self._selector.get_map().get(fd)
        number, calls = key.data if key is not None else (next(self._numbers), {})
        calls.pop(event, None)
        if call is not None:
            calls[event] = call
        if key is not None:
            self._selector.unregister(fd)
        if calls:
            self._selector.register(fd, sum(calls), (number, calls))

    # -- what it does

    def run(self, until: Callable[[], bool]) -> None:
        """Make calls until `until()` holds, which is asked before each. Raises what a call
        raises."""
        self._thread = threading.get_ident()
        while True:
            with self._guard:
                if until():
                    return
                idle_s = self._idle_s()
            turn = self._turn(self._selector.select(idle_s))
            while True:
                with self._guard:
                    call = next(turn, None)
                    if call is None:
                        break
                    call()
                    if until():
                        return

    def _idle_s(self) -> float | None:
        """How long only a descriptor can bring a call; None: for ever."""
        while self._timers and self._timers[0][2].call is None:
            heappop(self._timers)
        if self._posted:
            return 0.0
        if not self._timers:
            return None
        return min(max(0, self._timers[0][0] - time.monotonic_ns()) / S_NS, LONGEST_S)

    def _turn(self, ready: list[tuple[selectors.SelectorKey, int]]) -> Iterator[Call]:
        """What is to be done now. Nothing is taken from where it waits before its call is made."""
        for key, events in sorted(ready, key=lambda each: each[0].data[0]):
            _, calls = key.data  # as they are when it is their turn: some may have been removed
            for event in (READ, WRITE):
                if events & event and event in calls:
                    yield calls[event]
        for _ in range(len(self._posted)):
            yield self._posted.popleft()
        now_ns = time.monotonic_ns()
        while self._timers and self._timers[0][0] <= now_ns:
            timer = heappop(self._timers)[2]
            due, timer.call = timer.call, None
            if due is not None:
                yield due

    def close(self) -> None:
        """It makes no call any more. What it listened to stays open."""
        with self._posting:
            self._is_closed = True
            self._waker.close()
        self._selector.close()
