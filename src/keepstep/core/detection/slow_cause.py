"""Slow cause: why a rank needs longer than it did, or than its peers.

Comes in: blocks of a slow rank, and those that they are compared with. Goes out: one word, by what
has grown with its time.

Whoever computes more is kept from the processor for longer, too, where others want it: in
proportion. And whoever shares its processor computes longer, for the other one has its caches as
well. So a rank is called kept from the processor where most of what it takes more is a wait for it,
beyond that proportion and beyond what chance makes of it; its processor time is asked only else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log, sqrt

from keepstep.core.detection.drift import LEAST_NOISE, median
from keepstep.core.detection.work_measures import (
    all_own_ns,
    computed_ns_of,
    delayed_ns,
    own_ns_of,
    processor_ns,
)
from keepstep.model.step_work import Section, SlowCause, WorkBlock

CUTS: dict[SlowCause, float] = {"quota": 0.3, "memory": 0.3, "neighbour": 0.5, "compute": 0.5}
ERRORS = 3.0  # standard ones, of medians, by which the wait for a processor has grown
OF_MEDIAN = 1.25  # how much larger its standard error is than a mean's


def is_kept(now: Sequence[WorkBlock], before: Sequence[WorkBlock]) -> bool:
    """Whether most of what a rank takes more is that others have the processor."""
    own_ns, was_own_ns = (median(map(all_own_ns, of)) for of in (now, before))
    used_ns, was_used_ns = (median(map(processor_ns, of)) for of in (now, before))
    waits_ns, waited_ns = (median(map(delayed_ns, of)) for of in (now, before))
    proportional_ns = waited_ns * max(1.0, used_ns / max(1.0, was_used_ns))
    if waits_ns - proportional_ns < CUTS["neighbour"] * (own_ns - was_own_ns):
        return False
    shares, usual = ([_wait_share(block) for block in of] for of in (now, before))
    middle = median(usual)
    noise = max(LEAST_NOISE, 1.4826 * median(abs(share - middle) for share in usual))
    error = OF_MEDIAN * noise * sqrt(1 / len(shares) + 1 / len(usual))
    return median(shares) - middle > ERRORS * error


def _wait_share(block: WorkBlock) -> float:
    """Of what it computed."""
    return delayed_ns(block) / max(1.0, processor_ns(block))


def cause_of(
    section: Section,
    excess_ns: float,
    now: Sequence[WorkBlock],
    before: Sequence[WorkBlock],
    needs: Callable[[WorkBlock, Section], float],
    is_on_device: bool,
) -> SlowCause:
    """By what has grown with it, measured as `needs` does. Processor time is asked first, by its
    share of the growth, but of who is kept from the processor. A throttled thread is ready to run:
    what the kernel counts for the fewer reasons is asked before. A device that stands still because
    its trainer is kept from the processor looks as if it computed: there what keeps the thread is
    asked first."""

    def grown(of: str) -> float:
        return _mean_of(now, of) - _mean_of(before, of)

    delayed_more_ns = _mean_delay_ns(now) - _mean_delay_ns(before)
    is_delayed = delayed_more_ns >= CUTS["neighbour"] * excess_ns > 0
    if is_on_device:
        is_hindered = (
            is_delayed
            or grown("throttled_ns") >= CUTS["quota"] * excess_ns > 0
            or grown("memory_stall_ns") >= CUTS["memory"] * excess_ns > 0
        )
    else:
        is_hindered = needs is own_ns_of and is_kept(now, before)
    if section is not Section.DATA and not is_hindered:
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
    if is_hindered or (is_delayed and needs is own_ns_of):
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
    total = sum(delayed_ns(block) * block.steps for block in blocks)
    return total / max(1, sum(block.steps for block in blocks))
