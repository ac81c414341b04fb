"""Driver: runs a `Rank` inside a trainer, whose own thread cannot be a loop.

    loop thread      what keeper and agent say, timers
    trainer's thread the program's steps; work that must happen there
    background thread copies, one after the other
    aside threads     memory for one more slot: what takes long, and no copy waits for

Each of the first two calls the rank under one lock. Work runs outside of it: what is for the
trainer's thread waits until that is inside keepstep, and its results are handed in under the lock
again. The trainer sleeps on a condition while the rank is not READY.

Invariant: the rank is called by one thread at a time, no lock is held while a thread waits, and a
waiting thread checks its condition again after every call.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from keepstep.edge.os.loop import Loop
from keepstep.edge.os.threads import AsideThreads, run_acts
from keepstep.ports import Acts

T = TypeVar("T")


class Turn:
    """Held during a call of the rank; waiting threads check again when it is released."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed

    def __enter__(self) -> None:
        self._changed.acquire()

    def __exit__(self, *_: object) -> None:
        self._changed.notify_all()
        self._changed.release()


class TrainerThread:
    """`ports.Executor` on the trainer's own thread, one piece of work after the other."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._work: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()

    def submit(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        with self._changed:
            self._work.append((work, then))
            self._changed.notify_all()

    def act(self, acts: Acts[T], then: Callable[[T], None]) -> None:
        self.submit(lambda: run_acts(acts), then)

    @property
    def has_work(self) -> bool:
        return bool(self._work)

    def run_all(self) -> None:
        """On the trainer's thread: whatever waits, and what comes of it. Raises what it raises."""
        while self._work:
            work, then = self._work.popleft()
            result = work()
            with Turn(self._changed):
                then(result)


class BackgroundThread:
    """`ports.Executor` on a thread of its own, one piece of work after the other."""

    def __init__(self, changed: threading.Condition, begin: Callable[[], None]) -> None:
        """begin: called first on that thread."""
        self._changed = changed
        self._begin = begin
        self._work: deque[tuple[Callable[[], Any], Callable[[Any], None]] | None] = deque()
        self._has_work = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="keepstep-capture", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        self._work.append((work, then))
        self._has_work.release()

    def act(self, acts: Acts[T], then: Callable[[T], None]) -> None:
        self.submit(lambda: run_acts(acts), then)

    def _run(self) -> None:
        self._begin()
        while True:
            self._has_work.acquire()
            item = self._work.popleft()
            if item is None:
                return
            work, then = item
            result = work()
            with Turn(self._changed):
                then(result)

    def close(self, within_s: float) -> None:
        """Finish what has been submitted, if that takes no longer than this."""
        self._work.append(None)
        self._has_work.release()
        if threading.current_thread() is not self._thread:
            self._thread.join(within_s)


class Driver:
    """The threads of one rank. `lock` is held by whoever calls it."""

    def __init__(self, begin_background: Callable[[], None]) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.loop = Loop(guard=Turn(self.changed))
        self.trainer = TrainerThread(self.changed)
        self.background = BackgroundThread(self.changed, begin_background)
        self.aside = AsideThreads(self._hand_in, begin_background)
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="keepstep-rank", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.loop.run(lambda: self._is_over)
        self.loop.close()

    def _hand_in(self, call: Callable[[], None]) -> None:
        """On the thread that did the work."""
        with Turn(self.changed):
            call()

    def call(self, event: Callable[..., T], *arguments: Any) -> T:
        """On the trainer's thread: tell the rank something, and do what it asks of this thread."""
        with Turn(self.changed):
            result = event(*arguments)
        self.trainer.run_all()
        return result

    def wait(self, until: Callable[[], bool], within_s: float | None = None) -> bool:
        """On the trainer's thread: do what the rank asks of it until that holds, which is asked
        under the lock; False when it does not in time."""
        deadline_s = None if within_s is None else time.monotonic() + within_s
        while True:
            self.trainer.run_all()
            with self.changed:
                if until():
                    return True
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return False
                if not self.trainer.has_work:
                    self.changed.wait(left_s)

    def notify(self) -> None:
        """Something that the trainer may be waiting for has happened."""
        with self.changed:
            self.changed.notify_all()

    def close(self) -> None:
        """No event reaches the rank any more."""
        self.background.close(5.0)
        self._is_over = True
        self.loop.post(_nothing)
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)


def _nothing() -> None:
    """Wakes the loop."""
