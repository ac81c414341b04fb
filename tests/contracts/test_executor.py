"""What `Executor` do: work is done elsewhere, and the loop hears of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Protocol

import pytest

from keepstep.edge.os.threads import AsideThreads, LoopExecutor, Threads
from keepstep.ports import Executor
from tests.contracts.real import PatientLoop
from tests.contracts.simulated import SimLoop


class Loop(Protocol):
    """A loop, and the workers that belong to it."""

    workers: Executor

    def until(self, holds: Callable[[], bool]) -> None:
        """Let it run until that is so."""

    def close(self) -> None: ...


class ThreadedLoop(PatientLoop):
    def __init__(self) -> None:
        super().__init__()
        self._threads = Threads(2, self.loop.post)
        self.workers: Executor = self._threads

    def close(self) -> None:
        self._threads.close()
        super().close()


class LoneLoop(ThreadedLoop):
    """That does the work itself."""

    def __init__(self) -> None:
        super().__init__()
        self.workers = LoopExecutor(self.loop.post)


class AsideLoop(PatientLoop):
    """With a thread for each piece of work."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: Executor = AsideThreads(self.loop.post)


LOOPS: dict[str, Callable[[], Loop]] = {
    "threads": ThreadedLoop,
    "aside": AsideLoop,
    "loop": LoneLoop,
    "simulated": SimLoop,
}


@pytest.fixture(params=LOOPS)
def loop(request: pytest.FixtureRequest) -> Iterator[Loop]:
    made = LOOPS[request.param]()
    yield made
    made.close()


def test_the_loop_hears_what_came_of_it(loop: Loop) -> None:
    heard: list[tuple[int, threading.Thread]] = []
    for n in range(20):
        loop.workers.submit(
            lambda n=n: n * n,  # type: ignore[misc]
            lambda found: heard.append((found, threading.current_thread())),
        )
    assert heard == [], "not while it is submitted"
    loop.until(lambda: len(heard) == 20)
    assert sorted(found for found, _ in heard) == [n * n for n in range(20)]
    assert {thread for _, thread in heard} == {threading.current_thread()}


def test_who_hears_may_have_more_done(loop: Loop) -> None:
    heard: list[int] = []

    def then(found: int) -> None:
        heard.append(found)
        if found < 5:
            loop.workers.submit(lambda: found + 1, then)

    loop.workers.submit(lambda: 0, then)
    loop.until(lambda: len(heard) == 6)
    assert heard == list(range(6))


def test_what_the_work_raises_ends_the_loop(loop: Loop) -> None:
    loop.workers.submit(lambda: 1 // 0, lambda found: None)
    with pytest.raises(ZeroDivisionError):
        loop.until(lambda: False)
