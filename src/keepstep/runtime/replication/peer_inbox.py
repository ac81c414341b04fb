"""Peer inbox: what other keepers say to this one, seen from its one loop.

Comes in: what the links tell, on threads of theirs. Goes out: events, in the order in which they
came, when the loop takes them; it is woken for that. Only blocks are answered there and then, by
the `BlockTaker` that somebody registered for their snapshot. Messages carry the version of the mesh
they belong to: what is older is dropped, what is newer waits until this node has joined that mesh
too.

Invariant: a block is reported to the taker in whose memory it was placed, or to nobody.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from keepstep.model.messages.peers import MeshMessage
from keepstep.model.snapshot import Stamp
from keepstep.model.units import S_NS
from keepstep.model.wire import Part, Span
from keepstep.runtime.keeper_world import KeeperWorld

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
    """Made when the keeper is first asked to listen; a `MeshLinks` tells it which mesh is
    joined."""

    def __init__(
        self,
        world: KeeperWorld,
        job_hash: bytes,
        address: tuple[str, int],
        link_dead_s: float,
        after: int = 0,
    ) -> None:
        """`link_dead_s`: how long a node may be away before it is lost; `after`: the incarnation of
        the keeper before. Raises KeeperError when the address is not this machine's, or taken."""
        self._wake = world.wake
        self.incarnation = max(world.clock.wall_ns(), after + 1)  # the clock may have been set
        # A link that ends may mean that only a keeper died: so long another one has to come and
        # answer.
        self.return_ns = round(max(1.0, 0.3 * link_dead_s) * S_NS)
        self.mesh_version = -1  # of the mesh that was joined last
        self._events: queue.SimpleQueue[PeerEvent] = queue.SimpleQueue()
        self._early: deque[PeerEvent] = deque(maxlen=MAX_EARLY)
        self._takers: dict[tuple[int, Stamp], BlockTaker] = {}
        self._sums_taker: BlockTaker | None = None
        # by node and bytes: whose place the block that is coming was given. Several come at a time,
        # on as many streams, but not the same bytes twice
        self._placed: dict[tuple[int, Span], BlockTaker | None] = {}
        self._lock = threading.Lock()
        dead_ns = round(link_dead_s * S_NS) - self.return_ns
        self.links = world.open_links(job_hash, self.incarnation, address, dead_ns, self)

    @property
    def address(self) -> tuple[str, int]:
        """Where other keepers reach this one."""
        return self.links.address

    def join(self, mesh_version: int) -> None:
        """From now on messages of this mesh count, and those that came early are events."""
        self.mesh_version = mesh_version
        early, self._early = self._early, deque(maxlen=MAX_EARLY)
        for event in early:
            self.put(event)

    def counts(self) -> dict[str, int]:
        """What has crossed the links and what was refused, by name: for people."""
        return self.links.counts()

    # -- what comes in

    def take(self) -> list[PeerEvent]:
        """All that has come since the last time."""
        taken = []
        events, present = self._events, self.mesh_version
        while not events.empty():
            event = events.get()
            version = _mesh_version(event)
            if version is None or version == present:
                taken.append(event)
            elif version > present:
                self._early.append(event)
        return taken

    def put(self, event: PeerEvent) -> None:
        """Have the loop take this too. From any thread."""
        self._events.put(event)
        self._wake()

    def expect(self, rank: int, stamp: Stamp, taker: BlockTaker) -> None:
        """Blocks of that snapshot go there."""
        with self._lock:
            self._takers[(rank, stamp)] = taker

    def expect_no_more(self, taker: BlockTaker) -> None:
        """No block goes there any more, but one that is being written this moment."""
        with self._lock:
            self._takers = {key: known for key, known in self._takers.items() if known is not taker}

    def expect_sums(self, taker: BlockTaker | None) -> None:
        """Sums go there, of whatever snapshot; None: nobody wants any."""
        with self._lock:
            self._sums_taker = taker

    def _taker_of(self, span: Span) -> BlockTaker | None:
        if span.part is Part.SUM:
            return self._sums_taker
        return self._takers.get((span.rank, span.stamp))

    # -- the links call these, on threads of theirs

    def up(self, node: int) -> None:
        """See `ports.Receiver`."""
        with self._lock:  # of what broke off over an earlier link nothing comes any more
            self._placed = {key: taker for key, taker in self._placed.items() if key[0] != node}
        self.put(LinkUp(node))

    def message(self, node: int, message: MeshMessage) -> None:
        """See `ports.Receiver`."""
        self.put(FromPeer(node, message))

    def place(self, node: int, span: Span) -> memoryview | None:
        """See `ports.Receiver`."""
        with self._lock:
            taker = self._placed[node, span] = self._taker_of(span)
        return taker.place(node, span) if taker else None

    def block(self, node: int, span: Span, checksum: int) -> None:
        """See `ports.Receiver`."""
        with self._lock:
            taker = self._taker_of(span)
            # else it lies in the place of one that expects no more
            is_its = self._placed.pop((node, span), None) is taker
        if taker and is_its:
            taker.arrived(node, span, checksum)

    def writable(self, node: int) -> None:
        """See `ports.Receiver`."""
        self.put(LinkWritable(node))

    def dead(self, node: int, why: str, is_loss: bool) -> None:
        """See `ports.Receiver`."""
        self.put(LinkOver(node, why, is_loss, self.mesh_version))

    def close(self) -> None:
        """Say goodbye to all."""
        self.links.close("the job is over here")


def _mesh_version(event: PeerEvent) -> int | None:
    """Of the mesh that an event belongs to; None: it counts in any."""
    if isinstance(event, FromPeer):
        return event.message.mesh_version
    if isinstance(event, LinkOver | LoopCall):
        return event.mesh_version
    return None
