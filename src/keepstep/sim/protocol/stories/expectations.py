"""Expectations: what a story may expect of a run that has ended, beyond what all checkers judge.

Each takes the stage and the outcome, and returns what was found instead; None when it is so.
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep.model.units import S_NS
from keepstep.sim.protocol.job.job import SimOutcome
from keepstep.sim.protocol.stories.conditions import has_fields
from keepstep.sim.protocol.stories.phrases import PLACE, TIME, Phrases, fields, ns
from keepstep.sim.protocol.stories.stage import StoryStage

Expectation = Callable[[StoryStage, SimOutcome], str | None]

EXPECTATIONS: Phrases[Expectation] = Phrases("an expectation")

COUNT = r"(?:never|once|(?:at (?:least|most) )?\d+ times?|at (?:least|most) once)"


@EXPECTATIONS.phrase("ends well", r"ends well")
def _ends_well() -> Expectation:
    """Every node that lives says so."""
    return lambda stage, outcome: _all_end(stage, 0)


@EXPECTATIONS.phrase("ends with exit code 143", r"ends with exit code (?P<code>\d+)")
def _ends_with(code: str) -> Expectation:
    return lambda stage, outcome: _all_end(stage, int(code))


def _all_end(stage: StoryStage, code: int) -> str | None:
    if stage.job.launcher is not None:
        return None if stage.job.launcher.is_over else "its launcher has not seen it end"
    found = {node.machine.number: node.exit_code for node in stage.job.living_nodes()}
    return None if set(found.values()) == {code} else f"exit codes by machine: {found}"


@EXPECTATIONS.phrase("all ranks do their last step", r"all ranks do their last step")
def _all_done() -> Expectation:
    def judge(stage: StoryStage, outcome: SimOutcome) -> str | None:
        done = stage.done_ranks
        return None if len(done) == stage.job.world_size else f"ranks {sorted(done)}"

    return judge


@EXPECTATIONS.phrase("lost steps 0", r"lost steps (?P<steps>\d+)")
def _lost(steps: str) -> Expectation:
    return lambda stage, outcome: _unless(outcome.lost_steps == int(steps), outcome.lost_steps)


@EXPECTATIONS.phrase("at most 4 lost steps", r"at most (?P<steps>\d+) lost steps")
def _lost_at_most(steps: str) -> Expectation:
    return lambda stage, outcome: _unless(outcome.lost_steps <= int(steps), outcome.lost_steps)


@EXPECTATIONS.phrase("is over within 60s", rf"is over within (?P<time>{TIME})")
def _within(time: str) -> Expectation:
    def judge(stage: StoryStage, outcome: SimOutcome) -> str | None:
        return _unless(outcome.virtual_ns <= ns(time), f"{outcome.virtual_ns / S_NS:.1f} s")

    return judge


@EXPECTATIONS.phrase("at most 3 attempts", r"at most (?P<most>\d+) attempts?")
def _attempts(most: str) -> Expectation:
    def judge(stage: StoryStage, outcome: SimOutcome) -> str | None:
        found = {e.data["attempt"] for _, e in stage.events if e.kind == "attempt-formed"}
        return _unless(len(found) <= int(most), sorted(found))

    return judge


@EXPECTATIONS.phrase("every rank goes on from memory", r"every rank goes on from memory")
def _from_memory() -> Expectation:
    """Whenever there was something to go on from: the first time there is not."""

    def judge(stage: StoryStage, outcome: SimOutcome) -> str | None:
        found = stage.resumptions
        is_so = len(found) > 1 and all(each.source == "memory" for each in found[1:])
        return _unless(is_so, _listed(stage))

    return judge


@EXPECTATIONS.phrase(
    "all resume from memory at step 7 once",
    rf"all resume from (?P<source>memory|store)(?: at step (?P<step>\d+))? "
    rf"(?P<count>{COUNT})",
)
def _resume(source: str, step: str | None, count: str) -> Expectation:
    def judge(stage: StoryStage, outcome: SimOutcome) -> str | None:
        found = [
            each
            for each in stage.resumptions
            if each.source == source and (step is None or each.step == int(step))
        ]
        return _unless(_is_count(len(found), count), _listed(stage))

    return judge


@EXPECTATIONS.phrase("all begin afresh once", rf"all begin afresh (?P<count>{COUNT})")
def _afresh(count: str) -> Expectation:
    def judge(stage: StoryStage, outcome: SimOutcome) -> str | None:
        found = [each for each in stage.resumptions if each.source == "fresh"]
        return _unless(_is_count(len(found), count), _listed(stage))

    return judge


@EXPECTATIONS.phrase(
    "resumed with step=7 on machine 0 is recorded once",
    rf"(?P<kind>[\w-]+)(?: with (?P<having>[^ ]+(?: [^ =]+=[^ ]+)*))?(?: on (?P<place>{PLACE}))? "
    rf"is recorded (?P<count>{COUNT})",
)
def _recorded(kind: str, having: str | None, place: str | None, count: str) -> Expectation:
    wanted = fields(having)

    def judge(stage: StoryStage, outcome: SimOutcome) -> str | None:
        of_kind = [(number, e) for number, e in stage.events if e.kind == kind]
        found = [
            e
            for number, e in of_kind
            if has_fields(e.data, wanted)
            and (place is None or number == stage.machine_number(place))
        ]
        listed = [f"machine {number}: {e.why} {dict(e.data)}" for number, e in of_kind]
        return _unless(_is_count(len(found), count), f"{len(found)} of {listed}")

    return judge


def _is_count(found: int, count: str) -> bool:
    *how, number = (
        count.replace("never", "0")
        .replace("once", "1")
        .removesuffix(" times")
        .removesuffix(" time")
    ).split()
    match how:
        case ["at", "least"]:
            return found >= int(number)
        case ["at", "most"]:
            return found <= int(number)
        case _:
            return found == int(number)


def _listed(stage: StoryStage) -> str:
    found = [
        "began afresh" if each.source == "fresh" else f"went on from {each.source} at {each.step}"
        for each in stage.resumptions
    ]
    return f"all {', then '.join(found) or 'never began'}"


def _unless(is_so: bool, found: object) -> str | None:
    return None if is_so else str(found)
