"""Gate: how many bytes of copies may go onto the link at this moment.

Comes in: what the network of each rank of the node does now, its profile, what is under way on the
link. Goes out: a Grant: so many bytes, or when to ask again. This is `core/pacing/schedule.py` as
it happens: chunks follow the same rules, under budgets from which not the planned but the real time
is taken; and what the profile promises counts only while no collective is really under way.

A gate that stays shut for long would cost protection, so it opens by itself where there is no
training traffic to be spared: when no step runs, when a rank's network has not changed its mind for
much longer than a step takes, when no collective was ever seen. And it opens for a target that is
late. How late it is its stamp says, to all nodes the same: a clock that begins to run with each
block, link, node or target would let what all can go back to grow old however short it runs.

Invariant: while a rank trains, and its pulse moves, nothing is granted unless its network is idle
now. So however wrong the profile is, what meets a collective is what was under way when it began:
at most the reserve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keepstep.core.pacing.schedule import MOST_STEPS, Cost, chunk_size
from keepstep.core.pacing.step_profile import Profile
from keepstep.model.rhythm import Pulse
from keepstep.model.units import MS_NS, S_NS

LEAST_WAIT_NS = MS_NS // 2
MOST_WAIT_NS = 2 * MS_NS
# so many steps' time without any change, and at least STILL_NS: nobody trains there
STILL_STEPS = 2
STILL_NS = S_NS
LATE_STEPS = MOST_STEPS  # no plan takes longer
LATE_NS = S_NS  # where so many steps take less
LEARNING_NS = 4 * MS_NS  # without a profile: of a network that is idle now, this is counted on


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for a while: the link's cost, the largest chunk, how much may be under way at
    once, which chunks are worth their start."""

    cost: Cost
    chunk_bytes: int
    reserve_bytes: int
    least_bytes: int


@dataclass(frozen=True, slots=True)
class Grant:
    """`nbytes` may go now; when that is 0, ask again after `wait_ns`."""

    nbytes: int
    wait_ns: int = 0


@dataclass(frozen=True, slots=True)
class Room:
    """What one rank leaves: `left_ns` of its present idle span (None: no bound; 0: nothing), else
    how long it may be busy."""

    left_ns: int | None
    busy_ns: int = 0


def room(pulse: Pulse | None, profile: Profile | None, now_ns: int) -> Room:
    """A loop that waits for its copies, because their source is overwritten next, says that no step
    runs: then there is no bound."""
    if pulse is None or not pulse.trains:
        return Room(None)
    still_ns = now_ns - pulse.since_ns
    if still_ns > max(STILL_NS, STILL_STEPS * profile.step_ns if profile else 0):
        return Room(None)
    if profile is None:
        return Room(0, MOST_WAIT_NS) if pulse.pending else Room(LEARNING_NS)
    if profile.collectives == 0:
        return Room(None)
    span = profile.idle(pulse.entered)
    if pulse.pending:
        # It is idle next where the profile has a span behind at least as many collectives; it may
        # be there sooner.
        later = [s for s in profile.spans if s.index >= pulse.entered]
        before = [s for s in profile.spans if s.index < pulse.entered]
        busy_ns = (
            max(0, later[0].began_ns - (before[-1].ended_ns if before else 0))
            if later
            else MOST_WAIT_NS
        )
        return Room(0, busy_ns - still_ns)
    if span is None:
        return Room(0)
    return Room(max(0, round(profile.mu * span.length_ns) - still_ns - pulse.doubt_ns))


def grant(rooms: Sequence[Room], want_bytes: int, under_way_bytes: int, terms: Terms) -> Grant:
    """Of `want_bytes`, so many may go while `under_way_bytes` of others are on the link."""
    bounds = [r.left_ns for r in rooms if r.left_ns is not None]
    if not bounds:
        return Grant(want_bytes)
    cost = terms.cost
    drained_ns = cost.of(under_way_bytes) - cost.alpha_ns if under_way_bytes else 0
    size = chunk_size(
        min(bounds) - drained_ns, want_bytes, terms.chunk_bytes, cost, terms.least_bytes
    )
    if size and (not under_way_bytes or under_way_bytes + size <= terms.reserve_bytes):
        return Grant(size)
    if size:  # a sub-buffer has to be drained first
        return Grant(0, _within(cost.of(under_way_bytes + size - terms.reserve_bytes)))
    return Grant(0, _within(max((r.busy_ns for r in rooms if r.left_ns == 0), default=0) // 2))


def is_late(age_steps: int, step_ns: int) -> bool:
    """Whether a target waits no longer, whose step was so many steps of `step_ns` (0: nobody knows)
    ago."""
    return age_steps > LATE_STEPS and (not step_ns or age_steps * step_ns > LATE_NS)


def _within(wait_ns: int) -> int:
    return min(MOST_WAIT_NS, max(LEAST_WAIT_NS, wait_ns))
