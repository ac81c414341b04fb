"""Network: whether names lead where they should, and the interfaces carry what a job sends.

Comes in: facts of names, interfaces and ports. Goes out: defects. Whether a firewall lets other
nodes through cannot be seen from one node, and is not asked here.
"""

from __future__ import annotations

from collections.abc import Iterator

from keepstep.core.doctor.defect import Defect, DoctorCheck, broken, silence, warning
from keepstep.model.machine_facts import MachineFacts, NetworkInterface

LOOPBACK = ("127.", "::1")
MAX_RESOLVE_S = 0.25
MIN_MTU = 1280
MAX_ERROR_RATIO = 1e-4
MIN_PACKETS = 10_000  # fewer tell nothing of a ratio
MIN_MBITS = 1000
MIN_PORTS = 4096
FEWEST_PORTS = 256
MEETING_PORTS = (29400, 29500)  # torchrun's and torch's own defaults
MIN_BACKLOG = 128
MAX_TRACKED_RATIO = 0.9
CHOOSES_INTERFACE = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def localhost(facts: MachineFacts) -> Iterator[Defect]:
    """Whether localhost is this machine."""
    found = facts.network.localhost
    if found.took_s is None:
        yield silence("where localhost leads: no answer in time")
    elif not found.addresses or not all(a.startswith(LOOPBACK) for a in found.addresses):
        where = f"to {', '.join(found.addresses)}" if found.addresses else "nowhere"
        yield broken(
            f"localhost leads {where}",
            "ranks and agents of one machine meet there",
            "echo 127.0.0.1 localhost >> /etc/hosts",
        )


def loopback(facts: MachineFacts) -> Iterator[Defect]:
    """Whether processes of this machine reach each other."""
    interfaces = facts.network.interfaces
    if interfaces is None:
        yield silence("the network interfaces")
    elif not any(each.is_loopback and each.is_up for each in interfaces):
        yield broken(
            "the loopback interface is down",
            "ranks and agents of one machine meet there",
            "ip link set lo up",
        )


def host_name(facts: MachineFacts) -> Iterator[Defect]:
    """Whether the machine's own name leads to it, for others too."""
    found, nodes = facts.network.host, facts.wanted.nodes
    fix = f"echo ADDRESS {found.name} >> /etc/hosts, with this machine's address"
    chosen = "GLOO_SOCKET_IFNAME" in facts.wanted.environ
    grade = broken if nodes > 1 and not chosen else warning
    if found.took_s is None:
        yield warning(
            f"the name of this machine, {found.name}, was not resolved in time",
            "gloo asks for it whenever groups are built, which delays every start and recovery",
            fix,
        )
    elif not found.addresses:
        yield grade(
            f"the name of this machine, {found.name}, leads nowhere",
            "gloo takes its address from it, and falls back to loopback",
            f"{fix}, or set GLOO_SOCKET_IFNAME",
        )
    elif nodes > 1 and not chosen and all(a.startswith(LOOPBACK) for a in found.addresses):
        yield broken(
            f"the name of this machine, {found.name}, leads to {', '.join(found.addresses)}",
            "gloo tells other nodes this address, and they reach themselves",
            f"{fix}, or set GLOO_SOCKET_IFNAME",
        )
    elif found.took_s > MAX_RESOLVE_S:
        yield warning(
            f"to resolve {found.name}, this machine's name, took {found.took_s:.1f} s",
            "gloo asks for it whenever groups are built, which delays every start and recovery",
            fix,
        )


def interfaces(facts: MachineFacts) -> Iterator[Defect]:
    """Whether other nodes can be reached, over interfaces that work."""
    found = facts.network.interfaces
    if found is None:
        yield silence("the network interfaces")
        return
    outward = [each for each in found if each.is_up and not each.is_loopback]
    if facts.wanted.nodes > 1 and not outward:
        yield broken(
            "no network interface is up but loopback",
            "other nodes cannot be reached",
            "ip link set NAME up (ip link lists them), docker run --network=host",
        )
    for each in outward:
        yield from _health(each, facts.wanted.nodes)


