"""NICs: which network interface is down, flaps, or damages packets.

Comes in: looks at all interfaces that are up at first, and at RDMA ports (`rdma_ports.py`). Goes
out: the health of each. A flap is the carrier going and coming (`flaps.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from keepstep.core.parts.flaps import SOON_NS, Flaps
from keepstep.core.parts.judge import Spell, sick, unseen, well
from keepstep.core.parts.rdma_ports import RdmaPorts
from keepstep.model.parts import NicReading, PartHealth, PartReading
from keepstep.model.units import counted

ERROR_RATIO = 1e-4
LEAST_ERRORS = 10
DOWN_LOOKS = 2
FIX = "look at cable, optic and switch port (ethtool, dmesg)"


class _Nic:
    """What is known of one."""

    def __init__(self, first: NicReading) -> None:
        self.last = first
        self.is_down = Spell(DOWN_LOOKS)
        self.flaps = Flaps()
        # when, packets and errors by then, for the last five minutes
        self.counts: deque[tuple[int, int, int]] = deque()


class Nics:
    """See `Judge`."""

    def __init__(self) -> None:
        self._known: dict[str, _Nic] = {}
        self._ports = RdmaPorts()

    def add(self, readings: Sequence[PartReading], at_ns: int) -> list[PartHealth]:
        """See `Judge`. A card's that is gone is down; a virtual one has been removed."""
        found = {each.name: each for each in readings if isinstance(each, NicReading)}
        gone = [n for n, nic in self._known.items() if n not in found and not nic.last.has_device]
        for name in gone:
            del self._known[name]
        for name, reading in found.items():
            if name not in self._known and reading.is_up:
                self._known[name] = _Nic(reading)
        for name, nic in self._known.items():
            _note(nic, found.get(name), at_ns)
        nics = [_health(name, nic, at_ns) for name, nic in self._known.items()]
        return [*nics, *self._ports.add(readings, at_ns)]


def _note(nic: _Nic, reading: NicReading | None, at_ns: int) -> None:
    if reading is None:
        nic.is_down.look(True)
        return
    last = nic.last
    nic.is_down.look(not reading.is_up and reading.has_device)
    if reading.has_device and reading.changes is not None and last.changes is not None:
        # down and up again are two
        nic.flaps.note((reading.changes - last.changes + 1) // 2, at_ns)
    if reading.packets < last.packets or reading.errors < last.errors:
        nic.counts.clear()  # it was made anew
    nic.counts.append((at_ns, reading.packets, reading.errors))
    while at_ns - nic.counts[0][0] > SOON_NS:
        nic.counts.popleft()
    nic.last = reading


def _health(name: str, nic: _Nic, at_ns: int) -> PartHealth:
    part = f"nic {name}"
    if nic.is_down.holds:
        return sick(part, at_ns, "its link is down", FIX)
    if why := nic.flaps.why(at_ns):
        return sick(part, at_ns, why, FIX)
    if nic.counts:
        packets = nic.counts[-1][1] - nic.counts[0][1]
        errors = nic.counts[-1][2] - nic.counts[0][2]
        if errors >= LEAST_ERRORS and errors >= ERROR_RATIO * packets:
            why = f"{counted(errors, 'damaged packet')} among {packets} in five minutes"
            return sick(part, at_ns, why, FIX)
    last = nic.last
    if last.changes is last.received_errors is last.sent_errors is None:
        return unseen(part, at_ns, "nothing that the kernel counts of it can be read")
    return well(part, at_ns)
