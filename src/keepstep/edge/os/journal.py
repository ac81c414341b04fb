"""FileJournal: events appended to one file by all processes of a job, and read back.

A line goes out in one `write` on an O_APPEND descriptor, so writers do not interleave; a line torn
by a crash or a full disk is skipped by the reader and costs no other. Nothing in keepstep depends
on the journal: when it cannot be written, the event still reaches the log.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from keepstep.edge.os.clock import CLOCK
from keepstep.edge.os.tail import Tail
from keepstep.model.events import Event, event_from_line

log = logging.getLogger("keepstep")
FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
EVENT_BEGIN = '{"wall_ns":'


class FileJournal:
    """Append-only; safe to share between threads and processes."""

    def __init__(self, path: Path | None, who: str) -> None:
        self.who = who
        self._fd: int | None = None
        if path is not None:
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._fd = os.open(path, FLAGS, 0o600)
            except OSError as error:
                log.warning(
                    "the journal %s cannot be written (%s): events reach the log only", path, error
                )

    def record(self, kind: str, why: str, /, level: int = logging.INFO, **data: Any) -> None:
        """Write one event to the journal and, as the same sentence, to the log."""
        log.log(
            level, "%s: %s", self.who, why, extra={"keepstep_kind": kind, "keepstep_data": data}
        )
        if self._fd is None:
            return
        event = Event(
            CLOCK.wall_ns(), CLOCK.monotonic_ns(), self.who, kind, why, data, CLOCK.boot()
        )
        try:
            os.write(self._fd, event.to_line().encode())
        except OSError as error:
            log.warning("the journal lost an event (%s)", error)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def read_journal(path: Path) -> Iterator[Event]:
    """Every whole event of the file in the order written; nothing when there is no file."""
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            yield from _events(lines)
    except FileNotFoundError:
        return


class JournalTail:
    """What is added to a journal between two looks."""

    def __init__(self, path: Path, from_its_end: bool = False) -> None:
        self._tail = Tail(path, from_its_end)

    def read(self) -> list[Event]:
        """The events added since the last look."""
        return list(_events(self._tail.new().decode("utf-8", errors="replace").split("\n")))


def _events(lines: Iterable[str]) -> Iterator[Event]:
    for line in lines:
        # A torn line has no end: the next event stands behind it.
        with contextlib.suppress(ValueError):
            yield event_from_line(line[max(0, line.rfind(EVENT_BEGIN)) :])
