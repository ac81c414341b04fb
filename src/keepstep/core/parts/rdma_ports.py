"""RDMA ports: which InfiniBand or RoCE port is down, flaps, damages symbols or sends again.

Comes in: looks at all ports that are active at first. Goes out: the health of each. What counts as
a flap is in `flaps.py`; a link that had to be trained anew counts as one, because nothing passes
meanwhile. Ten damaged symbols or packets in five minutes are a cable, as the usual thresholds of
InfiniBand's own tools have it; requesters whose packets were lost count beside what was sent.

`out_of_sequence` accuses nobody: with adaptive routing packets arrive so by design. A counter that
stands at the end of its 8 or 16 bits counts no more, so nothing is known then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from keepstep.core.parts.flaps import SOON_NS, Flaps
from keepstep.core.parts.judge import Spell, sick, unseen, well
from keepstep.model.parts import PartHealth, PartReading, PortReading

ACTIVE = 4  # of the port states
STATES = {1: "down", 2: "initializing", 3: "armed", 5: "active, deferred"}
DOWN_LOOKS = 2
LEAST_ERRORS = 10
RESENT_RATIO = 1e-4
FULL = {"downed": 255, "recovered": 255, "symbol_errors": 65_535, "received_errors": 65_535}
FIX = "look at cable, optic and switch port (ibstat, ibdiagnet, mlxlink, dmesg)"
FULL_FIX = "perfquery -R on its LID and port sets the counters back"
Counts = tuple[int, int, int]  # damaged, sent again, sent


class _Port:
    """What is known of one."""

    def __init__(self, first: PortReading) -> None:
        self.last = first
        self.is_down = Spell(DOWN_LOOKS)
        self.flaps = Flaps()
        self.counts: deque[tuple[int, Counts]] = deque()  # for the last five minutes

    def look(self, reading: PortReading | None, at_ns: int) -> None:
        """None: it is gone."""
        self.is_down.look(reading is None or reading.state != ACTIVE)
        if reading is None:
            return
        for now, before in (
            (reading.downed, self.last.downed),
            (reading.recovered, self.last.recovered),
        ):
            if now is not None and before is not None:
                self.flaps.note(now - before, at_ns)
        counts = _counts(reading)
        if self.counts and any(a < b for a, b in zip(counts, self.counts[-1][1], strict=True)):
            self.counts.clear()  # they were set back
        self.counts.append((at_ns, counts))
        while at_ns - self.counts[0][0] > SOON_NS:
            self.counts.popleft()
        self.last = reading

    def lately(self) -> Counts:
        """In five minutes."""
        if not self.counts:
            return 0, 0, 0
        first, last = self.counts[0][1], self.counts[-1][1]
        return last[0] - first[0], last[1] - first[1], last[2] - first[2]


class RdmaPorts:
    """See `Judge`."""

    def __init__(self) -> None:
        self._known: dict[str, _Port] = {}

    def add(self, readings: Sequence[PartReading], at_ns: int) -> list[PartHealth]:
        """See `Judge`. One that is gone is down."""
        found = {each.name: each for each in readings if isinstance(each, PortReading)}
        for name, reading in found.items():
            # one whose state nobody tells may be active
            if name not in self._known and reading.state in (ACTIVE, None):
                self._known[name] = _Port(reading)
        for name, port in self._known.items():
            port.look(found.get(name), at_ns)
        return [_health(name, port, found.get(name), at_ns) for name, port in self._known.items()]


def _counts(reading: PortReading) -> Counts:
    return (
        (reading.symbol_errors or 0) + (reading.received_errors or 0),
        (reading.sequence_errors or 0) + (reading.timeouts or 0),
        reading.packets or 0,
    )


def _health(name: str, port: _Port, reading: PortReading | None, at_ns: int) -> PartHealth:
    part = f"nic {name}"
    if reading is not None and reading.state is None:
        return unseen(part, at_ns, "its state cannot be read")
    if port.is_down.holds:
        how = "gone" if reading is None else STATES.get(reading.state or 0, f"in {reading.state}")
        return sick(part, at_ns, f"its port is {how}", FIX)
    if why := port.flaps.why(at_ns):
        return sick(part, at_ns, why, FIX)
    damaged, resent, sent = port.lately()
    if damaged >= LEAST_ERRORS:
        why = f"{damaged} damaged symbols and packets in five minutes"
        return sick(part, at_ns, why, FIX)
    if resent >= LEAST_ERRORS and resent >= RESENT_RATIO * sent:
        why = f"packets were lost {resent} times among {sent} sent in five minutes"
        return sick(part, at_ns, why, FIX)
    last = port.last
    if last.downed is last.symbol_errors is last.received_errors is last.timeouts is None:
        return unseen(part, at_ns, "nothing that its driver counts of it can be read")
    if full := [name for name, most in FULL.items() if getattr(last, name) == most]:
        why = f"its counter of {full[0].replace('_', ' ')} stands at its end: {FULL_FIX}"
        return unseen(part, at_ns, why)
    return well(part, at_ns)
