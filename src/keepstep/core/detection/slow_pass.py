"""Slow pass: whether it is a pass of a step's body that takes longer, the forward or the backward
one, or the body as a whole.

Comes in: what a step's body takes, and its passes, in blocks of a rank that is slow in it and in
those that they are compared with. Goes out: the section to name. On a slower processor everything
takes longer, and the larger pass most of that: so a pass is named only where it has grown beyond
what else the body does, by more than noise makes of so many blocks. What of the body is neither
pass (a loss, a module that is not protected) is in the whole alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log, sqrt

from keepstep.core.detection.drift import LEAST_NOISE, median
from keepstep.model.step_work import PASSES, Section

BodyTimes = Mapping[Section, float]  # of the body, and of its passes, a step
EXPLAINS = 0.7  # of what the body takes more
KEEPS_PACE = 0.5  # of how much more the pass takes, as a share
ALMOST_ALL = 0.9  # of the body: there is nothing else in it to compare with
ERRORS = 3.0  # standard ones, of medians, by which a pass outgrows the rest
OF_MEDIAN = 1.25  # how much larger its standard error is than a mean's


def slow_part(now: Sequence[BodyTimes], before: Sequence[BodyTimes]) -> Section:
    """Block by block."""
    body = Section.COMPUTE
    now_ns, before_ns = ({s: median(b[s] for b in of) for s in of[0]} for of in (now, before))
    more = {section: now_ns[section] - before_ns[section] for section in (body, *PASSES)}
    part = max(PASSES, key=lambda section: more[section])
    all_more = max(more[body], sum(more[section] for section in PASSES))
    if before_ns[part] <= 0 or more[part] <= 0 or more[part] < EXPLAINS * all_more:
        return body
    if before_ns[part] >= ALMOST_ALL * before_ns[body]:
        return part
    rest_ns = before_ns[body] - before_ns[part]
    pace = more[part] / before_ns[part]
    if more[body] - more[part] > KEEPS_PACE * pace * rest_ns:
        return body
    return part if _outgrows(part, now, before) else body


def _outgrows(part: Section, now: Sequence[BodyTimes], before: Sequence[BodyTimes]) -> bool:
    """The pass the rest of the body."""
    grown, usual = ([_to_rest(block, part) for block in of] for of in (now, before))
    middle = median(usual)
    noise = max(LEAST_NOISE, 1.4826 * median(abs(one - middle) for one in usual))
    error = OF_MEDIAN * noise * sqrt(1 / len(grown) + 1 / len(usual))
    return median(grown) - middle > ERRORS * error


def _to_rest(block: BodyTimes, part: Section) -> float:
    """As a logarithm. None below 0: a clock that went back took no time."""
    return log(
        (1.0 + max(0.0, block[part])) / (1.0 + max(0.0, block[Section.COMPUTE] - block[part]))
    )
