"""LabNetwork: what connects the nodes of a lab, as network namespaces or as loopback addresses.

Comes in: a lab's number and its nodes. Goes out: for each node a `Seat`: the address others reach
it at, the interface that has it, and the words to put before a command so that it runs there.

    Namespaces   one namespace a node, a veth pair to a bridge in a namespace of the lab's own,
                 `tc tbf` on both ends of the pair, and a pair from the bridge to where the lab
                 itself runs. Needs root. A lost node's link goes first: no reset tells its peers.
    Loopback     127.0.LAB.1 and on. Needs nothing. Cannot be shaped or cut; the kernel tells the
                 peers of a dead process at once.

Every node that is seated again gets a new address. Names hold the lab's number, so that what a
killed lab has left can be found.
Invariant: nothing outside the lab's own namespaces and its one interface is changed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from keepstep.errors import ConfigError

PREFIX = "keepsteplab-"
NAMESPACES = Path("/run/netns")
SWITCH = "switch"
# what a shaped link may send at once: less than this and the timer's resolution caps the rate
BURST_S = 0.002
LEAST_BURST_BYTES = 128 << 10
# A port has as much memory when it is slow: what shrank with the rate would lose packets, too.
QUEUE_S, LEAST_QUEUE_BYTES = 0.02, 512 << 10
# A veth hands over up to 64 KiB in one piece: less room than that and nothing passes at all.
LOSSY_BURST_BYTES, LOSSY_QUEUE_BYTES = 70_000, 80_000
_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a node is."""

    address: str
    interface: str
    before: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LinkShape:
    """What passes a node's link. `loses`: it has next to no queue, so that bursts lose packets.
    `ways`: what the node sends, what it receives, or both."""

    bits_per_s: int
    loses: bool = False
    ways: tuple[str, ...] = ("sends", "receives")


class LabNetwork(Protocol):
    """`host`: the lab's own address, reachable from every node."""

    host: str

    def seat(self, node: int) -> Seat: ...

    def set_link(self, node: int, up: bool) -> None: ...

    def shape(self, node: int, shape: LinkShape | None) -> None:
        """Of its link from now on; None: as it was at first."""

    def unseat(self, node: int) -> None:
        """Cut the node off. Its processes may still live."""

    def clear(self, node: int) -> None:
        """Its processes are dead: forget what is left of it."""

    def has(self, node: int, pid: int) -> bool: ...

    def close(self) -> None: ...


def parse_rate(text: str) -> int:
    """`1gbit`: bits a second. Raises ConfigError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text)
    if found is None or float(found[1]) == 0:
        raise ConfigError(
            f"rate: expected a number and kbit, mbit or gbit, such as 1gbit, found {text!r}"
        )
    return round(float(found[1]) * _UNITS[found[2]])


def why_no_namespaces() -> str:
    """Why network namespaces cannot be made here; empty when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)}"
    probe = f"{PREFIX}probe-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    _try("ip", "netns", "del", probe)
    return (
        ""
        if done.returncode == 0
        else f"network namespaces are not allowed here: {done.stderr.strip()}"
    )


def _do(*words: str) -> None:
    """Raises ConfigError with what the tool said."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise ConfigError(
            f"lab: expected `{' '.join(words)}` to succeed, found: "
            f"{done.stderr.strip() or done.returncode}"
        )


def _try(*words: str) -> None:
    with suppress(FileNotFoundError):  # without the tool there is nothing of it either
        subprocess.run(words, capture_output=True)


class _Addresses:
    """Addresses PREFIX.2 to PREFIX.254, each given once in so many turns, never one that is in
    use."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._last = prefix, 1
        self.used: dict[int, str] = {}

    def give(self, node: int) -> str:
        while True:
            self._last = 2 if self._last == 254 else self._last + 1
            address = f"{self._prefix}.{self._last}"
            if address not in self.used.values():
                self.used[node] = address
                return address


