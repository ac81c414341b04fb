"""Mailbox: JSON objects over a unix SOCK_SEQPACKET socket, one object a packet.

The kernel keeps packet borders, tells a peer's death as end of file, and names the peer's pid and
uid (SO_PEERCRED), so there is no framing, no heartbeat and no password. Never blocks for ever:
every wait has a timeout.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
from pathlib import Path
from typing import Any

MAX_PACKET_BYTES = 1 << 16


class Mailbox:
    """One end of a connection. `recv` returns None when the peer is gone (or talks nonsense: such a
    peer is none of ours)."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @classmethod
    def connect(cls, path: Path, timeout_s: float) -> Mailbox:
        """Raises OSError when nobody listens."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(timeout_s)
            sock.connect(str(path))
        except OSError:
            sock.close()
            raise
        return cls(sock)

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def pid(self) -> int:
        return self.peer()[0]

    def peer(self) -> tuple[int, int]:
        """(pid, uid) of the other end, told by the kernel."""
        raw = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", raw)
        return pid, uid

    def send(self, message: dict[str, Any]) -> bool:
        """False when the peer is gone or not reading."""
        packet = json.dumps(message, separators=(",", ":")).encode()
        assert len(packet) <= MAX_PACKET_BYTES, f"a message of {len(packet)} bytes"
        try:
            self._sock.send(packet)
        except OSError:
            return False
        return True

    def poke(self, message: dict[str, Any]) -> None:
        """Send without ever waiting: a peer that does not read misses it."""
        with contextlib.suppress(OSError):
            self._sock.send(
                json.dumps(message, separators=(",", ":")).encode(), socket.MSG_DONTWAIT
            )

    def recv(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """The next message, or None when the peer is gone. Raises TimeoutError."""
        if timeout_s is not None and not select.select([self._sock], [], [], timeout_s)[0]:
            raise TimeoutError(f"no message within {timeout_s} s")
        try:
            self._sock.settimeout(None)
            packet = self._sock.recv(MAX_PACKET_BYTES)
        except OSError:
            return None
        if not packet:
            return None
        try:
            message = json.loads(packet)
        except ValueError:
            return None
        return message if isinstance(message, dict) else None

    def hang_up(self) -> None:
        """End the connection, also for a thread that waits in `recv` and for processes that
        inherited it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def close(self) -> None:
        """Give up this process's hold of the connection."""
        self._sock.close()


def listen(path: Path) -> socket.socket:
    """A listening socket at `path`, replacing a dead one's file. Only the owner may connect."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.bind(str(path))
    path.chmod(0o600)
    sock.listen(64)
    return sock
