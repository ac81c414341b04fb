"""What is kept of logs as they are read: sightings of patterns, exits, who is who.

Comes in: one `Excerpt` after the other, of any file in any order. Goes out: the sightings, each
with the rank and host that its line, its file or somebody's process number names. Bounded: for each
file, rank and pattern the first that was not survived, whatever the logs' size.

An error after which the same rank goes on with its steps was survived, and is no cause.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from keepstep.core.postmortem import collectives, exits
from keepstep.core.postmortem.collectives import Collectives
from keepstep.core.postmortem.exits import SLURM_TASK, SeenExit, seen_exit
from keepstep.core.postmortem.json_line import plain_lines, rank_of
from keepstep.core.postmortem.line import LogLine, parse_line, text_in
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
FRAMES = ('File "', "    ")  # the line above that of an exception
SURVIVED_STEPS = 5
FACT = 5  # the weight of what the kernel, or who else ended a process, says of it
STEP = re.compile(r"\b(?:step|iter|iteration|batch)s?\b[ \]=:#/|]{0,6}\d", re.IGNORECASE)
TRUE_RANK = re.compile(r"\bRank (\d{1,6})(?:: found |, node )")
BUS = re.compile(r"\(PCI:[0-9a-fA-F]{4,8}:([0-9a-fA-F]{2}):")
LABELS = re.compile(
    r"^(?:\[rank(\d{1,6})\]|\[\d{1,6},(\d{1,6})\]<std"
    r"|[^\n]{0,60}\b(?:DEBUG|INFO|WARNING|ERROR|info)\b[\]:]{0,2} (?:global_)?rank=(\d{1,6})[ ,|])",
    re.MULTILINE,
)
WORKERS = re.compile(  # of Ray, where the program names its ranks
    r"^\((?:[^)\n]{0,80} )?pid=(\d{1,9})[^)\n]{0,80}\) \[[Rr]ank[ :=]{0,2}(\d{1,6})\]", re.MULTILINE
)
LISTED = re.compile(  # by Ray Train, as it starts them
    r"\bip=([\w.:]{1,45}), pid=(\d{1,9})\) world_rank=(\d{1,6})\b"
)
RAISED_IN = re.compile(r"ray::[^\n]{0,200}?\(pid=(\d{1,9})")
SPAWNED = re.compile(r"-- Process (\d{1,6}) terminated with the following error")
HEADS = re.compile(  # DCP tells on every rank which one's traceback it is
    r"Traceback \(most recent call last\):(?: \(RANK (\d{1,6})\))?"
)
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
    """A pattern seen. `order`: its place among all lines, for those that tell no time. `is_local`:
    its rank is the number within its node, and a launcher may tell the other one later. `pods`:
    names of logs in and above a line of Kubernetes', and where they stand."""

    pattern: LogPattern
    place: LogPlace
    offset: int
    order: tuple[int, int]
    text: str
    rank: int | None
    host: str | None
    pid: int | None
    bus: str
    seconds: float | None
    clock: str
    local: int | None = None
    is_local: bool = False
    is_survived: bool = False
    pods: tuple[tuple[int, str], ...] = ()


