"""Drift: whether a measure lies above what it was, although it is noisy.

Comes in: one point a block, a ratio in log space. Goes out: that it has risen, and since when.

A one-sided CUSUM (Page, Continuous inspection schemes, 1954) sums how far the points lie above
their reference, in its spreads, clipped, so that a rare stall counts little. Its slack is half of
the smallest excess that matters; its limit is the one that noise alone would reach once in
`BLOCKS_TO_FALSE_ALARM` (Siegmund, Sequential Analysis, 1985). Where much noise makes that limit
far, a second sum of more slack is nearer to its own: what has risen by several spreads is told by
it in a few blocks. The reference, centre and spread (the larger one of median absolute deviation
and clipped standard deviation) of points that are at least `LAG_BLOCKS` old and older than what
rises now, follows slowly.

Invariant: nothing has risen while the reference is not learnt, or its spread is beyond
`MOST_NOISE`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from math import exp, log, sqrt
from typing import NamedTuple

LEARNT_BLOCKS = 24
LAG_BLOCKS = 24  # what is younger is no reference yet, nor what rises just now
REFERENCE_BLOCKS = 256
MOST_NOISE = 0.2  # spread of blocks, of a step
LEAST_NOISE = 0.01
CLIP = 4.0
MOST_SLACK = 0.5
DOUBT = 2.0  # standard errors, by which slack and noise are larger
BLOCKS_TO_FALSE_ALARM = 1_000_000
VERIFIED_BLOCKS = 3
KEPT_BLOCKS = 60  # since the onset
RELEARNT_EVERY = 8  # blocks, and more the more are known


class DriftPoint(NamedTuple):
    """One block of one channel. ratio: the logarithm; own: what the rank needed, in that channel's
    units, nanoseconds a step."""

    ratio: float
    own_ns: float

    def __deepcopy__(self, memo: object) -> DriftPoint:
        """It never changes: a judge that is copied has thousands."""
        return self


class Reference(NamedTuple):
    centre: float
    noise: float
    own_ns: float
    slack: float
    limit: float
    quick_slack: float
    quick_limit: float


class Rise(NamedTuple):
    """onset_step: the first one. excess: of the ratio over its reference; own_excess_ns: what the
    rank needs more than it did itself, a step. cost_blocks: what all of it together has taken, in
    blocks' time."""

    onset_step: int
    blocks: int
    excess: float
    own_excess_ns: float
    cost_blocks: float


class _Scored(NamedTuple):
    point: DriftPoint
    score: float
    before_step: int


class Drift:
    """One measure of one rank, its history and its sum."""

    def __init__(self, least_excess: float) -> None:
        self._least = least_excess
        self._points: deque[DriftPoint] = deque(maxlen=LAG_BLOCKS + REFERENCE_BLOCKS)
        self._count = 0
        self._learns_at = LEARNT_BLOCKS
        self._sum = self._quick = 0.0
        self.reference: Reference | None = None
        self._since: deque[_Scored] = deque(maxlen=KEPT_BLOCKS)  # the sum was 0
        self._since_count = 0

    @property
    def is_noisy(self) -> bool:
        return self.reference is not None and self.reference.noise > MOST_NOISE

    @property
    def is_blind(self) -> bool:
        """It tells nothing: its reference is not learnt, or too noisy."""
        return self.reference is None or self.is_noisy

    @property
    def is_beyond(self) -> bool:
        """Whether a sum is beyond its limit."""
        reference = self.reference
        return reference is not None and (
            self._sum > reference.limit or self._quick > reference.quick_limit
        )

    def add(self, point: DriftPoint, before_step: int) -> bool:
        """`is_beyond`, with this block. before_step: the last one before the block."""
        if self._count >= self._learns_at:
            self._learns_at = self._count + max(RELEARNT_EVERY, len(self._points) // 4)
            self._learn()
        self._points.append(point)
        self._count += 1
        reference = self.reference
        if reference is None or reference.noise > MOST_NOISE:
            return False
        score = (point.ratio - reference.centre) / reference.noise
        score = max(-CLIP, min(CLIP, score))
        self._sum += score - reference.slack
        self._quick = max(0.0, self._quick + score - reference.quick_slack)
        if self._sum <= 0:
            self.forget_rise()
            return False
        self._since.append(_Scored(point, score, before_step))
        self._since_count += 1
        return self.is_beyond

    def rise(self) -> Rise | None:
        """What has risen, since its likeliest onset: the one from which on the scores, whose mean
        was 0 before, have the largest sum for the square root of their number. None: too short."""
        if self.reference is None:
            return None
        best, begins, total = 0.0, len(self._since), 0.0
        for number in range(len(self._since) - 1, -1, -1):
            total += self._since[number].score
            likely = total / sqrt(len(self._since) - number)
            if likely > best:
                best, begins = likely, number
        found = list(islice(self._since, begins, None))
        if len(found) < VERIFIED_BLOCKS:
            return None
        return Rise(
            onset_step=found[0].before_step + 1,
            blocks=len(found),
            excess=median(one.point.ratio for one in found) - self.reference.centre,
            own_excess_ns=median(one.point.own_ns for one in found) - self.reference.own_ns,
            cost_blocks=sum(exp(one.point.ratio - self.reference.centre) - 1 for one in found),
        )

    def forget_rise(self) -> None:
        self._sum = self._quick = 0.0
        self._since_count = 0
        self._since.clear()

    def drop_rise(self) -> None:
        """What has risen is no reference, and not looked at any more."""
        for _ in range(min(self._since_count, len(self._points))):
            self._points.pop()
        self.forget_rise()

    def _learn(self) -> None:
        kept = len(self._points) - max(LAG_BLOCKS, self._since_count)
        if self.reference is None:
            kept = len(self._points)
        if kept < LEARNT_BLOCKS:
            return
        found = list(islice(self._points, kept))
        ratios = [point.ratio for point in found]
        middle = median(ratios)
        usual = max(LEAST_NOISE, 1.4826 * median(abs(ratio - middle) for ratio in ratios))
        # With what is clipped later clipped here, too, the score of the reference itself is 0.
        clipped = [max(-CLIP * usual, min(CLIP * usual, ratio - middle)) for ratio in ratios]
        off = sum(clipped) / len(clipped)
        spread = sqrt(sum((one - off) ** 2 for one in clipped) / len(clipped))
        doubt = DOUBT / sqrt(len(found))  # few blocks know neither centre nor spread well
        noise = max(usual, spread) * (1 + doubt)
        slack = min(MOST_SLACK, self._least / (2 * noise))
        own_ns = median(point.own_ns for point in found)
        quick = MOST_SLACK + doubt, _limit(MOST_SLACK)
        self.reference = Reference(
            middle + off, noise, own_ns, slack + doubt, _limit(slack), *quick
        )


def _limit(slack: float) -> float:
    return log(BLOCKS_TO_FALSE_ALARM * 2 * slack**2) / (2 * slack) - 1.166


def median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
