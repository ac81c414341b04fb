"""Porch: where those wait who have connected to a keeper and not knocked right yet
(`core/wire/knock.py`).

Comes in: sockets that listen. Goes out: a connected socket for each right knock, and who was sent
away, and why. All of it on one thread that waits for nobody: a connection is a socket and two short
texts here, and there are at most as many as the door has places. When one more comes somebody goes
(`core/wire/door.py`); who has not knocked right in time goes, too.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keepstep.model.units import S_NS
from keepstep.model.wire import MAX_AT_DOOR, Refusal, Refused

if TYPE_CHECKING:
    from keepstep.core.wire.door import Door
    from keepstep.core.wire.knock import Knock, Knocker

PAUSE_S = 0.1  # when the machine gives no more descriptors
MOST_UNHEARD = 4096
BUSY = Refused(Refusal.BUSY, f"{MAX_AT_DOOR} have not knocked yet, and another one has come")


@dataclass(slots=True, eq=False)
class Visitor:
    """Somebody who has connected from that address. `is_refused`: they were told why, and nothing
    that they say is heard; were the socket closed before they hang up, it might not reach them."""

    sock: socket.socket
    source: str
    knock: Knock
    until_ns: int
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class Household:
    """Who lives behind the porch. `refused`: called with an address, and why somebody from there
    was sent away; `hung_up`: somebody has gone by themselves. All on the porch's thread."""

    door: Door[Visitor]
    new_knock: Callable[[], Knock]
    refusal_record: Callable[[Refusal], bytes]
    neighbours: Callable[[], AbstractSet[str]]
    let_in: Callable[[socket.socket, str], None]
    refused: Callable[[str, Refused], None]
    hung_up: Callable[[], None]


class Porch:
    """Of one keeper, before all its addresses."""

    def __init__(
        self, listeners: Sequence[socket.socket], household: Household, knock_s: float
    ) -> None:
        """`knock_s`: so long each has."""
        self._household = household
        self._knock_s = knock_s
        self._door = household.door
        self._visitors: dict[Visitor, None] = {}  # in the order in which they have to go
        self._is_over = False
        self._selector = selectors.DefaultSelector()
        self._bell, self._rings = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._bell, selectors.EVENT_READ)
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, listener)
        self._thread = threading.Thread(target=self._run, name="porch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send all away, and let nobody in any more. The listeners stay their owner's. May be said
        again."""
        if self._is_over:
            return
        self._is_over = True
        os.write(self._rings, b"\0")
        self._thread.join()
        for visitor in list(self._visitors):
            self._leave(visitor)
            visitor.sock.close()
        self._selector.close()
        os.close(self._bell)
        os.close(self._rings)

    def _run(self) -> None:
        while not self._is_over:
            for key, _ in self._selector.select(self._pause_s()):
                match key.data:
                    case Visitor() as visitor:
                        self._hear(visitor)
                    case socket.socket() as listener:
                        self._accept(listener)
            now_ns = time.monotonic_ns()
            for visitor in [each for each in self._visitors if each.until_ns <= now_ns]:
                why = f"no knock within {self._knock_s} s"
                self._send_away(visitor, Refused(Refusal.LATE, why))

    def _pause_s(self) -> float | None:
        first = next(iter(self._visitors), None)
        return None if first is None else max(0, first.until_ns - time.monotonic_ns()) / S_NS

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, (source, *_) = listener.accept()
        except BlockingIOError:  # the stranger is gone already
            return
        except OSError:  # no descriptor is left, or it is shut down
            time.sleep(PAUSE_S)
            return
        sock.setblocking(False)
        until_ns = time.monotonic_ns() + round(self._knock_s * S_NS)
        visitor = Visitor(sock, source, self._household.new_knock(), until_ns)
        neighbours = self._household.neighbours() if self._door.is_full else frozenset[str]()
        leaver = self._door.enter(visitor, source, neighbours)
        self._visitors[visitor] = None
        self._selector.register(sock, selectors.EVENT_READ, visitor)
        if leaver is not None:
            self._send_away(leaver, BUSY)
        with contextlib.suppress(OSError):  # it is gone: heard next
            sock.send(visitor.knock.opening)

    def _hear(self, visitor: Visitor) -> None:
        if visitor not in self._visitors:  # it had to go for one that has just come
            return
        try:
            data = visitor.sock.recv(MOST_UNHEARD if visitor.is_refused else visitor.knock.wanted)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._send_away(visitor, None)
        elif visitor.is_refused:
            return
        elif refused := visitor.knock.receive(data):
            self._refuse(visitor, refused)
        elif visitor.knock.is_right:
            self._leave(visitor)
            visitor.sock.setblocking(True)
            self._household.let_in(visitor.sock, visitor.source)

    def _refuse(self, visitor: Visitor, refused: Refused) -> None:
        if refused.reason is Refusal.STRANGER:
            self._send_away(visitor, refused)
            return
        visitor.is_refused = True
        self._household.refused(visitor.source, refused)
        with contextlib.suppress(OSError):
            visitor.sock.send(self._household.refusal_record(refused.reason))
            visitor.sock.shutdown(socket.SHUT_WR)

    def _send_away(self, visitor: Visitor, why: Refused | None) -> None:
        """None: it has hung up."""
        self._leave(visitor)
        visitor.sock.close()
        if visitor.is_refused:  # and counted
            return
        if why is None:
            self._household.hung_up()
        else:
            self._household.refused(visitor.source, why)

    def _leave(self, visitor: Visitor) -> None:
        self._selector.unregister(visitor.sock)
        del self._visitors[visitor]
        self._door.leave(visitor)


def knock_at(sock: socket.socket, knocker: Knocker, within_s: float) -> Refused | None:
    """Be the one who knocks, on a connection that was dialled; why the other side cannot be talked
    to, if it is seen here. Raises OSError."""
    deadline_ns = time.monotonic_ns() + round(within_s * S_NS)
    sock.settimeout(within_s)
    sock.sendall(knocker.opening)
    while knocker.wanted:
        left_s = (deadline_ns - time.monotonic_ns()) / S_NS
        if left_s <= 0:
            raise TimeoutError(f"no answer to a knock within {within_s} s")
        sock.settimeout(left_s)
        data = sock.recv(knocker.wanted)
        if not data:
            raise ConnectionError("closed before the knock was answered")
        match knocker.receive(data):
            case Refused() as refused:
                return refused
            case bytes() as answer:
                sock.sendall(answer)
    sock.settimeout(None)
    return None
