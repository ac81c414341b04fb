"""NIC: network interfaces, as /sys/class/net shows them, and the ports of RDMA adapters
(`rdma_port.py`). Loopback is not one of them, and is the
canary: it is on every machine.

The interfaces are those of the network namespace in which /sys was mounted.
"""

from __future__ import annotations

from keepstep.edge.doctor.host import Host
from keepstep.edge.doctor.network import INTERFACES, IS_LOOPBACK, IS_UP
from keepstep.edge.parts.probe import PartLook, Targets
from keepstep.edge.parts.rdma_port import read_ports
from keepstep.model.parts import NicReading

ERRORS = ("rx_errors", "tx_errors")
PACKETS = ("rx_packets", "tx_packets")
DROPPED = ("rx_dropped", "tx_dropped")


def probe_nic(host: Host, targets: Targets, cursor: int) -> PartLook:
    """See `Probe`."""
    found, saw_loopback = [], False
    for name in host.names(INTERFACES):
        flags = host.text(f"{INTERFACES}/{name}/flags")
        if flags is None:
            continue  # `bonding_masters` is a file
        if int(flags, 16) & IS_LOOPBACK:
            saw_loopback = host.number(f"{INTERFACES}/{name}/statistics/rx_packets") is not None
        else:
            found.append(_read(host, name, int(flags, 16)))
    if not saw_loopback:
        return PartLook(blind=f"{INTERFACES} shows no loopback interface that counts")
    return PartLook((*found, *read_ports(host)))


def _read(host: Host, name: str, flags: int) -> NicReading:
    below = f"{INTERFACES}/{name}"

    def each_way(names: tuple[str, str]) -> tuple[int | None, int | None]:
        received, sent = (host.number(f"{below}/statistics/{each}") for each in names)
        return received, sent

    def total(*counts: int | None) -> int:
        return sum(each or 0 for each in counts)

    errors, dropped = each_way(ERRORS), each_way(DROPPED)
    # of many virtual ones the state is "unknown"
    is_carried = host.text(f"{below}/operstate") in ("up", "unknown")
    return NicReading(
        name=name,
        is_up=bool(flags & IS_UP) and is_carried,
        changes=host.number(f"{below}/carrier_changes"),
        packets=total(*each_way(PACKETS)),
        errors=total(*errors),
        dropped=total(*dropped),
        received_errors=errors[0],
        sent_errors=errors[1],
        received_dropped=dropped[0],
        sent_dropped=dropped[1],
        has_device=host.text(f"{below}/device/uevent") is not None,
    )
