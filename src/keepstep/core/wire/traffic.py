"""Traffic: what all channels of one link share: the queues, the options, who wants to know.

Comes in: messages and blocks, or a refusal to take them when there is no room: nothing here queues
without bound. Goes out: what the channels ask for, and calls of the `Receiver`, without any lock
held. Moves no byte itself.

`lock` guards what the two threads of a connection both touch. It need not be one that its holder
may take again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from keepstep.core.wire.connection import KEEPERS_FORMAT, WireFormat
from keepstep.core.wire.delivery import Outbox
from keepstep.core.wire.health import Health, LinkTimeouts
from keepstep.core.wire.streams import StreamCount, StreamLimits
from keepstep.model.messages.peers import LinkStreams
from keepstep.model.units import MIB
from keepstep.model.wire import Flow, Refusal, Refused, Span

if TYPE_CHECKING:
    from keepstep.ports import Receiver

Done = Callable[[str | None], None]
Lock = AbstractContextManager[Any]


class Gate(Protocol):
    """Says when bytes of blocks may go. Called with the link's lock held: quick."""

    def ask(self, nbytes: int, flow: Flow, /) -> tuple[int, int]:
        """So many of `nbytes` may go now; when that is 0: ask again after so many nanoseconds."""


class RunningHash(Protocol):
    """A checksum of bytes that come piece by piece."""

    def update(self, data: memoryview, /) -> None: ...

    def intdigest(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Hashing:
    """Checksums of blocks: of bytes that lie there, and of bytes that are still coming."""

    checksum: Callable[[memoryview], int]
    begin: Callable[[], RunningHash]


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Of all links of a keeper. `streams`: over how many connections this side sends its blocks.
    `max_messages`: not confirmed. `queue_bytes`: of blocks that wait for one node. `window_bytes`:
    of blocks that are not answered, on one stream. `gate`: says when blocks may go, of all streams
    together; without one they always may."""

    hashing: Hashing
    timeouts: LinkTimeouts = field(default_factory=LinkTimeouts)
    streams: StreamLimits = field(default_factory=StreamLimits)
    max_messages: int = 10_000
    queue_bytes: int = 64 * MIB
    window_bytes: int = 16 * MIB
    gate: Gate | None = None
    format: WireFormat = KEEPERS_FORMAT


@dataclass(frozen=True, slots=True, eq=False)
class Outgoing:
    """A block to send. `source` must stand still until `done` is called: None it arrived, or why
    not. `checksum`: what the bytes should have, if that is known."""

    span: Span
    source: memoryview
    done: Done
    checksum: int | None


# Between two keepers of one release only the network makes these.
NOT_AS_SENT = frozenset(
    (Refusal.DAMAGED, Refusal.OUT_OF_ORDER, Refusal.OVERSIZED, Refusal.MALFORMED)
)


class Counts:
    """Named counters."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._counter: Counter[str] = Counter()
        self._damaged: Counter[int] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counter[name] += count

    def refused(self, refused: Refused) -> None:
        self.add(f"refused {'by peer ' if refused.by_peer else ''}{refused.reason.name.lower()}")

    def damage(self, node: int) -> None:
        """What came from there does not prove."""
        with self._lock:
            self._damaged[node] += 1

    def damaged(self) -> dict[int, int]:
        """By node, how often."""
        with self._lock:
            return dict(self._damaged)

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counter)


class Traffic:
    """Of one link with `node`. `dials`: this side, of the two. `said_bye` is called, once, with the
    reason the other side gives for ending the link; `told_streams` with what it says of its
    streams; `more_streams` when this side is to send over more of them. All without any lock
    held."""

    def __init__(
        self,
        node: int,
        dials: bool,
        options: LinkOptions,
        receiver: Receiver,
        counts: Counts,
        lock: Lock,
        now_ns: int,
        said_bye: Callable[[str], None],
        told_streams: Callable[[LinkStreams], None],
        more_streams: Callable[[], None],
    ) -> None:
        self.node = node
        self.dials = dials
        self.options = options
        self.receiver = receiver
        self.counts = counts
        self.lock = lock
        self.said_bye = said_bye
        self.told_streams = told_streams
        self.more_streams = more_streams
        self.streams = StreamCount(options.streams)
        # what comes this moment, and on which channel: nothing comes twice at a time
        self.arriving: dict[Span, int] = {}
        self.health = Health(options.timeouts, now_ns)
        self.outbox = Outbox(options.max_messages)
        self.waiting: deque[Outgoing] = deque()  # blocks that no channel has begun
        self.waiting_bytes = 0
        self._owes_writable = False  # somebody was turned away

    def refused(self, refused: Refused) -> None:
        """What came is not listened to: count it."""
        self.counts.refused(refused)
        if refused.reason in NOT_AS_SENT:
            self.counts.damage(self.node)

    def queue(self, block: Outgoing) -> bool:
        """With the lock held: False when there is no room. One block always may wait."""
        nbytes = block.span.length
        if self.waiting and self.waiting_bytes + nbytes > self.options.queue_bytes:
            return False
        self.waiting.append(block)
        self.waiting_bytes += nbytes
        return True

    def turned_away(self) -> bool:
        """With the lock held: somebody has to be told when there is room. False."""
        self._owes_writable = True
        return False

    def relieved(self) -> None:
        """Something left the queues; tell who was turned away once half of the room is free."""
        if not self._owes_writable:
            return
        with self.lock:
            roomy = (
                2 * self.waiting_bytes <= self.options.queue_bytes
                and 2 * len(self.outbox) <= self.outbox.limit
            )
            is_told = self._owes_writable and roomy
            if is_told:
                self._owes_writable = False
        if is_told:
            self.receiver.writable(self.node)

    def unqueue(self) -> Outgoing:
        """With the lock held: the oldest that waits."""
        block = self.waiting.popleft()
        self.waiting_bytes -= block.span.length
        return block
