"""Executors: threads for what takes long, and the loop itself where nothing else waits. Results are
posted to the loop, in the order in which they came."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from keepstep.ports import Acts

T = TypeVar("T")


def run_acts(acts: Acts[T]) -> T:
    """All of it, one after the other."""
    while True:
        try:
            next(acts)
        except StopIteration as over:
            result: T = over.value
            return result


class Threads:
    """See `ports.Executor`. `post`, from any thread: have the loop make a call soon."""

    def __init__(self, count: int, post: Callable[[Callable[[], None]], None]) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="worker")
        self._post = post
        self._is_closed = False

    def submit(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        def finished(future: Future[T]) -> None:
            self._post(lambda: self._hand_in(future, then))

        self._pool.submit(work).add_done_callback(finished)

    def act(self, acts: Acts[T], then: Callable[[T], None]) -> None:
        self.submit(lambda: run_acts(acts), then)

    def _hand_in(self, future: Future[T], then: Callable[[T], None]) -> None:
        """In the loop. Raises what the work raised."""
        if not self._is_closed:
            then(future.result())

    def close(self) -> None:
        """Wait for what has begun; nobody hears of it any more."""
        self._is_closed = True
        self._pool.shutdown()


class LoopExecutor:
    """See `ports.Executor`. Works in the loop itself, one piece after the other: for a process that
    has nothing else to do."""

    def __init__(self, post: Callable[[Callable[[], None]], None]) -> None:
        self._post = post

    def submit(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        self._post(lambda: then(work()))

    def act(self, acts: Acts[T], then: Callable[[T], None]) -> None:
        self._post(lambda: then(run_acts(acts)))


def aside(
    post: Callable[[Callable[[], None]], None], work: Callable[[], T], then: Callable[[T], None]
) -> None:
    """Do this once, on a thread of its own that the interpreter's end does not wait for; `post`
    hands its result in, or raises there what it raised."""

    def run() -> None:
        done: Future[T] = Future()
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)
            raise
        finally:
            post(lambda: then(done.result()))

    threading.Thread(target=run, name="aside", daemon=True).start()


class AsideThreads:
    """See `ports.Executor`, for what is rare and may never end: each piece of work has a thread of
    its own, and nobody waits for it at the end."""

    def __init__(
        self,
        post: Callable[[Callable[[], None]], None],
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        """begin: called first on each thread."""
        self._post, self._begin = post, begin

    def submit(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        def begun() -> T:
            self._begin()
            return work()

        aside(self._post, begun, then)

    def act(self, acts: Acts[T], then: Callable[[T], None]) -> None:
        self.submit(lambda: run_acts(acts), then)
