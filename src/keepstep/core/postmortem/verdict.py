"""From what was seen in logs to one cause: its class, whose it is, and what to do.

Comes in: `Sightings`. Goes out: a `LogVerdict`, with the reason in one sentence.

The rule. A root beats every cascade, whenever their clocks say they were: survivors tell of others.
Among roots the heavier wins (a fact of the kernel, an error that names itself, how a process ended,
any error), then the one on fewer ranks, then the earlier. No root, but watchdogs: a hang, and the
culprit is who did not enter the collective; torch's flight recorder says it best, and also when
ranks entered different ones. Nothing but cascades: the one rank that says nothing
hangs or is gone. Else nobody knows, and that is what is said.

What a kernel's log tells of hours before the end is not of this failure.

Invariant: what is said while the rest is ended is never the cause.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from keepstep.core.postmortem.collectives import Missed
from keepstep.core.postmortem.places import rank_beside, rank_columns
from keepstep.core.postmortem.sightings import Sighting, Sightings
from keepstep.core.postmortem.table import FailureClass

UNKNOWN = FailureClass(
    "unknown",
    "no line of the logs names a cause",
    "restart",
    "Restart a few times at most. If it fails again, test the nodes (keepstep preflight).",
    "job",
)
SHOWN = 5  # lines of evidence
FOLLOWS = ("cancelled", "crash")  # a watchdog aborts its rank, and the launcher cancels the rest
OF_NODES = ("kernel", "slurm", "pod")  # what these say is not of the file's own rank
STALE_S = 2 * 3600  # a collective's time-out is shorter, and a kernel's log goes back for weeks


@dataclass(frozen=True, slots=True)
class LogVerdict:
    """`rank` None: nobody in particular, or nobody is named; `ranks`: all that the cause was seen
    on. `first`: where it stands; `evidence`: the lines that support it, or, of an unknown cause,
    the first suspicious ones. `cascades`, `teardowns`: how many were seen and put aside."""

    cause: FailureClass
    rank: int | None
    host: str | None
    ranks: tuple[int, ...]
    attempt: int
    why: str
    first: Sighting | None
    evidence: tuple[Sighting, ...]
    missed: Missed | None
    cascades: int
    teardowns: int
    survived: int

    @property
    def is_known(self) -> bool:
        return self.cause is not UNKNOWN


@dataclass(slots=True)
class _Attempt:
    """The sightings of one attempt of a job that was started several times."""

    number: int
    roots: list[Sighting]
    cascades: list[Sighting]
    teardowns: list[Sighting]
    survived: list[Sighting]


def judge(seen: Sightings) -> LogVerdict:
    """The cause of the last attempt that has one: it is what ended the job."""
    attempts = _attempts(seen)
    known = seen.who.known()
    missed = seen.recorder.missed(known) or seen.collectives.missed(known)
    for attempt in reversed(attempts):
        is_last = attempt is attempts[-1]
        verdict = _cause(seen, attempt, missed if is_last else None)
        if verdict is not None:
            return verdict
    last = attempts[-1]
    why = "no root was found"
    if not (last.cascades or last.teardowns or last.survived):
        why = "no line tells of a failure: are the logs of all ranks here?"
    return _verdict(seen, last, UNKNOWN, why, missed=missed)


def _attempts(seen: Sightings) -> list[_Attempt]:
    found: dict[int, _Attempt] = {}
    for place in seen.places.values():
        found.setdefault(place.attempt, _Attempt(place.attempt, [], [], [], []))
    last = max(found, default=0)
    found.setdefault(last, _Attempt(last, [], [], [], []))
    columns = rank_columns(seen.alone)
    in_attempts = any(number > 0 for number in found)
    for sighting in [*seen.found.values(), *_first_exits(seen)]:
        if sighting.is_local and sighting.local is not None:
            path, host = sighting.place.path, sighting.host or ""
            sighting.rank = seen.who.rank_within(path, host, sighting.local)
        elif sighting.rank is None:
            pod = seen.rank_of_pod(sighting)
            sighting.rank = seen.who.rank_of(sighting) if pod is None else pod
            if sighting.rank is None and sighting.pattern.where not in OF_NODES:
                sighting.rank = rank_beside(sighting.place.path, columns)
        # What no attempt's directory holds, a launcher's or the kernel's log, is of the last one.
        is_inside = "attempt_" in sighting.place.path
        number = sighting.place.attempt if is_inside or not in_attempts else last
        attempt = found[number]
        role = sighting.pattern.role
        if role == "root":
            (attempt.survived if sighting.is_survived else attempt.roots).append(sighting)
        else:
            (attempt.cascades if role == "cascade" else attempt.teardowns).append(sighting)
    for attempt in found.values():
        _drop_stale(attempt)
    return [found[number] for number in sorted(found)]


def _drop_stale(attempt: _Attempt) -> None:
    """What the kernel told long before anybody noticed anything was survived."""
    others = [*attempt.roots, *attempt.cascades, *attempt.teardowns]
    last = max((s.seconds for s in others if s.seconds is not None), default=inf)
    for root in list(attempt.roots):
        told = last if root.seconds is None else root.seconds
        if root.pattern.where == "kernel" and told < last - STALE_S:
            attempt.roots.remove(root)
            attempt.survived.append(root)


def _first_exits(seen: Sightings) -> list[Sighting]:
    """The exits that a launcher saw first; all of them where none says which was."""
    first = [sighting for _, found, sighting in seen.exits if found.is_first]
    if first:
        return first
    return [sighting for _, found, sighting in seen.exits]


def _cause(seen: Sightings, attempt: _Attempt, missed: Missed | None) -> LogVerdict | None:
    weighty = [s for s in attempt.roots if s.pattern.weight > 0]
    if weighty:
        return _of_roots(seen, attempt, weighty, missed)
    is_last = attempt.number == _last(seen)
    if is_last and (mismatch := seen.recorder.mismatch()) is not None:
        return _of_mismatch(seen, attempt, *mismatch)
    if missed is not None and (seen.collectives.has_timeout or seen.recorder.dumps):
        return _of_hang(seen, attempt, missed)
    silent = _silent(seen, attempt)
    if silent is not None:
        return _of_silence(seen, attempt, silent)
    has_timeout = seen.collectives.has_timeout and is_last
    faint = [s for s in attempt.roots if not (has_timeout and s.pattern.failure in FOLLOWS)]
    if faint:
        return _of_roots(seen, attempt, faint, missed)
    if has_timeout:
        why = "collectives timed out, and nothing tells which rank did not enter them"
        return _verdict(seen, attempt, seen.table.classes["hang"], why)
    return None


def _last(seen: Sightings) -> int:
    return max((place.attempt for place in seen.places.values()), default=0)


def _of_roots(
    seen: Sightings, attempt: _Attempt, roots: Sequence[Sighting], missed: Missed | None
) -> LogVerdict:
    by_class: dict[str, list[Sighting]] = defaultdict(list)
    for root in sorted(roots, key=_when):
        by_class[root.pattern.failure].append(root)
    world = len(seen.who.known())

    def rank_of(group: list[Sighting]) -> tuple[int, bool, float, tuple[int, int]]:
        weight = max(s.pattern.weight for s in group)
        return (-weight, _is_everywhere(_ranks(group), world), *_when(group[0]))

    chosen = min(by_class.values(), key=rank_of)
    cause = seen.table.classes[chosen[0].pattern.failure]
    weight = max(s.pattern.weight for s in chosen)
    heavy = [s for s in chosen if s.pattern.weight == weight]
    ranks = _ranks(chosen)
    blamed = _ranks(heavy) or ranks  # whose peers only tell of it, by lighter words, is still one
    first = heavy[0]
    rank = next((s.rank for s in heavy if s.rank is not None), None)
    if rank is None:
        rank = next(iter(ranks), None) if len(ranks) == 1 else None
    host = next(
        (s.host for s in heavy if s.host and (rank is None or s.rank in (rank, None))), None
    )
    if rank is None and cause.scope == "rank":
        rank = _named_elsewhere(seen, attempt, host)
    why = f"{len(by_class)} kinds of roots were seen; this one weighs most, or came first"
    if len(by_class) == 1:
        why = "it is the only root that was seen"
    if _is_everywhere(blamed, world):
        rank, why = None, f"{len(blamed)} ranks say the same: it is nobody's in particular"
        host = _host_of_all(chosen)
    if cause.scope == "job" or first.pattern.of == "others":
        rank = None
    verdict = _verdict(seen, attempt, cause, why, rank=rank, first=first, missed=missed)
    return replace(verdict, ranks=tuple(sorted(ranks)), host=host or verdict.host)


def _host_of_all(group: Sequence[Sighting]) -> str | None:
    """The host of what is told by many: the one whose kernel says so, or where all of them are."""
    kernels = {s.host for s in group if s.pattern.where == "kernel" and s.host}
    hosts = kernels or {s.host for s in group if s.host}
    return hosts.pop() if len(hosts) == 1 else None


def _named_elsewhere(seen: Sightings, attempt: _Attempt, host: str | None) -> int | None:
    """A rank for a root that names none: whose process ended first, or who else has a root."""
    others = [s for s in sorted(attempt.roots, key=_when) if s.rank is not None]
    others.sort(key=lambda s: -s.pattern.weight)
    for other in others:
        if not host or not other.host or other.host == host:
            return other.rank
    here = {rank for rank, where in seen.who.hosts.items() if host and where == host}
    return here.pop() if len(here) == 1 else None


def _of_hang(seen: Sightings, attempt: _Attempt, missed: Missed) -> LogVerdict:
    rank = missed.missing[0] if len(missed.missing) == 1 else None
    collective = (
        f"{missed.op or 'the collective'} {'' if missed.seq is None else missed.seq}".strip()
    )
    who = ", ".join(str(r) for r in missed.missing[:8])
    whose = "rank" if len(missed.missing) == 1 else "ranks"
    why = (
        f"{whose} {who} did not enter {collective}, and {len(missed.waiting)} waited: {missed.how}"
    )
    first = min(
        (s for s in attempt.cascades if s.pattern.failure == "hang"), key=_when, default=None
    )
    verdict = _verdict(
        seen, attempt, seen.table.classes["hang"], why, rank=rank, first=first, missed=missed
    )
    return replace(verdict, ranks=missed.missing)


def _of_mismatch(
    seen: Sightings, attempt: _Attempt, ranks: tuple[int, ...], said: str
) -> LogVerdict:
    rank = ranks[0] if len(ranks) == 1 else None
    cause = seen.table.classes["collective-mismatch"]
    verdict = _verdict(seen, attempt, cause, f"by the flight recorder, {said}", rank=rank)
    return replace(verdict, ranks=ranks)


def _of_silence(seen: Sightings, attempt: _Attempt, rank: int) -> LogVerdict:
    """Where peers waited until their time ran out it hangs; else their connections broke: it is
    gone."""
    told = sorted((s for s in attempt.cascades if s.rank is not None), key=_when)
    hangs = all(s.pattern.failure == "hang" for s in told)
    kind, what = ("hang", "did not answer") if hangs else ("lost-rank", "is gone")
    why = f"every other rank says that a peer {what}, and rank {rank} says nothing"
    return _verdict(seen, attempt, seen.table.classes[kind], why, rank=rank, first=told[0])


def _silent(seen: Sightings, attempt: _Attempt) -> int | None:
    """The one rank that says nothing where all its peers say that somebody is gone."""
    told = {s.rank for s in attempt.cascades if s.rank is not None}
    known = seen.who.known()
    silent = known - told
    return silent.pop() if len(silent) == 1 and len(known) > 2 and told else None


def _ranks(sightings: Iterable[Sighting]) -> set[int]:
    return {s.rank for s in sightings if s.rank is not None}


def _is_everywhere(ranks: set[int], world: int) -> bool:
    return len(ranks) > 1 and 2 * len(ranks) > world


def _when(sighting: Sighting) -> tuple[float, tuple[int, int]]:
    return (inf if sighting.seconds is None else sighting.seconds, sighting.order)


def _verdict(
    seen: Sightings,
    attempt: _Attempt,
    cause: FailureClass,
    why: str,
    rank: int | None = None,
    first: Sighting | None = None,
    missed: Missed | None = None,
) -> LogVerdict:
    lines = attempt.roots or [*attempt.cascades, *attempt.survived] or attempt.teardowns
    evidence = sorted(lines, key=lambda s: (-s.pattern.weight, *_when(s)))
    host = seen.who.hosts.get(rank) if rank is not None else None
    return LogVerdict(
        cause,
        rank,
        host,
        () if rank is None else (rank,),
        attempt.number,
        why,
        first,
        tuple(s for s in evidence if s is not first)[:SHOWN],
        missed,
        len(attempt.cascades),
        len(attempt.teardowns),
        len(attempt.survived),
    )
