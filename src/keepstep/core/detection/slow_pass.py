"""Slow pass: whether it is a pass of a step's body that takes longer, the forward or the backward
one, or the body as a whole.

Comes in: what a step's body takes, and its passes, of a rank that is slow in it and of what that is
compared with. Goes out: the section to name. On a slower processor everything takes longer, and the
larger pass most of that: so a pass is named only where what else the body does has grown much less
than in proportion. What of the body is neither pass (a loss, a module that is not protected) is in
the whole alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from keepstep.model.step_work import PASSES, Section

EXPLAINS = 0.7  # of what the body takes more
KEEPS_PACE = 0.5  # of how much more the pass takes, as a share
ALMOST_ALL = 0.9  # of the body: there is nothing else in it to compare with


def slow_part(now_ns: Mapping[Section, float], before_ns: Mapping[Section, float]) -> Section:
    """By section, a step: of the body, and of its passes."""
    body = Section.COMPUTE
    more = {section: now_ns[section] - before_ns[section] for section in (body, *PASSES)}
    part = max(PASSES, key=lambda section: more[section])
    all_more = max(more[body], sum(more[section] for section in PASSES))
    if before_ns[part] <= 0 or more[part] <= 0 or more[part] < EXPLAINS * all_more:
        return body
    if before_ns[part] >= ALMOST_ALL * before_ns[body]:
        return part
    rest_ns = before_ns[body] - before_ns[part]
    pace = more[part] / before_ns[part]
    return part if more[body] - more[part] <= KEEPS_PACE * pace * rest_ns else body
