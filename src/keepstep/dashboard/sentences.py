"""Sentences: what a terminal and a page say alike of a job, each with how it is meant.

Comes in: the views of `view.py`, `nodes.py` and `timeline.py`. Goes out: words. Pure: no file, no
clock, no colour; a screen chooses one for a tone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

from keepstep.core.resume.cadence import at_most_lost_steps
from keepstep.dashboard.ages import count, human_age
from keepstep.dashboard.nodes import NodeRow, NodesView
from keepstep.dashboard.slots import SlotRow
from keepstep.dashboard.timeline import (
    AWAY,
    GOOD_NEWS,
    JobRun,
    RecoveryChain,
    TimelineStage,
    begins_in_the_middle,
    is_trouble,
)
from keepstep.model.events import Event
from keepstep.model.loss import loss_words
from keepstep.model.topology import NoRedundancy
from keepstep.model.units import S_NS, human_bytes, human_ns

# good: as it should be. warn: look at it. bad: something is lost, or may be. quiet: in passing.
Tone = Literal["", "good", "warn", "bad", "quiet"]

STATE_TONES: dict[str, Tone] = {
    "training": "good",
    "restoring": "warn",
    "waiting": "warn",
    "broken": "bad",
    "left-over": "warn",
    "ended": "quiet",
    "unknown": "warn",
}
LINK_TONES: dict[str, Tone] = {
    "fact": "bad",
    "suspicion": "warn",
    "diagnosis": "bad",
    "refused": "quiet",
    AWAY: "quiet",
    "closed": "good",
}
# The leading keeper reports when something changes; an older report is shown with its age.
OLD_NS = 5 * S_NS
PLURALS = {"copy": "copies", "parity": "parities"}
# A failure is to fit on a screen.
MAX_SENTENCES = 4
MAX_SENTENCE_CHARACTERS = 200


class Said(NamedTuple):
    """A sentence."""

    text: str
    tone: Tone = ""


class ScreenLine(NamedTuple):
    """A line of a run's log: events that are read as one. `event`: the one it is told by."""

    event: Event
    who: str
    why: str
    tone: Tone


# -- a run and its recoveries


def run_outcome(run: JobRun) -> str:
    """How many failures, and what became of them, as far as its journal tells."""
    middle = begins_in_the_middle(run)
    since = " since its journal begins, in the middle of the run" if middle else ""
    if not run.recoveries:
        return f"no failure{since}"
    recovered = sum(recovery.outcome == "resumed" for recovery in run.recoveries)
    failures = count(len(run.recoveries), "failure")
    lost = loss_words(run.lost_steps, run.lost_at_least)
    return f"{failures}, {recovered} recovered, {lost}{since}"


def run_end(run: JobRun, is_alive: bool | None = None) -> Said:
    """Whether the run is over, and why. is_alive: whether a rank of it lives; None: nobody has
    looked."""
    if run.end is None and is_alive:
        return Said("still running", "good")
    if run.end is None:
        lives = "" if is_alive is None else ", and no rank of it lives"
        return Said(f"its journal tells of no end{lives}", "quiet" if is_alive is None else "warn")
    return Said(f"over: {run.end}", "good" if run.ended_well else "bad")


def recovery_title(number: int, recovery: RecoveryChain) -> Said:
    """How a failure ended, the `number`th of its run."""
    took = human_ns(recovery.took_ns)
    if recovery.away_ns:
        took += f" after {human_ns(recovery.away_ns)} away"
    if recovery.outcome == "resumed":
        source = f"step {recovery.step} from {recovery.source}"
        if recovery.source == "fresh":
            source = "a fresh start"
        lost = loss_words(recovery.lost_steps, recovery.lost_at_least)
        words = f"resumed with {source} in {took}, {lost}"
        return Said(f"Recovery {number}: {words}", "good")
    if recovery.outcome == "ended":
        return Said(f"Failure {number}: the job ended {took} later", "bad")
    return Said(f"Failure {number}: not recovered yet", "warn")


def stage_words(stage: TimelineStage, most: int = MAX_SENTENCE_CHARACTERS) -> Said:
    """What one link of a chain says, in at most so many characters."""
    if stage.link == AWAY:
        return Said("no rank ran until somebody started one, imports included", LINK_TONES[AWAY])
    why = short(stage.event.why, most)
    if len(stage.who) > 1:
        why = f"{len(stage.who)} report it, the last: {why}"
    return Said(why, LINK_TONES.get(stage.link, ""))


def remarks(recovery: RecoveryChain) -> Iterator[tuple[str, str]]:
    """What went wrong on the way: (refused, setback or evidence; a sentence). Of many sentences
    only the first, and how many more there are."""
    for label, sentences in (
        ("refused", [short(why) for why in recovery.refused]),
        ("setback", [short(why) for why in recovery.setbacks]),
        ("evidence", recovery.evidence),
    ):
        for why in sentences[:MAX_SENTENCES]:
            yield label, why
        if len(sentences) > MAX_SENTENCES:
            yield "", f"and {len(sentences) - MAX_SENTENCES} more"


