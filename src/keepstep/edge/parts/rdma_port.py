"""RDMA port: ports of InfiniBand and RoCE adapters, as /sys/class/infiniband shows them.

Comes in: a machine. Goes out: a reading of each port. What a driver does not count is None: some
count nothing below `counters` (irdma), some write `N/A (no PMA)` into it or all bits, and
`hw_counters` differ from driver to driver.
"""

from __future__ import annotations

from collections.abc import Iterator

from keepstep.edge.doctor.host import Host
from keepstep.model.bounds import U63
from keepstep.model.parts import PortReading

ADAPTERS = "/sys/class/infiniband"


def read_ports(host: Host) -> Iterator[PortReading]:
    """All of them; none where there are no such adapters."""
    for device in host.names(ADAPTERS):
        for port in host.names(f"{ADAPTERS}/{device}/ports"):
            if port.isdecimal():
                yield _read(host, device, port)


def _read(host: Host, device: str, port: str) -> PortReading:
    below = f"{ADAPTERS}/{device}/ports/{port}"
    number = (host.text(f"{below}/state") or "").partition(":")[0]  # "4: ACTIVE"

    def count(name: str, kind: str = "counters") -> int | None:
        found = host.number(f"{below}/{kind}/{name}")
        return found if found is not None and 0 <= found <= U63 else None

    return PortReading(
        device=device,
        port=int(port),
        state=int(number) if number.isdecimal() else None,
        downed=count("link_downed"),
        recovered=count("link_error_recovery"),
        symbol_errors=count("symbol_error"),
        received_errors=count("port_rcv_errors"),
        discards=count("port_xmit_discards"),
        packets=count("port_xmit_packets"),
        out_of_sequence=count("out_of_sequence", "hw_counters"),
        sequence_errors=count("packet_seq_err", "hw_counters"),
        timeouts=count("local_ack_timeout_err", "hw_counters"),
    )
