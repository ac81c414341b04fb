"""Lines: this keeper's links to others, seen from its one loop.

Whatever the links tell, on threads of theirs, is put into an inbox, and the loop is woken; only
blocks are answered there and then, by the `Taker` that somebody registered for their snapshot.
Messages carry the round they belong to: what is older is dropped, what is newer waits until this
node has heard of that round too. A message to this node itself takes the same way.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from keepstep.model.mesh import Mesh
from keepstep.model.snapshot import Stamp
from keepstep.model.units import S_NS
from keepstep.model.wire import Message, Span
from keepstep.runtime.world import World

MAX_EARLY = 10_000  # messages of a round that this node has not heard of yet


class Taker(Protocol):
    """Who takes the blocks of one snapshot. Called on the links' threads: quick, and safe for
    several of them."""

    def place(self, node: int, span: Span) -> memoryview | None: ...

    def arrived(self, node: int, span: Span, checksum: int) -> None: ...


class Heard(NamedTuple):
    """What the loop is told: a message, or a link's beginning (`up`) or end (`dead`; `left` after a
    goodbye)."""

    node: int
    kind: str
    fields: dict[str, Any]


class Lines:
    """Made when the keeper is first asked to listen; knows the others from the first mesh on."""

    def __init__(
        self, world: World, job_hash: bytes, address: tuple[str, int], link_dead_s: float
    ) -> None:
        """Raises KeeperError when the address is not ours or taken."""
        self._wake, self.incarnation = world.wake, world.clock.wall_ns()
        # A link that ends may mean that only a keeper died: so long another one has to come and
        # answer.
        self.return_ns = round(max(1.0, 0.3 * link_dead_s) * S_NS)
        self._inbox: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        self._early: deque[Heard] = deque(maxlen=MAX_EARLY)
        self._takers: dict[tuple[int, Stamp], Taker] = {}
        # by node: whose place the block that is coming was given; they come one after the other
        self._placed: dict[int, Taker | None] = {}
        self._lock = threading.Lock()
        self.mesh: Mesh | None = None
        self._needed: set[int] = set()
        self._sources: set[int] = set()
        self._links = world.open_links(
            job_hash, self.incarnation, address, round(link_dead_s * S_NS) - self.return_ns, self
        )

    @property
    def address(self) -> tuple[str, int]:
        return self._links.address

    # -- whom we are linked with

    def join(self, mesh: Mesh, with_nodes: set[int]) -> None:
        """Be linked with these nodes of this round, in these lives of them."""
        self._links.be(mesh.node, mesh.secret.encode())
        self.mesh = mesh
        self._needed, self._sources = set(), set()
        self.link_with(with_nodes)
        early, self._early = self._early, deque(maxlen=MAX_EARLY)
        for heard in early:
            self._put(heard)

    def link_with(self, nodes: set[int], to_restore: bool = False) -> None:
        """Be linked with these nodes too, for this round or until all is restored. Both ends must
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
        """Whether the link with that node is one of this round, and not what an earlier one or a
        restore has left."""
        return node in self._needed or node in self._sources

    def is_open(self, node: int) -> bool:
        return self._links.is_open(node)

    # -- what goes out

    def send(self, node: int, kind: str, **fields: Any) -> bool:
        """False when it could not be taken: no link, or its queue is full."""
        assert self.mesh is not None
        fields = {"round": self.mesh.version, **fields}
        if node == self.mesh.node:
            self._put(Heard(node, kind, fields))
            return True
        return self._links.send(node, Message(kind, fields))

    def send_block(
        self,
        node: int,
        span: Span,
        source: memoryview,
        done: Callable[[str | None], None],
        checksum: int | None,
    ) -> bool:
        return self._links.send_block(node, span, source, done, checksum)

    def call_in_loop(self, call: Callable[[], None]) -> None:
        """From any thread: have the loop call this, unless another round has begun by then."""
        assert self.mesh is not None
        self._put(Heard(self.mesh.node, "call", {"round": self.mesh.version, "call": call}))

    def counts(self) -> dict[str, int]:
        return self._links.counts()

    # -- what comes in

    def take(self) -> list[Heard]:
        """All that has come since the last time."""
        heard = []
        while not self._inbox.empty():
            one = self._inbox.get()
            round_ = one.fields.get("round")
            if self.mesh is None or (round_ is not None and round_ > self.mesh.version):
                self._early.append(one)
            elif round_ is None or round_ == self.mesh.version:
                heard.append(one)
        return heard

    def _put(self, heard: Heard) -> None:
        self._inbox.put(heard)
        self._wake()

    def expect(self, rank: int, stamp: Stamp, taker: Taker) -> None:
        """Blocks of that snapshot go there."""
        with self._lock:
            self._takers[(rank, stamp)] = taker

    def expect_no_more(self, taker: Taker) -> None:
        with self._lock:
            self._takers = {key: known for key, known in self._takers.items() if known is not taker}

    # -- the links call these, on threads of theirs

    def up(self, node: int) -> None:
        self._put(Heard(node, "up", {}))

    def message(self, node: int, message: Message) -> None:
        self._put(Heard(node, message.kind, dict(message.fields)))

    def place(self, node: int, span: Span) -> memoryview | None:
        with self._lock:
            taker = self._placed[node] = self._takers.get((span.rank, span.stamp))
        return taker.place(node, span) if taker else None

    def block(self, node: int, span: Span, checksum: int) -> None:
        with self._lock:
            taker = self._takers.get((span.rank, span.stamp))
            # else it lies in the place of one that expects no more
            is_its = self._placed.pop(node, None) is taker
        if taker and is_its:
            taker.arrived(node, span, checksum)

    def writable(self, node: int) -> None:
        self._put(Heard(node, "writable", {}))

    def dead(self, node: int, why: str, is_loss: bool) -> None:
        round_ = self.mesh.version if self.mesh is not None else 0
        self._put(Heard(node, "dead" if is_loss else "left", {"round": round_, "why": why}))

    def close(self) -> None:
        self._links.close("the job is over here")
