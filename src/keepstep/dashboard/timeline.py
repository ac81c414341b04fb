"""Timeline: a journal as a story: runs, and in each run the recoveries, measured from stage to stage.

Comes in: events in the order written. Goes out: frozen values. Pure: no file, no clock.

A run begins with a fresh start and goes on through everything that resumed from it, be it from memory or, after the machine
was lost, from the store. A journal is one node's: of several, the leading one decides (`restore-offered`, `resumed`), and the others
write down what they hear of it (`offer`, `go`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from keepstep.model.events import Event
from keepstep.model.units import S_NS

SAME_CLOCK_NS = 60 * S_NS  # two clocks that disagree by more have a reboot or a suspension between them
REFUSED = {"damaged", "restore-failed", "fetch-failed", "checkpoint-damaged", "store-unreadable", "restore-refused", "slot-voided"}
TROUBLE = REFUSED | {"capture-failed", "persist-failed", "persist-impossible", "keeper-lost", "keeper-missing", "torn", "stranger-refused"}
TROUBLE |= {"copy-failed", "copy-lost", "copy-refused", "declined", "mesh-refused", "meeting-lost", "keeper-unheard"}  # between nodes
GLAD = {"resumed", "go", "mended"}
BACK = {"resumed", "go"}  # all ranks may train
# What an agent says before its first word about the job, while it finds its keeper and the other nodes.
PRELUDE = {"keeper-listens", "keeper-unheard", "meeting", "round-waiting"}


@dataclass(frozen=True, slots=True)
class Stage:
    """One step on the way back: noticed, met, restarted, joined, offered, fetched, loaded, resumed, next step; as many of them as there
    were. `took_ns` since the stage before."""

    name: str
    event: Event
    took_ns: int


@dataclass(frozen=True, slots=True)
class Recovery:
    """From the first sign of a failure to the next completed step. `outcome` is resumed, ended or pending.

    `refused` are the sources that were tried or looked at and not used; `setbacks` what failed meanwhile.
    """

    outcome: str
    step: int | None
    source: str | None
    lost_steps: int | None
    took_ns: int
    stages: tuple[Stage, ...]
    refused: tuple[str, ...]
    setbacks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Story:
    """One run. `end` is its last word, None while it goes on."""

    events: tuple[Event, ...]
    recoveries: tuple[Recovery, ...]
    end: str | None
    ended_well: bool | None
    lost_steps: int


def between_ns(earlier: Event, later: Event) -> int:
    """How long from one event to another: by the monotonic clock, unless a reboot has set it back. Never negative."""
    mono_ns, wall_ns = later.mono_ns - earlier.mono_ns, later.wall_ns - earlier.wall_ns
    return max(0, mono_ns if abs(mono_ns - wall_ns) < SAME_CLOCK_NS else wall_ns)


def is_failure(event: Event) -> bool:
    """Whether the event says that a rank or a node is gone, or going, without having ended well."""
    if event.kind == "node-lost":
        return True
    if event.kind == "rank-exited":
        return event.data.get("code") != 0
    if event.kind == "rank-left":
        return not event.data.get("expected", True)
    return event.kind == "rank-bye" and not event.data.get("ok", True)


def is_trouble(event: Event) -> bool:
    """Whether a reader should see the line in red."""
    return is_failure(event) or event.kind in TROUBLE


def stories(events: Iterable[Event]) -> list[Story]:
    """Every run of the job, the oldest first."""
    return [_story(run) for run in _runs(events)]


def _runs(events: Iterable[Event]) -> list[list[Event]]:
    """What opened with empty memory and did not start afresh continues the run before."""
    runs: list[list[Event]] = []
    for memory in _memories(events):
        first = next((e for e in memory if e.kind in BACK), None)
        if runs and first and first.data.get("source") != "fresh":
            runs[-1].extend(memory)
        else:
            runs.append(memory)
    return runs


def _memories(events: Iterable[Event]) -> list[list[Event]]:
    """An agent and a keeper with nothing in its hands open together, in either order: what follows is about one memory."""
    memories: list[list[Event]] = []
    for event in events:
        if not memories or (_opens(event) and not all(_opens(e) or e.kind in PRELUDE for e in memories[-1])):
            memories.append([])
        memories[-1].append(event)
    return memories


def _opens(event: Event) -> bool:
    return event.kind == "job-started" or (event.kind == "keeper-started" and event.why.endswith("nothing there yet"))


def _story(events: Sequence[Event]) -> Story:
    recoveries = tuple(_recoveries(events))
    last = next((e for e in reversed(events) if e.kind in BACK | {"job-over", "keeper-started"}), None)
    end = last if last and last.kind == "job-over" else None
    lost = sum(r.lost_steps or 0 for r in recoveries)
    return Story(tuple(events), recoveries, end.why if end else None, bool(end.data.get("ok")) if end else None, lost)


def _recoveries(events: Sequence[Event]) -> list[Recovery]:
    """One for each way back to training, and one for a failure that nothing followed."""
    resumed_at = [i for i, e in enumerate(events) if e.kind in BACK and not _is_repeated(e, events[:i])]
    found = []
    for begin, end in zip([-1, *resumed_at], [*resumed_at, len(events)], strict=True):
        window = events[begin + 1 : end]
        resumed = events[end] if end < len(events) else None
        failure = next((i for i, e in enumerate(window) if is_failure(e)), None)
        if failure is None and (resumed is None or resumed.data.get("source") == "fresh"):
            continue  # the start itself, or the rest of a run that went well
        # Without a witness (the keeper was gone as well) the way back begins with the keeper that came next.
        start = failure if failure is not None else max((i for i, e in enumerate(window) if e.kind == "keeper-started"), default=0)
        found.append(_recovery(window[start:], failure is not None, resumed, events[end + 1 :]))
    return found


def _is_repeated(go: Event, before: Sequence[Event]) -> bool:
    """A permission that was said before: again for a node whose keeper had died, or by each of the nodes that share a journal."""
    last = next((e for e in reversed(before) if e.kind in BACK or e.kind == "rank-joined"), None)
    epoch = go.data.get("epoch")
    return last is not None and last.kind in BACK and epoch is not None and last.data.get("epoch") == epoch


def _recovery(way: Sequence[Event], noticed: bool, resumed: Event | None, following: Sequence[Event]) -> Recovery:
    def last(*kinds: str) -> Event | None:
        return next((e for e in reversed(way) if e.kind in kinds), None)

    over = last("job-over") if resumed is None else None
    reached = {
        "noticed": way[0] if noticed else None,
        "met": last("round-formed") or last("mesh"),  # the agents, or under a foreign launcher the ranks
        "restarted": last("ranks-restarted"),
        "joined": last("rank-joined"),
        "offered": last("restore-offered", "offer"),
        "fetched": last("fetched"),
        "loaded": last("loaded"),
        "resumed": resumed,
        "next step": _next_step(following) if resumed else None,
        "ended": over,
    }
    known = [(name, event) for name, event in reached.items() if event is not None]
    pairs = zip([known[0], *known], known, strict=False)
    stages = tuple(Stage(name, event, between_ns(before, event)) for (_, before), (name, event) in pairs)
    # Ranks that end between the first sign and the restart go down with the first; those after it are failures of their own.
    back = next((i for i, e in enumerate(way) if e.kind in ("ranks-restarted", "rank-joined")), len(way))
    return Recovery(
        outcome="resumed" if resumed else "ended" if over else "pending",
        step=resumed.data.get("step") if resumed else None,
        source=resumed.data.get("source") if resumed else None,
        lost_steps=resumed.data.get("lost_steps") if resumed else None,
        took_ns=between_ns(known[0][1], known[-1][1]),
        stages=stages,
        refused=tuple(e.why for e in way if e.kind in REFUSED),
        setbacks=tuple(e.why for e in way[back:] if is_failure(e)),
    )


def _next_step(following: Sequence[Event]) -> Event | None:
    """The moment at which every rank had done a step again: the last of their words before anything else happens."""
    found = None
    for event in following:
        if event.kind == "resumed" or is_failure(event):
            break
        if event.kind == "next-step":
            found = event
    return found
