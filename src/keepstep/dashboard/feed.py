"""Feed: one document, looked at as long as somebody reads, and sent to all of them as it changes.

Comes in: a function that looks. Goes out: to each reader first the whole document, then changes
(`delta.py`), as server-sent events. One thread looks for all readers; without readers it sleeps,
and nothing is looked at.

Invariant: a reader that has applied every change it was given has the document of the newest look.
One that falls behind is given the whole document again.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

from keepstep.dashboard.delta import difference

EVERY_S = 1.5  # steps go on; what has happened is in a journal, and shown at once
NEWS_EVERY_S = 0.2  # a journal that has grown is looked at at once
# A look is followed by a pause of so many times what it took, whatever the news: so much of a core
# is the most that readers can cost.
PAUSE_RATIO = 19.0
HEARTBEAT_S = 5.0
KEPT_CHANGES = 32
LAST_WORD_S = 1.0  # for readers to be told that it is over
MAX_READERS = 8
RETRY_MS = 1000  # after which a browser comes again


class Subject(Protocol):
    """What is looked at. All calls come from one thread at a time."""

    def look(self) -> dict[str, Any]:
        """The document, now."""

    def has_news(self) -> bool:
        """Whether it is worth a look before its time."""

    def rest(self) -> None:
        """Nobody reads any more."""


class Feed:
    """Of one subject."""

    def __init__(
        self, subject: Subject, every_s: float = EVERY_S, now_ms: Callable[[], int] | None = None
    ) -> None:
        self._subject = subject
        self._every_s = every_s
        self._now_ms = now_ms or (lambda: time.time_ns() // 1_000_000)
        self._news = threading.Condition()
        self._closing = threading.Event()
        self._readers = 0
        self._thread: threading.Thread | None = None
        self._version = 0  # of the newest document; 0: none
        self._document: dict[str, Any] = {}
        self._changes: deque[tuple[int, bytes]] = deque(maxlen=KEPT_CHANGES)

    def is_full(self) -> bool:
        """Whether one more reader would be one too many."""
        return self._readers >= MAX_READERS

    def read(self) -> Iterator[bytes]:
        """What to send to one reader, event by event, until the feed is closed or looking has
        failed. The reader counts from the first event on, until the iterator is closed."""
        self._enter()
        try:
            yield f"retry: {RETRY_MS}\n\n".encode()
            version = 0
            while True:
                with self._news:
                    self._news.wait_for(partial(self._has_more, version), HEARTBEAT_S)
                    is_over, has_failed = self._closing.is_set(), self._thread is None
                    messages = self._since(version)
                    version = self._version
                yield from messages or [b": nothing new\n\n"]
                if is_over:
                    yield b"event: over\ndata: {}\n\n"
                if is_over or has_failed:
                    return
        finally:
            self._leave()

    def close(self) -> None:
        """Readers are told that it is over."""
        self._closing.set()
        with self._news:
            self._news.notify_all()
            thread = self._thread
            self._news.wait_for(lambda: not self._readers, LAST_WORD_S)
        if thread is not None:
            thread.join()

    # -- readers

    def _enter(self) -> None:
        with self._news:
            self._readers += 1
            if self._thread is None and not self._closing.is_set():
                self._forget()
                self._thread = threading.Thread(target=self._look_on, name="keepstep-dashboard")
                self._thread.daemon = True
                self._thread.start()
            self._news.notify_all()

    def _leave(self) -> None:
        with self._news:
            self._readers -= 1
            self._news.notify_all()

    def _has_more(self, version: int) -> bool:
        return self._version != version or self._closing.is_set() or self._thread is None

    def _since(self, version: int) -> list[bytes]:
        """What leads from that version to the newest."""
        if self._version in (0, version):  # nothing was seen yet, or nothing since
            return []
        changes = [message for number, message in self._changes if number > version]
        if version and len(changes) == self._version - version:
            return changes
        return [self._message("whole", self._document)]

    def _message(self, name: str, said: dict[str, Any]) -> bytes:
        # ASCII, so that no half of a character can break it; and on one line
        text = json.dumps({"now_ms": self._now_ms(), name: said}, separators=(",", ":"))
        return f"event: {name}\ndata: {text}\n\n".encode("ascii")

    # -- the thread

    def _look_on(self) -> None:
        try:
            while self._wait_for_readers():
                began_s = time.thread_time()
                self._publish(self._subject.look())
                self._pause(time.thread_time() - began_s)
        finally:
            self._subject.rest()
            with self._news:
                self._thread = None
                self._news.notify_all()

    def _wait_for_readers(self) -> bool:
        """Until there are some; False when the feed is closed."""
        with self._news:
            if self._readers > 0 or self._closing.is_set():
                return not self._closing.is_set()
            self._forget()
        self._subject.rest()
        with self._news:
            self._news.wait_for(lambda: self._readers > 0 or self._closing.is_set())
        return not self._closing.is_set()

    def _forget(self) -> None:
        """What was seen last would be old news to the next reader."""
        self._version, self._document = 0, {}
        self._changes.clear()

    def _publish(self, document: dict[str, Any]) -> None:
        message = self._message("change", difference(self._document, document))
        with self._news:
            self._version += 1
            self._document = document
            self._changes.append((self._version, message))
            self._news.notify_all()

    def _pause(self, took_s: float) -> None:
        """Until it is time, or there is news."""
        least_s = took_s * PAUSE_RATIO
        now_s = time.monotonic()
        until_s, least_until_s = now_s + max(self._every_s, least_s), now_s + least_s
        while not self._closing.wait(min(NEWS_EVERY_S, max(0.0, until_s - now_s))):
            now_s = time.monotonic()
            if now_s >= until_s or (now_s >= least_until_s and self._subject.has_news()):
                return
