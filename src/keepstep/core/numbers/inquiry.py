"""Inquiry: what is done about a step whose numbers are wrong, one act after the other.

    wrong in the first run -> run again, same ranks; without a snapshot of before it is only told
      right                     it counts: nothing is lost but the time
      a value that came in      skip the batch
      wrong again               run with the ranks in each other's places, where that can be
        that hardware             run again and again, at growing pauses; right: it had passed,
                                  never: the rank leaves
        data, code, not known     skip the batch, or stop: by policy; what is only great, and a
                                  number, counts as it is, or its batch is skipped: by policy

Where nothing is to be done but to undo what a device or a batch has done, nobody stops: what comes
again and cannot be left out goes on as the program has it. A state that is not finite after
gradients that are is the program's own, unless gradients behind it were not: then it was no good.

Comes in: the runs so far. Goes out: the next act, with its verdict. Never waits, never acts.

Invariant: the same runs and rules give the same act on every rank, and every inquiry ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from keepstep.core.numbers.verdict import judge
from keepstep.model.numbers import Culprit, Sight, Sign, StepRun, StepVerdict, Way
from keepstep.model.units import MS_NS, counted

# A device that computes wrong is given so many runs to come right again.
COOLING_RUNS = 64
FIRST_PAUSE_NS = 10 * MS_NS
LONGEST_PAUSE_NS = 200 * MS_NS
SPOILT_RUNS = 8  # likewise where an update is wrong, and nobody can tell a device from the program
SKIPS = 3  # batches within so many steps; more is no matter of single batches
SKIPS_WITHIN_STEPS = 1000


@dataclass(frozen=True, slots=True)
class Rules:
    """may_skip: the policy, where what was wrong comes again. skips_spikes: likewise, where all of
    it is finite. can_skip: keepstep's loaders gave the step its batches, so that they can be left
    out. can_swap: every rank can run the step in another's place. only_undoes: nobody stops, and
    what is not finite though all gradients are is the program's. within: so far apart runs of one
    state and batch may be."""

    may_skip: bool = True
    skips_spikes: bool = False
    can_skip: bool = True
    can_swap: bool = False
    only_undoes: bool = False
    within: float = 0.0


@dataclass(frozen=True, slots=True)
class RunIt:
    """Go back to before the step, wait, and run it that way."""

    way: Way
    why: str
    pause_ns: int = 0


@dataclass(frozen=True, slots=True)
class CountIt:
    """The last run counts as any step."""

    verdict: StepVerdict


@dataclass(frozen=True, slots=True)
class LetBe:
    """The last run counts, wrong as it is. `is_meant`: it is the program's own way; else there is
    nothing that can be done, and what follows is in doubt no more."""

    verdict: StepVerdict
    is_meant: bool
    why: str


@dataclass(frozen=True, slots=True)
class SkipIt:
    """Go back to before the step, and train on without its batches."""

    verdict: StepVerdict


@dataclass(frozen=True, slots=True)
class Leave:
    """The hardware of `verdict.rank` computes wrong for good: that rank's process ends, and says
    so."""

    verdict: StepVerdict


@dataclass(frozen=True, slots=True)
class NoWayBack:
    """Nobody can go back: only what the step has left can be done about it."""

    verdict: StepVerdict
    why: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Nobody goes on: a person decides."""

    verdict: StepVerdict
    why: str


Act = RunIt | CountIt | LetBe | SkipIt | Leave | NoWayBack | Stop


def next_act(step: int, runs: Sequence[StepRun], rules: Rules) -> Act:
    """`runs`: of that step, the newest last; the first is that which was found wrong."""
    if len(runs) == 1:
        if not can_go_behind(step, runs[0].seen):
            verdict = StepVerdict(Culprit.UNKNOWN, False, None, "", told(runs[0]))
            return NoWayBack(verdict, f"no snapshot of before step {step} is held by every rank")
        return RunIt(Way.AGAIN, f"step {step} is run again: {told(runs[0])}")
    last, verdict = runs[-1], judge(runs, rules.within)
    if last.is_clean and last.way is Way.AGAIN:
        return CountIt(verdict)
    ways = [run.way for run in runs]
    may_tell_more = verdict.culprit is Culprit.UNKNOWN and Way.SWAPPED not in ways
    if may_tell_more and rules.can_swap:
        why = (
            f"step {step} has wrong numbers once more, and is run with the ranks in each other's "
            "places: that tells a device from the program"
        )
        return RunIt(Way.SWAPPED, why)
    if verdict.culprit is Culprit.HARDWARE:
        return _undone(step, runs, verdict, rules, _cool(step, runs, verdict))
    act = _undone(step, runs, verdict, rules, _skip_or_stop(step, last, verdict, rules))
    if last.is_finite and not (isinstance(act, SkipIt) and rules.skips_spikes):
        return _take_as_it_is(step, last, verdict)
    return act


