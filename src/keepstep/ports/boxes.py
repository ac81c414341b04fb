"""Connections between the processes of one node, and how these find each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from keepstep.errors import KeepstepError

if TYPE_CHECKING:  # a format laid over a Memory, which these ports only hand on
    pass


class MessageCodec(Protocol):
    """What may be said at one end of a connection, and how that is written. Both raise NotAMessage,
    a ValueError."""

    def encode(self, message: Any, /) -> bytes:
        """A message that this end sends."""

    def decode(self, packet: bytes, /) -> Any:
        """A message that came."""


class Box(Protocol):
    """One end of a connection within a node. Messages are those of `model/messages/`."""

    @property
    def pid(self) -> int:
        """The process at the other end."""

    def send(self, message: Any, /) -> bool:
        """False when nobody will read it any more. Raises NotAMessage when it is none."""

    def poke(self, message: Any, /) -> None:
        """Send without ever waiting: who does not read misses it."""

    def hear_rest(self) -> None:
        """Hear what has come already, at once."""

    def close(self) -> None:
        """Hang up. The other end hears that behind everything that was sent."""

    def release(self) -> None:
        """In a forked child: let the parent alone hold the connection."""


class Hearer(Protocol):
    """Who is at this end of a connection. A message that does not decode is counted, told and
    answered by `NotUnderstood`, and never reaches it."""

    def hear(self, box: Box, message: Any, /) -> None: ...

    def gone(self, box: Box, /) -> None:
        """Nobody is at the other end any more. Comes once, last; not after `close`."""


class Keepers(Protocol):
    """How a process of a node finds the keeper of its job."""

    def find(
        self,
        hearer: Hearer,
        found: Callable[[Box], None],
        missing: Callable[[KeepstepError], None],
    ) -> None:
        """A connection to the keeper that lives, or that is started if none does; or, after some
        seconds, why there is none: a KeeperError, or an IdentityError when the job directory is
        another user's."""

    def end(self, box: Box) -> None:
        """Kill the keeper at the other end, which does not answer any more; `gone` follows."""


class KeeperDoor(Protocol):
    """Where the keeper of a job answers, on one node."""

    def connect(self, hearer: Hearer) -> Box | None:
        """At once; None when none lives, or it does not answer yet."""

    def start(self, then: Callable[[KeepstepError | None], None]) -> None:
        """Start a keeper; `then` hears None, or why it cannot be: a KeeperError, or an
        IdentityError when the job directory is another user's."""

    def end(self, box: Box) -> None:
        """See `Keepers`."""

    def in_vain(self, within_ns: int) -> KeepstepError:
        """What to say when none answered in that time."""


class Agents(Protocol):
    """How a rank finds the agent of its node."""

    def find(self, hearer: Hearer) -> Box | None:
        """At once; None when there is none, or it has died."""


class BoxServer(Protocol):
    """Where processes of the node connect."""

    def close(self) -> None:
        """Nobody can connect any more; connections that there are stay."""


class ServeBoxes(Protocol):
    """Makes a `BoxServer`."""

    def __call__(self, path: Path, hearer: Hearer) -> BoxServer:
        """`hearer` is at this end of every connection that is made at `path`."""
