"""GPUs: which one is slowed down, loses bits, loses links, or is gone.

Comes in: looks at all GPUs of a node. Goes out: the health of each that was ever there.

* *Slowed down*: the driver gave a hardware slowdown, a thermal one or the power brake as the reason
  of the clock (bits 0x8, 0x40, 0x80) in a fifth of the looks of five minutes; or, for three looks
  in a row, the clock was below 0.9 of the median of the others that are as busy. Idle (0x1),
  application clocks (0x2) and the software's power cap (0x4), which is usual at full load, say
  nothing.
* *Hot*: for three looks in a row three degrees or less are left to where it is slowed down. The
  margin counts, not the temperature: models differ.
* *Losing bits*: uncorrected ECC errors that were not there at the first look, or no spare rows
  left. Rows that wait to be remapped do not hurt the running job.
* *Links*: fewer NVLinks than before, or new errors on them in more than half of thirty minutes.

Sources: NVML's clock event reasons; gpud and Autopilot for hardware slowdown, NVRx for the window
of NVLink errors, ByteRobust (SOSP 2025) for reading on and on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from keepstep.core.parts.judge import Spell, sick, unseen, well
from keepstep.model.parts import GpuReading, PartHealth, PartPolicy, PartReading
from keepstep.model.units import S_NS, counted

SLOWED = {0x08: "a hardware slowdown", 0x40: "its heat", 0x80: "the power brake"}
SLOWED_BITS = 0xC8
WINDOW_NS = 300 * S_NS
SLOWED_RATIO = 0.2
LEAST_LOOKS = 6
CLOCK_RATIO = 0.9
BUSY_RATIO = 0.5
LIKE_RATIO = 0.25  # as busy is: within this
FEWEST_PEERS = 2
LEAST_MARGIN_C = 3
MINUTE_NS = 60 * S_NS
LINK_MINUTES = 30
BAD_MINUTES = 15


class _Gpu:
    """What is known of one."""

    def __init__(self, first: GpuReading) -> None:
        self.first = first
        self.uncorrected = first.uncorrected  # from where on they are new
        self.last = first
        self.looks: deque[tuple[int, int]] = deque()  # when, and the bits of SLOWED
        self.is_hot, self.is_behind = Spell(), Spell()
        self.minutes: deque[tuple[int, bool]] = deque(maxlen=LINK_MINUTES)


class Gpus:
    """See `Judge`."""

    def __init__(self) -> None:
        self._known: dict[str, _Gpu] = {}

    def add(self, readings: Sequence[PartReading], at_ns: int) -> list[PartHealth]:
        """See `Judge`."""
        found = {each.bus: each for each in readings if isinstance(each, GpuReading)}
        for bus, reading in found.items():
            self._note(self._known.setdefault(bus, _Gpu(reading)), reading, found, at_ns)
        return [
            _health(bus, gpu, at_ns) if bus in found else _gone(bus, at_ns)
            for bus, gpu in self._known.items()
        ]

    def _note(
        self, gpu: _Gpu, reading: GpuReading, all_of: Mapping[str, GpuReading], at_ns: int
    ) -> None:
        if reading.reasons is not None:
            gpu.looks.append((at_ns, reading.reasons & SLOWED_BITS))
        while gpu.looks and at_ns - gpu.looks[0][0] > WINDOW_NS:
            gpu.looks.popleft()
        margin = reading.margin_c
        gpu.is_hot.look(margin is not None and margin <= LEAST_MARGIN_C)
        gpu.is_behind.look(_is_behind(reading, all_of))
        if reading.uncorrected is not None:  # a count that has fallen begins anew
            before = reading.uncorrected if gpu.uncorrected is None else gpu.uncorrected
            gpu.uncorrected = min(before, reading.uncorrected)
        self._note_links(gpu, reading, at_ns)
        gpu.last = reading

    def _note_links(self, gpu: _Gpu, reading: GpuReading, at_ns: int) -> None:
        if reading.link_errors is None or gpu.last.link_errors is None:
            return
        minute, is_new = at_ns // MINUTE_NS, reading.link_errors > gpu.last.link_errors
        if gpu.minutes and gpu.minutes[-1][0] == minute:
            gpu.minutes[-1] = (minute, gpu.minutes[-1][1] or is_new)
        else:
            gpu.minutes.append((minute, is_new))


def _is_behind(reading: GpuReading, all_of: Mapping[str, GpuReading]) -> bool:
    """Whether its clock is, of GPUs that are as busy."""
    used, clock = reading.used_ratio, reading.clock_mhz
    if used is None or clock is None or used < BUSY_RATIO:
        return False
    peers = [
        other.clock_mhz
        for bus, other in all_of.items()
        if bus != reading.bus
        and other.clock_mhz is not None
        and other.used_ratio is not None
        and abs(other.used_ratio - used) <= LIKE_RATIO
    ]
    return len(peers) >= FEWEST_PEERS and clock < CLOCK_RATIO * median(peers)


def _gone(bus: str, at_ns: int) -> PartHealth:
    return sick(
        f"gpu {bus}",
        at_ns,
        "it was there and does not answer any more",
        "look for Xid 79 in dmesg; reboot the node, and replace the GPU when it falls off again",
    )


def _health(bus: str, gpu: _Gpu, at_ns: int) -> PartHealth:
    """The worst that holds."""
    part, last, first = f"gpu {bus}", gpu.last, gpu.first
    new_errors = (last.uncorrected or 0) - (gpu.uncorrected or 0)
    if last.remap_failed:
        why = "it has no spare rows left for damaged memory"
        return sick(part, at_ns, why, "take it out of service, and have it replaced")
    if new_errors > 0:
        why = f"{counted(new_errors, 'uncorrected ECC error')} since the job began"
        return sick(part, at_ns, why, "reset it once nothing uses it (nvidia-smi --gpu-reset)")
    if slowed := _slowed(gpu):
        fix = "look at fans, airflow and power (nvidia-smi -q -d PERFORMANCE)"
        return sick(part, at_ns, f"{slowed}{_heat(last)}", fix, slows=True)
    if gpu.is_hot.holds:
        why = f"{last.margin_c} degrees are left to where it is slowed down{_heat(last)}"
        return sick(part, at_ns, why, "look at fans and airflow", PartPolicy.AVOID, slows=True)
    if gpu.is_behind.holds:
        why = f"its clock is {last.clock_mhz} MHz, below 0.9 of its peers', which are as busy"
        fix = "compare nvidia-smi -q -d CLOCK; reset it, or take a spare"
        return sick(part, at_ns, f"{why}{_heat(last)}", fix, slows=True)
    if last.links is not None and first.links is not None and last.links < first.links:
        why = f"{last.links} of {first.links} NVLinks are up"
        return sick(part, at_ns, why, "reset it (nvidia-smi --gpu-reset), then look at the bridge")
    bad_minutes = sum(is_new for _, is_new in gpu.minutes)
    if bad_minutes > BAD_MINUTES:
        why = f"new NVLink errors in {bad_minutes} of {len(gpu.minutes)} minutes"
        return sick(part, at_ns, why, "look at nvidia-smi nvlink -e, and at the bridge")
    if last.remap_pending:
        why = "damaged rows wait to be remapped, which does not hurt the running job"
        return sick(part, at_ns, why, "reset it before the next one", PartPolicy.AVOID)
    if last.temperature_c is last.margin_c is last.reasons is last.uncorrected is None:
        return unseen(part, at_ns, "neither its heat nor its errors can be read")
    return well(part, at_ns)


def _heat(last: GpuReading) -> str:
    """For the end of a clause."""
    return "" if last.temperature_c is None else f" (it is at {last.temperature_c} C)"


def _slowed(gpu: _Gpu) -> str:
    """What for and how often; empty when it is not, or not enough looks were taken."""
    slowed = [bits for _, bits in gpu.looks if bits]
    if len(gpu.looks) < LEAST_LOOKS or len(slowed) < SLOWED_RATIO * len(gpu.looks):
        return ""
    reasons = " and ".join(
        name for bit, name in SLOWED.items() if any(bits & bit for bits in slowed)
    )
    return f"slowed down by {reasons} in {len(slowed)} of {len(gpu.looks)} looks"
