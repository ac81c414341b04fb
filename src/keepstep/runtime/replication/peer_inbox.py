"""Peer inbox: what other keepers say to this one, seen from its one loop.

Comes in: what the links tell, on threads of theirs. Goes out: events, in the order in which they
came, when the loop takes them; it is woken for that. Only blocks are answered there and then, by
the `BlockTaker` that somebody registered for their snapshot. Messages carry the version of the mesh
they belong to: what is older is dropped, what is newer waits until this node has heard of that mesh
too. A message to this node itself takes the same way.

Invariant: a block is reported to the taker in whose memory it was placed, or to nobody.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from keepstep.model.mesh import Mesh
from keepstep.model.messages.peers import MeshMessage
from keepstep.model.snapshot import Stamp
from keepstep.model.units import S_NS
from keepstep.model.wire import Span
from keepstep.runtime.world import World

MAX_EARLY = 10_000  # messages of a mesh that this node has not heard of yet


class BlockTaker(Protocol):
    """Who takes the blocks of one snapshot. Called on the links' threads: quick, and safe for
    several of them."""

    def place(self, node: int, span: Span) -> memoryview | None:
        """Where these bytes go; None when they are not wanted."""

    def arrived(self, node: int, span: Span, checksum: int) -> None:
        """They are there, and that is their checksum."""


class FromPeer(NamedTuple):
    """A message of that node's keeper."""

    node: int
    message: MeshMessage


class LinkUp(NamedTuple):
    """The link to that node is open, perhaps to another life of its keeper."""

    node: int


class LinkWritable(NamedTuple):
    """A block that the link to that node refused may be tried again."""

    node: int


class LinkOver(NamedTuple):
    """The link to that node is over. No loss: its keeper said goodbye."""

    node: int
    why: str
    is_loss: bool
    mesh_version: int


class LoopCall(NamedTuple):
    """Something that another thread wants done in the loop."""

    call: Callable[[], None]
    mesh_version: int


PeerEvent = FromPeer | LinkUp | LinkWritable | LinkOver | LoopCall


