"""Peer user: whose process is at the other end of a connection over this machine's loopback.

Comes in: both ends' addresses. Goes out: a user's number, as the kernel's table of sockets has it
(`/proc/net/tcp`, proc(5)). Asks nobody.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

TABLES = {socket.AF_INET: "tcp", socket.AF_INET6: "tcp6"}
_LOCAL, _REMOTE, _USER = 1, 2, 7  # columns
_MAPPED = bytes(10) + b"\xff\xff"  # an IPv4 address in the clothes of IPv6 (RFC 4291, 2.5.5.2)


def user_of_peer(
    peer: tuple[str, int], here: tuple[str, int], proc: Path = Path("/proc/self/net")
) -> int | None:
    """The user that made the socket of `peer`, which is connected to `here`; None when the kernel
    does not tell."""
    for family, ends in _spellings(peer[0], here[0]):
        try:
            lines = (proc / TABLES[family]).read_text().splitlines()[1:]
        except OSError:
            continue
        local, remote = (
            f"{_hex(address)}:{port:04X}"
            for address, port in zip(ends, (peer[1], here[1]), strict=True)
        )
        for line in lines:
            columns = line.split()
            if columns[_LOCAL] == local and columns[_REMOTE] == remote:
                return int(columns[_USER])
    return None


def _spellings(peer: str, here: str) -> list[tuple[socket.AddressFamily, list[bytes]]]:
    """How both addresses may stand in the tables."""
    if ":" in peer:
        return [(socket.AF_INET6, [socket.inet_pton(socket.AF_INET6, a) for a in (peer, here)])]
    plain = [socket.inet_aton(address) for address in (peer, here)]
    return [
        (socket.AF_INET, plain),
        (socket.AF_INET6, [_MAPPED + address for address in plain]),
    ]


def _hex(address: bytes) -> str:
    """In words of four bytes, each as this machine has a number in memory."""
    words = (address[at : at + 4] for at in range(0, len(address), 4))
    return "".join(
        (word[::-1] if sys.byteorder == "little" else word).hex().upper() for word in words
    )
