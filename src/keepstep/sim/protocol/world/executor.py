"""Executors of simulated processes: work is done a while after it was asked for, and what comes of
it is heard a while later. Work in acts takes a while for each: between two of them anything may
happen, and the process may be killed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

from keepstep.ports import Acts
from keepstep.sim.protocol.world.world import Process

T = TypeVar("T")


def _nothing_more() -> int:
    """Acts take no longer than `most_ns`."""
    return 0


class SimExecutor:
    """See `ports.Executor`: pieces of work run beside each other. `most_ns`: how long an act takes
    at most. `is_split`: whether anything may happen between two acts. `more_ns`: how much longer
    the next act takes, asked once for each."""

    def __init__(
        self,
        process: Process,
        most_ns: int,
        is_split: bool = True,
        more_ns: Callable[[], int] = _nothing_more,
    ) -> None:
        self._process = process
        self._most_ns = max(1, most_ns)
        self._is_split = is_split
        self._more_ns = more_ns
        self._random: Random = process.world.stream(f"executor {process.name}")

    def submit(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        self._process.after(self.delay_ns(), self._work, work, then)

    def act(self, acts: Acts[T], then: Callable[[T], None]) -> None:
        self._process.after(self.delay_ns(), self._act, acts, then)

    def _act(self, acts: Acts[T], then: Callable[[T], None]) -> None:
        self._process.touch("act")
        try:
            self.do_next(acts)
        except StopIteration as over:
            self._process.after(self.delay_ns(), then, over.value)
        else:
            self.act(acts, then)

    def do_next(self, acts: Acts[T]) -> None:
        """The next act, or all that are left. Raises StopIteration at the end, with the result."""
        next(acts)
        while not self._is_split:
            next(acts)

    def _work(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        self._process.touch("work")
        found = work()
        self._process.after(self.delay_ns(), then, found)

    def delay_ns(self) -> int:
        """With what the work before has taken by itself."""
        delay_ns = int(self._most_ns * self._random.random()) + self._process.spent_ns()
        return delay_ns + self._more_ns()


class SerialExecutor(SimExecutor):
    """One piece of work after the other, in the order in which they were submitted."""

    def __init__(
        self,
        process: Process,
        most_ns: int,
        is_split: bool = True,
        more_ns: Callable[[], int] = _nothing_more,
    ) -> None:
        super().__init__(process, most_ns, is_split, more_ns)
        self._waiting: deque[tuple[Acts[Any], Callable[[Any], None]]] = deque()
        self._is_busy = False

    @property
    def is_busy(self) -> bool:
        return self._is_busy

    def submit(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        self.act(_as_act(work), then)

    def act(self, acts: Acts[T], then: Callable[[T], None]) -> None:
        self._waiting.append((acts, then))
        if not self._is_busy:
            self._is_busy = True
            self._process.after(self.delay_ns(), self._next)

    def _next(self) -> None:
        self._process.touch("act")
        acts, then = self._waiting[0]
        try:
            self.do_next(acts)
        except StopIteration as over:
            self._waiting.popleft()
            then(over.value)
            if self._waiting:
                self._process.after(self.delay_ns(), self._next)
            else:
                self._is_busy = False
                self.idle()
        else:
            self._process.after(self.delay_ns(), self._next)

    def idle(self) -> None:
        """Nothing is left to do."""


class TrainerExecutor(SerialExecutor):
    """Of the program's own thread, which goes on when nothing is left to do."""

    def __init__(
        self,
        process: Process,
        most_ns: int,
        is_split: bool = True,
        more_ns: Callable[[], int] = _nothing_more,
    ) -> None:
        super().__init__(process, most_ns, is_split, more_ns)
        self._then: list[Callable[[], None]] = []

    def when_idle(self, then: Callable[[], None]) -> None:
        """`then` is called when nothing is left to do: at once, if nothing is."""
        if self.is_busy:
            self._then.append(then)
        else:
            self._process.after(0, then)

    def idle(self) -> None:
        waiting, self._then = self._then, []
        for then in waiting:
            self._process.after(0, then)


def _as_act(work: Callable[[], T]) -> Acts[T]:
    return work()
    yield
