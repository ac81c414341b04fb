"""Work measures: what a rank did in a block of steps, as numbers that can be compared.

Comes in: a block, as it was measured. Goes out: nanoseconds a step, of a section or of all that
ranks are judged by; or the block as if it had been of other work, or a device's.
"""

from __future__ import annotations

from keepstep.model.step_work import JUDGED, PASSES, Section, Timing, WorkBlock

BODY = (Section.COMPUTE, *PASSES)


def timed(block: WorkBlock, timing: Timing) -> WorkBlock:
    """With what the device did in place of what the thread did, where that is measured. Where it is
    not seen when a device waits, its data is the thread's: the rest of the step is as long as the
    slowest rank's, and tells how long that is."""
    if timing not in (Timing.DEVICE, Timing.PASSES):
        return block
    own_ns = block.device_ns
    if timing is Timing.PASSES:
        own_ns = block.own_ns[: Section.DATA + 1] + own_ns[Section.DATA + 1 :]
    works = (*BODY, Section.UPDATE)
    used = tuple(ns if section in works else 0 for section, ns in enumerate(block.device_ns))
    return block._replace(own_ns=own_ns, cpu_ns=used)


def own_ns_of(block: WorkBlock, section: Section) -> float:
    """Nanoseconds a step."""
    return block.own_ns[section] / block.steps


def free_ns_of(block: WorkBlock, section: Section) -> float:
    """Without what it was ready to run and did not, nanoseconds a step."""
    own = max(block.cpu_ns[section], block.own_ns[section] - block.delay_ns[section])
    return own / block.steps


def computed_ns_of(block: WorkBlock, section: Section) -> float:
    """Processor time, nanoseconds a step."""
    return block.cpu_ns[section] / block.steps


def all_free_ns(block: WorkBlock) -> float:
    return sum(free_ns_of(block, section) for section in JUDGED)


def all_own_ns(block: WorkBlock) -> float:
    """All that the rank did itself, nanoseconds a step."""
    return sum(block.own_ns[section] for section in JUDGED) / block.steps


def with_share(block: WorkBlock, scale: float) -> WorkBlock:
    """Its passes as if it had so many times as many micro-batches."""

    def passes(times_ns: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(
            int(ns * scale) if section in BODY else ns for section, ns in enumerate(times_ns)
        )

    return block._replace(
        own_ns=passes(block.own_ns),
        cpu_ns=passes(block.cpu_ns),
        delay_ns=passes(block.delay_ns),
        tokens=int(block.tokens * scale),
    )


def scaled(block: WorkBlock, scale: float) -> WorkBlock:
    return block._replace(
        own_ns=tuple(int(ns * scale) for ns in block.own_ns),
        cpu_ns=tuple(int(ns * scale) for ns in block.cpu_ns),
        delay_ns=tuple(int(ns * scale) for ns in block.delay_ns),
    )


def processor_ns(block: WorkBlock) -> float:
    """Processor time of what is judged, nanoseconds a step."""
    return sum(block.cpu_ns[section] for section in JUDGED) / block.steps


def delayed_ns(block: WorkBlock) -> float:
    """Ready to run while others had the processor, in what is judged, nanoseconds a step."""
    return sum(block.delay_ns[section] for section in JUDGED) / block.steps
