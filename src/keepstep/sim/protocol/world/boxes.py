"""Boxes: the connections within a simulated machine, as `ports.Box`.

Messages take a while and arrive in their order; with `checks` they cross as the bytes that the
codec makes. Some pokes get lost, as they do when who should read is busy. A process may be killed
at each message that it sends; its connections end with it, behind all that it sent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from keepstep.model.messages.keeper_rank import NotUnderstood
from keepstep.model.units import MS_NS
from keepstep.ports import Box, Hearer, MessageCodec
from keepstep.sim.protocol.world.machine import Machine
from keepstep.sim.protocol.world.world import Process

LATENCY_NS = MS_NS // 20
JITTER_NS = MS_NS // 10
LOST_POKES = 0.01
MAX_WHY = 1000  # characters

Tell = Callable[[str, str], object]
Seen = Callable[[Process, Any], None]


class LocalSockets:
    """The paths of one machine at which processes listen. `checks`: whether messages cross as
    bytes. `lost_pokes`: the part of all pokes that get lost. `on_sent` and `on_heard` see all
    messages, with the process that sends or hears."""

    def __init__(
        self, machine: Machine, checks: bool = True, lost_pokes: float = LOST_POKES
    ) -> None:
        self.world = machine.world
        self.checks = checks
        self.lost_pokes = lost_pokes
        self.on_sent: Seen = _nobody
        self.on_heard: Seen = _nobody
        self.random = machine.world.stream(f"sockets {machine.number}")
        self._servers: dict[Path, SimBoxServer] = {}

    def listen(
        self,
        process: Process,
        path: Path,
        codec: MessageCodec,
        on_box: Callable[[Box], Hearer],
        tell: Tell,
    ) -> SimBoxServer:
        """Take connections at `path`, for as long as the process lives. See
        `edge/net/boxes.py`."""
        server = SimBoxServer(self, process, path, codec, on_box, tell)
        self._servers[path] = server
        process.on_end.append(server.close)
        return server

    def forget(self, server: SimBoxServer) -> None:
        if self._servers.get(server.path) is server:
            del self._servers[server.path]

    def connect(
        self,
        process: Process,
        path: Path,
        codec: MessageCodec,
        hearer: Hearer,
        tell: Tell,
    ) -> SimBox:
        """A connection to who listens at `path`. Raises OSError when nobody does."""
        process.touch("connect")
        server = self._servers.get(path)
        if server is None:
            raise ConnectionRefusedError(f"{path}: nobody listens")
        here = SimBox(self, process, server.process.pid, codec, tell)
        there = SimBox(self, server.process, process.pid, server.codec, server.tell)
        here.other, there.other = there, here
        here.hearer = hearer
        here.cross(lambda: there.begin(server.on_box))
        return here

    def join(self, here: SimBox, there: SimBox) -> None:
        """The ends of a connection that nobody listened for, as a process has with one that it
        starts: what comes `there` waits until that end begins."""
        here.other, there.other = there, here
        there.hold()


class SimBoxServer:
    """Who listens at a path."""

    def __init__(
        self,
        sockets: LocalSockets,
        process: Process,
        path: Path,
        codec: MessageCodec,
        on_box: Callable[[Box], Hearer],
        tell: Tell,
    ) -> None:
        self._sockets, self.process, self.path = sockets, process, path
        self.codec = codec
        self.on_box, self.tell = on_box, tell

    def close(self) -> None:
        """Take no more. The connections there are stay."""
        self._sockets.forget(self)


class SimBox:
    """See `ports.Box`. `refused`: how many packets were no message."""

    def __init__(
        self,
        sockets: LocalSockets,
        process: Process,
        pid: int,
        codec: MessageCodec,
        tell: Tell,
    ) -> None:
        self._sockets, self._process, self.pid = sockets, process, pid
        self._codec, self._tell = codec, tell
        self.refused = 0
        self.other: SimBox = self
        self.hearer: Hearer = _NOBODY
        self.is_over = False
        self._last_ns = 0  # when what was sent last arrives
        self._held: list[Callable[[], None]] | None = None  # until it begins
        process.on_end.append(self._hang_up)

    def begin(self, on_box: Callable[[Box], Hearer]) -> None:
        """In the server's process."""
        if self.is_over:
            return
        self.hearer = on_box(self)
        held, self._held = self._held or [], None
        for call in held:
            call()

    def hold(self) -> None:
        """What comes waits until this end begins."""
        self._held = []

    # -- the port

    def send(self, message: Any, /) -> bool:
        is_broken = self._process.touch("send", type(message).__name__)
        packet = self._encode(message)
        if is_broken:
            self._break()
            return False
        is_taken = self._deliver(packet)
        if is_taken:
            self._sockets.on_sent(self._process, message)
        return is_taken

    def poke(self, message: Any, /) -> None:
        is_lost = self._process.touch("poke", type(message).__name__)
        packet = self._encode(message)
        if not is_lost and self._sockets.random.random() >= self._sockets.lost_pokes:
            self._deliver(packet)

    def close(self) -> None:
        self._hang_up()

    def release(self) -> None:
        """No process forks here."""

    def hear_rest(self) -> None:
        """What is still on its way was not sent in time."""

    # -- the way there

    def _encode(self, message: Any) -> Any:
        return self._codec.encode(message) if self._sockets.checks else message

    def send_packet(self, packet: bytes) -> None:
        """What no codec has made."""
        self._deliver(packet)

    def _deliver(self, packet: Any) -> bool:
        other = self.other
        if self.is_over or other.is_over:
            return False
        self.cross(lambda: other.come(packet))
        return True

    def cross(self, call: Callable[[], None]) -> None:
        """Have this happen at the other end, behind what was sent before."""
        sockets = self._sockets
        now_ns = sockets.world.now_ns
        delay_ns = LATENCY_NS + int(JITTER_NS * sockets.random.random())
        self._last_ns = max(self._last_ns, now_ns + delay_ns)
        sockets.world.at(self._last_ns, self.other._process, call)

    def come(self, packet: Any) -> None:
        """A packet has arrived here."""
        if self._held is not None:
            self._held.append(partial(self.come, packet))
            return
        if self.is_over:
            return
        message = packet
        if isinstance(packet, bytes):
            try:
                message = self._codec.decode(packet)
            except ValueError as error:
                self._refuse(str(error)[:MAX_WHY])
                return
        self.hearer.hear(self, message)
        self._sockets.on_heard(self._process, message)

    def _refuse(self, why: str) -> None:
        self.refused += 1
        self._tell("message-refused", f"process {self.pid} sent an invalid message: {why}")
        self._deliver(self._encode(NotUnderstood(why)))

    # -- the end

    def _hang_up(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        if self._hang_up in self._process.on_end:
            self._process.on_end.remove(self._hang_up)
        self.cross(self.other._end)

    def _end(self) -> None:
        if self._held is not None:
            self._held.append(self._end)
        elif not self.is_over:
            self._hang_up()
            self.hearer.gone(self)

    def _break(self) -> None:
        """It is over at both ends, though both processes live."""
        self._process.after(0, self._end)
        self.other._process.after(0, self.other._end)


class _Nobody:
    """Who hears what comes before the server has taken the connection: nothing does."""

    def hear(self, box: Box, message: Any, /) -> None:
        raise AssertionError(f"{message} came before the connection was taken")

    def gone(self, box: Box, /) -> None:
        """It was taken by nobody."""


_NOBODY = _Nobody()


def _nobody(process: Process, message: Any) -> None:
    """Nobody wants to know."""
