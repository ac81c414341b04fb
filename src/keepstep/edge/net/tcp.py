"""TCP: sockets as keepers want them, what a socket tells of its connection, and a pacer for links
that are shaped in process.

Comes in: addresses and options. Goes out: sockets that listen or are connected.
"""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
import threading
import time
from dataclasses import dataclass

from keepstep.model.links import LinkCount
from keepstep.model.units import KIB, S_NS
from keepstep.model.wire import Address

_SO_MAX_PACING_RATE = 47  # Linux 3.13; Python has no name for it
_SIOCOUTQ, _SIOCGIFCONF = 0x5411, 0x8912
_IFREQ_BYTES, _MOST_ADDRESSES = 40, 1024
_TCP_INFO_MIN_RTT_AT = 148  # Linux 4.6; microseconds
# bytes and microseconds, of 64 bits each
_TCP_INFO_ACKED_AT, _TCP_INFO_BUSY_AT, _TCP_INFO_NO_ROOM_AT = 120, 168, 176
_TCP_INFO_SENT_AT, _TCP_INFO_RESENT_AT = 200, 208
BULK_PRIORITY = 2  # TC_PRIO_BULK: the last band of the kernel's own queues


@dataclass(frozen=True, slots=True)
class TcpOptions:
    """`buffer_bytes` (SO_SNDBUF, SO_RCVBUF), `priority` (SO_PRIORITY, 0 to 6) and
    `max_pacing_bytes_per_s` (SO_MAX_PACING_RATE, one connection) are left alone when None. Buffers
    that are set stay as they are: the kernel makes them no larger than `net.core.wmem_max` and
    `rmem_max` without a word, and follows the link with its own (`tcp_wmem`, `tcp_rmem`) no more.
    `copy_dscp`: of connections that carry blocks, see `yield_to_others`.
    """

    buffer_bytes: int | None = None
    # bytes unacknowledged by the other kernel for so long break the connection
    unacked_s: float = 5.0
    handshake_s: float = 5.0
    priority: int | None = None
    max_pacing_bytes_per_s: int | None = None
    copy_dscp: int = 0


def listen(address: Address, options: TcpOptions) -> socket.socket:
    """Raises OSError, naming the address, when it is taken or not ours."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # accepted sockets inherit all of it; buffers must be large before the window is negotiated
        _tune(sock, options)
        sock.bind(address)
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise OSError(
            error.errno, f"cannot listen on {address[0]}:{address[1]}: {error.strerror}"
        ) from error
    return sock


def dial(
    address: Address, source_host: str, options: TcpOptions, within_s: float | None = None
) -> socket.socket:
    """`within_s`: as long as a handshake may take, unless given. Raises OSError."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        _tune(sock, options)
        sock.bind((source_host, 0))
        sock.settimeout(options.handshake_s if within_s is None else within_s)
        sock.connect(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: it is no host name at all
        sock.close()
        why = (error.strerror or error) if isinstance(error, OSError) else error
        raise ConnectionError(f"cannot reach {address[0]}:{address[1]}: {why}") from error
    return sock


def _tune(sock: socket.socket, options: TcpOptions) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if options.buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, options.buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options.buffer_bytes)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = max(1, round(options.unacked_s / 2))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(options.unacked_s * 1000))
    if options.priority is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, options.priority)
    if options.max_pacing_bytes_per_s is not None:
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, options.max_pacing_bytes_per_s)


def yield_to_others(sock: socket.socket, dscp: int = 0) -> None:
    """Behind all other traffic, where the interface's queue has bands; and where the network's have
    classes, in that one: `dscp` is what its packets say (RFC 2474). Elsewhere nothing changes."""
    if dscp:  # which sets the priority, too
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, BULK_PRIORITY)


def queued_bytes(sock: socket.socket) -> int:
    """What was handed to the socket and is not acknowledged by the other kernel: in its queue, on
    the wire, on its way back."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock, _SIOCOUTQ, bytes(4)))[0])
    except (OSError, ValueError):  # it was closed meanwhile
        return 0


def round_trip_ns(sock: socket.socket) -> int:
    """The least that the kernel has seen."""
    try:
        told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        return 0
    if len(told) < _TCP_INFO_MIN_RTT_AT + 4:
        return 0
    found = int(struct.unpack_from("<I", told, _TCP_INFO_MIN_RTT_AT)[0])
    return 0 if found == 0xFFFFFFFF else found * 1000


def sent_counts(sock: socket.socket) -> LinkCount:
    """What the kernel counts of the connection; nothing where it does not (before Linux 4.19)."""
    try:
        told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:  # it was closed meanwhile
        return LinkCount()
    if len(told) < _TCP_INFO_RESENT_AT + 8:
        return LinkCount()

    def at(offset: int) -> int:
        return int(struct.unpack_from("<Q", told, offset)[0])

    return LinkCount(
        at(_TCP_INFO_ACKED_AT),
        at(_TCP_INFO_BUSY_AT) * 1000,
        at(_TCP_INFO_SENT_AT),
        at(_TCP_INFO_RESENT_AT),
        at(_TCP_INFO_NO_ROOM_AT) * 1000,
    )


def interface_of(host: str) -> str:
    """The network interface that has this IPv4 address, be it its first or another one; empty when
    none is found."""
    room = ctypes.create_string_buffer(_MOST_ADDRESSES * _IFREQ_BYTES)
    asked = struct.pack("iP", len(room), ctypes.addressof(room))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        nbytes, _ = struct.unpack("iP", fcntl.ioctl(probe, _SIOCGIFCONF, asked))
    for at in range(0, nbytes, _IFREQ_BYTES):
        one = room.raw[at : at + _IFREQ_BYTES]
        if socket.inet_ntoa(one[20:24]) == host:
            label = one[:16].rstrip(b"\0").decode(errors="replace")
            return label.partition(":")[0]  # `eth0:1` is another address of `eth0`
    return ""


class Pacer:
    """A token bucket: everything sent through one pacer together keeps to its rate. For links
    shaped without root."""

    def __init__(self, bytes_per_s: float, burst_bytes: int = 256 * KIB) -> None:
        self._ns_per_byte = S_NS / bytes_per_s
        self._burst_ns = round(burst_bytes * self._ns_per_byte)
        self.chunk_bytes = burst_bytes // 4
        self._lock = threading.Lock()
        self._full_ns = time.monotonic_ns()  # when the bucket will be full again

    def take(self, nbytes: int) -> None:
        """Wait until so many bytes may go."""
        with self._lock:
            now_ns = time.monotonic_ns()
            self._full_ns = max(self._full_ns, now_ns) + round(nbytes * self._ns_per_byte)
            wait_ns = self._full_ns - now_ns - self._burst_ns
        if wait_ns > 0:
            time.sleep(wait_ns / S_NS)
