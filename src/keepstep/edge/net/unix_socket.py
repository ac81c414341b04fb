"""Mailbox: messages over a unix SOCK_SEQPACKET socket, one a packet.

The kernel keeps packet borders, tells a peer's death as end of file, and names the peer's pid and
uid (SO_PEERCRED), so there is no framing, no heartbeat and no password. What may be said is the
conversation's business (`core/wire/conversations.py`); a packet that is no message of it is counted
and answered, and the connection stays. Never blocks for ever: every wait has a timeout.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keepstep.model.bounds import MAX_PACKET_BYTES
from keepstep.model.messages.keeper_rank import NotUnderstood
from keepstep.ports import Hearer, MessageCodec

SEND_WITHIN_S = 5  # to somebody who does not read
OnRefused = Callable[[str, str], None]  # who has sent it, and why it is none


def ignore_refused(sender: str, why: str) -> None:
    """For who has no journal."""


class Mailbox:
    """One end of a connection. See `ports.Box`."""

    def __init__(
        self, sock: socket.socket, codec: MessageCodec, on_refused: OnRefused = ignore_refused
    ) -> None:
        self._sock, self._codec, self._on_refused = sock, codec, on_refused
        # The kernel's own limits: with one of Python's, MSG_DONTWAIT would wait too.
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_WITHIN_S, 0))

    @classmethod
    def connect(
        cls,
        path: Path,
        timeout_s: float,
        codec: MessageCodec,
        on_refused: OnRefused = ignore_refused,
        uid: int | None = None,
    ) -> Mailbox:
        """uid: whose process must listen; this one's user unless given. Raises OSError when nobody
        does, or another user's process."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(timeout_s)
            sock.connect(str(path))
            box = cls(sock, codec, on_refused)
            pid, theirs = box.peer()
            if theirs != (os.getuid() if uid is None else uid):
                raise PermissionError(f"{path}: process {pid} there is user {theirs}'s")
        except OSError:
            sock.close()
            raise
        return box

    def fileno(self) -> int:
        """For a selector."""
        return self._sock.fileno()

    @property
    def pid(self) -> int:
        """The process at the other end."""
        return self.peer()[0]

    def peer(self) -> tuple[int, int]:
        """(pid, uid) of the other end, told by the kernel."""
        raw = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", raw)
        return pid, uid

    def send(self, message: Any, /) -> bool:
        """False when the peer is gone or not reading. Raises NotAMessage when it is none."""
        packet = self._codec.encode(message)
        try:
            self._sock.send(packet)
        except OSError:
            return False
        return True

    def poke(self, message: Any, /) -> None:
        """Send without ever waiting: a peer that does not read misses it."""
        packet = self._codec.encode(message)
        with contextlib.suppress(OSError):
            self._sock.send(packet, socket.MSG_DONTWAIT)

    def recv(self, timeout_s: float | None = None) -> Any:
        """The next message, or None when the peer is gone. Raises TimeoutError."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            if left_s is not None and not self._is_readable(left_s):
                raise TimeoutError(f"no message within {timeout_s} s")
            packet = self._packet()
            if packet is None:
                return None
            message = self._understood(packet)
            if message is not None:
                return message

    def _is_readable(self, within_s: float) -> bool:
        # not `select`: it fails on descriptors beyond 1,023
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(1000 * within_s))

    def hear(self, hearer: Hearer) -> None:
        """Take what makes this readable, and tell it the hearer. Who hears that the other end is
        gone closes this."""
        packet = self._packet()
        if packet is None:
            hearer.gone(self)
            return
        message = self._understood(packet)
        if message is not None:
            hearer.hear(self, message)

    def _packet(self) -> bytes | None:
        try:
            packet = self._sock.recv(MAX_PACKET_BYTES)
        except OSError:
            return None
        return packet or None

    def _understood(self, packet: bytes) -> Any:
        """The message; None when it is none, which its sender is told."""
        try:
            return self._codec.decode(packet)
        except ValueError as error:
            self._on_refused(f"process {self.pid}", str(error))
            self.poke(NotUnderstood(str(error)))
            return None

    def hang_up(self) -> None:
        """End the connection, also for a thread that waits in `recv` and for processes that
        inherited it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def hear_rest(self) -> None:
        """Whoever reads it hears it."""

    def release(self) -> None:
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
