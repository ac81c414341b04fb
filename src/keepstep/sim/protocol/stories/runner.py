"""Runner: a story's case as a run, judged by all checkers and by what the story expects.

A rule that never comes about fails the story too: it would say nothing any more.
"""

from __future__ import annotations

from dataclasses import replace

from keepstep.errors import KeepstepError
from keepstep.model.units import MS_NS
from keepstep.sim.protocol.checkers.atlas import Atlas
from keepstep.sim.protocol.job.job import SimJob, SimOutcome
from keepstep.sim.protocol.stories.reader import StoryCase, StoryRule
from keepstep.sim.protocol.stories.stage import Happened, StoryStage
from keepstep.sim.protocol.swarm import CHECKERS
from keepstep.sim.protocol.world.world import World

LOOK_AGAIN_NS = MS_NS // 5


class Telling:
    """The rules of a case, each of which happens once."""

    def __init__(self, stage: StoryStage, rules: tuple[StoryRule, ...]) -> None:
        self._stage = stage
        self._world = stage.job.world
        self._rules = rules
        self._waiting: dict[int, int] = {}  # by rule: how often what it waits for has happened
        self.pending = set(range(len(rules)))
        stage.on_happened = self._happened
        for number, rule in enumerate(rules):
            if not rule.follows:
                self._world.after(rule.after_ns, None, self._arm, number)

    def _arm(self, number: int) -> None:
        rule = self._rules[number]
        if rule.condition is not None:
            self._waiting[number] = 0
        elif rule.look is not None:
            self._look(number)
        else:
            self._act(number)

    def _look(self, number: int) -> None:
        rule = self._rules[number]
        assert rule.look is not None
        if rule.look(self._stage):
            self._world.after(rule.late_ns, None, self._act, number)
        else:
            self._world.after(LOOK_AGAIN_NS, None, self._look, number)

    def _happened(self, happened: Happened) -> None:
        for number in list(self._waiting):
            rule = self._rules[number]
            assert rule.condition is not None
            if number in self._waiting and rule.condition(self._stage, happened):
                self._waiting[number] += 1
                if self._waiting[number] == rule.nth:
                    del self._waiting[number]
                    self._come(number, happened)

    def _come(self, number: int, happened: Happened) -> None:
        """At a port call what is to happen happens before it; else behind what happens now."""
        rule = self._rules[number]
        if happened.kind == "calls" and not rule.late_ns:
            self._act(number)
        else:
            self._world.after(rule.late_ns, None, self._act, number)

    def _act(self, number: int) -> None:
        rule = self._rules[number]
        self.pending.discard(number)
        for act in rule.acts:
            try:
                what = act(self._stage)
            except KeepstepError as error:
                self._stage.job.violate("story", f"line {rule.line}, {rule.text}: {error}")
                return
            if what:
                self._stage.job.struck(what)
        after = number + 1
        if after < len(self._rules) and self._rules[after].follows:
            self._world.after(self._rules[after].after_ns, None, self._arm, after)


def tell(case: StoryCase) -> SimOutcome:
    """The run, to its end. Its `wrong` says also what was not as expected."""
    job = SimJob(case.plan, World(case.seed))
    atlas = Atlas(job)
    stage = StoryStage(job)
    job.watch([atlas, *(new(job, atlas) for new in CHECKERS), stage])
    telling = Telling(stage, case.rules)
    outcome = job.run()
    if outcome.wrong is not None:
        return outcome
    wrong = [
        f"line {case.rules[number].line}, {case.rules[number].text}: it never came about"
        for number in sorted(telling.pending)
    ]
    for entry, expectation in case.expected:
        found = expectation(stage, outcome)
        if found is not None:
            wrong.append(f"line {entry.line}: expected {entry.text!r}, found {found}")
    return replace(outcome, wrong="; ".join(wrong) or None)
