"""What a keeper asks for: links to other keepers, a persister, a look into the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from keepstep.model.checkpoint import StoreListing
from keepstep.model.links import LinkCount
from keepstep.model.messages.peers import MeshMessage
from keepstep.model.wire import Span

if TYPE_CHECKING:  # a format laid over a Memory, which these ports only hand on
    pass
from keepstep.ports.boxes import Box, Hearer


class Receiver(Protocol):
    """Who takes what links bring. The real ones call it on their threads: quick, and safe for
    several of them."""

    def up(self, node: int) -> None:
        """The link to that node is open, for the first time or again with another life of its
        keeper."""

    def message(self, node: int, message: MeshMessage) -> None:
        """Arrives once, in the order in which it was sent."""

    def place(self, node: int, span: Span) -> memoryview | None:
        """Where these bytes go; None: nobody wants them. Several blocks of a node may come at a
        time, but the same bytes once: they are asked for again when they came damaged, or broke
        off."""

    def block(self, node: int, span: Span, checksum: int) -> None:
        """They are there, and that is their checksum."""

    def writable(self, node: int) -> None:
        """A `send_block` that was refused may be tried again."""

    def dead(self, node: int, why: str, is_loss: bool) -> None:
        """That link is over with all it carried, for good: another life of its keeper may open
        another one. No loss: it said goodbye."""


class Links(Protocol):
    """A keeper's links to others. Open when both ends want it; they outlive their connections
    (docs/protocol.md, "The wire").

    `be` comes first. A call that may end a link (`be`, `connect`, `close`) is not for the
    receiver's calls.
    """

    @property
    def address(self) -> tuple[str, int]:
        """Where others reach this keeper, from the beginning."""

    def be(self, node: int, secret: bytes, encrypt: bool = False) -> None:
        """The keeper of this node in another mesh, among those who know the secret, and encrypt
        what they send each other or do not. With anything else than before: without the links
        there were."""

    def connect(self, node: int, address: tuple[str, int], incarnation: int = 0) -> None:
        """Be linked with that node's keeper, in this life of it or a later one. At another address
        than before, or at first in another mesh, it is another one, of whatever age."""

    def send(self, node: int, message: MeshMessage) -> bool:
        """False when it could not be taken: no link, or its queue is full."""

    def send_block(
        self,
        node: int,
        span: Span,
        source: memoryview,
        done: Callable[[str | None], None],
        checksum: int | None = None,
    ) -> bool:
        """`done` hears None, or why it did not get there; False when it could not be taken now.

        `source` stays as it is until `done` was called."""

    def is_open(self, node: int) -> bool: ...

    def sent_counts(self) -> dict[tuple[int, int], LinkCount]:
        """By node and stream: what the connections that carry blocks have sent, each since it
        began. Nothing where nobody counts."""

    def damaged(self) -> dict[int, int]:
        """By node: how much of what came from there was not as it was sent, since this keeper
        began."""

    def counts(self) -> dict[str, int]:
        """What has crossed and what was refused, by name: for people."""

    def close(self, reason: str = "closing") -> None:
        """Say goodbye to all."""


class OpenLinks(Protocol):
    """Makes a keeper's links."""

    def __call__(
        self,
        job_hash: bytes,
        incarnation: int,
        address: tuple[str, int],
        dead_ns: int,
        receiver: Receiver,
    ) -> Links:
        """`address`: port 0 is any that is free. `dead_ns`: how long a link may be without a
        connection before it is over.

        Raises KeeperError when the address is not this node's, or taken.
        """


class ChildConnection(Box, Protocol):
    """A connection with a process of the keeper's own, which ends when that is closed, also when it
    hangs."""

    @property
    def computed_ns(self) -> int:
        """How long the process has computed so far: it stays while it waits for something."""

    def hurry(self, is_urgent: bool, /) -> bool:
        """From now on it computes as others do, also what it is at; or lets them compute first, as
        from its start. False: that could not be now, and is to be asked for again."""


class Persisters(Protocol):
    """How a keeper gets a persister, which may die at any moment."""

    def start(self, hearer: Hearer) -> ChildConnection:
        """Start one: a connection with it, over which it takes acts and answers each of them, in
        order (`model/messages/persister.py`). It ends when the connection is closed; when it ends
        by itself, `hearer` hears `gone`. One that says what is no message is ended. Raises OSError
        when the machine gives no more processes."""


class Checkpoints(Protocol):
    """The store, as far as a keeper looks into it."""

    def begin_run(self) -> str | None:
        """Begin another run, so that the checkpoints there are kept and not taken any more: where;
        None when the newest run has none. Raises StoreError."""

    def doubt(self, first: int, before_epoch: int) -> Sequence[str]:
        """From now on checkpoints of step `first` and of later ones do not count, where an epoch
        before that one computed them: the directories of those there are. Raises as `look`."""

    def look(self) -> StoreListing:
        """What there is. Raises StoreError when the list cannot be read, ConfigError when it is
        none, IdentityError when it is another job's, DamageError when nobody can tell whose."""
