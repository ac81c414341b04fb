"""Slow cause: why a rank needs longer than it did, or than its peers.

Comes in: blocks of a slow rank, and those that they are compared with. Goes out: one word, by what
has grown with its time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log

from keepstep.core.detection.drift import median
from keepstep.core.detection.work_measures import computed_ns_of, own_ns_of
from keepstep.model.step_work import JUDGED, Section, SlowCause, WorkBlock

CUTS: dict[SlowCause, float] = {"quota": 0.3, "memory": 0.3, "neighbour": 0.5, "compute": 0.5}


def cause_of(
    section: Section,
    excess_ns: float,
    now: Sequence[WorkBlock],
    before: Sequence[WorkBlock],
    needs: Callable[[WorkBlock, Section], float],
    is_on_device: bool,
) -> SlowCause:
    """By what has grown with it, measured as `needs` does. Whoever computes more is kept from the
    processor for longer, too, where others want it: so processor time is asked first, by its share
    of the growth. A throttled thread is ready to run: what the kernel counts for the fewer reasons
    is asked before. A device that stands still because its trainer is kept from the processor looks
    as if it computed: there what keeps the thread is asked first."""

    def grown(of: str) -> float:
        return _mean_of(now, of) - _mean_of(before, of)

    delayed_ns = _mean_delay_ns(now) - _mean_delay_ns(before)
    is_delayed = delayed_ns >= CUTS["neighbour"] * excess_ns > 0
    is_kept = is_on_device and (
        is_delayed
        or grown("throttled_ns") >= CUTS["quota"] * excess_ns > 0
        or grown("memory_stall_ns") >= CUTS["memory"] * excess_ns > 0
    )
    if section is not Section.DATA and not is_kept:
        computed = log(
            _usual(now, computed_ns_of, section) / _usual(before, computed_ns_of, section)
        )
        took = log(_usual(now, needs, section) / _usual(before, needs, section))
        if computed >= CUTS["compute"] * took:
            return "compute"
    if grown("throttled_ns") >= CUTS["quota"] * excess_ns > 0:
        return "quota"
    if grown("memory_stall_ns") >= CUTS["memory"] * excess_ns > 0:
        return "memory"
    if is_delayed and (is_on_device or needs is own_ns_of):
        return "neighbour"
    return "data" if section is Section.DATA else "blocked"


def _usual(
    blocks: Sequence[WorkBlock], of: Callable[[WorkBlock, Section], float], section: Section
) -> float:
    """Of a step, never 0."""
    return 1.0 + median(of(block, section) for block in blocks)


def _mean_of(blocks: Sequence[WorkBlock], of: str) -> float:
    """A step."""
    total: int = sum(getattr(b, of) for b in blocks)
    return total / max(1, sum(b.steps for b in blocks))


def _mean_delay_ns(blocks: Sequence[WorkBlock]) -> float:
    """A step."""
    total = sum(block.delay_ns[section] for block in blocks for section in JUDGED)
    return total / max(1, sum(block.steps for block in blocks))
