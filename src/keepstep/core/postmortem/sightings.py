"""What is kept of logs as they are read: sightings of patterns, exits, who is who.

Comes in: one `Excerpt` after the other, of any file in any order. Goes out: the sightings, each
with the rank and host that its line, its file or somebody's process number names. Bounded: for each
file, rank and pattern the first that was not survived, whatever the logs' size.

An error after which the same rank goes on with its steps was survived, and is no cause.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from keepstep.core.postmortem import collectives, exits
from keepstep.core.postmortem.collectives import Collectives
from keepstep.core.postmortem.exits import SLURM_TASK, SeenExit, seen_exit
from keepstep.core.postmortem.line import LogLine, parse_line
from keepstep.core.postmortem.places import LogPlace
from keepstep.core.postmortem.recorder import Recorder
from keepstep.core.postmortem.table import LogPattern, PatternTable

INTRODUCED = " nranks "  # NCCL tells each rank's process and device
MAX_SIGHTINGS = 20_000
MAX_EXITS = 5_000
MAX_RANKS = 200_000
AFTER_BYTES = 48 << 10
BEFORE_BYTES = 4 << 10
TRACE_BYTES = 8 << 10
TRACES = ('File "', "Traceback (", "\u2771")  # Python's own, and Rich's
SURVIVED_STEPS = 5
STEP = re.compile(r"\b(?:step|iter|iteration|batch)s?\b[ \]=:#/|]{0,6}\d", re.IGNORECASE)
TRUE_RANK = re.compile(r"\bRank (\d{1,6}): found ")
BUS = re.compile(r"\(PCI:[0-9a-fA-F]{4,8}:([0-9a-fA-F]{2}):")
KILLED_PID = re.compile(r"(?:Killed process |pid=)(\d{1,9})")


class Excerpt(Protocol):
    """A line of a file, and what stands around it. `offset`: of its first byte in the file."""

    @property
    def path(self) -> str: ...

    @property
    def offset(self) -> int: ...

    @property
    def text(self) -> str: ...

    def before(self, size: int, /) -> str: ...

    def after(self, size: int, /) -> str: ...


@dataclass(slots=True)
class Sighting:
    """A pattern seen. `order`: when it was read, which orders the lines of one file."""

    pattern: LogPattern
    place: LogPlace
    offset: int
    order: int
    text: str
    rank: int | None
    host: str | None
    pid: int | None
    bus: str
    seconds: float | None
    clock: str
    local: int | None = None
    is_survived: bool = False


@dataclass(slots=True)
class WhoIsWho:
    """What the lines say of ranks, processes and devices."""

    world: int = 0
    ranks: set[int] = field(default_factory=set)
    by_pid: dict[tuple[str, int], int] = field(default_factory=dict)
    by_bus: dict[tuple[str, str], int] = field(default_factory=dict)
    by_local: dict[tuple[str, int], int] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)

    def is_here(self, rank: int | None, host: str | None) -> None:
        if rank is not None and rank < MAX_RANKS:
            self.ranks.add(rank)
            if host:
                self.hosts[rank] = host

    def rank_of(self, host: str | None, pid: int | None, bus: str, local: int | None) -> int | None:
        """The rank of that process, else of that device, else the local one where there is one
        host; a host that no line names is any."""
        for known, key in ((self.by_pid, pid), (self.by_bus, bus)):
            found = {
                rank
                for (where, what), rank in known.items()
                if key and what == key and (not host or not where or where == host)
            }
            if len(found) == 1:
                return found.pop()
        return local if len(set(self.hosts.values())) <= 1 else None

    def known(self) -> set[int]:
        """Every rank of the job, as far as is known."""
        return self.ranks | set(range(min(self.world, MAX_RANKS)))


@dataclass(slots=True)
class Sightings:
    """Everything that was seen, and how many lines were looked at."""

    table: PatternTable
    places: Mapping[str, LogPlace]
    found: dict[tuple[str, int | None, int, bool], Sighting] = field(default_factory=dict)
    exits: list[tuple[LogPlace, SeenExit, Sighting]] = field(default_factory=list)
    collectives: Collectives = field(default_factory=Collectives)
    recorder: Recorder = field(default_factory=Recorder)
    who: WhoIsWho = field(default_factory=WhoIsWho)
    read: int = 0

    def __post_init__(self) -> None:
        for place in self.places.values():
            self.who.is_here(place.rank, place.host)

    def see(self, excerpt: Excerpt) -> None:
        """Take one line."""
        self.read += 1
        line = parse_line(excerpt.text)
        place = self.places[excerpt.path]
        if INTRODUCED in line.text:
            self._introduce(line)
        rank = self._rank_of(line, place)
        self.who.is_here(rank, line.host)
        if any(needle in line.text for needle in exits.NEEDLES):
            self._see_exit(excerpt, line, place)
            return
        if any(needle in line.text for needle in collectives.NEEDLES):
            rank = self.collectives.hear(line, rank)
        if line.is_exception:
            before = excerpt.before(TRACE_BYTES)
            line.is_traced = any(trace in before for trace in TRACES)
        pattern = self.table.match(line)
        if pattern is not None and not self._is_kept(place, rank, pattern):
            self._keep(self._sighting(excerpt, line, place, rank, pattern), excerpt, line)

    def _is_kept(self, place: LogPlace, rank: int | None, pattern: LogPattern) -> bool:
        return (place.path, rank, id(pattern), False) in self.found

    def _rank_of(self, line: LogLine, place: LogPlace) -> int | None:
        if line.by == "kernel":
            return None
        if found := TRUE_RANK.search(line.body):
            return int(found[1])
        if line.rank is not None and (not line.label.strip(" :").isdigit() or place.rank is None):
            return line.rank
        if place.rank is not None:
            return place.rank
        host = line.host or place.host or ""
        local = line.local if line.local is not None else place.local
        if line.by == "nccl":
            local = line.device
        if local is not None:
            return self.who.by_local.get((host, local), local if not host else None)
        return None

    def _introduce(self, line: LogLine) -> None:
        """`comm 0x... rank 3 nranks 8 cudaDev 3 nvmlDev 3 busId 3b000`"""
        words = dict(re.findall(r"\b(rank|nranks|cudaDev|busId) ([0-9a-f]{1,12})\b", line.text))
        if not (words.get("rank", "").isdigit() and words.get("nranks", "").isdigit()):
            return
        rank, world = int(words["rank"]), int(words["nranks"])
        if world < self.who.world or rank >= min(world, MAX_RANKS):
            return  # a group of fewer counts its ranks by itself
        self.who.world = world
        host = line.host or ""
        self.who.is_here(rank, host)
        if line.pid is not None:
            self.who.by_pid[host, line.pid] = rank
        if "busId" in words:
            self.who.by_bus[host, words["busId"][:-3].zfill(2)] = rank
        if words.get("cudaDev", "").isdigit():
            self.who.by_local[host, int(words["cudaDev"])] = rank

    def _see_exit(self, excerpt: Excerpt, line: LogLine, place: LogPlace) -> None:
        found = seen_exit(line.text, excerpt.before(BEFORE_BYTES))
        if found is None or len(self.exits) >= MAX_EXITS:
            return
        host = found.host or ""
        self.who.is_here(found.rank, found.host)
        if found.rank is not None and found.pid is not None:
            self.who.by_pid[host, found.pid] = found.rank
        if found.rank is not None and found.local is not None:
            self.who.by_local[host, found.local] = found.rank
        pattern = self.table.of_exit(found.code)
        if pattern is not None:
            seen = self._sighting(excerpt, line, place, found.rank, pattern)
            seen.host, seen.pid, seen.local = found.host or seen.host, found.pid, found.local
            self.exits.append((place, found, seen))

    def _sighting(
        self,
        excerpt: Excerpt,
        line: LogLine,
        place: LogPlace,
        rank: int | None,
        pattern: LogPattern,
    ) -> Sighting:
        pid, bus = line.pid, ""
        if line.by == "kernel":
            found = KILLED_PID.search(line.text)
            pid = int(found[1]) if found else None
            device = BUS.search(line.text)
            bus = device[1].lower() if device else ""
        host = line.host or place.host
        if line.by == "slurm" and (task := SLURM_TASK.search(line.text)):
            host, rank = task[1], int(task[2])
        seconds, clock = line.seconds, line.clock
        if seconds is None:
            seconds, clock = _time_before(excerpt.before)
        return Sighting(
            pattern,
            place,
            excerpt.offset,
            self.read,
            line.text,
            rank,
            host,
            pid,
            bus,
            seconds,
            clock,
        )

    def _keep(self, seen: Sighting, excerpt: Excerpt, line: LogLine) -> None:
        key = (seen.place.path, seen.rank, id(seen.pattern))
        if len(self.found) >= MAX_SIGHTINGS:
            return
        if seen.pattern.role == "root" and line.by == "program":
            label = line.label if seen.place.rank is None else ""
            seen.is_survived = _goes_on(excerpt.after(AFTER_BYTES), label)
        self.found.setdefault((*key, seen.is_survived), seen)


def _goes_on(after: str, label: str) -> bool:
    """Whether the same rank tells of steps after that."""
    steps = 0
    for text in after.splitlines():
        if text.startswith(label) and STEP.search(text[:400]):
            steps += 1
            if steps >= SURVIVED_STEPS:
                return True
    return False


def _time_before(before: Callable[[int], str]) -> tuple[float | None, str]:
    """The time of the nearest line above that has one."""
    for text in reversed(before(BEFORE_BYTES).splitlines()[-40:]):
        line = parse_line(text[:400])
        if line.seconds is not None:
            return line.seconds, line.clock
    return None, ""
