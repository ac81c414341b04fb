"""Logs, read: from a directory to what was seen in its files, in bounded time and memory.

Comes in: a path, and how long it may take. Goes out: the verdict of `core/postmortem`, and what was
not read, and why. Which parts of more logs than can be read are, `core/postmortem/portions.py`
decides; the time is only a backstop to that, since what it cuts off differs from run to run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from keepstep.cli.progress_bar import bytes_bar
from keepstep.core.postmortem import collectives, exits
from keepstep.core.postmortem.places import places_of
from keepstep.core.postmortem.portions import MOST_BYTES, LogPortion, LogSize, portions_of
from keepstep.core.postmortem.recorder import parse_dump, rank_in
from keepstep.core.postmortem.sightings import INTRODUCED, Sightings
from keepstep.core.postmortem.table import parse_table
from keepstep.core.postmortem.verdict import LogVerdict, judge
from keepstep.edge.os.log_files import LogNeedles, TornLogError, head_of, search, size_of
from keepstep.edge.os.log_folders import LogFolder, find_logs
from keepstep.edge.os.own_tables import pattern_text
from keepstep.edge.os.recorder_dumps import read_dump

WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What of the logs was not read, though it could have been. `parts`: of so many files only
    parts; `files`: of so many nothing. `is_late`: the time was over. `is_cut`: there were more
    files than are looked at."""

    read_bytes: int = 0
    total_bytes: int = 0
    parts: int = 0
    files: int = 0
    is_late: bool = False
    is_cut: bool = False

    def __bool__(self) -> bool:
        return bool(self.parts or self.files or self.is_cut)


class ReadLogs(NamedTuple):
    """`verdict` None: nothing could be read. `names`: the files by name. `unread`: why, by name; of
    a torn one what stands before the tear was read."""

    verdict: LogVerdict | None
    names: dict[str, Path]
    unread: dict[str, str]
    left: LeftOut


@dataclass(slots=True)
class _Reading:
    """`had`: how much of each file was read; `cut`: the streams that have more than that."""

    seen: Sightings
    needles: LogNeedles
    names: dict[str, Path]
    until_s: float
    unread: dict[str, str]
    had: dict[str, int] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    is_late: bool = False

    def is_over(self) -> bool:
        self.is_late = self.is_late or time.monotonic() > self.until_s
        return self.is_late


def read_verdict(path: Path, within_s: float = WITHIN_S, most_bytes: int = MOST_BYTES) -> ReadLogs:
    """What the logs there say, by as much of them as can be read within this time."""
    until_s = time.monotonic() + within_s
    folder = find_logs(path)
    places = places_of(list(folder.files))
    seen = Sightings(parse_table(pattern_text()), places)
    words = [*seen.table.needles(), *exits.NEEDLES, *collectives.NEEDLES, INTRODUCED]
    needles, unread = LogNeedles(words), dict(folder.skipped)
    reading = _Reading(seen, needles, folder.files, until_s, unread)
    logs = _logs(reading)
    if sum(log.size for log in logs) > most_bytes:  # the last attempt is what ended the job
        logs.sort(key=lambda log: -places[log.name].attempt)
    rounds = portions_of(logs, most_bytes)
    streams = {log.name for log in logs if log.is_stream}
    with bytes_bar() as bar:
        task = bar.add_task("reading", total=sum(log.size for log in logs))
        for portion in (portion for portions in rounds for portion in portions):
            if reading.is_over():
                break
            _read(reading, portion, portion.name in streams)
            bar.advance(task, portion.end - portion.begin)
        bar.update(task, completed=bar.tasks[0].total)
    left = _left_out(reading, logs, folder)
    verdict = judge(seen) if reading.had else None
    return ReadLogs(verdict, folder.files, unread, left)


def _logs(reading: _Reading) -> list[LogSize]:
    """Those that can be read, and how large they are."""
    logs = []
    for name, file in reading.names.items():
        try:
            logs.append(LogSize(name, *size_of(file)))
        except OSError as error:
            reading.unread[name] = error.strerror or str(error)
    return logs


def _read(reading: _Reading, portion: LogPortion, is_stream: bool) -> None:
    name, file = portion.name, reading.names[portion.name]
    if name in reading.unread:
        return
    count = 0

    def goes_on(added: int) -> bool:
        nonlocal count
        count += added
        return not reading.is_over()

    try:
        if name not in reading.had:
            if _take_dump(reading.seen, file, name):
                reading.had[name] = portion.end
                return
            reading.seen.greet(name, head_of(file))
        for excerpt in search(file, name, reading.needles, portion.begin, portion.end, goes_on):
            reading.seen.see(excerpt)
    except TornLogError as error:
        reading.unread[name] = str(error)
        if count:
            reading.had[name] = count
    except OSError as error:
        reading.unread[name] = error.strerror or str(error)
    except ValueError as error:
        reading.unread[name] = str(error)
    else:
        if is_stream:
            reading.had[name] = min(count, portion.end)
            (reading.cut.add if count > portion.end else reading.cut.discard)(name)
        elif not reading.is_late:
            reading.had[name] = reading.had.get(name, 0) + portion.end - portion.begin
        else:
            reading.had[name] = reading.had.get(name, 0) + min(count, portion.end - portion.begin)


def _left_out(reading: _Reading, logs: list[LogSize], folder: LogFolder) -> LeftOut:
    read = total = parts = files = 0
    for log in logs:
        if log.name in reading.unread:
            continue
        had = reading.had.get(log.name)
        is_whole = log.name not in reading.cut if log.is_stream else had == log.size
        size = had or 0 if log.is_stream and had is not None and is_whole else log.size
        read += had or 0
        total += max(size, had or 0)
        files += had is None
        parts += had is not None and not is_whole
    return LeftOut(read, total, parts, files, reading.is_late, folder.is_cut)


def _unpickle(raw: bytes) -> object:
    """Raises UntrustedError, ValueError where there is no torch."""
    try:
        from keepstep.edge.torch.pickles.plain import load_plain
    except ImportError as error:
        raise ValueError(
            "a flight recorder's dump is read with torch, which is not here"
        ) from error
    return load_plain(raw)


def _take_dump(seen: Sightings, file: Path, name: str) -> bool:
    """Whether the file is a dump of torch's flight recorder; then what it tells is kept. Raises
    OSError, ValueError."""
    document = read_dump(file, _unpickle)
    if document is None:
        return False
    rank = rank_in(name)
    if rank is None:
        raise ValueError("a flight recorder's dump: expected its rank at the end of its name")
    seen.recorder.take(parse_dump(rank, document))
    seen.who.is_here(rank, seen.places[name].host)
    return True
