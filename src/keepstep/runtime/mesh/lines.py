"""Lines: this keeper's links to others, seen from its one loop.

Whatever the links' threads tell is put into an inbox that wakes the loop; only blocks are answered on those threads, by the `Receiver`
that somebody registered for their snapshot. Messages carry the round they belong to: what is older is dropped, what is newer waits until
this node has heard of that round too. A message to this node itself takes the same way.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from keepstep.config import Settings
from keepstep.core.linkstate import Link as Books
from keepstep.core.linkstate import Patience
from keepstep.core.wire import NONCE_BYTES, Connection
from keepstep.edge.peer import SAID_GOODBYE, PeerOptions, Peers
from keepstep.edge.tcp import TcpOptions
from keepstep.errors import KeeperError
from keepstep.model.mesh import Mesh
from keepstep.model.snapshot import Stamp
from keepstep.model.units import MS_NS, S_NS
from keepstep.model.wire import Identity, Message, Span

Later = Callable[[Callable[[], Any], Callable[[Any], None]], None]  # (work for another thread, what the loop does with its result)

MAX_MESSAGES = 10_000
MAX_EARLY = 10_000  # messages of a round that this node has not heard of yet


class Receiver(Protocol):
    """Takes the blocks of one snapshot. Called on the links' threads: quick, and safe for several of them."""

    def place(self, node: int, span: Span) -> memoryview | None: ...

    def arrived(self, node: int, span: Span, checksum: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Heard:
    """What the loop is told: a message, or a link's beginning (`up`) or end (`dead`; `left` after a goodbye)."""

    node: int
    kind: str
    fields: dict[str, Any]


class Lines:
    """Made when the keeper is first asked to listen; knows the others from the first mesh on."""

    def __init__(self, settings: Settings, job_hash: bytes, host: str, port: int, incarnation: int) -> None:
        """Reserves the port. Raises KeeperError when the address is not ours or taken."""
        self._settings, self._job_hash, self.incarnation = settings, job_hash, incarnation
        self._reserved: socket.socket | None = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # Bound and not listening: the listener can bind beside it once the node's number is known.
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._reserved.bind((host, port))
        except OSError as error:
            self._reserved.close()
            raise KeeperError(f"host: expected an address of this machine with port {port} free, found {host}: {error.strerror}") from error
        # A link that ends may mean that only a keeper died: so long another one has to come and answer.
        self.return_ns = round(max(1.0, 0.3 * settings.link_dead_s) * S_NS)
        self.address: tuple[str, int] = self._reserved.getsockname()[:2]
        self._inbox: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._early: deque[Heard] = deque(maxlen=MAX_EARLY)
        self._receivers: dict[tuple[int, Stamp], Receiver] = {}
        self._lock = threading.Lock()
        self._peers: Peers | None = None
        self.mesh: Mesh | None = None

    def fileno(self) -> int:
        return self._wake

    # -- whom we are linked with

    def join(self, mesh: Mesh, with_nodes: set[int]) -> None:
        """Be linked with these nodes of this round, in these lives of them."""
        if self._peers is not None and self.mesh is not None and (self.mesh.node, self.mesh.secret) != (mesh.node, mesh.secret):
            self._peers.close("another number")
            self._peers = None
        self.mesh = mesh
        self._peers = self._peers or self._open(mesh)
        self.link_with(with_nodes)
        early, self._early = self._early, deque(maxlen=MAX_EARLY)
        for heard in early:
            self._put(heard)

    def link_with(self, nodes: set[int]) -> None:
        """Be linked with these nodes too. Both ends must want it."""
        assert self.mesh is not None and self._peers is not None
        for node in nodes - {self.mesh.node}:
            member = self.mesh.members[node]
            self._peers.connect(node, (member.host, member.port), member.incarnation)

    def _open(self, mesh: Mesh) -> Peers:
        me = Identity(self._job_hash, mesh.node, self.incarnation)
        secret, dead_ns = mesh.secret.encode(), round(self._settings.link_dead_s * S_NS) - self.return_ns
        silence_ns = min(5 * S_NS, dead_ns // 2)
        retry_ns = min(S_NS, dead_ns // 8)
        patience = Patience(silence_ns // 4, silence_ns, dead_ns, retry_first_ns=min(50 * MS_NS, retry_ns), retry_most_ns=retry_ns)
        options = PeerOptions(bind=self.address, tcp=TcpOptions(unacked_s=silence_ns / S_NS))
        peers = Peers(
            me,
            lambda admit, dial: Connection(me, secret, os.urandom(NONCE_BYTES), admit, dial),
            lambda now_ns: Books(now_ns, patience=patience, max_messages=MAX_MESSAGES),
            self,
            options,
        )
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None
        return peers

    def is_open(self, node: int) -> bool:
        return self._peers is not None and self._peers.is_open(node)

    # -- what goes out

    def send(self, node: int, kind: str, **fields: Any) -> bool:
        """False when it could not be taken: no link, or its queue is full."""
        assert self.mesh is not None and self._peers is not None
        fields = {"round": self.mesh.round, **fields}
        if node == self.mesh.node:
            self._put(Heard(node, kind, fields))
            return True
        return self._peers.send(node, Message(kind, fields))

    def send_block(self, node: int, span: Span, source: memoryview, done: Callable[[str | None], None], checksum: int | None) -> bool:
        assert self._peers is not None
        return self._peers.send_block(node, span, source, done, checksum)

    def call_in_loop(self, call: Callable[[], None]) -> None:
        """From any thread: have the loop call this, unless another round has begun by then."""
        assert self.mesh is not None
        self._put(Heard(self.mesh.node, "call", {"round": self.mesh.round, "call": call}))

    def counts(self) -> dict[str, int]:
        return self._peers.counts.snapshot() if self._peers else {}

    # -- what comes in

    def take(self) -> list[Heard]:
        """All that has come since the last time."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        heard = []
        while not self._inbox.empty():
            one = self._inbox.get()
            round_ = one.fields.get("round")
            if self.mesh is None or (round_ is not None and round_ > self.mesh.round):
                self._early.append(one)
            elif round_ is None or round_ == self.mesh.round:
                heard.append(one)
        return heard

    def _put(self, heard: Heard) -> None:
        self._inbox.put(heard)
        os.eventfd_write(self._wake, 1)

    def expect(self, rank: int, stamp: Stamp, receiver: Receiver) -> None:
        """Blocks of that snapshot go there."""
        with self._lock:
            self._receivers[(rank, stamp)] = receiver

    def expect_no_more(self, receiver: Receiver) -> None:
        with self._lock:
            self._receivers = {key: known for key, known in self._receivers.items() if known is not receiver}

    # -- the links' threads call these

    def up(self, peer: Identity) -> None:
        self._put(Heard(peer.node, "up", {}))

    def message(self, node: int, message: Message) -> None:
        self._put(Heard(node, message.kind, dict(message.fields)))

    def place(self, node: int, span: Span) -> memoryview | None:
        with self._lock:
            receiver = self._receivers.get((span.rank, span.stamp))
        return receiver.place(node, span) if receiver else None

    def block(self, node: int, span: Span, checksum: int) -> None:
        with self._lock:
            receiver = self._receivers.get((span.rank, span.stamp))
        if receiver:
            receiver.arrived(node, span, checksum)

    def writable(self, node: int) -> None:
        self._put(Heard(node, "writable", {}))

    def dead(self, node: int, why: str) -> None:
        round_ = self.mesh.round if self.mesh is not None else 0
        self._put(Heard(node, "left" if SAID_GOODBYE in why else "dead", {"round": round_, "why": why}))

    def close(self) -> None:
        if self._peers is not None:
            self._peers.close("the job is over here")
        if self._reserved is not None:
            self._reserved.close()
        os.close(self._wake)