def can_go_behind(step: int, seen: Sequence[Sight]) -> bool:
    """Whether all ranks hold one snapshot of before that step: that each holds some is not
    enough."""
    common = frozenset.intersection(*(frozenset(one.holds) for one in seen))
    return any(stamp.step < step for stamp in common)


def told(run: StepRun) -> str:
    """What was seen of a run, in one clause."""
    for sign in Sign:
        ranks = [seen.rank for seen in run.seen if sign in seen.signs]
        if ranks:
            others = "every rank" if len(ranks) == len(run.seen) else f"rank {ranks[0]}"
            if 1 < len(ranks) < len(run.seen):
                others = f"{len(ranks)} of {len(run.seen)} ranks"
            return f"{others} saw {sign.value}"
    return "nothing wrong was seen"


def _cool(step: int, runs: Sequence[StepRun], verdict: StepVerdict) -> RunIt | Leave | Stop:
    tried = sum(run.way is Way.AGAIN for run in runs)
    if tried < COOLING_RUNS:
        why = f"step {step} is run again, to see whether it lasts: {verdict.why}"
        return RunIt(Way.AGAIN, why, _pause_ns(runs))
    why = f"{verdict.why}; it still does after {counted(tried, 'run')} of step {step}"
    if verdict.rank is None:
        return Stop(verdict, why)
    return Leave(replace(verdict, why=why))


def _pause_ns(runs: Sequence[StepRun]) -> int:
    tried = sum(run.way is Way.AGAIN for run in runs)
    return min(LONGEST_PAUSE_NS, FIRST_PAUSE_NS << min(tried - 1, 20))


def _undone(
    step: int, runs: Sequence[StepRun], verdict: StepVerdict, rules: Rules, act: Act
) -> Act:
    """The same act, or what takes its place where nobody is to stop."""
    last = runs[-1]
    if not rules.only_undoes or not isinstance(act, (SkipIt, Stop)) or last.is_finite:
        return act
    is_of_state = all(seen.signs in ((), (Sign.STATE,)) for seen in last.seen)
    if isinstance(act, SkipIt) and not (is_of_state and all(seen.looked for seen in last.seen)):
        return act
    if last.way is not Way.AGAIN:
        return RunIt(Way.AGAIN, f"step {step} is run again, and counts then: {verdict.why}")
    has_spoilt = any(sign is not Sign.STATE for seen in runs[0].seen for sign in seen.signs)
    if is_of_state and not has_spoilt:
        why = f"the gradients of step {step} are finite: what is not in its state is the program's"
        return LetBe(verdict, True, why)
    if is_of_state and sum(run.way is Way.AGAIN for run in runs) < SPOILT_RUNS:
        why = f"step {step} is run again, to see whether its update stays wrong: {verdict.why}"
        return RunIt(Way.AGAIN, why, _pause_ns(runs))
    told_why = act.why if isinstance(act, Stop) else verdict.why
    why = f"{told_why}. Training goes on as it is; nothing of it is kept from step {step} on"
    return LetBe(verdict, False, why)


def _take_as_it_is(step: int, last: StepRun, verdict: StepVerdict) -> RunIt | CountIt:
    """Numbers that come again and are numbers are the training's own: another level."""
    if last.way is Way.AGAIN:
        return CountIt(verdict)
    why = f"step {step} is run again, and counts then: {verdict.why}"
    return RunIt(Way.AGAIN, why)


def _skip_or_stop(step: int, last: StepRun, verdict: StepVerdict, rules: Rules) -> SkipIt | Stop:
    skips = max(seen.skips for seen in last.seen)
    if not rules.may_skip:
        return Stop(verdict, f"step {step} has wrong numbers that come again: {verdict.why}")
    if verdict.culprit is Culprit.MODEL:
        return Stop(verdict, f"step {step} has wrong numbers that come again: {verdict.why}")
    if not rules.can_skip:
        why = (
            f"step {step} has wrong numbers that come again, and its batch cannot be skipped: it "
            f"was not taken from job.loader() within the step. {verdict.why}"
        )
        return Stop(verdict, why)
    if skips >= SKIPS:
        why = (
            f"step {step} has wrong numbers that come again, and the batches of "
            f"{counted(skips, 'step')} were skipped within {SKIPS_WITHIN_STEPS} steps already: "
            f"this is no single batch. {verdict.why}"
        )
        return Stop(verdict, why)
    return SkipIt(verdict)
