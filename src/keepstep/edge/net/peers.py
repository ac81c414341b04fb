"""Peers: the links of one keeper to the keepers of other nodes, over TCP.

Comes in: which nodes to be linked with and where they listen; messages and blocks for them. Goes
out: calls of the `Receiver`. What is decided about links is decided by the table of links
(`core/wire/link_table.py`), which whoever builds this brings; here are the threads and sockets: one
thread for all who connect until they have knocked (`porch.py`), one that asks the table what time
asks for, one for each channel that is dialled from here, and two for each connection
(`carrier.py`).

Never queues without bound: what does not fit is not taken, and the caller is told.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from keepstep.edge.net.buffer_carrier import BufferCarrier
from keepstep.edge.net.carrier import Carrier
from keepstep.edge.net.nixl_buffers import NixlBuffers
from keepstep.edge.net.porch import Household, Porch, knock_at
from keepstep.edge.net.tcp import Pacer, TcpOptions, dial, listen
from keepstep.model.links import LinkCount
from keepstep.model.messages.peers import MeshMessage
from keepstep.model.units import S_NS
from keepstep.model.wire import MAX_AT_DOOR, Address, Identity, Refusal, Refused, Span

if TYPE_CHECKING:
    from keepstep.core.wire.link import PeerLink
    from keepstep.core.wire.link_table import LinkTable, Shell
    from keepstep.core.wire.roads import Road

log = logging.getLogger("keepstep")

# Connections whose other side has knocked right, and not proven itself yet. The table keeps fewer,
# and ends others; here they count until their threads have ended.
MAX_UNPROVEN = 2 * MAX_AT_DOOR
WATCH_S = 0.1
BYE_S = 1.0
# the part of a handshake's time that one of several roads may take to answer at all
ROAD_RATIO = 0.3

NewTable = Callable[["Shell"], "LinkTable"]
Done = Callable[[str | None], None]


def nobody_told(source: str, why: str) -> None:
    """For who does not want to know."""


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """`bind` is where this keeper listens and dials from: loopback unless said otherwise. Port 0:
    any that is free. `more`: likewise, on other interfaces of the node. `pacer`: everything sent
    together keeps to its rate. `buffers`: blocks cross by them where the other side has some,
    too. `refused`: called, on a thread of this, with an address from which somebody came who did
    not knock right, and why."""

    bind: Address = ("127.0.0.1", 0)
    more: tuple[Address, ...] = ()
    tcp: TcpOptions = field(default_factory=TcpOptions)
    pacer: Pacer | None = None
    buffers: NixlBuffers | None = None
    refused: Callable[[str, str], None] = nobody_told


class Peers:
    """All links of this keeper. Safe to call from any thread, but what may end a link (`connect`,
    `fence`, `forget`, `close`) waits until nothing of it moves, and is not for a receiver's calls.
    `close` it at the end."""

    def __init__(self, new_table: NewTable, options: PeerOptions) -> None:
        """Listens at once. Raises OSError when it cannot.

        `new_table(self)` is the table of links, with locks of its own.
        """
        self._options = options
        self._table = new_table(self)
        self._unproven = threading.BoundedSemaphore(MAX_UNPROVEN)
        self._closing = threading.Event()
        self._news = threading.Condition()  # of links that have ended or are over
        self._listeners: list[socket.socket] = []
        try:
            for address in (options.bind, *options.more):
                self._listeners.append(listen(address, options.tcp))
        except OSError:
            self._close_listeners()
            raise
        self.addresses: tuple[Address, ...] = tuple(
            listener.getsockname()[:2] for listener in self._listeners
        )
        table = self._table
        household = Household(
            door=table.new_door(),
            new_knock=table.knock,
            refusal_record=table.refusal_record,
            neighbours=table.neighbours,
            let_in=self._let_in,
            refused=self._sent_away,
            hung_up=self._hung_up,
        )
        self._porch = Porch(self._listeners, household, options.tcp.handshake_s)
        self._watcher = self._start(self._watch)

    @property
    def address(self) -> Address:
        """The one that others are told."""
        return self.addresses[0]

    @property
    def me(self) -> Identity:
        return self._table.me

    # what the caller wants: see `LinkTable`

    def begin_mesh(self) -> None:
        self._table.begin_mesh()

    def connect(self, node: int, address: Address, incarnation: int = 0) -> None:
        ended = self._table.connect(node, address, incarnation, time.monotonic_ns())
        if ended is not None:
            self._until(lambda: ended.is_over)

    def fence(self, node: int, incarnation: int) -> None:
        ended = self._table.fence(node, incarnation)
        if ended is not None:
            self._until(lambda: ended.is_over)

    def forget(self, node: int, reason: str) -> None:
        """Say goodbye and expect that node no more. No `dead` is told."""
        self._leave(self._table.say_bye(reason, node), reason)

    def send(self, node: int, message: MeshMessage) -> bool:
        return self._table.send(node, message)

    def send_block(
        self, node: int, span: Span, source: memoryview, done: Done, checksum: int | None = None
    ) -> bool:
        return self._table.send_block(node, span, source, done, checksum)

    def is_open(self, node: int) -> bool:
        return self._table.is_open(node)

    def sent_counts(self) -> dict[tuple[int, int], LinkCount]:
        return self._table.sent_counts()

    def damaged(self) -> dict[int, int]:
        return self._table.counts.damaged()

    def counts(self) -> dict[str, int]:
        return self._table.counts.snapshot()

    def close(self, reason: str = "closing") -> None:
        """Say goodbye to all and stop; nothing moves any more when it returns. Not from a
        receiver."""
        self._closing.set()
        self._porch.close()
        self._leave(self._table.say_bye(reason), reason)
        self._until(lambda: self._table.is_quiet)
        self._watcher.join()
        self._close_listeners()

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()

    def _leave(self, links: list[PeerLink], reason: str) -> None:
        self._until(lambda: all(link.is_flushed for link in links), BYE_S)
        self._table.leave(links, reason)
        self._until(lambda: all(link.is_over for link in links))

    # for the table: see `Shell`

    def dial(self, link: PeerLink, index: int) -> None:
        self._start(self._keep_dialled, link, index)

    def changed(self) -> None:
        with self._news:
            self._news.notify_all()

    def _until(self, holds: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Wait until that is so; False when it was not in time."""
        with self._news:
            return self._news.wait_for(holds, limit_s)

    # threads

    def _watch(self) -> None:
        while not self._closing.wait(WATCH_S):
            self._table.tick(time.monotonic_ns())

    def _keep_dialled(self, link: PeerLink, index: int) -> None:
        """Keep one channel connected until the link ends."""
        while (delay_ns := link.redial_ns(index)) is not None:
            if not self._until(lambda: link.ended is not None, delay_ns / S_NS):
                self._dial_once(link, index)

    def _dial_once(self, link: PeerLink, index: int) -> None:
        sock = None
        try:
            sock = self._reach(link.road(index))
            self._knock(sock)
        except OSError as error:
            if sock is not None:
                sock.close()
            is_stranger = sock is not None  # there is somebody, who has proven nothing
            self._table.unreachable(link, index, str(error), time.monotonic_ns(), is_stranger)
            return
        carrier = self._new_carrier(sock)
        endpoint = self._table.dialled(link, index, carrier)
        carrier.carry(endpoint, self._options.tcp.handshake_s)
        log.debug("channel %d to node %d: %s", index, link.node, endpoint.closing)

    def _reach(self, road: Road) -> socket.socket:
        """A new connection to there. Raises OSError."""
        options = self._options.tcp
        within_s = options.handshake_s * (1 if road.is_only else ROAD_RATIO)
        return dial(road.target, road.source, options, within_s)

    def _knock(self, sock: socket.socket) -> None:
        """Prove to who answered there that this side may talk. Raises OSError."""
        refused = knock_at(sock, self._table.knocker(), self._options.tcp.handshake_s)
        if refused is not None:
            self._table.counts.refused(refused)
            raise ConnectionError(str(refused))

    def _let_in(self, sock: socket.socket, source: str) -> None:
        """Somebody from there has knocked right."""
        if self._unproven.acquire(blocking=False):
            self._start(self._welcome, sock, source)
            return
        why = f"{MAX_UNPROVEN} connections are unproven"
        self._table.counts.refused(Refused(Refusal.BUSY, why))
        sock.close()

    def _sent_away(self, source: str, why: Refused) -> None:
        self._table.counts.refused(why)
        self._options.refused(source, str(why))

    def _hung_up(self) -> None:
        self._table.counts.add("handshakes broken")

    def _welcome(self, sock: socket.socket, source: str) -> None:
        carrier = self._new_carrier(sock)
        endpoint = self._table.accepted(carrier, source)
        carrier.carry(endpoint, self._options.tcp.handshake_s, self._unproven.release)

    def _new_carrier(self, sock: socket.socket) -> Carrier:
        options, dscp = self._options, self._options.tcp.copy_dscp
        if options.buffers is None:
            return Carrier(sock, options.pacer, dscp)
        return BufferCarrier(sock, options.buffers, options.tcp.unacked_s, options.pacer, dscp)

    def _start(self, run: Callable[..., None], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=run, args=args, name=run.__name__.strip("_"), daemon=True)
        thread.start()
        return thread
