"""Boxes: `ports.Box` over unix sockets, driven by a loop.

Comes in: packets, of which each is one message. Goes out: typed messages to a `Hearer`, and
packets. The kernel keeps packet borders, tells a peer's death as end of file, and names the peer's
process and user, so there is no framing, no heartbeat and no password. What a peer does not read
yet waits here until the loop can send it: sending never blocks.

A packet that is no message is counted, told and answered by `NotUnderstood`; the connection stays.
Another user's process is refused and told.

Invariant: everything that a peer sent before its end is heard before `gone`.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from keepstep.edge.net import unix_socket
from keepstep.edge.os.loop import Loop
from keepstep.model.bounds import MAX_PACKET_BYTES
from keepstep.model.messages.keeper_rank import NotUnderstood
from keepstep.model.units import MIB, MS_NS
from keepstep.ports import Box, Hearer, MessageCodec

CONNECT_S = 5.0  # a server that is there, and very busy, takes a connection in so long
MAX_UNSENT_BYTES = 4 * MIB  # a peer that lets so much wait will never read it
MAX_ANSWERS = 100  # to packets that are no message: two releases do not go on about it for ever
ACCEPT_AGAIN_NS = 100 * MS_NS  # where a connection cannot be had
MAX_WHY = 1000  # characters
CREDENTIALS = struct.Struct("3i")  # as the kernel tells them: pid, uid, gid

# a kind of event and a sentence, as `ports.Journal.record` takes them
Tell = Callable[[str, str], object]


class SocketBox:
    """See `ports.Box`. `refused`: how many packets were no message."""

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        codec: MessageCodec,
        tell: Tell,
    ) -> None:
        self._loop, self._sock, self._tell = loop, sock, tell
        self._codec = codec
        self.pid, self.uid = _peer(sock)
        self.refused = 0
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._hearer: Hearer | None = None  # until the end
        sock.setblocking(False)

    def begin(self, hearer: Hearer) -> None:
        """From now on what comes is heard."""
        self._hearer = hearer
        self._loop.add_reader(self._sock.fileno(), self._read)

    # -- the port

    def send(self, message: Any, /) -> bool:
        packet = self._encode(message)
        if self._hearer is None:
            return False
        if not self._unsent:
            try:
                self._sock.send(packet)
            except BlockingIOError:
                self._loop.add_writer(self._sock.fileno(), self._flush)
            except OSError:  # `gone` is heard behind what the peer said before
                return False
            else:
                return True
        if self._unsent_bytes + len(packet) > MAX_UNSENT_BYTES:
            self._loop.post(self._end)
            return False
        self._unsent.append(packet)
        self._unsent_bytes += len(packet)
        return True

    def poke(self, message: Any, /) -> None:
        packet = self._encode(message)
        if self._hearer is not None and not self._unsent:
            with suppress(OSError):
                self._sock.send(packet)

    def close(self) -> None:
        if self._hearer is not None:
            self._hearer = None
            self._loop.remove_reader(self._sock.fileno())
            if not self._unsent:
                self._hang_up()

    def release(self) -> None:
        self._sock.close()

    def hear_rest(self) -> None:
        while self._hearer is not None and _has_something(self._sock):
            self._read()

    # -- what the loop brings

    def _read(self) -> None:
        try:
            packet = self._sock.recv(MAX_PACKET_BYTES + 1)
        except (BlockingIOError, ConnectionResetError):
            return  # reset: the peer left something unread; what it said itself is still to come
        except OSError:
            packet = b""
        if not packet and self._has_hung_up():
            self._end()
        else:
            self._hear(packet)

    def _hear(self, packet: bytes) -> None:
        try:
            message = self._codec.decode(packet)
        except ValueError as error:
            self._refuse(str(error)[:MAX_WHY])
        else:
            if self._hearer is not None:
                self._hearer.hear(self, message)

    def _refuse(self, why: str) -> None:
        self.refused += 1
        self._tell("message-refused", f"process {self.pid} sent an invalid message: {why}")
        if self.refused <= MAX_ANSWERS:
            self.send(NotUnderstood(why))

    def _end(self) -> None:
        """Nobody is there, or nobody reads."""
        hearer = self._hearer
        if hearer is not None:
            self._unsent.clear()
            self.close()
            hearer.gone(self)

    def _flush(self) -> None:
        try:
            while self._unsent:
                self._sock.send(self._unsent[0])
                self._unsent_bytes -= len(self._unsent.popleft())
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()
        self._loop.remove_writer(self._sock.fileno())
        if self._hearer is None:
            self._hang_up()

    # -- the socket

    def _encode(self, message: Any) -> bytes:
        packet = self._codec.encode(message)
        assert len(packet) <= MAX_PACKET_BYTES, f"a message of {len(packet)} bytes"
        return packet

    def _has_hung_up(self) -> bool:
        """An empty packet looks like the end, too. Peers of ours send none; of one that sends one
        and hangs up, nothing more is heard."""
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    def _hang_up(self) -> None:
        """Also for processes that have inherited the connection."""
        self._loop.remove_writer(self._sock.fileno())
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class UnixBoxServer:
    """Takes connections at a path, until `close`."""

    def __init__(
        self,
        loop: Loop,
        path: Path,
        codec: MessageCodec,
        on_box: Callable[[Box], Hearer],
        tell: Tell,
        uid: int,
    ) -> None:
        self._loop, self._path, self._uid = loop, path, uid
        self._codec = codec
        self._on_box, self._tell = on_box, tell
        self._is_short = False  # of what a connection takes, and that was told
        self._server = unix_socket.listen(path)
        self._server.setblocking(False)
        loop.add_reader(self._server.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._server.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptor is left, or no memory
            self._cannot_accept(error)
            return
        box = SocketBox(self._loop, sock, self._codec, self._tell)
        if box.uid != self._uid:
            why = f"process {box.pid} of user {box.uid} wanted to join user {self._uid}'s job"
            self._tell("stranger-refused", why)
            sock.close()
            return
        box.begin(self._on_box(box))

    def _cannot_accept(self, error: OSError) -> None:
        """Whoever wants to connect waits, and is looked at again: told once, as it goes on so until
        something is freed."""
        if not self._is_short:
            self._is_short = True
            self._tell("connection-refused", f"nobody can connect to {self._path.name}: {error}")
        self._loop.remove_reader(self._server.fileno())
        self._loop.after(ACCEPT_AGAIN_NS, self._look_again)

    def _look_again(self) -> None:
        if self._server.fileno() >= 0:
            self._loop.add_reader(self._server.fileno(), self._accept)

    def close(self) -> None:
        """Take no more. The connections there are stay."""
        if self._server.fileno() < 0:
            return
        self._loop.remove_reader(self._server.fileno())
        self._server.close()
        self._path.unlink(missing_ok=True)


def listen(
    loop: Loop,
    path: Path,
    codec: MessageCodec,
    on_box: Callable[[Box], Hearer],
    tell: Tell,
    uid: int | None = None,
) -> UnixBoxServer:
    """Take connections at `path`, replacing a dead server's. `on_box` says who hears what comes
    over a new one. `tell`: of what was refused. `uid`: the user whose processes may connect, this
    process's unless given. Raises OSError."""
    own = os.getuid() if uid is None else uid
    return UnixBoxServer(loop, path, codec, on_box, tell, own)


def connect(
    loop: Loop,
    path: Path,
    codec: MessageCodec,
    hearer: Hearer,
    tell: Tell,
    uid: int | None = None,
) -> SocketBox:
    """A connection to the server at `path`. Raises OSError when there is none, or another
    user's."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(CONNECT_S)
        sock.connect(str(path))
        box = SocketBox(loop, sock, codec, tell)
        if box.uid != (os.getuid() if uid is None else uid):
            raise PermissionError(f"{path}: process {box.pid} there is user {box.uid}'s")
    except OSError:
        sock.close()
        raise
    box.begin(hearer)
    return box


def _has_something(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _peer(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the other end; of a server, of who began to listen."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, _ = CREDENTIALS.unpack(raw)
    return pid, uid