@dataclass(slots=True)
class WhoIsWho:
    """What the lines say of ranks, processes and devices. `told`: the rank of a number within a
    node, by file, host and that number, as launchers sum up; `numbers`: those that speak;
    `counted`: the ranks that nothing but their files' numbers tells."""

    world: int = 0
    ranks: set[int] = field(default_factory=set)
    by_pid: dict[tuple[str, int], int] = field(default_factory=dict)
    by_bus: dict[tuple[str, str], int] = field(default_factory=dict)
    by_local: dict[tuple[str, int], int] = field(default_factory=dict)
    told: dict[tuple[str, str, int], int] = field(default_factory=dict)
    numbers: set[tuple[str, str, int]] = field(default_factory=set)
    counted: dict[str, int] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    machines: set[str] = field(default_factory=set)

    def is_here(self, rank: int | None, host: str | None) -> None:
        if rank is not None and rank < MAX_RANKS:
            self.ranks.add(rank)
            if host:
                self.hosts[rank] = host

    def rank_of(self, seen: Sighting) -> int | None:
        """The rank of that process, else of that device, else the local one where there is one
        host; a host that no line names is any."""
        host, pid, bus, local = seen.host, seen.pid, seen.bus, seen.local
        for known, key in ((self.by_pid, pid), (self.by_bus, bus)):
            found = {
                rank
                for (where, what), rank in known.items()
                if key and what == key and (not host or not where or where == host)
            }
            if len(found) == 1:
                return found.pop()
        if local is None or len({*self.hosts.values(), *self.machines}) > 1:
            return None
        return self.rank_within(seen.place.path, host or "", local)

    def rank_within(self, path: str, host: str, local: int) -> int | None:
        """The rank of this number within a node: as the launcher's summary in the same file says,
        else the one of that host. Ranks of a node follow each other, so one tells all. Without a
        summary it is that number itself; None: summaries of several nodes could be meant."""
        same_file = {key: rank for key, rank in self.told.items() if key[0] == path}
        same_host = {
            key: rank for key, rank in self.told.items() if not host or not key[1] or key[1] == host
        }
        found = same_file or same_host
        shifts = {rank - number for (_, _, number), rank in found.items()}
        exact = {rank for (_, _, number), rank in found.items() if number == local}
        if len(exact) == 1:
            return exact.pop()
        if len(shifts) == 1:
            return local + shifts.pop()
        return None if found else local

    def known(self) -> set[int]:
        """Every rank of the job, as far as is known."""
        within = {self.rank_within(*number) for number in self.numbers}
        named = {rank for rank in within if rank is not None and rank < MAX_RANKS}
        counted = {rank for rank in self.counted.values() if rank < MAX_RANKS}
        return self.ranks | named | counted | set(range(min(self.world, MAX_RANKS)))