def _health(interface: NetworkInterface, nodes: int) -> Iterator[Defect]:
    name = interface.name
    if interface.mtu < MIN_MTU:
        yield warning(
            f"{name} has an MTU of {interface.mtu}",
            "copies to other nodes are cut into tiny packets",
            f"ip link set {name} mtu 1500",
        )
    errors, packets = interface.errors, interface.packets
    if packets >= MIN_PACKETS and errors > packets * MAX_ERROR_RATIO:
        yield warning(
            f"{name} has received {errors} damaged of {packets} packets",
            "they are sent again after a while: collectives stall",
            f"look at cable, transceiver and switch port (ethtool -S {name})",
        )
    if nodes > 1 and interface.mbits is not None and 0 < interface.mbits < MIN_MBITS:
        yield warning(
            f"{name} carries {interface.mbits} Mbit/s",
            "copies of a snapshot take longer than a step",
            f"look at cable and switch port (ethtool {name}), or choose another interface: --host",
        )


def chosen_interfaces(facts: MachineFacts) -> Iterator[Defect]:
    """Whether the interfaces that variables name are there."""
    found = facts.network.interfaces
    if found is None:
        yield silence("the network interfaces")
        return
    up = [each.name for each in found if each.is_up]
    for variable in CHOOSES_INTERFACE:
        said = facts.wanted.environ.get(variable)
        if said is not None and not _chooses(variable, said, up):
            yield broken(
                f"{variable}={said} names no interface that is up",
                "process groups are not built",
                f"unset {variable}, or name one of {', '.join(up) or 'none'}",
            )


def _chooses(variable: str, said: str, up: list[str]) -> bool:
    """gloo and TensorPipe take names, NCCL beginnings of names, `=` before exact ones, `^` before
    those to avoid."""
    if not variable.startswith("NCCL"):
        return bool(said) and all(name.strip() in up for name in said.split(","))
    avoids, exact = said.startswith("^"), "=" in said[:2]
    words = [word.strip() for word in said.lstrip("^=").split(",")]

    def is_meant(name: str) -> bool:
        return name in words if exact else any(name.startswith(word) for word in words)

    return any(is_meant(name) != avoids for name in up)


def ports(facts: MachineFacts) -> Iterator[Defect]:
    """Whether there are ports for a job's connections, and others do not take those where it
    meets."""
    found = facts.network.ports
    if found is None:
        yield silence("net.ipv4.ip_local_port_range")
        return
    low, high = found
    count = high - low + 1
    fix = 'sysctl -w net.ipv4.ip_local_port_range="32768 60999"'
    if count < MIN_PORTS:
        grade = broken if count < FEWEST_PORTS else warning
        yield grade(
            f"{count} ports are there for outgoing connections ({low} to {high})",
            "every rank connects to every other one several times",
            fix,
        )
    taken = [port for port in MEETING_PORTS if low <= port <= high]
    if taken:
        yield warning(
            f"outgoing connections take ports from {low} on",
            f"one may have taken {' or '.join(map(str, taken))}, where nodes meet by default",
            fix,
        )


def backlog(facts: MachineFacts) -> Iterator[Defect]:
    """Whether all ranks may connect at once."""
    found = facts.network.backlog
    if found is None:
        yield silence("net.core.somaxconn")
    elif found < MIN_BACKLOG:
        yield warning(
            f"net.core.somaxconn is {found}",
            "ranks that connect to the meeting place at once are turned away, and try again later",
            "sysctl -w net.core.somaxconn=4096",
        )


def tracked_connections(facts: MachineFacts) -> Iterator[Defect]:
    """Whether the firewall's table has room for new connections."""
    count, most = facts.network.tracked, facts.network.tracked_max
    if count is not None and most and count > most * MAX_TRACKED_RATIO:
        yield warning(
            f"the firewall's table has {count} of {most} connections",
            "packets of new ones are dropped when it is full: nodes cannot meet again",
            f"sysctl -w net.netfilter.nf_conntrack_max={2 * most}",
        )


CHECKS = (
    DoctorCheck("localhost", localhost),
    DoctorCheck("loopback", loopback),
    DoctorCheck("host-name", host_name),
    DoctorCheck("interfaces", interfaces),
    DoctorCheck("chosen-interfaces", chosen_interfaces),
    DoctorCheck("ports", ports),
    DoctorCheck("backlog", backlog),
    DoctorCheck("tracked-connections", tracked_connections),
)
