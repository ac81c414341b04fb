"""FileJournal: events appended to one file by all processes of a job, and read back.

A line goes out in one `write` on an O_APPEND descriptor, so writers do not interleave; a line torn
by a crash or a full disk is skipped by the reader and costs no other. Nothing in keepstep depends
on the journal: when it cannot be written, the event still reaches the log. That it cannot is told
when it begins and when it is over, not with each event.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from keepstep.codes import of_warning
from keepstep.edge.os.clock import CLOCK
from keepstep.edge.os.own_file import append_to_own, check_own_directory, read_if_of
from keepstep.edge.os.tail import Tail, lines_of
from keepstep.model.events import Event, event_from_line

log = logging.getLogger("keepstep")
EVENT_BEGIN = '{"wall_ns":'


class FileJournal:
    """Append-only; safe to share between threads and processes."""

    def __init__(self, path: Path | None, who: str) -> None:
        self.who = who
        self._fd: int | None = None
        self._path, self._lost = path, 0  # since it was written last
        if path is not None:
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                check_own_directory(path.parent)
                self._fd = append_to_own(path)
            except OSError as error:
                log.warning(
                    "the journal %s cannot be written (%s): events reach the log only [KS5225]",
                    path,
                    error,
                )

    def record(self, kind: str, why: str, /, level: int = logging.INFO, **data: Any) -> None:
        """Write one event to the journal and, as the same sentence, to the log."""
        extra = {"keepstep_kind": kind, "keepstep_data": data}
        log.log(level, "%s: %s%s", self.who, why, _code(kind, why, level), extra=extra)
        if self._fd is None:
            return
        event = Event(
            CLOCK.wall_ns(), CLOCK.monotonic_ns(), self.who, kind, why, data, CLOCK.boot()
        )
        line = event.to_line().encode()
        try:
            written = os.write(self._fd, line)
            why = "" if written == len(line) else f"{written} of {len(line)} bytes were written"
        except OSError as error:
            why = str(error)
        self._tell_loss(why)

    def _tell_loss(self, why: str) -> None:
        if why:
            self._lost += 1
            if self._lost == 1:
                log.warning(
                    "the journal %s lost an event (%s): until it can be written again events reach "
                    "the log only [KS5225]",
                    self._path,
                    why,
                )
        elif self._lost:
            lost, self._lost = self._lost, 0
            log.warning(
                "the journal %s is written again: it lost %d of this process's events [KS5225]",
                self._path,
                lost,
            )

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _code(kind: str, why: str, level: int) -> str:
    """What a warning or an error ends with in the log: `keepstep help` and the documentation say
    what is behind it."""
    found = of_warning(kind, why) if level >= logging.WARNING else None
    return "" if found is None or "[KS" in why else f" [{found.number}]"


class ReadJournal(NamedTuple):
    """`unread`: so many lines are no event, or have a part of one that was not written whole."""

    events: list[Event]
    unread: int


def read_journal(path: Path, owner: int | None = None) -> Iterator[Event]:
    """Every whole event of the file in the order written; nothing when there is no regular file.
    owner: whose it and its directory must be, else there is nothing either: in a shared state
    directory anybody may put a journal. None where a person has named the file."""
    yield from filter(None, _read(path, owner))


def read_all(path: Path, owner: int | None = None) -> ReadJournal:
    """As `read_journal`, for whom it matters what is missing."""
    found = list(_read(path, owner))
    events = [event for event in found if event is not None]
    return ReadJournal(events, len(found) - len(events))


def _read(path: Path, owner: int | None) -> Iterator[Event | None]:
    fd = read_if_of(path, owner)
    if fd is not None:
        with open(fd, "rb") as file:
            yield from _events(lines_of(file))


class JournalTail:
    """What is added to a journal between two looks."""

    def __init__(self, path: Path, from_its_end: bool = False, owner: int | None = None) -> None:
        """owner: as in `read_journal`."""
        self._tail = Tail(path, from_its_end, owner)

    def read(self) -> list[Event]:
        """The events added since the last look."""
        return list(filter(None, _events(self._tail.new())))


def _events(lines: Iterable[bytes]) -> Iterator[Event | None]:
    """None for each that cannot be read."""
    for raw in lines:
        line = raw.decode("utf-8", errors="replace")
        # A torn line has no end: the next event stands behind it.
        begin = max(0, line.rfind(EVENT_BEGIN))
        if begin:
            yield None
        try:
            yield event_from_line(line[begin:])
        except ValueError:
            yield None
