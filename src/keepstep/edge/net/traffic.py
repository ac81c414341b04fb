"""Traffic: what crosses one link, shared by its lanes: the queues, who is there, who wants to know.

Comes in: messages and blocks, or a refusal to take them when there is no room: nothing here queues
without bound. Goes out: what the lanes ask for, and calls of the `Receiver`, without any lock held.
Moves no byte itself.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from keepstep.edge.net.tcp import Pacer
from keepstep.model.messages.peers import KeeperMessage
from keepstep.model.wire import Identity, Refused, Span
from keepstep.ports import Receiver

if TYPE_CHECKING:
    from keepstep.core.wire.link import Link as Books

Done = Callable[[str | None], None]


@dataclass(frozen=True, slots=True)
class Flow:
    """One lane's socket at this moment: what it has and the other kernel has not acknowledged."""

    node: int
    queued_bytes: int
    round_trip_ns: int


class Gate(Protocol):
    """Says when bytes of blocks may go. Called on IO threads with the link's lock held: quick."""

    def ask(self, nbytes: int, flow: Flow) -> tuple[int, int]:
        """So many of `nbytes` may go now; when that is 0: ask again after so many nanoseconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Outgoing:
    """A block to send. `source` must stand still until `done` is called: None it arrived, or why
    not."""

    span: Span
    source: memoryview
    done: Done
    checksum: int | None


class Counts:
    """Named counters for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counter: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counter[name] += count

    def refused(self, refused: Refused) -> None:
        self.add(f"refused {'by peer ' if refused.by_peer else ''}{refused.reason.name.lower()}")

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counter)


@dataclass(eq=False)
class Traffic:
    """What crosses one link. `lock` guards all of it; each lane's sender waits on its own
    condition, so that only who has work wakes."""

    node: int
    books: Books[Outgoing]
    receiver: Receiver
    counts: Counts
    pacer: Pacer | None
    queue_bytes: int
    gate: Gate | None = None
    dials: bool = True  # this side, of the two
    lock: threading.RLock = field(default_factory=threading.RLock)
    ready: list[threading.Condition] = field(default_factory=list)  # one a lane
    waiting: deque[Outgoing] = field(default_factory=deque)
    waiting_bytes: int = 0
    ended: str | None = None
    bye: str | None = None  # the other side's last word
    round_trip_ns: int | None = None
    peer: Identity | None = None  # who is there, once anybody was
    opened: threading.Event = field(default_factory=threading.Event)  # `up` has been told
    _owes_writable: bool = False

    def __post_init__(self) -> None:
        self.flushing = threading.Condition(self.lock)

    def send(self, message: KeeperMessage) -> bool:
        """False when there is no room (or no link any more). Raises ValueError when no peer would
        accept it."""
        with self.lock:
            if self.ended is not None or not self.books.outbox.put(message):
                return self._turned_away()
            self.ready[0].notify()
            return True

    def send_block(self, block: Outgoing) -> bool:
        with self.lock:
            fits = not self.waiting or self.waiting_bytes + block.span.length <= self.queue_bytes
            if self.ended is not None or not fits:
                return self._turned_away()
            self.waiting.append(block)
            self.waiting_bytes += block.span.length
            for lane in self.ready[1:]:
                lane.notify()
            return True

    def _turned_away(self) -> bool:
        self._owes_writable = True
        self.counts.add("would block")
        return False

    def relieved(self) -> None:
        """Something left the queues; tell who was turned away once half of the room is free."""
        with self.lock:
            roomy = (
                2 * self.waiting_bytes <= self.queue_bytes
                and 2 * len(self.books.outbox) <= self.books.outbox.limit
            )
            owed, self._owes_writable = (
                self._owes_writable and roomy,
                self._owes_writable and not roomy,
            )
        if owed:
            self.receiver.writable(self.node)

    def flushed(self, limit_s: float) -> bool:
        """Wait until all messages are confirmed; not when the other side is away."""
        with self.lock:
            return self.flushing.wait_for(
                lambda: not self.books.outbox or not self.books.health.is_open, limit_s
            )

    def end(self, why: str) -> bool:
        """Take nothing any more; False when that was said before."""
        with self.lock:
            if self.ended is not None:
                return False
            self.ended = why
            return True

    def lost(self) -> list[Outgoing]:
        """The blocks that will not arrive; to be asked once, when all lanes are quiet."""
        with self.lock:
            return [block for lane in self.books.lanes for block in lane.flight.items()] + list(
                self.waiting
            )
