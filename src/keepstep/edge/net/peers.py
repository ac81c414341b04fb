"""Peers: the links of one keeper to the keepers of other nodes, over TCP.

Comes in: which nodes to be linked with and where they listen; messages and blocks for them. Goes
out: calls of the `Receiver`. Of two nodes the one with the lower number dials, so there is never
more than one link between them. A link has one lane for messages and one or more for blocks, each a
TCP connection that is made again whenever it breaks; what was under way is then sent again. A link
that stays away too long, says goodbye, or is superseded by a newer life of its node is ended and
told as `dead`, once.

Never decides what bytes mean or when a link is dead: that is `core/wire/connection.py` and
`core/wire/link.py`, passed in by who builds this. Never queues without bound: what does not fit is
not taken, and the caller is told.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from keepstep.edge.net.channel import BlockLane, Lane, MessageLane
from keepstep.edge.net.tcp import Address, Pacer, TcpOptions, dial, listen, shake_hands
from keepstep.edge.net.traffic import Counts, Done, Gate, Outgoing, Traffic
from keepstep.model.messages.peers import KeeperMessage, LinkGoodbye, Ping
from keepstep.model.units import MIB, S_NS
from keepstep.model.wire import (
    Cut,
    Dead,
    Dial,
    Identity,
    Opened,
    Refusal,
    Refused,
    SendPing,
    Span,
)
from keepstep.ports import Receiver

if TYPE_CHECKING:
    from keepstep.core.wire.connection import Connection
    from keepstep.core.wire.link import Link as Books

log = logging.getLogger("keepstep")

MAX_UNPROVEN = 64  # connections whose other side has not proven itself yet
WATCH_S = 0.1
BYE_S = 1.0
# Said by the peer, dialling again changes nothing. Said so often in a row, because a refusal proves
# nothing: a damaged hello gets one too.
_FINAL = {Refusal.OLD_INCARNATION, Refusal.FORGOTTEN}
FINAL_TIMES = 3

Admit = Callable[[Identity, Dial], Refused | None]
NewConnection = Callable[[Admit, Dial | None], "Connection"]
NewBooks = Callable[[int], "Books[Any]"]


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """`bind` is where this keeper listens and dials from: loopback unless said otherwise. Port 0:
    any that is free."""

    bind: Address = ("127.0.0.1", 0)
    queue_bytes: int = 64 * MIB  # blocks waiting for one node
    tcp: TcpOptions = field(default_factory=TcpOptions)
    pacer: Pacer | None = None
    gate: Gate | None = None


@dataclass(frozen=True, slots=True)
class Carried:
    """A connection was open, and broke."""

    why: str


class Link:
    """One link: its traffic, its lanes, and whether it is over."""

    def __init__(self, traffic: Traffic, address: Address | None, wanted: int) -> None:
        self.traffic = traffic
        self.address = address  # where it is dialled; may move while nobody is there
        self.wanted = wanted  # the incarnation it was made for
        self.id: int | None = None  # the accepting side learns it
        self.messages = MessageLane(traffic)
        self.lanes: list[Lane] = [
            self.messages,
            *(BlockLane(traffic, i) for i in range(len(traffic.books.lanes))),
        ]
        self.ending: str | None = None  # asks the watch to end it
        self.over = threading.Event()

    @property
    def node(self) -> int:
        return self.traffic.node

    @property
    def incarnation(self) -> int:
        """Of who is there, or who is waited for."""
        return self.traffic.peer.incarnation if self.traffic.peer else self.wanted

    def is_with(self, peer: Identity, asked: Dial) -> bool:
        return self.id == asked.link and self.traffic.peer == peer

    def cut(self, why: str) -> None:
        for lane in self.lanes:
            lane.cut(why)


class Peers:
    """All links of this keeper. Safe to call from any thread, but what may end a link (`connect`,
    `fence`, `forget`, `close`) waits for its lanes and is not for a receiver's calls. `close` it at
    the end."""

    def __init__(
        self,
        me: Identity,
        new_connection: NewConnection,
        new_books: NewBooks,
        receiver: Receiver,
        options: PeerOptions,
    ) -> None:
        """Listens at once. Raises OSError when it cannot.

        `new_connection(admit, dial)` is a state machine for one connection, `new_books(now_ns)` the
        books of one link (`core.linkstate.Link` itself will do).
        """
        self.me, self._receiver, self._options = me, receiver, options
        self._new_connection, self._new_books = new_connection, new_books
        self.counts = Counts()
        self._lock = threading.RLock()
        self._links: dict[int, Link] = {}
        self._link_ids = itertools.count(time.monotonic_ns())
        self._expected: set[int] = set()
        # the oldest incarnation, and link of it, that is still listened to; it only grows
        self._least: dict[int, tuple[int, int]] = {}
        self._addresses: dict[int, Address] = {}  # where each was last said to be
        self._unproven = threading.BoundedSemaphore(MAX_UNPROVEN)
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._listener = listen(options.bind, options.tcp)
        self.address: Address = self._listener.getsockname()[:2]
        self._threads = [self._start(self._accept), self._start(self._watch)]

    # what the caller wants

    def connect(self, node: int, address: Address, incarnation: int = 0) -> None:
        """Be linked with that node, in this life of it or a later one: dial it, or wait to be
        dialled.

        A link with an older life ends, without a `dead`: who says this knows. One with this life
        stays, and is dialled at the new address when it breaks. So this may be said again at any
        time. After `dead` the side that dials must say it again.
        """
        assert node != self.me.node
        if self._has_moved(node, address, incarnation):
            self._fence(node, 1 << 63, tell=False)
            with self._lock:
                del self._least[node]
        self._fence(node, incarnation, tell=False)
        with self._lock:
            if self._closing.is_set():
                return
            self._expected.add(node)
            if link := self._links.get(node):
                link.address = address
                return
            link = self._links[node] = self._new_link(node, address, self._least[node][0])
            dials = self.me.node < node
            if dials:
                link.id = next(self._link_ids)
        if dials:
            for index in range(len(link.lanes)):
                self._start(self._dial, link, index)

    def _has_moved(self, node: int, address: Address, incarnation: int) -> bool:
        """Whether another machine has that number now: one at another address, whose clock says
        that it began before. Whoever asks for the link knows that; by incarnations alone it would
        be refused for ever."""
        with self._lock:
            known, self._addresses[node] = self._addresses.get(node), address
            return (
                known is not None
                and known != address
                and incarnation < self._least.get(node, (0, 0))[0]
            )

    def fence(self, node: int, incarnation: int) -> None:
        """Listen to no life of that node before this one; a link with one, or made to wait for one,
        is ended and told as `dead`."""
        self._fence(node, incarnation, tell=True)

    def _fence(self, node: int, incarnation: int, tell: bool) -> None:
        with self._lock:
            self._least[node] = max((incarnation, 0), self._least.get(node, (0, 0)))
            link = self._links.get(node)
        if link is not None and link.incarnation < incarnation:
            self._end(
                link, f"fenced: incarnation {link.incarnation} is older than {incarnation}", tell
            )

    def forget(self, node: int, reason: str) -> None:
        """Say goodbye and expect that node no more. No `dead` is told."""
        with self._lock:
            self._expected.discard(node)
            link = self._links.get(node)
        if link is not None:
            self._say_bye([link], reason)

    def send(self, node: int, message: KeeperMessage) -> bool:
        """False when it was not taken: no link, or its queue is full (`writable` will say when
        not). Raises ValueError."""
        link = self._links.get(node)
        return link is not None and link.traffic.send(message)

    def send_block(
        self, node: int, span: Span, source: memoryview, done: Done, checksum: int | None = None
    ) -> bool:
        """Send `source` from where it lies; it must stand still until `done`. False when it was not
        taken, as for `send`.

        `checksum`: what the bytes should have, if that is known (a slot's table): then they are not
            read here to find out.
        """
        assert source.nbytes == span.length and source.format == "B", (
            f"{source.nbytes} bytes of format {source.format} for {span}"
        )
        link = self._links.get(node)
        return link is not None and link.traffic.send_block(Outgoing(span, source, done, checksum))

    def is_open(self, node: int) -> bool:
        """Is a connection there now, since `up` was told? False while a link is away, which may
        pass."""
        link = self._links.get(node)
        return (
            link is not None and link.traffic.opened.is_set() and link.traffic.books.health.is_open
        )

    def round_trip_ns(self, node: int) -> int | None:
        """The last one measured."""
        link = self._links.get(node)
        return link.traffic.round_trip_ns if link else None

    def close(self, reason: str = "closing") -> None:
        """Say goodbye to all and stop; nothing moves any more when it returns. Not from a
        receiver."""
        with self._lock:
            self._closing.set()
            links = list(self._links.values())
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._say_bye(links, reason)
        self._wake.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    # a link's life

    def _new_link(self, node: int, address: Address | None, wanted: int) -> Link:
        books = self._new_books(time.monotonic_ns())
        o = self._options
        traffic = Traffic(
            node,
            books,
            self._receiver,
            self.counts,
            o.pacer,
            o.queue_bytes,
            o.gate,
            dials=self.me.node < node,
        )
        return Link(traffic, address, wanted)

    def _end(self, link: Link, why: str, tell: bool = True, is_loss: bool = True) -> None:
        """End a link; returns when nothing of it moves any more. Not from a thread that carries one
        of its lanes."""
        if not link.traffic.end(why):
            link.over.wait()
            return
        with self._lock:
            if self._links.get(link.node) is link:
                del self._links[link.node]
        link.cut(why)
        for lane in link.lanes:
            lane.quiet()
        try:
            for block in link.traffic.lost():
                block.done(why)
            if tell:
                self._receiver.dead(link.node, why, is_loss)
        finally:
            link.over.set()
            link.traffic.opened.set()  # lanes that wait for it find that it is over

    def _say_bye(self, links: list[Link], reason: str) -> None:
        for link in links:
            link.traffic.send(LinkGoodbye(reason[:500]))
        until_s = time.monotonic() + BYE_S
        for link in links:
            link.traffic.flushed(max(0.0, until_s - time.monotonic()))
            self._end(link, reason, tell=False)

    def _watch(self) -> None:
        """Ping, cut, end: what the links' health asks for."""
        while not self._closing.is_set():
            self._wake.wait(WATCH_S)
            self._wake.clear()
            with self._lock:
                links = list(self._links.values())
            for link in links:
                with link.traffic.lock:
                    asked = link.traffic.books.health.decide(time.monotonic_ns())
                if link.traffic.bye is not None:
                    self._end(
                        link, f"node {link.node} said goodbye: {link.traffic.bye}", is_loss=False
                    )
                elif link.ending is not None:
                    self._end(link, link.ending)
                elif isinstance(asked, Dead):
                    self._end(link, asked.why)
                elif isinstance(asked, Cut):
                    self.counts.add("silences")
                    link.cut(asked.why)
                elif isinstance(asked, SendPing):
                    link.messages.say(Ping(time.monotonic_ns()))

    def _carry(self, link: Link, index: int, sock: socket.socket, wire: Connection) -> str:
        why = link.lanes[index].carry(sock, wire, wire.take())
        self.counts.add("connections lost")
        self._wake.set()
        log.debug("lane %d to node %d: %s", index, link.node, why)
        return why

    # the side that dials

    def _dial(self, link: Link, index: int) -> None:
        """Keep one lane connected until the link is over."""
        if index:
            link.traffic.opened.wait()
        failures = finals = 0
        while not link.over.is_set():
            ended = self._dial_once(link, index)
            failures = 1 if isinstance(ended, Carried) else failures + 1
            if not isinstance(ended, Carried):
                link.lanes[index].away(str(ended))
            finals = (
                finals + 1
                if isinstance(ended, Refused) and ended.by_peer and ended.reason in _FINAL
                else 0
            )
            if finals == FINAL_TIMES:
                link.ending = str(ended)
                self._wake.set()
            link.over.wait(link.traffic.books.patience.retry_ns(failures) / S_NS)

    def _dial_once(self, link: Link, index: int) -> Carried | Refused | OSError:
        """How it ended: after carrying traffic, or why there was none to carry."""
        assert link.id is not None and link.address is not None
        wire = self._new_connection(
            self._admit_for(link), Dial(link.id, index, link.traffic.opened.is_set())
        )
        try:
            sock = dial(link.address, self._options.bind[0], self._options.tcp)
        except OSError as error:
            return error
        try:
            met = shake_hands(sock, wire, self._options.tcp.handshake_s)
        except OSError as error:
            sock.close()
            return error
        if isinstance(met, Refused):
            sock.close()
            self.counts.refused(met)
            return met
        link.traffic.peer = met.peer
        return Carried(self._carry(link, index, sock, wire))

    def _admit_for(self, link: Link) -> Admit:
        def admit(peer: Identity, asked: Dial) -> Refused | None:
            if link.traffic.ended is not None:
                return Refused(Refusal.FORGOTTEN, link.traffic.ended)
            if peer.node != link.node:
                return Refused(
                    Refusal.NOT_EXPECTED, f"expected node {link.node}, found node {peer.node}"
                )
            if link.traffic.peer is not None and peer != link.traffic.peer:
                return Refused(
                    Refusal.NOT_EXPECTED,
                    f"the link is with incarnation {link.traffic.peer.incarnation}, found "
                    f"{peer.incarnation}",
                )
            return self._too_old(peer)

        return admit

    def _too_old(self, peer: Identity) -> Refused | None:
        if peer.node not in self._expected:
            return Refused(Refusal.NOT_EXPECTED, f"node {peer.node} is not expected")
        least = self._least[peer.node][0]
        if peer.incarnation < least:
            return Refused(
                Refusal.OLD_INCARNATION,
                f"expected incarnation {least} of node {peer.node} or later, found "
                f"{peer.incarnation}",
            )
        return None

    # the side that is dialled

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                # it was shut down, or the stranger is gone already, or no descriptor is left
                self._closing.wait(WATCH_S)
                continue
            if self._unproven.acquire(blocking=False):
                self._start(self._welcome, sock)
            else:
                self.counts.refused(
                    Refused(Refusal.BUSY, f"{MAX_UNPROVEN} connections are unproven")
                )
                sock.close()

    def _welcome(self, sock: socket.socket) -> None:
        wire = self._new_connection(self._admit, None)
        try:
            met = shake_hands(sock, wire, self._options.tcp.handshake_s)
        except OSError:
            self.counts.add("handshakes broken")
            sock.close()
            return
        finally:
            self._unproven.release()
        link = None if isinstance(met, Refused) else self._attach(met)
        if isinstance(met, Refused):
            self.counts.refused(met)
        if link is None or isinstance(met, Refused):
            sock.close()
            return
        link.lanes[met.dial.lane].cut("replaced by a new connection")
        self._carry(link, met.dial.lane, sock, wire)

    def _admit(self, peer: Identity, asked: Dial) -> Refused | None:
        """Is this somebody we would talk to, if they prove it?"""
        with self._lock:
            if peer.node >= self.me.node:
                return Refused(
                    Refusal.NOT_EXPECTED, f"node {peer.node} is dialled from here, not from there"
                )
            if refused := self._too_old(peer):
                return refused
            link = self._links.get(peer.node)
            if link is not None and asked.lane >= len(link.lanes):
                return Refused(
                    Refusal.NOT_EXPECTED, f"lane {asked.lane}, there are {len(link.lanes)}"
                )
            if not (link is not None and link.is_with(peer, asked)) and self._is_over(peer, asked):
                return Refused(
                    Refusal.FORGOTTEN, f"link {asked.link:x} with node {peer.node} is over"
                )
        return None

    def _is_over(self, peer: Identity, asked: Dial) -> bool:
        """Can this not be a new link? A connection of an ended one may have been under way for
        long: it does not replace a later one."""
        return (
            bool(asked.lane)
            or asked.resuming
            or (peer.incarnation, asked.link) < self._least[peer.node]
        )

    def _attach(self, met: Opened) -> Link | None:
        """The link this connection belongs to: the present one, or a new one, which ends the
        present one. None when that is over."""
        peer, asked = met.peer, met.dial
        while True:
            with self._lock:
                if self._closing.is_set() or self._too_old(peer):
                    return None
                link = self._links.get(peer.node)
                if link is not None and link.is_with(peer, asked):
                    return link
                if self._is_over(peer, asked):
                    return None
                if link is None:
                    link = self._links[peer.node] = self._new_link(
                        peer.node, None, peer.incarnation
                    )
                if link.id is None:
                    link.id, link.traffic.peer = asked.link, peer
                    self._least[peer.node] = (peer.incarnation, asked.link)
                    return link
            self._end(
                link,
                f"replaced by a new link with incarnation {peer.incarnation} of node {peer.node}",
            )

    def _start(self, run: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=run, args=args, name=run.__name__.strip("_"), daemon=True)
        thread.start()
        return thread
