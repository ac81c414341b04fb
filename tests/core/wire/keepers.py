"""Keepers' tables of links on connections that are lists: every step is asked for by the test, so
that any schedule of bytes, cuts and losses can be tried."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from threading import Lock
from typing import Any

from keepstep.coding.checksum import checksum, running_checksum
from keepstep.core.wire.endpoint import Endpoint
from keepstep.core.wire.health import LinkTimeouts
from keepstep.core.wire.link import PeerLink
from keepstep.core.wire.link_table import Entropy, LinkTable
from keepstep.core.wire.traffic import Hashing, LinkOptions
from keepstep.model.links import LinkCount
from keepstep.model.messages.peers import MeshMessage, RanksEnded
from keepstep.model.snapshot import Stamp
from keepstep.model.units import S_NS
from keepstep.model.wire import Address, Flow, Identity, Part, Span

JOB, SECRET = b"j" * 16, b"the job's secret, 32 bytes long."
NOWHERE = ("nowhere", 0)
HASHING = Hashing(checksum, running_checksum)
TIMEOUTS = LinkTimeouts(
    ping_ns=1 * S_NS,
    silence_ns=5 * S_NS,
    dead_ns=20 * S_NS,
    retry_first_ns=S_NS // 20,
    retry_max_ns=S_NS,
)


def note(number: int) -> RanksEnded:
    return RanksEnded(number)


def span_of(nbytes: int, offset: int = 0) -> Span:
    return Span(0, Stamp(7, 1), Part.PAYLOAD, offset, nbytes)


class End:
    """One end of a connection: `Transport` to its endpoint."""

    def __init__(self) -> None:
        self.endpoint: Endpoint
        self.other: End = self
        self.coming: deque[bytes | memoryview] = deque()  # on its way here
        self.is_closed = False  # by this side; what is said to it is lost
        self.is_lost = False
        self.redial: tuple[PeerLink, int] | None = None
        self.queued_bytes = 0

    def wake(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True

    def flow(self, node: int) -> Flow:
        return Flow(node, self.queued_bytes, 0)

    def sent_counts(self) -> LinkCount:
        return LinkCount()

    def pump(self) -> int:
        """Send all there is; how many pieces that are."""
        count = 0
        while pieces := self.endpoint.next_pieces():
            count += len(pieces)
            if not self.other.is_closed:
                self.other.coming.extend(pieces)
        return count

    @property
    def coming_bytes(self) -> int:
        return sum(map(len, self.coming))

    def deliver(self, nbytes: int, now_ns: int) -> int:
        """So many of the bytes that are on their way here arrive, fewer when there are not so many
        or nobody listens any more. How many did."""
        arrived = 0
        while arrived < nbytes and self.coming and self.endpoint.closing is None:
            buffer = self.endpoint.get_buffer()
            if nbytes - arrived >= len(buffer) and self._waits_for(len(buffer)):
                break
            piece = self.coming.popleft()
            taken = min(len(buffer), len(piece), nbytes - arrived)
            assert taken, "no room for anything"
            buffer[:taken] = piece[:taken]
            if taken < len(piece):
                self.coming.appendleft(piece[taken:])
            self.endpoint.buffer_updated(taken, now_ns)
            arrived += taken
        return arrived

    def _waits_for(self, nbytes: int) -> bool:
        """As a carrier does: what is certain to come is taken as a whole, or when nothing comes any
        more."""
        awaits_all = self.endpoint.awaits_all and not self.other.is_closed
        return awaits_all and self.coming_bytes < nbytes


@dataclass(eq=False)
class Keeper:
    """`Receiver` and `Shell` to its table."""

    world: World
    addresses: Sequence[Address] = (NOWHERE,)
    memory: bytearray | None = None
    table: LinkTable = field(init=False)
    told: list[tuple[Any, ...]] = field(default_factory=list)
    heard: list[int] = field(default_factory=list)
    blocks: list[Span] = field(default_factory=list)
    writable_times: int = 0
    changed_times: int = 0
    to_dial: list[tuple[PeerLink, int]] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)

    # as a receiver

    def up(self, node: int) -> None:
        self.told.append(("up", node))

    def message(self, node: int, message: MeshMessage) -> None:
        self.heard.append(message.mesh_version)

    def place(self, node: int, span: Span) -> memoryview | None:
        if self.memory is None:
            return None
        return memoryview(self.memory)[span.offset : span.offset + span.length]

    def block(self, node: int, span: Span, checksum: int) -> None:
        self.blocks.append(span)

    def writable(self, node: int) -> None:
        self.writable_times += 1

    def dead(self, node: int, why: str, is_loss: bool) -> None:
        self.told.append(("dead" if is_loss else "left", node, why))

    # as a shell

    def dial(self, link: PeerLink, index: int) -> None:
        self.to_dial.append((link, index))

    def changed(self) -> None:
        self.changed_times += 1

    # what the test does

    def connect(self, other: Keeper, incarnation: int = 0) -> PeerLink | None:
        address = ("host", other.table.me.incarnation)
        return self.table.connect(other.table.me.node, address, incarnation, self.world.now_ns)

    def lose(self, end: End, why: str = "lost") -> None:
        """Nobody touches it any more."""
        assert not end.is_lost
        end.is_closed = end.is_lost = True
        self.ends.remove(end)
        end.coming.clear()
        end.endpoint.lost(why, self.world.now_ns)
        if end.redial is not None:
            self.to_dial.append(end.redial)


class World:
    """`links`: what their options differ in from the usual."""

    def __init__(self, **links: Any) -> None:
        self.now_ns = S_NS
        self.keepers: list[Keeper] = []
        self._random = Random(1)
        self._links = links

    def keeper(
        self, node: int, incarnation: int = 1, secret: bytes = SECRET, job: bytes = JOB
    ) -> Keeper:
        keeper = Keeper(self)
        options = LinkOptions(**{"hashing": HASHING, "timeouts": TIMEOUTS, **self._links})
        entropy = Entropy(lambda: self._random.randbytes(32), len(self.keepers) * 1000)
        keeper.table = LinkTable(
            me=Identity(job, node, incarnation),
            secret=secret,
            receiver=keeper,
            shell=keeper,
            options=options,
            entropy=entropy,
            new_lock=Lock,
        )
        self.keepers.append(keeper)
        return keeper

    def dial(self, one: Keeper, two: Keeper) -> End | None:
        """Have `one` make the first of the connections it wants; None when it does not any more."""
        link, index = one.to_dial.pop(0)
        if link.redial_ns(index) is None:
            return None
        near, far = End(), End()
        near.other, far.other = far, near
        near.redial = (link, index)
        near.endpoint = one.table.dialled(link, index, near)
        far.endpoint = two.table.accepted(far, "10.0.0.1")
        one.ends.append(near)
        two.ends.append(far)
        return near

    def step(self, end: End, nbytes: int = 1 << 40) -> int:
        """Bytes move, first from that end and then to it. How much happened."""
        return end.pump() + end.deliver(nbytes, self.now_ns)

    def settle(self, redials: int = 1000) -> None:
        """Everything moves until nothing does: what is wanted is dialled, so often at most, what is
        closed is lost. Of two keepers with the same number the later one listens."""
        by_node = {keeper.table.me.node: keeper for keeper in self.keepers}
        for _ in range(10_000):
            count = 0
            for keeper in self.keepers:
                while keeper.to_dial and keeper.to_dial[0][0].node in by_node and redials:
                    redials -= 1
                    other = by_node[keeper.to_dial[0][0].node]
                    count += self.dial(keeper, other) is not None
                for end in list(keeper.ends):
                    count += self.step(end)
                    count += self._hang_up(keeper, end)
            if not count:
                return
        raise AssertionError("it does not come to rest")

    def _hang_up(self, keeper: Keeper, end: End) -> bool:
        if end.is_lost:
            return False
        if end.endpoint.closing is not None:
            end.pump()
            keeper.lose(end)
            return True
        if end.other.is_closed and not end.coming:
            end.endpoint.cut("closed by the other side")
            keeper.lose(end)
            return True
        return False

    def linked(self) -> tuple[Keeper, Keeper]:
        """Nodes 1 and 2, once both know that they are."""
        one, two = self.keeper(1), self.keeper(2)
        two.connect(one)
        one.connect(two)
        self.settle()
        assert one.told == [("up", 2)] and two.told == [("up", 1)]
        return one, two
