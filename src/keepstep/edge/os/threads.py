"""Executor: threads for what takes long. Results wait for the loop, in the order in which they
came."""

from __future__ import annotations

import queue
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
    """`wake`, from any thread: have the loop call `hand_in` soon."""

    def __init__(self, count: int, wake: Callable[[], None]) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="worker")
        self._wake = wake
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def submit(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        def finished(future: Future[T]) -> None:
            self._done.put(lambda: then(future.result()))
            self._wake()

        self._pool.submit(work).add_done_callback(finished)

    def act(self, acts: Acts[T], then: Callable[[T], None]) -> None:
        self.submit(lambda: run_acts(acts), then)

    def hand_in(self) -> None:
        """In the loop: call what waits for results. Raises what the work raised."""
        while not self._done.empty():
            self._done.get()()

    def close(self) -> None:
        """Wait for what has begun; nobody hears of it any more."""
        self._pool.shutdown()