class PeerInbox:
    """Made when the keeper is first asked to listen; knows the others from the first mesh on."""

    def __init__(
        self, world: World, job_hash: bytes, address: tuple[str, int], link_dead_s: float
    ) -> None:
        """Raises KeeperError when the address is not ours or taken."""
        self._wake = world.wake
        self.incarnation = world.clock.wall_ns()
        # A link that ends may mean that only a keeper died: so long another one has to come and
        # answer.
        self.return_ns = round(max(1.0, 0.3 * link_dead_s) * S_NS)
        self._inbox: queue.SimpleQueue[PeerEvent] = queue.SimpleQueue()
        self._early: deque[PeerEvent] = deque(maxlen=MAX_EARLY)
        self._takers: dict[tuple[int, Stamp], BlockTaker] = {}
        # by node: whose place the block that is coming was given; they come one after the other
        self._placed: dict[int, BlockTaker | None] = {}
        self._lock = threading.Lock()
        self.mesh: Mesh | None = None
        self._needed: set[int] = set()
        self._sources: set[int] = set()
        self._links = world.open_links(
            job_hash, self.incarnation, address, round(link_dead_s * S_NS) - self.return_ns, self
        )

    @property
    def address(self) -> tuple[str, int]:
        """Where other keepers reach this one."""
        return self._links.address

    # -- whom we are linked with

    def join(self, mesh: Mesh, with_nodes: set[int]) -> None:
        """Be linked with these nodes of this mesh, in these lives of them."""
        self._links.be(mesh.node, mesh.secret.encode())
        self.mesh = mesh
        self._needed, self._sources = set(), set()
        self.link_with(with_nodes)
        early, self._early = self._early, deque(maxlen=MAX_EARLY)
        for event in early:
            self._put(event)

    def link_with(self, nodes: set[int], to_restore: bool = False) -> None:
        """Be linked with these nodes too, for this mesh or until all is restored. Both ends must
        want it."""
        assert self.mesh is not None
        (self._sources if to_restore else self._needed).update(nodes)
        for node in sorted(nodes - {self.mesh.node}):
            self.link_again(node)

    def link_again(self, node: int) -> None:
        """After its end: the node's next keeper may come."""
        assert self.mesh is not None
        member = self.mesh.members[node]
        self._links.connect(node, (member.host, member.port), member.incarnation)

    def restored(self) -> None:
        """Sources are needed no more: their next lives will not expect this node."""
        self._sources = set()

    def needs(self, node: int) -> bool:
        """Whether the link with that node is one of this mesh, and not what an earlier one or a
        restore has left."""
        return node in self._needed or node in self._sources

    def is_open(self, node: int) -> bool:
        """Whether that node is reached at this moment."""
        return self._links.is_open(node)

    # -- what goes out

    @property
    def mesh_version(self) -> int:
        """Of the present mesh; -1 before the first."""
        return -1 if self.mesh is None else self.mesh.version

    def send(self, node: int, message: MeshMessage) -> bool:
        """False when it could not be taken: no link, or its queue is full."""
        assert self.mesh is not None
        if node == self.mesh.node:
            self._put(FromPeer(node, message))
            return True
        return self._links.send(node, message)

    def send_block(
        self,
        node: int,
        span: Span,
        source: memoryview,
        done: Callable[[str | None], None],
        checksum: int | None,
    ) -> bool:
        """See `ports.Links`."""
        return self._links.send_block(node, span, source, done, checksum)

    def call_in_loop(self, call: Callable[[], None]) -> None:
        """From any thread: have the loop call this, unless another mesh has begun by then."""
        self._put(LoopCall(call, self.mesh_version))

    def counts(self) -> dict[str, int]:
        """See `ports.Links`."""
        return self._links.counts()

    # -- what comes in

    def take(self) -> list[PeerEvent]:
        """All that has come since the last time."""
        taken = []
        while not self._inbox.empty():
            event = self._inbox.get()
            version = _mesh_version(event)
            if self.mesh is None or (version is not None and version > self.mesh.version):
                self._early.append(event)
            elif version is None or version == self.mesh.version:
                taken.append(event)
        return taken

    def _put(self, event: PeerEvent) -> None:
        self._inbox.put(event)
        self._wake()

    def expect(self, rank: int, stamp: Stamp, taker: BlockTaker) -> None:
        """Blocks of that snapshot go there."""
        with self._lock:
            self._takers[(rank, stamp)] = taker

    def expect_no_more(self, taker: BlockTaker) -> None:
        """No block goes there any more, but one that is being written this moment."""
        with self._lock:
            self._takers = {key: known for key, known in self._takers.items() if known is not taker}

    # -- the links call these, on threads of theirs

    def up(self, node: int) -> None:
        """See `ports.Receiver`."""
        self._put(LinkUp(node))

    def message(self, node: int, message: MeshMessage) -> None:
        """See `ports.Receiver`."""
        self._put(FromPeer(node, message))

    def place(self, node: int, span: Span) -> memoryview | None:
        """See `ports.Receiver`."""
        with self._lock:
            taker = self._placed[node] = self._takers.get((span.rank, span.stamp))
        return taker.place(node, span) if taker else None

    def block(self, node: int, span: Span, checksum: int) -> None:
        """See `ports.Receiver`."""
        with self._lock:
            taker = self._takers.get((span.rank, span.stamp))
            # else it lies in the place of one that expects no more
            is_its = self._placed.pop(node, None) is taker
        if taker and is_its:
            taker.arrived(node, span, checksum)

    def writable(self, node: int) -> None:
        """See `ports.Receiver`."""
        self._put(LinkWritable(node))

    def dead(self, node: int, why: str, is_loss: bool) -> None:
        """See `ports.Receiver`."""
        self._put(LinkOver(node, why, is_loss, max(0, self.mesh_version)))

    def close(self) -> None:
        """Say goodbye to all."""
        self._links.close("the job is over here")


def _mesh_version(event: PeerEvent) -> int | None:
    """Of the mesh that an event belongs to; None: it counts in any."""
    match event:
        case FromPeer():
            return event.message.mesh_version
        case LinkOver() | LoopCall():
            return event.mesh_version
        case _:
            return None