def short(why: str, most: int = MAX_SENTENCE_CHARACTERS) -> str:
    """For a line; the log has the whole sentence."""
    return why if len(why) <= most else f"{why[: most - 3]}..."


def lines(events: Sequence[Event]) -> Iterator[ScreenLine]:
    """What people read of a journal. Checkpoints in a row become one line, and so do ranks that
    report the same; the journal has every event."""
    for is_persist, group in groupby(events, lambda e: e.kind in ("persist-started", "persisted")):
        members = list(group)
        written = [event for event in members if event.kind == "persisted"]
        if is_persist and len(written) > 1:
            first, last = written[0], written[-1]
            steps = f"steps {first.data.get('step')} to {last.data.get('step')}"
            why = f"{len(written)} checkpoints, {steps}; the last one: {last.why}"
            yield ScreenLine(last, last.who, why, _tone_of(last))
            continue
        for _, alike in groupby(members, lambda e: (e.kind, e.why)):
            same = list(alike)
            who = ", ".join(dict.fromkeys(event.who for event in same))
            yield ScreenLine(same[0], who, same[0].why, _tone_of(same[0]))


def _tone_of(event: Event) -> Tone:
    if is_trouble(event):
        return "bad"
    return "good" if event.kind in GOOD_NEWS else ""


# -- the job now


def keeper_words(keeper_alive: bool | None) -> Said:
    """Whether this node's keeper lives."""
    if keeper_alive is None:
        return Said("whether the keeper lives is unknown", "warn")
    return Said("the keeper is alive") if keeper_alive else Said("the keeper is not alive", "warn")


def period_words(period_steps: int) -> Said | None:
    """How much a killed process costs where that is more than one step, and why."""
    if period_steps <= 1:
        return None
    lost_steps = at_most_lost_steps(period_steps)
    return Said(
        f"A capture takes up to {period_steps} steps, so one step in {period_steps} is captured, "
        f"and a killed process costs up to {lost_steps} completed steps.",
        "warn",
    )


def held_words(held: Sequence[SlotRow]) -> str | None:
    """What is kept here for other nodes."""
    counts = Counter(row.kind for row in held if row.state == "sealed")
    if not counts:
        return None
    words = " and ".join(
        f"{number} {kind if number == 1 else PLURALS[kind]}" for kind, number in counts.items()
    )
    size = human_bytes(sum(row.payload_bytes for row in held))
    return f"held for other nodes: {words}, {size}"


def holding(slot: SlotRow) -> str:
    """What a slot holds, in words."""
    if slot.state == "sealed":
        return f"step {slot.step}"
    return f"step {slot.step}, unsealed" if slot.state == "writing" else slot.state


# -- several nodes


def nodes_words(nodes: NodesView) -> Iterator[tuple[Said, ...]]:
    """Which nodes may be lost right now, in a few lines of one or two sentences each."""
    if nodes.policy is None:
        yield (Said(f"Several nodes: {nodes.doubt}.", "warn"),)
        return
    here = "" if nodes.here is None else f" (this is node {nodes.here})"
    name = f"{len(nodes.nodes)} nodes{here}, {nodes.policy}"
    if nodes.doubt:
        yield (Said(f"{name}: which may be lost is unknown: {nodes.doubt}.", "warn"),)
        age = human_age(nodes.told_age_ns)
        yield (Said(f"{age} ago: {_committed(nodes)}; {nodes.why}.", "quiet"),)
        return
    yield _verdict(name, nodes)
    if nodes.policy == str(NoRedundancy()) and nodes.policy_why:
        yield (Said(f"Why {nodes.policy}: {nodes.policy_why}.", "warn"),)
    for row in nodes.nodes:
        if not row.linked:
            told = f"Node {row.node} ({row.host}, {ranks_of(row)})"
            yield (Said(f"{told} has no open link to the leading keeper.", "warn"),)


def old_report_words(nodes: NodesView) -> Said | None:
    """What to think of a report that is not new any more."""
    if nodes.policy is None or nodes.doubt or (nodes.told_age_ns or 0) <= OLD_NS:
        return None
    return Said(
        f"Reported {human_age(nodes.told_age_ns)} ago and unchanged since, unless the leading "
        "node was lost and the keeper here has not noticed yet.",
        "quiet",
    )


def _committed(nodes: NodesView) -> str:
    if nodes.step is None:
        return "no step is held by every rank yet"
    return f"step {nodes.step} is {'' if nodes.is_committed else 'not yet '}committed"


def _verdict(name: str, nodes: NodesView) -> tuple[Said, ...]:
    said = Said(f"{name}: {_committed(nodes)}.")
    if nodes.step is None:
        return (said,)
    tone: Tone = "good" if (nodes.any_nodes or 0) > 0 else "bad"
    return said, Said(f" {nodes.why[:1].upper()}{nodes.why[1:]}.", tone)


def ranks_of(row: NodeRow) -> str:
    """`rank 3`, `ranks 8 to 15`."""
    if not row.ranks:
        return "no ranks"
    first, last = row.ranks[0], row.ranks[-1]
    return f"rank {first}" if first == last else f"ranks {first} to {last}"
