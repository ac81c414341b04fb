"""Porch: what comes before the handshake on a connection of the simulated network, where there are
knocks (`Wires.knocks`).

The product's `core/wire/knock.py` and `door.py` decide; what `edge/net/porch.py` does with sockets
and a thread is done here. Who has connected stands at the door until the knock is right, has to go
when somebody comes and it is full, and when its time is over. Comes in: sockets. Goes out: a socket
for each right knock, with what was sent behind it; on the side that dials, whether it was heard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

from keepstep.core.wire.door import Door
from keepstep.core.wire.knock import Knock, Knocker
from keepstep.model.units import S_NS
from keepstep.model.wire import Refused
from keepstep.sim.protocol.wire.pipe import Piece, SimSocket
from keepstep.sim.protocol.world.world import Process

KNOCK_NS = 5 * S_NS

LetIn = Callable[[SimSocket, bytes], None]


class SimPorch:
    """Of one keeper."""

    def __init__(
        self,
        process: Process,
        door: Door[Caller],
        neighbours: Callable[[], AbstractSet[str]],
        let_in: LetIn,
    ) -> None:
        self.process = process
        self._door, self._neighbours, self._let_in = door, neighbours, let_in
        self.callers: dict[Caller, None] = {}

    def receive(self, socket: SimSocket, knock: Knock) -> None:
        """Somebody has connected."""
        caller = Caller(self, socket, knock)
        neighbours = self._neighbours() if self._door.is_full else frozenset[str]()
        leaver = self._door.enter(caller, socket.pipe.hosts[0], neighbours)
        self.callers[caller] = None
        if leaver is not None:
            leaver.go()
        socket.send([knock.opening])
        self.process.after(KNOCK_NS, caller.late)

    def leave(self, caller: Caller) -> None:
        """It is gone, or let in."""
        self._door.leave(caller)
        self.callers.pop(caller, None)

    def let_in(self, caller: Caller, behind: bytes) -> None:
        """It has knocked right, and said that behind it."""
        self.leave(caller)
        self._let_in(caller.socket, behind)


class Caller:
    """Who stands there. `User` to its socket."""

    def __init__(self, porch: SimPorch, socket: SimSocket, knock: Knock) -> None:
        self.socket = socket
        self._porch, self._knock = porch, knock
        socket.user = self

    def arrived(self, pieces: Sequence[Piece]) -> None:
        """See `User`."""
        data = b"".join(map(bytes, pieces))
        while data and self in self._porch.callers:
            taken, data = data[: self._knock.wanted], data[self._knock.wanted :]
            if self._knock.receive(taken) is not None:
                self.go()
            elif self._knock.is_right:
                self._porch.let_in(self, data)

    def ended(self, why: str) -> None:
        """See `User`."""
        self._porch.leave(self)

    def late(self) -> None:
        """Its time is over."""
        if self in self._porch.callers:
            self.go()

    def go(self) -> None:
        """It is sent away."""
        self._porch.leave(self)
        self.socket.close()


class Knocking:
    """The side that dials. `User` to its socket. `then` hears None once it has knocked, or why
    there is nobody to talk to."""

    def __init__(
        self, socket: SimSocket, knocker: Knocker, then: Callable[[str | None], None]
    ) -> None:
        self.socket = socket
        self._knocker, self._then = knocker, then
        self._is_over = False
        socket.user = self

    def begin(self) -> None:
        """Not earlier: there may be an end to it at once."""
        self.socket.send([self._knocker.opening])
        self.socket.process.after(KNOCK_NS, lambda: self.ended("no answer to a knock"))
        if not self.socket.is_open:
            self.ended("closed before the knock was answered")
        self.socket.arrive()  # what came before there was anybody

    def arrived(self, pieces: Sequence[Piece]) -> None:
        """See `User`."""
        data = b"".join(map(bytes, pieces))
        while data and not self._is_over:
            taken, data = data[: self._knocker.wanted], data[self._knocker.wanted :]
            match self._knocker.receive(taken):
                case Refused() as refused:
                    self.ended(refused.why)
                case bytes() as answer:
                    self._is_over = True
                    self.socket.send([answer])
                    self._then(None)
                    if data and self.socket.user is not None:
                        self.socket.user.arrived([data])

    def ended(self, why: str) -> None:
        """See `User`."""
        if not self._is_over:
            self._is_over = True
            self.socket.close()
            self._then(why)
