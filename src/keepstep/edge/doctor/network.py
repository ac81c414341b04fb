"""Network: names, interfaces and ports, as /sys, /proc and the resolver tell."""

from __future__ import annotations

from keepstep.edge.doctor.host import Host, TimedAnswer, whole
from keepstep.model.machine_facts import NetworkFacts, NetworkInterface, ResolvedName

INTERFACES = "/sys/class/net"
IS_UP = 0x1  # IFF_UP
IS_LOOPBACK = 0x8  # IFF_LOOPBACK
LOCALHOST = "localhost"


class NameSearch:
    """The names that matter, asked for while other things are read."""

    def __init__(self, host: Host) -> None:
        self._wait_s = host.wait_s
        own = host.text("/proc/sys/kernel/hostname") or LOCALHOST
        self._asked = {
            name: TimedAnswer(lambda name=name: host.addresses(name), host.now_s)  # type: ignore[misc]
            for name in (own, LOCALHOST)
        }
        self._own = own

    def host(self) -> ResolvedName:
        """Where this machine's own name leads."""
        return self._found(self._own)

    def localhost(self) -> ResolvedName:
        """Where `localhost` leads."""
        return self._found(LOCALHOST)

    def _found(self, name: str) -> ResolvedName:
        addresses, took_s = self._asked[name].get(self._wait_s)
        return ResolvedName(name, addresses, took_s)


def read_network(host: Host, names: NameSearch) -> NetworkFacts:
    """Waits for the names, up to `wait_s` after they were asked for."""
    found = host.names(INTERFACES)
    ports = [whole(word) for word in (host.text(_ipv4("ip_local_port_range")) or "").split()]
    low, high = (*ports, None, None)[:2]
    return NetworkFacts(
        host=names.host(),
        localhost=names.localhost(),
        interfaces=tuple(_interface(host, name) for name in found if _is_one(host, name)) or None,
        ports=None if low is None or high is None else (low, high),
        backlog=host.number("/proc/sys/net/core/somaxconn"),
        tracked=host.number("/proc/sys/net/netfilter/nf_conntrack_count"),
        tracked_max=host.number("/proc/sys/net/netfilter/nf_conntrack_max"),
        rdma_devices=tuple(host.names("/sys/class/infiniband")),
    )


def _ipv4(name: str) -> str:
    return f"/proc/sys/net/ipv4/{name}"


def _is_one(host: Host, name: str) -> bool:
    return host.text(f"{INTERFACES}/{name}/flags") is not None  # `bonding_masters` is a file


def _interface(host: Host, name: str) -> NetworkInterface:
    below = f"{INTERFACES}/{name}"
    flags = int(host.text(f"{below}/flags") or "0", 16)
    speed = host.number(f"{below}/speed")
    is_loopback = bool(flags & IS_LOOPBACK)
    # loopback's state is "unknown", as that of many virtual ones
    is_carried = host.text(f"{below}/operstate") in ("up", "unknown")
    return NetworkInterface(
        name=name,
        is_up=bool(flags & IS_UP) and is_carried,
        is_loopback=is_loopback,
        mtu=host.number(f"{below}/mtu") or 0,
        mbits=speed if speed is not None and speed > 0 else None,
        packets=host.number(f"{below}/statistics/rx_packets") or 0,
        errors=host.number(f"{below}/statistics/rx_errors") or 0,
    )