class Namespaces:
    """See above. 198.18.0.0/15 is set aside for such things (RFC 2544)."""

    def __init__(self, number: int, rate_bits_per_s: int | None) -> None:
        """Raises ConfigError."""
        self._number, self._rate = number, rate_bits_per_s
        self._addresses = _Addresses(f"198.18.{number}")
        self.host = f"198.18.{number}.1"
        self._switch, outer = self._name(SWITCH), _outer(number)
        _do("ip", "netns", "add", self._switch)
        _do("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _do("ip", "-n", self._switch, "link", "set", "bridge", "up")
        _do(
            "ip", "link", "add", outer, "type", "veth", "peer", "name", "lab", "netns", self._switch
        )
        _do("ip", "-n", self._switch, "link", "set", "lab", "master", "bridge", "up")
        _do("ip", "address", "add", f"{self.host}/24", "dev", outer)
        _do("ip", "link", "set", outer, "up")

    def _name(self, node: int | str) -> str:
        return f"{PREFIX}{self._number}-{node}"

    def seat(self, node: int) -> Seat:
        name, address, port = self._name(node), self._addresses.give(node), f"node{node}"
        _do("ip", "netns", "add", name)
        _do("ip", "-n", name, "link", "set", "lo", "up")
        _do(
            "ip",
            "-n",
            name,
            "link",
            "add",
            "eth0",
            "type",
            "veth",
            "peer",
            "name",
            port,
            "netns",
            self._switch,
        )
        _do("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        if self._rate:
            for place in ((name, "eth0"), (self._switch, port)):
                _filter(*place, LinkShape(self._rate))
        _do("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
        _do("ip", "-n", name, "link", "set", "eth0", "up")
        # Not `ip netns exec`: it mounts another /sys, in which a process no longer finds its memory
        # limit.
        return Seat(address, "eth0", ("nsenter", f"--net={NAMESPACES / name}", "--"))

    def shape(self, node: int, shape: LinkShape | None) -> None:
        places = {"sends": (self._name(node), "eth0"), "receives": (self._switch, f"node{node}")}
        if shape is not None:
            for way in shape.ways:
                _filter(*places[way], shape)
            return
        for namespace, device in places.values():
            if self._rate:
                _filter(namespace, device, LinkShape(self._rate))
            else:
                _try("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")

    def tie(self, one: int, other: int, bits_per_s: int | None) -> None:
        """A road of their own between two seated nodes, of that rate: what goes between them takes
        it from then on, and nothing else does. None: as fast as everything here. A second time its
        rate changes."""
        names, used = (self._name(one), self._name(other)), self._addresses.used
        devices = (f"to{other}", f"to{one}")
        if not _is_there(names[0], devices[0]):
            there = ("type", "veth", "peer", "name", devices[1], "netns", names[1])
            _do("ip", "-n", names[0], "link", "add", "name", devices[0], *there)
            for name, device, target, source in zip(
                names, devices, (used[other], used[one]), (used[one], used[other]), strict=True
            ):
                _do("ip", "-n", name, "link", "set", device, "up")
                road = ("dev", device, "src", source)
                _do("ip", "-n", name, "route", "add", f"{target}/32", *road)
        rate = bits_per_s or self._rate
        for name, device in zip(names, devices, strict=True):
            if rate:
                _filter(name, device, LinkShape(rate))
            else:
                _try("tc", "-n", name, "qdisc", "del", "dev", device, "root")

    def set_link(self, node: int, up: bool) -> None:
        _do("ip", "-n", self._switch, "link", "set", f"node{node}", "up" if up else "down")

    def unseat(self, node: int) -> None:
        _try("ip", "-n", self._switch, "link", "del", f"node{node}")

    def clear(self, node: int) -> None:
        _try("ip", "netns", "del", self._name(node))
        self._addresses.used.pop(node, None)

    def has(self, node: int, pid: int) -> bool:
        return is_in(self._name(node), pid)

    def close(self) -> None:
        remove(self._number)


class Loopback:
    """See above."""

    def __init__(self, number: int) -> None:
        self.host = f"127.0.{number}.1"
        self._addresses = _Addresses(f"127.0.{number}")

    def seat(self, node: int) -> Seat:
        return Seat(self._addresses.give(node), "lo")

    def set_link(self, node: int, up: bool) -> None:
        raise ConfigError(
            f"lab: expected network namespaces to set the link of node {node}, found "
            "loopback addresses"
        )

    def shape(self, node: int, shape: LinkShape | None) -> None:
        raise ConfigError(
            f"lab: expected network namespaces to shape the link of node {node}, found loopback "
            "addresses"
        )

    def unseat(self, node: int) -> None:
        pass

    def clear(self, node: int) -> None:
        self._addresses.used.pop(node, None)

    def has(self, node: int, pid: int) -> bool:
        return False  # only its mark tells

    def close(self) -> None:
        pass


def _filter(namespace: str, device: str, shape: LinkShape) -> None:
    """A token bucket in front of the device, in place of what is there."""
    rate = shape.bits_per_s
    burst_bytes = max(LEAST_BURST_BYTES, int(rate / 8 * BURST_S))
    queue_bytes = burst_bytes + max(LEAST_QUEUE_BYTES, int(rate / 8 * QUEUE_S))
    if shape.loses:
        burst_bytes, queue_bytes = LOSSY_BURST_BYTES, LOSSY_QUEUE_BYTES
    bucket = ("rate", f"{rate}bit", "burst", str(burst_bytes), "limit", str(queue_bytes))
    _do("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *bucket)


def _is_there(namespace: str, device: str) -> bool:
    words = ("ip", "-n", namespace, "link", "show", "dev", device)
    return subprocess.run(words, capture_output=True).returncode == 0


def is_in(namespace: str, pid: int) -> bool:
    """Whether that process lives in the namespace; False when one of them is gone."""
    try:
        return os.path.samefile(NAMESPACES / namespace, f"/proc/{pid}/ns/net")
    except OSError:
        return False


def _outer(number: int) -> str:
    # 15 letters for a lab with three digits: the longest name an interface may have
    return f"{PREFIX}{number}"


def remains() -> dict[int, list[str]]:
    """By the lab's number: the namespaces and interfaces that are there."""
    found: dict[int, list[str]] = {}
    names: list[str] = []
    for directory in (NAMESPACES, Path("/sys/class/net")):
        with suppress(OSError):
            names += os.listdir(directory)
    for name in names:
        if match := re.fullmatch(rf"{PREFIX}(\d+)(-.+)?", name):
            found.setdefault(int(match[1]), []).append(name)
    return found


def remove(number: int) -> None:
    """Everything of a lab's network, as far as there is any. Its processes must be dead."""
    # namespaces end later than the command returns, and with them their interfaces
    _try("ip", "link", "del", _outer(number))
    for name in remains().get(number, []):
        if name != _outer(number):
            _try("ip", "netns", "del", name)
