"""Mesh links: this node's links to the other nodes of one mesh.

Comes in: which nodes are needed, and messages and blocks for them. Goes out: calls of the keeper's
`ports.Links`. A message to this node itself takes the way of all others, through the inbox.

Invariant: only a link that this mesh needs says by its end that a node may be lost. One that an
earlier mesh or a restore has left says nothing: its other end's next keeper does not expect it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from keepstep.model.links import LinkCount
from keepstep.model.mesh import LEADER, Mesh
from keepstep.model.messages.peers import FetchRanges, MeshMessage, SeveralMessages, SnapshotMessage
from keepstep.model.snapshot import Stamp
from keepstep.model.wire import Span
from keepstep.runtime.replication.peer_inbox import BlockTaker, FromPeer, LoopCall, PeerInbox

GATHERED = 64  # messages in one
SHORT_RANGES = 64  # of a fetch that is gathered: many of them must fit into a message


class MeshLinks:
    """Of one mesh. Nothing crosses before `open`."""

    def __init__(self, inbox: PeerInbox, mesh: Mesh) -> None:
        self._inbox, self._links, self.mesh = inbox, inbox.links, mesh
        self._needed: set[int] = set()
        self._sources: set[int] = set()  # for as long as anything is restored
        self._gathered: dict[int, list[SnapshotMessage]] | None = None  # by node, while gathering

    @property
    def version(self) -> int:
        """What every message of this mesh carries."""
        return self.mesh.version

    @property
    def node(self) -> int:
        """This one."""
        return self.mesh.node

    # -- whom we are linked with

    def open(self, nodes: Iterable[int]) -> None:
        """Join the mesh, and be linked with these nodes of it."""
        self._links.be(self.mesh.node, self.mesh.secret.encode(), self.mesh.encrypt)
        self._inbox.join(self.mesh.version)
        self.link_with(nodes)

    def link_with(self, nodes: Iterable[int], to_restore: bool = False) -> None:
        """Be linked with these nodes too, for this mesh or until all is restored. Both ends must
        want it."""
        wanted = set(nodes)
        (self._sources if to_restore else self._needed).update(wanted)
        for node in sorted(wanted - {self.node}):
            self.link_again(node)

    def link_again(self, node: int) -> None:
        """After its end: the node's next keeper may come."""
        member = self.mesh.members[node]
        self._links.connect(node, (member.host, member.port), member.incarnation)

    def restored(self) -> None:
        """Sources are needed no more."""
        self._sources.clear()

    def needs(self, node: int) -> bool:
        """Whether the end of that link says that the node may be lost."""
        return node in self._needed or node in self._sources

    def is_open(self, node: int) -> bool:
        """Whether that node is reached at this moment."""
        return self._links.is_open(node)

    def linked(self) -> set[int]:
        """The nodes that are reached at this moment, this one among them."""
        nodes = (member.node for member in self.mesh.members)
        return {node for node in nodes if node == self.node or self._links.is_open(node)}

    def sent_counts(self) -> dict[tuple[int, int], LinkCount]:
        """By node and stream: what this node has sent of blocks, as its kernel counts."""
        return self._links.sent_counts()

    def damaged(self) -> dict[int, int]:
        """By node: how much of what came from there was not as it was sent."""
        return self._links.damaged()

    # -- what goes out

    def send(self, node: int, message: MeshMessage) -> bool:
        """False when it could not be taken: no link, or its queue is full."""
        if node == self.node:
            self._inbox.put(FromPeer(node, message))
            return True
        return self._links.send(node, message)

    def say(self, node: int, message: SnapshotMessage) -> None:
        """About a snapshot, to its owner or holder: with what else is being gathered. Should it not
        be taken, the owner offers again."""
        if self._gathered is not None and _is_short(message):
            self._gathered.setdefault(node, []).append(message)
        else:
            self.send(node, message)

    def gathering(self) -> AbstractContextManager[None]:
        """What is said about snapshots meanwhile goes in one message to each node, at the end: it
        is signed, sent and confirmed once."""
        return _NOT_AGAIN if self._gathered is not None else _Gathering(self)

    def gather(self) -> None:
        """From now on."""
        self._gathered = {}

    def forget_gathered(self) -> None:
        """Send nothing of it, and gather no more."""
        self._gathered = None

    def send_gathered(self) -> None:
        """And gather no more."""
        gathered, self._gathered = self._gathered or {}, None
        for node, messages in gathered.items():
            for at in range(0, len(messages), GATHERED):
                self._send_gathered(node, messages[at : at + GATHERED])

    def _send_gathered(self, node: int, messages: list[SnapshotMessage]) -> None:
        if len(messages) == 1:
            self.send(node, messages[0])
        else:
            self.send(node, SeveralMessages(self.version, tuple(messages)))

    def to_leader(self, message: MeshMessage) -> bool:
        """As `send`."""
        return self.send(LEADER, message)

    def to_all(self, message: MeshMessage) -> None:
        """To every node, this one among them."""
        self.send(self.node, message)
        self.to_others(message)

    def to_others(self, message: MeshMessage) -> None:
        """To every other node."""
        for member in self.mesh.members:
            if member.node != self.node:
                self.send(member.node, message)

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
        self._inbox.put(LoopCall(call, self.version))

    # -- blocks that come in

    def expect(self, rank: int, stamp: Stamp, taker: BlockTaker) -> None:
        """Blocks of that snapshot go there."""
        self._inbox.expect(rank, stamp, taker)

    def expect_no_more(self, taker: BlockTaker) -> None:
        """No block goes there any more, but one that is being written this moment."""
        self._inbox.expect_no_more(taker)

    def expect_sums(self, taker: BlockTaker | None) -> None:
        """Sums go there, of whatever snapshot; None: nobody wants any."""
        self._inbox.expect_sums(taker)


class _Gathering:
    """From its beginning to its end. What is left by an error is not sent."""

    __slots__ = ("_links",)

    def __init__(self, links: MeshLinks) -> None:
        self._links = links

    def __enter__(self) -> None:
        self._links.gather()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._links.send_gathered()
        else:
            self._links.forget_gathered()


_NOT_AGAIN = nullcontext()


def _is_short(message: SnapshotMessage) -> bool:
    return not isinstance(message, FetchRanges) or len(message.ranges) <= SHORT_RANGES