@dataclass(slots=True)
class Sightings:
    """Everything that was seen, and how many lines were looked at. `alone`: the rank of each file
    in which only one speaks."""

    table: PatternTable
    places: dict[str, LogPlace]
    found: dict[tuple[str, int | str | None, int, bool], Sighting] = field(default_factory=dict)
    exits: list[tuple[LogPlace, SeenExit, Sighting]] = field(default_factory=list)
    collectives: Collectives = field(default_factory=Collectives)
    recorder: Recorder = field(default_factory=Recorder)
    who: WhoIsWho = field(default_factory=WhoIsWho)
    alone: dict[str, int] = field(default_factory=dict)
    read: int = 0
    _numbers: dict[str, int] = field(default_factory=dict)
    _pods: dict[str, int | None] = field(default_factory=dict)
    _exits_at: set[tuple[str, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.places = dict(self.places)
        for number, place in enumerate(self.places.values()):
            self._numbers[place.path] = number
            if place.local is not None and place.rank is not None:
                self.who.numbers.add((place.path, place.host or "", place.local))
            elif place.is_counted and place.rank is not None:
                self.who.counted[place.path] = place.rank
            else:
                self.who.is_here(place.rank, place.host)
            if place.rank is not None:
                self._pods[_stem(place.path)] = place.rank

    def greet(self, name: str, text: str) -> None:
        """Take note of the ranks that speak in here: who is silent later is missed. Where only one
        does, the log is its pod's."""
        ranks = {int(found[1] or found[2] or found[3]) for found in LABELS.finditer(text)}
        for worker in WORKERS.finditer(text):
            ranks.add(int(worker[2]))
            self.who.by_pid["", int(worker[1])] = int(worker[2])
        for ip, pid, rank in LISTED.findall(text):
            self.who.is_here(int(rank), None)
            self.who.by_pid[ip, int(pid)] = int(rank)
        for rank in ranks:
            self.who.is_here(rank, None)
        place = self.places[name]
        if place.is_counted and ranks and ranks != {place.rank}:
            # The number counts nodes or pods: lines that name no rank are not of that one.
            self.places[name] = replace(place, rank=None, is_counted=False)
            self.who.counted.pop(name, None)
            self._pods.pop(_stem(name), None)
        if len(ranks) == 1:
            self._pods.setdefault(_stem(name), *ranks)
            self.alone[name] = next(iter(ranks))

    def rank_of_pod(self, seen: Sighting) -> int | None:
        """Of the pod that is named last, by its log."""
        ranks = [(at, self._pods[name]) for at, name in seen.pods if name in self._pods]
        return max(ranks, default=(0, None), key=lambda found: found[0])[1]

    def see(self, excerpt: Excerpt) -> None:
        """Take one line; a record of JSON is as many as it says."""
        self.read += 1
        texts = plain_lines(text_in(excerpt.text)) if "}" in excerpt.text else []
        if not texts:
            self._see_line(excerpt, parse_line(excerpt.text))
            return
        label, is_traced = rank_of(excerpt.text), False
        for text in texts:
            line = parse_line(text)
            line.label, line.is_traced = label, is_traced
            self._see_line(excerpt, line)
            is_traced = is_traced or any(trace in text for trace in TRACES)

    def _see_line(self, excerpt: Excerpt, line: LogLine) -> None:
        place = self.places[excerpt.path]
        if INTRODUCED in line.text:
            self._introduce(line)
        if line.by == "nccl" and line.host:
            self.who.machines.add(line.host)
        rank, local = self._rank_of(line, place)
        if local is None:
            self.who.is_here(rank, line.host)
        else:
            self.who.numbers.add((place.path, line.host or place.host or "", local))
        if any(needle in line.text for needle in exits.NEEDLES) and self._see_exit(
            excerpt, line, place
        ):
            return
        if any(needle in line.text for needle in collectives.NEEDLES):
            rank = self.collectives.hear(line, rank)
        if not line.is_traced and line.may_be_exception:
            rank = self._trace(line, excerpt.before(TRACE_BYTES), rank)
        pattern = self.table.match(line)
        if pattern is None:
            return
        who: int | str | None = rank
        if rank is None and line.by == "nccl":
            who = f"{line.host}:{line.pid}"
        if self._is_kept(place, who, pattern, excerpt.offset):
            return
        seen = self._sighting(excerpt, line, place, rank, pattern)
        if local is not None and rank is not None:
            seen.local, seen.is_local = local, True
        if pattern.where == "pod" and rank is None:
            seen.pods = self._pods_in(excerpt.before(BEFORE_BYTES) + line.text)
        if rank is None and line.pid is None and line.is_traced:
            raised = RAISED_IN.findall(excerpt.before(TRACE_BYTES))
            seen.pid = int(raised[-1]) if raised else seen.pid
        self._keep(seen, excerpt, line, who)

    @staticmethod
    def _trace(line: LogLine, before: str, rank: int | None) -> int | None:
        """Whether a traceback stands above this line, and, where torch's spawn or DCP wrote that,
        of which rank."""
        if not any(trace in before for trace in TRACES):
            return rank
        above = before.rstrip("\n").rpartition("\n")[2]
        line.is_traced = line.is_exception or any(frame in above for frame in FRAMES)
        if line.is_traced and (told := _head_rank(before, line.label)) is not None:
            return told
        if rank is None and line.is_traced and (spawned := SPAWNED.findall(before)):
            return int(spawned[-1])
        return rank

    def _pods_in(self, text: str) -> tuple[tuple[int, str], ...]:
        names = {_stem(path) for path in self.places}
        return tuple((text.rfind(name), name) for name in sorted(names, key=len) if name in text)

    def _is_kept(
        self, place: LogPlace, who: int | str | None, pattern: LogPattern, offset: int
    ) -> bool:
        kept = self.found.get((place.path, who, id(pattern), False))
        return kept is not None and kept.offset <= offset

    def _rank_of(self, line: LogLine, place: LogPlace) -> tuple[int | None, int | None]:
        """Whose line it is, and its number within its node where nothing else tells the rank."""
        if line.by == "kernel":
            return None, None
        if found := TRUE_RANK.search(line.body):
            return int(found[1]), None
        if line.rank is not None and (
            not line.label.strip(" :[]|").isdigit() or place.rank is None
        ):
            return line.rank, None
        if place.rank is not None:
            return place.rank, place.local
        host = line.host or place.host or ""
        local = line.local if line.local is not None else place.local
        if line.by == "nccl":
            local = line.device
        if local is None:
            return None, None
        if (host, local) in self.who.by_local:
            return self.who.by_local[host, local], None
        return (None, None) if host else (local, local)

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

    def _see_exit(self, excerpt: Excerpt, line: LogLine, place: LogPlace) -> bool:
        """Whether the line is of a launcher that tells of an exit, and not an error's own."""
        found = seen_exit(line, excerpt.before(BEFORE_BYTES))
        if found is None:
            return any(needle in line.text for needle in exits.LAUNCHERS)
        at = (place.path, excerpt.offset)
        if at in self._exits_at or len(self.exits) >= MAX_EXITS:
            return True
        self._exits_at.add(at)
        host = found.host or ""
        self.who.is_here(found.rank, found.host)
        if found.rank is not None and found.pid is not None:
            self.who.by_pid[host, found.pid] = found.rank
        if found.rank is not None and found.local is not None:
            self.who.by_local[host, found.local] = found.rank
            self.who.told[place.path, host, found.local] = found.rank
        pattern = self.table.of_exit(found.code)
        if pattern is not None:
            seen = self._sighting(excerpt, line, place, found.rank, pattern)
            seen.host, seen.pid, seen.local = found.host or seen.host, found.pid, found.local
            self.exits.append((place, found, seen))
        return True

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
        elif pid is None and pattern.weight == FACT:  # Ray's monitor says whom it killed
            found = KILLED_PID.search(line.text)
            pid = int(found[1]) if found else None
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
            (self._numbers[place.path], excerpt.offset),
            line.text,
            rank,
            host,
            pid,
            bus,
            seconds,
            clock,
            line.device if line.by == "nccl" else None,
        )

    def _keep(self, seen: Sighting, excerpt: Excerpt, line: LogLine, who: int | str | None) -> None:
        key = (seen.place.path, seen.rank if who is None else who, id(seen.pattern))
        if len(self.found) >= MAX_SIGHTINGS:
            return
        if seen.pattern.role == "root" and line.by == "program":
            label = line.label if seen.place.rank is None else ""
            seen.is_survived = _goes_on(excerpt.after(AFTER_BYTES), label)
        kept = self.found.setdefault((*key, seen.is_survived), seen)
        if seen.offset < kept.offset:  # of a large file the ends are read first
            self.found[(*key, seen.is_survived)] = seen


def _stem(path: str) -> str:
    return path.rpartition("/")[2].partition(".")[0]


def _head_rank(before: str, label: str) -> int | None:
    """The rank in the head of the nearest traceback above, of those that the same rank wrote."""
    if "(RANK " not in before:  # nearly always, and much cheaper
        return None
    heads = [
        found
        for text in before.splitlines()
        if text.startswith(label) and (found := HEADS.search(text))
    ]
    return int(heads[-1][1]) if heads and heads[-1][1] else None


def _goes_on(after: str, label: str) -> bool:
    """Whether the same rank tells of steps after that."""
    steps = 0
    for text in after.splitlines():
        if _is_labelled(text, label) and STEP.search(text[:400]):
            steps += 1
            if steps >= SURVIVED_STEPS:
                return True
    return False


def _is_labelled(text: str, label: str) -> bool:
    return text.startswith(label) or (label.startswith('"') and label in text)


def _time_before(before: Callable[[int], str]) -> tuple[float | None, str]:
    """The time of the nearest line above that has one."""
    for text in reversed(before(BEFORE_BYTES).splitlines()[-40:]):
        line = parse_line(text[:400])
        if line.seconds is not None:
            return line.seconds, line.clock
    return None, ""
