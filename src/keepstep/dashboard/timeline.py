"""Timeline: a journal as runs, and in each run the failures, link by link from first sign to next
step.

Comes in: events in the order written. Goes out: frozen values. Pure: no file, no clock.

A run begins with a fresh start and goes on through everything that resumed from it, be it from
memory or, after the machine was lost, from the store. A journal is one node's: of several, the
leading one decides (`restore-offered`, `resumed`), and the others write down what they hear of it
(`offer`, `go`). A kind of event that is not known here is part of the run and of no chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from keepstep.core.economics.absence import Absence, Away
from keepstep.core.economics.goodput import Axis
from keepstep.core.economics.journal_kinds import (
    BACK,
    CLOSING,
    REFUTING,
    ends_training,
    is_about,
    is_failure,
    loss_of,
    number,
)
from keepstep.model.events import Event
from keepstep.model.failure import failure_from_json

# the last word about a run: of the keeper, and of an agent
ENDS = {"job-over", "job-ended"}
REFUSED = {
    "damaged",
    "restore-failed",
    "fetch-failed",
    "checkpoint-damaged",
    "restore-refused",
    "slot-voided",
}
TROUBLE = REFUSED | {
    "capture-failed",
    "copy-failed",
    "copy-lost",
    "copy-refused",
    "declined",
    "diagnosis",
    "keeper-lost",
    "keeper-missing",
    "keeper-unheard",
    "lost-notice",
    "meeting-lost",
    "mesh-refused",
    "persist-failed",
    "persist-impossible",
    "persister-ended",
    "recurrence",
    "stranger-refused",
    "suspicion",
    "torn",
}
AWAY = "away"
GOOD_NEWS = {"resumed", "go", "mended"}
# What an agent says before its first word about the job, while it finds its keeper.
PRELUDE = {"keeper-listens", "keeper-missing", "keeper-unheard"}

# The links of a chain behind its first fact: which kinds of event make one, and how it is called.
# Of each the last event counts, and of `suspicion` the first; those of `refused` count one by one.
LINKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "suspicion": ("suspicion", ("suspicion",)),
    "diagnosis": ("diagnosis", ("diagnosis",)),
    "recurred": ("diagnosis", ("recurrence",)),
    "plan": ("plan", ("plan",)),
    "stacks": ("action", ("stacks",)),
    "coordinator": ("action", ("coordinator",)),
    "told": ("action", ("lost-notice",)),
    # the agents, or under a foreign launcher the ranks
    "met": ("action", ("attempt-formed", "mesh")),
    "respawned": ("action", ("rank-respawned",)),
    "restarted": ("action", ("ranks-restarted",)),
    "joined": ("action", ("rank-joined",)),
    "offered": ("action", ("restore-offered", "offer")),
    "fetched": ("action", ("fetched",)),
    "loaded": ("action", ("loaded",)),
}


@dataclass(frozen=True, slots=True)
class TimelineStage:
    """One link of a chain.

    link: fact, suspicion, diagnosis, refused (a cheaper way to recover), plan, action, away (nobody
    had started the job) or closed.
    name: noticed, met, restarted, joined, ..., or which way was refused.
    event: the last one that made the link. who: all who reported it.
    took_ns: since the link before.
    """

    link: str
    name: str
    event: Event
    took_ns: int
    who: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecoveryChain:
    """From the first sign of a failure to the next completed step.

    outcome: resumed, ended or pending.
    lost_steps: None: nobody knows, or it is not resumed; `lost_at_least` says what is certain then.
    took_ns: without the time in which nobody had started the job, `away_ns`.
    refused: sources of state that were tried and not used. setbacks: what failed meanwhile.
    evidence: the failures on which a finding about the program or the hardware rests.
    """

    outcome: str
    step: int | None
    source: str | None
    lost_steps: int | None
    took_ns: int
    stages: tuple[TimelineStage, ...]
    refused: tuple[str, ...]
    setbacks: tuple[str, ...]
    evidence: tuple[str, ...] = ()
    lost_at_least: int = 0

    @property
    def away_ns(self) -> int:
        """For how long no rank ran, and nobody was there to start one."""
        return sum(stage.took_ns for stage in self.stages if stage.link == AWAY)


@dataclass(frozen=True, slots=True)
class JobRun:
    """One run of a job. `end`: why it is over, None while it goes on. `lost_steps`: None: nobody
    knows how many in all; `lost_at_least` says what is certain."""

    events: tuple[Event, ...]
    recoveries: tuple[RecoveryChain, ...]
    end: str | None
    ended_well: bool | None
    lost_steps: int | None
    lost_at_least: int = 0


def between_ns(earlier: Event, later: Event) -> int:
    """How long from one event to another: by the monotonic clock, unless a reboot has set it back.
    Never negative."""
    axis = Axis()
    began_ns = axis.place(earlier.wall_ns, earlier.mono_ns, earlier.boot)
    return max(0, axis.place(later.wall_ns, later.mono_ns, later.boot) - began_ns)


def is_trouble(event: Event) -> bool:
    """Whether a reader should see the line in red."""
    return is_failure(event) or event.kind in TROUBLE


def runs_of(events: Iterable[Event], of_several: bool = False) -> list[JobRun]:
    """Every run of the job, the oldest first. `of_several`: the events are of several nodes'
    journals, laid together by time; their processes do not begin at once."""
    return [_run(each) for each in _split(events, of_several)]


def begins_in_the_middle(run: JobRun) -> bool:
    """Whether nobody tells how the run began: its journal was removed meanwhile."""
    return not any(map(_opens, run.events))


def _split(events: Iterable[Event], of_several: bool) -> list[list[Event]]:
    """What opened with empty memory and did not start afresh continues the run before. So does, of
    several nodes, one that opens while no node has trained or ended yet."""
    runs: list[list[Event]] = []
    for memory in _memories(events):
        first = next((e for e in memory if e.kind in BACK), None)
        is_same = first is not None and first.data.get("source") != "fresh"
        if runs and (is_same or (of_several and not _has_begun(runs[-1]))):
            runs[-1].extend(memory)
        else:
            runs.append(memory)
    return runs


def _has_begun(events: Iterable[Event]) -> bool:
    return any(event.kind in BACK or event.kind in CLOSING for event in events)


def _memories(events: Iterable[Event]) -> list[list[Event]]:
    """An agent and a keeper with nothing in its hands open together, in either order: what follows
    is about one memory."""
    memories: list[list[Event]] = []
    for event in events:
        if not memories or (
            _opens(event) and not all(_opens(e) or e.kind in PRELUDE for e in memories[-1])
        ):
            memories.append([])
        memories[-1].append(event)
    return memories


def _opens(event: Event) -> bool:
    return event.kind == "job-started" or (
        event.kind == "keeper-started" and event.data.get("adopted_slots") == 0
    )


def _run(events: Sequence[Event]) -> JobRun:
    recoveries = tuple(_recoveries(events))
    last = next((e for e in reversed(events) if e.kind in BACK | ENDS | {"keeper-started"}), None)
    end = last if last and last.kind in ENDS else None
    is_known = all(r.lost_steps is not None for r in recoveries if r.outcome == "resumed")
    lost = sum(r.lost_at_least for r in recoveries)
    return JobRun(
        events=tuple(events),
        recoveries=recoveries,
        end=end.why if end else None,
        ended_well=bool(end.data.get("ok")) if end else None,
        lost_steps=lost if is_known else None,
        lost_at_least=lost,
    )


def _recoveries(events: Sequence[Event]) -> list[RecoveryChain]:
    """One for each way back to training, and one for a failure that nothing followed."""
    closed_at = [
        i for i, e in enumerate(events) if e.kind in BACK and not _is_repeated(e, events[:i])
    ]
    found = []
    aways = absences(events)
    for begin, end in zip([-1, *closed_at], [*closed_at, len(events)], strict=True):
        window = events[begin + 1 : end]
        closer = events[end] if end < len(events) else None
        sign = next((i for i, e in enumerate(window) if ends_training(e)), None)
        if sign is None and (closer is None or closer.data.get("source") == "fresh"):
            continue  # the start itself, or the rest of a run that went well
        if sign is None:
            # Without a witness (the keeper was gone as well) the way back begins with the keeper
            # that came next.
            sign = max((i for i, e in enumerate(window) if e.kind == "keeper-started"), default=0)
            found.append(_recovery(window[sign:], None, closer, events[end + 1 :], aways))
        else:
            way = window[_first_doubt(window, sign) :]
            noticed = window[sign] if window[sign].kind not in ("diagnosis", "plan") else None
            found.append(_recovery(way, noticed, closer, events[end + 1 :], aways))
    return found


def _first_doubt(window: Sequence[Event], sign: int) -> int:
    """Where the incident that `sign` tells of began: with the first suspicion of it that nothing
    refuted, if there is one."""
    refuted = max((i for i, e in enumerate(window[:sign]) if e.kind in REFUTING), default=-1)
    suspicions = (i for i in range(refuted + 1, sign) if window[i].kind == "suspicion")
    return next(
        (i for i in suspicions if is_about(0, window[sign], between_ns(window[i], window[sign]))),
        sign,
    )


def _is_repeated(go: Event, before: Sequence[Event]) -> bool:
    """A permission that was said before: again for a node whose keeper had died, or by each of the
    nodes that share a journal."""
    last = next((e for e in reversed(before) if e.kind in BACK or e.kind == "rank-joined"), None)
    epoch = go.data.get("epoch")
    return (
        last is not None
        and last.kind in BACK
        and epoch is not None
        and last.data.get("epoch") == epoch
    )


def _recovery(
    way: Sequence[Event],
    noticed: Event | None,
    closer: Event | None,
    following: Sequence[Event],
    aways: Sequence[Away],
) -> RecoveryChain:
    over = (
        next((e for e in reversed(way) if e.kind == "job-over"), None) if closer is None else None
    )
    stages = _chained([*_beginning(way, noticed, aways), *_ending(closer, over, following)])
    # Ranks that end between the first sign and the restart go down with the first; those after it
    # are failures of their own.
    back = next(
        (
            i
            for i, e in enumerate(way)
            if e.kind in ("ranks-restarted", "rank-respawned", "rank-joined")
        ),
        len(way),
    )
    lost = loss_of(closer) if closer else (None, 0)
    return RecoveryChain(
        outcome="resumed" if closer else "ended" if over else "pending",
        step=number(closer.data.get("step")) if closer else None,
        source=closer.data.get("source") if closer else None,
        lost_steps=lost[0],
        took_ns=sum(stage.took_ns for stage in stages if stage.link != AWAY),
        stages=stages,
        refused=tuple(e.why for e in way if e.kind in REFUSED),
        setbacks=tuple(e.why for e in way[back:] if is_failure(e)),
        evidence=_evidence(way),
        lost_at_least=lost[1],
    )


def _evidence(way: Sequence[Event]) -> tuple[str, ...]:
    last = next((e for e in reversed(way) if e.kind == "recurrence"), None)
    failures = [failure_from_json(said) for said in last.data.get("failures", ())] if last else []
    return tuple(
        f"{failure}{f'; more in {failure.files}' if failure.files else ''}" for failure in failures
    )


# which link, its name, and the words that made it, the one that counts last
Link = tuple[str, str, list[Event]]


def absences(events: Iterable[Event]) -> list[Away]:
    """When nobody had started the job, in order."""
    absence = Absence()
    return [away for event in events if (away := absence.hear(event)) is not None]


def _absent(way: Sequence[Event], noticed: Event | None, aways: Sequence[Away]) -> Iterator[Link]:
    """The absences in this way back, each with what began it."""
    here = {id(event) for event in way}
    for away in aways:
        if id(away.since) in here and id(away.until) in here:
            if away.since is not noticed:
                yield "fact", "gone", [away.since]
            yield AWAY, "away", [away.until]


def _beginning(way: Sequence[Event], noticed: Event | None, aways: Sequence[Away]) -> list[Link]:
    """The links up to the leave to train, in the order in which they came about."""
    found = list(_absent(way, noticed, aways))
    planned = next(
        (i for i, e in enumerate(way) if e.kind in ("plan", "ranks-restarted")), len(way)
    )
    for name, (link, kinds) in LINKS.items():
        seen = way[:planned] if link == "suspicion" else way  # what is suspected later is no news
        kind = next((k for k in kinds if any(e.kind == k and e is not noticed for e in seen)), None)
        words = [e for e in seen if e.kind == kind and e is not noticed]
        if words:
            found.append((link, name, words[:1] if link == "suspicion" else words))
    found += [("refused", str(e.data.get("rung", "")), [e]) for e in way if e.kind == "refused"]
    place = {id(event): i for i, event in enumerate(way)}
    found.sort(key=lambda found: place[id(found[2][-1])])
    first = [link for link in found if link[0] == "suspicion"]
    return (
        [*first, ("fact", "noticed", [noticed]), *(link for link in found if link not in first)]
        if noticed is not None
        else found
    )


def _ending(closer: Event | None, over: Event | None, following: Sequence[Event]) -> list[Link]:
    """The links from the leave to train on."""
    after = list(_undisturbed(following)) if closer else []
    regrouped, steps = ([e for e in after if e.kind == kind] for kind in ("regrouped", "next-step"))
    links: list[Link] = [
        ("action", "resumed", [closer] if closer else []),
        ("action", "regrouped", regrouped),
        ("closed", "next step", steps),
        ("closed", "ended", [over] if over else []),
    ]
    return [link for link in links if link[2]]


def _chained(links: Sequence[Link]) -> tuple[TimelineStage, ...]:
    stages: list[TimelineStage] = []
    for link, name, words in links:
        event = words[-1]
        took_ns = between_ns(stages[-1].event, event) if stages else 0
        stages.append(
            TimelineStage(link, name, event, took_ns, tuple(dict.fromkeys(e.who for e in words)))
        )
    return tuple(stages)


def _undisturbed(following: Sequence[Event]) -> Iterator[Event]:
    """What ranks say when they train again, before anything else happens."""
    for event in following:
        if event.kind == "resumed" or ends_training(event):
            return
        yield event
