"""Pipe: a simulated TCP connection between two processes: bytes, in order, in both directions.

Comes in: pieces that one end sends, and what the network does to the paths between the two machines
(`network.py`). Goes out: the same bytes at the other end, later, in pieces of other sizes; or that
the connection is no more, to one end or both, at once or when its kernel gives up. Nothing here
knows what the bytes mean.

What is on its way into a path that does not carry is not lost but late: TCP repeats it, unless an
end gives the connection up first. A kernel gives up when nothing was acknowledged for too long; the
other end's may not know for a while, and then has half a connection. The memory that a piece lies
in is read when the piece arrives: a source that does not stand still shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from keepstep.sim.protocol.wire.network import Network
    from keepstep.sim.protocol.world.world import Process

Piece = bytes | memoryview


class User(Protocol):
    """The program at one end. Called in its process."""

    def arrived(self, pieces: list[Piece]) -> None:
        """In order."""

    def ended(self, why: str) -> None:
        """The connection is no more. Not after `SimSocket.close`."""


class SimSocket:
    """One end. `unacked_ns`: after so long without any acknowledgement its kernel gives up."""

    __slots__ = (
        "_arrives_ns",
        "_burst_ns",
        "_coming",
        "_latency_ns",
        "_network",
        "_unacked_ns",
        "is_open",
        "is_stuck",
        "machine",
        "other",
        "pipe",
        "process",
        "road",
        "user",
    )

    def __init__(self, network: Network, process: Process, unacked_ns: int) -> None:
        self.process = process
        self.machine = process.machine.number
        self.is_open = True
        self.is_stuck = False  # what is on its way here gets no further
        self.user: User | None = None
        self.other: SimSocket = self
        self.pipe: Pipe
        self.road: tuple[str, str]  # to this end, by which hosts
        self._network = network
        self._unacked_ns = unacked_ns
        # On its way to this end; None: the other end is closed.
        self._coming: deque[tuple[int, Piece | None]] = deque()
        self._arrives_ns = 0  # the last of it
        self._burst_ns = -1  # when the last of it was sent, and how long that takes
        self._latency_ns = 0

    @property
    def chance(self) -> Random:
        """From which is drawn what happens on its wires."""
        return self._network.random

    # what the program does

    def send(self, pieces: Sequence[Piece]) -> None:
        """One directly after the other. Nothing happens when the connection is no more."""
        if self.is_open:
            network = self._network
            for tap in network.taps:
                tap(self, pieces)
            self.other._put(pieces)
            if network.breaks:
                network.sent(self.other)

    def inject(self, piece: Piece) -> None:
        """Somebody between sends that as if it came from this end."""
        if self.is_open:
            self.other._put([piece])

    def close(self) -> None:
        """The other end hears of it behind everything that was sent."""
        if self.is_open:
            self._forget()
            self.other._put_end()

    # what becomes of it

    def vanish(self) -> None:
        """Its machine is gone: nobody says anything to anybody."""
        if self.is_open:
            self._forget()

    def break_off(self, why: str) -> None:
        """This end is told that the connection is no more; the other one is not, until it sends
        something or its kernel asks."""
        if self.is_open:
            self._forget()
            self._network.world.after(0, self.process, self._tell, why)
            self._probe_soon()

    def _forget(self) -> None:
        self.is_open = False
        self._coming.clear()
        if not self.other.is_open:
            self._network.connections.pop(self.pipe, None)

    def _tell(self, why: str) -> None:
        if self.user is not None:
            self.user.ended(why)

    def _probe_soon(self) -> None:
        other = self.other
        self._network.world.after(other._unacked_ns // 2, other.process, other._probe)

    def _probe(self) -> None:
        """Keep-alive: is there still somebody at the other end?"""
        if self.is_open and not self.other.is_open:
            if self.pipe.carries:
                self._reset()
            else:
                self.other._probe_soon()

    def _reset(self) -> None:
        if self.is_open and self.pipe.carries:
            self._forget()
            self._tell("connection reset by peer")

    def suspect(self, suspicion: int) -> None:
        """Nothing is acknowledged from now on, perhaps."""
        after_ns = self._unacked_ns + self._network.random.randrange(self._unacked_ns // 2)
        self._network.world.after(after_ns, self.process, self._give_up, suspicion)

    def _give_up(self, suspicion: int) -> None:
        if self.is_open and suspicion == self.pipe.suspicion and not self.pipe.carries:
            self.break_off("connection timed out")

    # what comes here

    def _put(self, pieces: Sequence[Piece]) -> None:
        """The other end sends that, now."""
        network = self._network
        if not self.is_open:
            # its kernel answers that there is no such connection
            if self.process.machine.alive:
                delay_ns = 2 * network.latency_ns()
                network.world.after(delay_ns, self.other.process, self.other._reset)
            return
        now_ns = at_ns = network.world.now_ns
        if now_ns != self._burst_ns:  # what is sent at once takes as long
            self._burst_ns = now_ns
            self._latency_ns = network.latency_ns()
        for piece in pieces:
            if type(piece) is memoryview:  # a block's bytes; frames are small
                at_ns = network.take_road(self.road, at_ns, len(piece))
        at_ns += self._latency_ns
        if network.may_harm:
            self._put_harmed(at_ns, pieces)
        else:
            self._schedule(at_ns)
            for piece in pieces:
                self._coming.append((self._arrives_ns, piece))

    def _put_harmed(self, at_ns: int, pieces: Sequence[Piece]) -> None:
        network = self._network
        for piece in pieces:
            cut = network.cut_at(piece)
            piece = network.harm(piece)
            if cut:
                self._schedule(at_ns)
                self._coming.append((self._arrives_ns, piece[:cut]))
                at_ns += network.latency_ns()
            self._schedule(at_ns)
            self._coming.append((self._arrives_ns, piece[cut:] if cut else piece))

    def _put_end(self) -> None:
        if self.is_open:
            self._schedule(self._network.world.now_ns + self._network.latency_ns())
            self._coming.append((self._arrives_ns, None))

    def _schedule(self, at_ns: int) -> None:
        """Something arrives then, or together with what comes shortly before."""
        if at_ns > self._arrives_ns + self._network.step_ns:
            self._arrives_ns = at_ns
            self._network.world.at(at_ns, self.process, self.arrive)

    def arrive(self) -> None:
        """All that should have come by now has, where the path carries."""
        network = self._network
        coming = self._coming
        if not coming or self.is_stuck:
            return
        if self.user is None and network.wires.knocks:
            return  # who is dialled speaks first there: its kernel keeps that until somebody reads
        if network.is_faulty and not (
            network.flows(self.other.machine, self.machine) and network.is_plugged(self.road)
        ):
            return
        now_ns = network.world.now_ns
        pieces: list[Piece] = []
        is_end = False
        while coming and coming[0][0] <= now_ns:
            piece = coming.popleft()[1]
            if piece is None:
                is_end = True
            else:
                pieces.append(piece)
        if pieces and self.user is not None:
            self.user.arrived(pieces)
        if is_end and self.is_open:
            self._forget()
            self._tell("closed by the other side")

    def tear(self) -> None:
        """Of what is on its way here, a part arrives now and nothing behind it ever will."""
        pieces = [piece for _, piece in self._coming if piece is not None]
        self._coming.clear()
        self.is_stuck = False
        left = self._network.random.randrange(1 + sum(len(piece) for piece in pieces))
        while pieces and left:
            piece = pieces.pop(0)[:left]
            left -= len(piece)
            self._coming.append((0, piece))
        self._network.world.after(0, self.process, self.arrive)

    def end_torn(self, why: str) -> None:
        if self.is_open:
            self._forget()
            self._tell(why)


class Pipe:
    """A connection from `ends[0]`, which dialled, to `ends[1]`, between these hosts."""

    def __init__(
        self, network: Network, dialer: SimSocket, other: SimSocket, hosts: tuple[str, str]
    ) -> None:
        self.ends = (dialer, other)
        self.hosts = hosts
        dialer.road, other.road = (hosts[1], hosts[0]), hosts
        here, there = dialer.machine, other.machine
        self.paths = ((here, there), (there, here))
        self.suspicion = 0  # counts
        self._network = network
        dialer.pipe = other.pipe = self
        dialer.other = other
        other.other = dialer
        network.connections[self] = None

    @property
    def carries(self) -> bool:
        """Both ways."""
        network = self._network
        return network.is_plugged(self.hosts) and all(network.carries(*p) for p in self.paths)

    def suspect(self) -> None:
        """A path does not carry any more."""
        self.suspicion += 1
        for end in self.ends:
            end.suspect(self.suspicion)

    def carries_again(self) -> None:
        """A path carries again, or some of it flows again: what is late comes soon."""
        if self.carries:
            self.suspicion += 1
        for end in self.ends:
            if end.is_open:
                self._network.world.after(self._network.latency_ns(), end.process, end.arrive)

    def cut(self, why: str) -> None:
        """Both ends are told, in the middle of whatever is on its way."""
        for end in self.ends:
            if end.is_open:
                end.tear()
        for end in self.ends:
            if end.is_open:
                self._network.world.after(0, end.process, end.end_torn, why)
