"""Step profile: when a rank's network is idle within a step, learnt from the steps that were seen.

Comes in: steps, with the gaps between their collectives. Goes out: a Profile: each idle span's mean
and spread; and, when the steps are not like it any more, why it is given up. As in GEMINI (SOSP
2023, section 5.4) it is an average over 20 steps; a first one is made of 4, so that copies need not
wait for the rest. Measures nothing.

A gap is known by how many collectives of its step were begun before it, so that one that vanishes
in some steps (the next collective was begun before the last had ended) has length 0 there and
shifts none of the others.

Ranks need not agree on a profile, because copies are no collectives: a keeper sends when *all*
ranks of its node leave room (`intersection` is the same in advance). Of other nodes it asks
nothing: a collective keeps the links of all its members busy at once.

Invariant: a profile is made of steps with equally many collectives, none of which took twice as
long as the median one.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from keepstep.model.rhythm import StepSeen
from keepstep.model.units import human_ns

FIRST_STEPS = 4
FULL_STEPS = 20
CHANGED_STEPS = 4  # in a row; fewer are an evaluation, a garbage collection, a slow file
CHANGED_RATIO = 0.25
MOST_MU, LEAST_MU, FIRST_MU = 0.95, 0.25, 0.7


@dataclass(frozen=True, slots=True)
class Idle:
    """An idle span: where in the step it begins, how long it is, on average; `spread_ns`: the
    standard deviation of its length."""

    index: int
    began_ns: int
    length_ns: int
    spread_ns: int

    @property
    def ended_ns(self) -> int:
        return self.began_ns + self.length_ns


@dataclass(frozen=True, slots=True)
class Profile:
    """The mean of so many `steps`."""

    steps: int
    step_ns: int
    collectives: int
    spans: tuple[Idle, ...]

    @property
    def idle_ns(self) -> int:
        return sum(span.length_ns for span in self.spans)

    @property
    def spread_ratio(self) -> float:
        """The normalised standard deviation: of all spans' lengths, longer ones weighing more.
        GEMINI's are below 0.1."""
        return sum(span.spread_ns for span in self.spans) / self.idle_ns if self.idle_ns else 0.0

    @property
    def mu(self) -> float:
        """The part of a span that is counted on: what it is longer than in most steps, whatever its
        distribution (two deviations below the mean lies at most a fifth, by Cantelli's inequality;
        of a normal one 2 %)."""
        return mu_of(self.spread_ratio, self.steps)

    def idle(self, index: int) -> Idle | None:
        return next((span for span in self.spans if span.index == index), None)


def mu_of(spread_ratio: float, steps: int) -> float:
    # odd ones among the last 20 do not count
    most = MOST_MU if steps > FULL_STEPS // 2 else FIRST_MU
    return min(most, max(LEAST_MU, 1 - 2 * spread_ratio))


def average(steps: Sequence[StepSeen]) -> Profile | None:
    """None when there is no rhythm: when no more than half of the steps are alike."""
    if not steps:
        return None
    most_ns = 2 * statistics.median(step.step_ns for step in steps)
    [(collectives, _)] = Counter(step.collectives for step in steps).most_common(1)
    alike = [step for step in steps if step.collectives == collectives and step.step_ns <= most_ns]
    if 2 * len(alike) <= len(steps):
        return None
    spans = (_idle(index, alike) for index in range(collectives + 1))
    step_ns = round(statistics.fmean(step.step_ns for step in alike))
    return Profile(
        len(alike), step_ns, collectives, tuple(span for span in spans if span.length_ns > 0)
    )


def _idle(index: int, steps: Sequence[StepSeen]) -> Idle:
    seen = [
        (gap.began_ns - step.began_ns, gap.ended_ns - gap.began_ns)
        for step in steps
        for gap in step.gaps
        if gap.index == index
    ]
    if not seen:
        return Idle(index, 0, 0, 0)
    lengths = [length for _, length in seen] + [0] * (len(steps) - len(seen))
    began_ns = statistics.fmean(began for began, _ in seen)
    return Idle(
        index,
        round(began_ns),
        round(statistics.fmean(lengths)),
        math.ceil(statistics.pstdev(lengths)),
    )


class Rhythm:
    """Of one rank, as it goes. `profile` is what holds now, `why` a sentence about it."""

    def __init__(self) -> None:
        self.profile: Profile | None = None
        self.why = "no step was seen yet"
        self._steps: deque[StepSeen] = deque(maxlen=FULL_STEPS)
        self._other: list[StepSeen] = []  # the last ones, when they are not like the profile
        self._since_average = 0

    def saw(self, step: StepSeen) -> bool:
        """True when there is another profile, or none any more."""
        if self.profile is None:
            return self._add(step)
        wrong = difference(self.profile, step)
        if wrong is None:
            self._other.clear()
            return self._add(step)
        self._other.append(step)
        if len(self._other) < CHANGED_STEPS:
            return False
        self._steps = deque(self._other, maxlen=FULL_STEPS)
        self._other = []
        self._average(f"the rhythm has changed: {wrong}, in {CHANGED_STEPS} steps in a row; ")
        return True

    def _add(self, step: StepSeen) -> bool:
        self._steps.append(step)
        self._since_average += 1
        many = len(self._steps)
        due = many == FIRST_STEPS or (
            many == FULL_STEPS and (self.profile is None or self.profile.steps <= FULL_STEPS // 2)
        )
        if due or self._since_average >= FULL_STEPS:
            self._average("")
            return True
        return False

    def _average(self, head: str) -> None:
        self._since_average = 0
        self.profile = average(self._steps)
        if self.profile is None:
            self.why = (
                f"{head}no more than half of {len(self._steps)} steps are alike: there is no rhythm"
            )
            return
        told, spread = self.profile, self.profile.spread_ratio
        self.why = (
            f"{head}the network is idle for {human_ns(told.idle_ns)} of a step's "
            f"{human_ns(told.step_ns)}, in {len(told.spans)} spans "
            f"between {told.collectives} collectives, within {spread:.0%} (mean of "
            f"{told.steps} steps): {told.mu:.0%} of each is counted on"
        )


def difference(profile: Profile, step: StepSeen) -> str | None:
    """What makes this step another rhythm's; None when it is of this one."""
    if step.collectives != profile.collectives:
        return f"{step.collectives} collectives a step instead of {profile.collectives}"
    if abs(step.step_ns - profile.step_ns) > CHANGED_RATIO * profile.step_ns:
        return f"a step takes {human_ns(step.step_ns)} instead of {human_ns(profile.step_ns)}"
    spread_ns = sum(span.spread_ns for span in profile.spans)
    if abs(step.idle_ns - profile.idle_ns) > max(CHANGED_RATIO * profile.idle_ns, 4 * spread_ns):
        return (
            f"the network is idle for {human_ns(step.idle_ns)} of a step instead of "
            f"{human_ns(profile.idle_ns)}"
        )
    return None


def intersection(profiles: Iterable[Profile]) -> tuple[tuple[int, int], ...]:
    """When all of these are idle: (begin, end) within the step, in order."""
    found: list[tuple[int, int]] | None = None
    for profile in profiles:
        spans = [(span.began_ns, span.ended_ns) for span in profile.spans]
        found = (
            spans
            if found is None
            else [
                (max(a, c), min(b, d)) for a, b in found for c, d in spans if max(a, c) < min(b, d)
            ]
        )
    return tuple(sorted(found or ()))
