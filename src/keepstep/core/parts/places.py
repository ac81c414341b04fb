"""Places: whether a directory, on a disk or in memory, still takes bytes and gives back the same.

Comes in: what became of bytes written, forced out and read back. Goes out: its health. Slow is ten
times its own usual and a second, three times in a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from keepstep.core.parts.judge import Spell, sick, well
from keepstep.model.parts import PartHealth, PartPolicy, PartReading, PlaceReading
from keepstep.model.units import MIB, S_NS, human_bytes, human_ns

USUAL_LOOKS = 20
SLOW_TIMES = 10
SLOW_NS = S_NS
FREE_RATIO = 0.02
FREE_BYTES = 256 * MIB


class Places:
    """See `Judge`. `kind`: of part, disk or shm."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._took: dict[str, deque[int]] = {}
        self._is_slow: dict[str, Spell] = {}

    def add(self, readings: Sequence[PartReading], at_ns: int) -> list[PartHealth]:
        """See `Judge`."""
        return [self._judge(each, at_ns) for each in readings if isinstance(each, PlaceReading)]

    def _judge(self, reading: PlaceReading, at_ns: int) -> PartHealth:
        part, path = f"{self._kind} {reading.path}", reading.path
        if reading.refusal:
            why = f"it cannot be written: {reading.refusal}"
            return sick(part, at_ns, why, f"look at df, mount and dmesg for {path}")
        if not reading.is_same:
            why = "what was read there is not what was written"
            return sick(part, at_ns, why, "trust nothing on it; take the device out of service")
        free, total = reading.free_bytes, reading.total_bytes
        if free is not None and total and free < min(FREE_BYTES, FREE_RATIO * total):
            why = f"{human_bytes(free)} of {human_bytes(total)} are free"
            return sick(part, at_ns, why, f"make room on {path}", PartPolicy.WARN)
        took = self._took.setdefault(path, deque(maxlen=USUAL_LOOKS))
        usual_ns = int(median(took)) if took else reading.took_ns
        limit_ns = max(SLOW_NS, SLOW_TIMES * usual_ns)
        spell = self._is_slow.setdefault(path, Spell())
        is_slow = reading.took_ns > limit_ns
        if not is_slow:  # what is slow is not what is usual
            took.append(reading.took_ns)
        if spell.look(is_slow):
            why = f"a MiB takes {human_ns(reading.took_ns)} there, and took {human_ns(usual_ns)}"
            return sick(part, at_ns, why, "look at the device and at who else uses it")
        return well(part, at_ns)
