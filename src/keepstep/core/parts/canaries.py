"""Canaries: a sickness that every judge is shown before it is believed, and now and then again.

Comes in: a fresh judge, or a copy of one that judges. Goes out: why it cannot be believed, empty
when it saw what it was shown. A judge that calls nothing sick looks as if all were well; so a judge
that does not see its canary is no witness. What the probes read has canaries of its own
(`edge/parts/`).

Invariant: what is planted is of parts that no machine has, or of those of which there is one, so
that nothing but the canary is taken for it.
"""

from __future__ import annotations

from keepstep.core.parts.judge import Judge
from keepstep.model.parts import (
    ClockReading,
    GpuReading,
    KernelLine,
    NicReading,
    PartReading,
    PartState,
    PlaceReading,
    PressureReading,
)
from keepstep.model.units import S_NS

LOOKS = 8
EVERY_NS = 10 * S_NS


SICKENS = {
    "nvml": "gpu 0000:00:00",  # where each machine has its host bridge
    "amd": "gpu 0000:00:00",
    "kernel": "gpu 0000:00:00",
    "nic": "nic canary",
    "disk": "disk canary",
    "shm": "shm canary",
    "pressure": "memory",
    "clock": "clock",
}


def flaw_of(probe: str, judge: Judge, since_ns: int = 0) -> str:
    """Why this judge is no witness; empty: it saw its canary. It is spent then: give a copy of one
    that is still needed. since_ns: when it was last shown something."""
    for look in range(LOOKS):
        at_ns = since_ns + (look + 1) * EVERY_NS
        found = judge.add([_planted(probe, look, at_ns)], at_ns)
        if any(
            part.health == PartState.BAD.value and part.part == SICKENS[probe] for part in found
        ):
            return ""
    return "its judge does not see a sickness that was planted"


def _planted(probe: str, look: int, at_ns: int) -> PartReading:
    """Of that look: what such a part would show."""
    match probe:
        case "nvml" | "amd":
            return GpuReading("0000:00:00", margin_c=0, reasons=0x40)
        case "nic":
            return NicReading("canary", look == 0, None, 0, 0, 0)
        case "disk" | "shm":
            return PlaceReading("canary", S_NS // 1000, "", False, None, None)
        case "pressure":
            return PressureReading(look * EVERY_NS, None, None, None, None)
        case "clock":
            return ClockReading((1 if look else 0) * 5 * S_NS + at_ns, at_ns, 0)
        case _:
            return KernelLine(at_ns, "NVRM: Xid (PCI:0000:00:00): 79, pid=0, canary")
