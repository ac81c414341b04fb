"""Links: `ports.Links` on the simulated network.

What `edge/net/peers.py` guarantees holds here too: of two nodes the one with the lower number
dials; messages are numbered, arrive once and in order, and wait until they are confirmed; blocks
have a lane of their own, go to the place that is named for them, and are answered; a connection on
which nothing is heard for a while is given up and made again, and what was not confirmed is sent
again; a link that is without a connection for too long is over, once and for good, as is one that
another life of the keeper replaces.

Not run here: TCP, handshakes' bytes and proofs, frames and their MACs (`edge/net/channel.py`,
`core/wire/connection.py`); a refusal is modelled by its reason. `Wires.checks` has every message
cross as its bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import cast

from keepstep.coding.checksum import checksum as checksum_of
from keepstep.core.wire.link import MAX_TRIES, WINDOW_BLOCKS, Patience
from keepstep.core.wire.messages import decode, encode
from keepstep.model.messages.peers import MeshMessage
from keepstep.model.units import MS_NS, S_NS
from keepstep.model.wire import Span
from keepstep.ports import Receiver
from keepstep.sim.protocol.network import Network
from keepstep.sim.protocol.world.world import Process

MAX_MESSAGES = 10_000
FINAL_TIMES = 3  # a refusal that dialling again does not change, so often in a row, ends the link
WATCH_NS = 100 * MS_NS

Done = Callable[[str | None], None]


class Block:
    """On its way."""

    __slots__ = ("checksum", "done", "source", "span", "tries")

    def __init__(self, span: Span, source: memoryview, done: Done, checksum: int | None) -> None:
        self.span, self.source, self.done, self.checksum, self.tries = (
            span,
            source,
            done,
            checksum,
            1,
        )


class End:
    """One keeper's end of a link."""

    def __init__(
        self, links: SimLinks, node: int, address: tuple[str, int] | None, wanted: int
    ) -> None:
        self.links, self.node, self.address, self.wanted = links, node, address, wanted
        self.id: int | None = None
        self.peer: int | None = None  # the incarnation that is there, once anybody was
        self.connection: Connection | None = None
        self.over = False
        self.away = 0  # counts the times it had no connection
        self.why_away = "it was never reached"
        self.failures = self.finals = 0
        self.messages: deque[MeshMessage] = deque()  # not confirmed
        self.first = 1  # the number of the oldest of them
        self.heard = 0  # the number of the newest message that came
        self.flight: dict[int, Block] = {}
        self.waiting: deque[Block] = deque()
        self.waiting_bytes = 0
        self.next_block = 1
        self.seen: set[int] = set()
        self.owes_writable = False
        self.message_ns = self.lane_ns = 0  # until when what was sent before is under way
        self.writing_ns = 0  # until when a block that came is being written

    @property
    def incarnation(self) -> int:
        return self.wanted if self.peer is None else self.peer


class Connection:
    """Between two ends, while there is one."""

    def __init__(self, network: Network, dialer: End, other: End) -> None:
        self.network, self.ends, self.alive, self.closing = network, (dialer, other), True, False
        here, there = dialer.links.machine, other.links.machine
        self.paths = ((here, there), (there, here))
        # by end: what comes from there
        self.late: dict[int, list[tuple[Process, Callable[..., None], tuple[object, ...]]]] = {}
        self._suspicions = 0
        network.connections.append(self)
        for end in self.ends:
            end.connection = self
            end.failures = end.finals = 0
            end.message_ns = end.lane_ns = 0

    def other(self, end: End) -> End:
        return self.ends[1] if end is self.ends[0] else self.ends[0]

    def carries_from(self, end: End) -> bool:
        return self.network.carries(*self.paths[end is self.ends[1]])

    def suspect(self) -> None:
        """A path does not carry any more: when nothing has been heard for long enough, this is
        given up."""
        self._suspicions += 1
        after_ns = self.ends[0].links.patience.silence_ns + self.network.random.randrange(WATCH_NS)
        self.network.world.after(after_ns, None, self._silence, self._suspicions)

    def _silence(self, suspicion: int) -> None:
        if (
            self.alive
            and suspicion == self._suspicions
            and not all(self.carries_from(e) for e in self.ends)
        ):
            self.cut("silent for too long")

    def carries_again(self) -> None:
        if self.alive and all(self.carries_from(e) for e in self.ends):
            self._suspicions += 1
        for index, end in enumerate(self.ends):
            if index in self.late and self.carries_from(end):
                self.network.world.after(self.network.latency_ns(), None, self._release, index)

    def _release(self, index: int) -> None:
        if self.alive and self.carries_from(self.ends[index]):
            for process, call, args in self.late.pop(index, ()):
                self.network.world.after(0, process, call, *args)

    def is_late(self, end: End, process: Process, call: Callable[..., None], *args: object) -> bool:
        """What has just come from `end` cannot have: it comes when the path carries again."""
        carries = self.carries_from(end)
        if carries and not self.late:
            return False
        index = self.ends.index(end)
        if carries and index not in self.late:
            return False
        self.late.setdefault(index, []).append((process, call, args))
        return True

    def cut(self, why: str) -> None:
        if not self.alive:
            return
        self.alive = False
        self.network.connections.remove(self)
        for end in self.ends:
            if end.connection is self:
                end.connection = None
                if not end.over and end.links.process.alive:
                    end.links.is_away(end, why)


class SimLinks:
    """A keeper's."""

    def __init__(
        self,
        network: Network,
        process: Process,
        job_hash: bytes,
        incarnation: int,
        address: tuple[str, int],
        dead_ns: int,
        receiver: Receiver,
    ) -> None:
        self.network, self.process, self.machine = network, process, process.machine.number
        self.job_hash, self.incarnation, self._receiver = job_hash, incarnation, receiver
        self._address = network.reserve(process.machine.host, address)
        self.patience = Patience.within(dead_ns)
        self.node, self.secret = -1, b""
        self.ends: dict[int, End] = {}
        self._expected: set[int] = set()
        self._least: dict[int, tuple[int, int]] = {}
        self._addresses: dict[int, tuple[str, int]] = {}
        self._counts: dict[str, int] = {}
        self.random: Random = network.random
        process.on_end.append(self._process_ended)

    @property
    def address(self) -> tuple[str, int]:
        return self._address

    # -- what the keeper wants

    def be(self, node: int, secret: bytes) -> None:
        if (node, secret) == (self.node, self.secret):
            return
        if self.node >= 0:
            self._say_bye("another number")
            self._expected.clear()
            self._least.clear()
            self._addresses.clear()
        self.node, self.secret = node, secret
        self.network.doors[self._address] = self

    def connect(self, node: int, address: tuple[str, int], incarnation: int = 0) -> None:
        assert node != self.node and self.node >= 0
        known, self._addresses[node] = self._addresses.get(node), address
        # another machine has that number now
        has_moved = known not in (None, address) and incarnation < self._least.get(node, (0, 0))[0]
        if has_moved:
            del self._least[node]
        self._least[node] = max((incarnation, 0), self._least.get(node, (0, 0)))
        end = self.ends.get(node)
        if end is not None and (has_moved or end.incarnation < incarnation):
            self._end(
                end,
                f"fenced: incarnation {end.incarnation} is older than {incarnation}",
                tell=False,
            )
        self._expected.add(node)
        if node in self.ends:
            self.ends[node].address = address
            return
        end = self._new_end(node, address, self._least[node][0])
        if self.node < node:
            end.id = self.network.next_link()
            self._dial_soon(end, 0)

    def send(self, node: int, message: MeshMessage) -> bool:
        broken = self.process.touch("send", message.KIND)
        end = self.ends.get(node)
        if broken and end is not None and end.connection is not None:
            end.connection.cut("reset")
        if end is None or end.over or len(end.messages) >= MAX_MESSAGES:
            return False
        if self.network.wires.checks:
            message = cast(MeshMessage, decode(encode(message)))
        self.network.on_send(self, node, message)
        end.messages.append(message)
        if end.connection is not None:
            self._transmit(end, end.first + len(end.messages) - 1, message)
        return True

    def send_block(
        self, node: int, span: Span, source: memoryview, done: Done, checksum: int | None = None
    ) -> bool:
        broken = self.process.touch("send block")
        assert source.nbytes == span.length and source.format == "B", (
            f"{source.nbytes} bytes of format {source.format} for {span}"
        )
        end = self.ends.get(node)
        if end is None or end.over:
            return False
        if broken and end.connection is not None:
            end.connection.cut("reset")
        if end.waiting and end.waiting_bytes + span.length > self.network.wires.queue_bytes:
            end.owes_writable = True
            return False
        end.waiting.append(Block(span, source, done, checksum))
        end.waiting_bytes += span.length
        self._pump(end)
        return True

    def is_open(self, node: int) -> bool:
        end = self.ends.get(node)
        return end is not None and end.connection is not None

    def counts(self) -> dict[str, int]:
        return dict(self._counts)

    def count(self, what: str) -> None:
        self._counts[what] = self._counts.get(what, 0) + 1

    def close(self, reason: str = "closing") -> None:
        self._say_bye(reason)
        self.network.release(self._address)

    def _say_bye(self, reason: str) -> None:
        for end in list(self.ends.values()):
            connection = end.connection
            if connection is not None:
                connection.closing = True
                other = connection.other(end)
                at_ns = max(end.message_ns, self.network.world.now_ns + self.network.latency_ns())
                self.network.world.at(
                    at_ns, other.links.process, other.links.hear_bye, connection, end, other, reason
                )
                end.connection = None
            self._end(end, reason, tell=False)

    # -- dialling

    def _new_end(self, node: int, address: tuple[str, int] | None, wanted: int) -> End:
        end = self.ends[node] = End(self, node, address, wanted)
        self._watch_away(end)
        return end

    def is_away(self, end: End, why: str) -> None:
        end.why_away = why
        end.away += 1
        self._watch_away(end)
        if self.node < end.node:
            end.failures = 1
            self._dial_soon(end, self.patience.retry_ns(1))

    def _watch_away(self, end: End) -> None:
        after_ns = self.patience.dead_ns + self.random.randrange(WATCH_NS)
        self.process.after(after_ns, self._still_away, end, end.away)

    def _still_away(self, end: End, away: int) -> None:
        if not end.over and end.connection is None and end.away == away:
            self._end(
                end,
                f"away for longer than {self.patience.dead_ns / S_NS} s: {end.why_away}",
                tell=True,
            )

    def _dial_soon(self, end: End, delay_ns: int) -> None:
        self.process.after(delay_ns, self._dial, end)

    def _dial(self, end: End) -> None:
        if end.over or end.connection is not None:
            return
        assert end.address is not None
        target = self.network.doors.get(end.address)
        unanswered_ns = 0
        if target is not None and target.process.alive:
            carries = self.network.carries(self.machine, target.machine) and self.network.carries(
                target.machine, self.machine
            )
            if carries:
                self.process.after(2 * self.network.latency_ns(), self._shake_hands, end, target)
                return
            unanswered_ns = self.patience.silence_ns if self.network.wires.dials_wait else 0
        end.failures += 1
        self._dial_soon(end, unanswered_ns + self.patience.retry_ns(end.failures))

    def _shake_hands(self, end: End, target: SimLinks) -> None:
        if end.over or end.connection is not None:
            return
        refused, is_final = self._judge(end, target)
        if refused:
            end.why_away = refused
            end.failures += 1
            end.finals = end.finals + 1 if is_final else 0
            self.count(refused)
            if end.finals >= FINAL_TIMES:
                self._end(end, refused, tell=True)
            else:
                self._dial_soon(end, self.patience.retry_ns(end.failures))
            return
        there = target.attach(self.node, self.incarnation, end)
        is_new = end.peer is None
        end.peer = target.incarnation
        connection = Connection(self.network, end, there)
        for one in connection.ends:
            world = self.network.world
            world.after(0, one.links.process, one.links.opened, one, connection, is_new)

    def _judge(self, end: End, target: SimLinks) -> tuple[str, bool]:
        """Why these two are not linked, and whether dialling again cannot change it; "" when they
        are."""
        assert end.id is not None
        if not target.process.alive or target.node < 0:
            return "nobody listens", False
        if (target.job_hash, target.secret) != (
            self.job_hash,
            self.secret,
        ) or target.node != end.node:
            return "not who was expected", False
        if self.node not in target._expected:
            return "refused: not expected", False
        least = target._least[self.node]
        if self.incarnation < least[0]:
            return "refused: old incarnation", True
        known = target.ends.get(self.node)
        is_same = known is not None and known.id == end.id and known.peer == self.incarnation
        if not is_same and (end.peer is not None or (self.incarnation, end.id) < least):
            return "refused: forgotten", True
        if end.peer is not None and end.peer != target.incarnation:
            return "the link is with another life", False
        if target.incarnation < self._least[end.node][0]:
            return "too old", False
        return "", False

    def attach(self, node: int, incarnation: int, dialer: End) -> End:
        """The end here for a connection from there, which has been judged."""
        known = self.ends.get(node)
        assert dialer.id is not None
        if known is not None and known.id == dialer.id:
            if known.connection is not None:
                known.connection.cut("replaced by a new connection")
            return known
        if known is not None and known.id is not None:
            why = f"replaced by a new link with incarnation {incarnation} of node {node}"
            if known.connection is not None:
                known.connection.cut(why)
            self.network.world.after(0, self.process, self._end, known, why, True)
            known = None
        end = known or self._new_end(node, None, incarnation)
        end.id, end.peer = dialer.id, incarnation
        self._least[node] = (incarnation, dialer.id)
        return end

    def opened(self, end: End, connection: Connection, is_new: bool) -> None:
        if end.connection is not connection or not connection.alive:
            return
        if is_new:
            self._receiver.up(end.node)
        for index, message in enumerate(list(end.messages)):
            self._transmit(end, end.first + index, message)
        for number in list(end.flight):
            self._transmit_block(end, number)
        self._pump(end)

    # -- the end of a link

    def _end(self, end: End, why: str, tell: bool, is_loss: bool = True) -> None:
        if end.over:
            return
        end.over = True
        if self.ends.get(end.node) is end:
            del self.ends[end.node]
        if end.connection is not None:
            end.connection.cut(why)
        lost = [*end.flight.values(), *end.waiting]
        end.flight.clear()
        end.waiting.clear()
        for block in lost:
            block.done(why)
        if tell:
            self._receiver.dead(end.node, why, is_loss)

    def hear_bye(self, connection: Connection, source: End, end: End, reason: str) -> None:
        if connection.is_late(source, self.process, self.hear_bye, connection, source, end, reason):
            return
        if connection.alive:
            self._end(end, f"node {end.node} said goodbye: {reason}", tell=True, is_loss=False)
            connection.cut("goodbye")

    def _process_ended(self) -> None:
        """The kernel closes what was open: the others see that, where they can."""
        self.network.release(self._address)
        world = self.network.world
        for end in self.ends.values():
            connection = end.connection
            if connection is None or connection.closing:
                continue
            if self.process.machine.alive:
                at_ns = max(end.message_ns, world.now_ns + self.network.latency_ns())
                world.at(at_ns, None, self._hear_end, connection, end)

    def _hear_end(self, connection: Connection, end: End) -> None:
        if connection.carries_from(end):
            connection.cut("closed by the other side")
        else:
            connection.suspect()

    # -- messages

    def _transmit(self, end: End, number: int, message: MeshMessage) -> None:
        connection = end.connection
        assert connection is not None
        end.message_ns = at_ns = max(
            end.message_ns, self.network.world.now_ns + self.network.latency_ns()
        )
        other = connection.other(end)
        self.network.world.at(
            at_ns,
            other.links.process,
            other.links.message_comes,
            connection,
            end,
            other,
            number,
            message,
        )

    def message_comes(
        self, connection: Connection, source: End, end: End, number: int, message: MeshMessage
    ) -> None:
        if not connection.alive or connection.is_late(
            source, self.process, self.message_comes, connection, source, end, number, message
        ):
            return
        if connection.carries_from(end):
            # else its confirmation does not get through, and it comes again
            while source.messages and source.first <= number:
                source.messages.popleft()
                source.first += 1
        if number > end.heard:
            end.heard = number
            self._receiver.message(end.node, message)

    # -- blocks

    def _pump(self, end: End) -> None:
        while end.connection is not None and end.waiting and len(end.flight) < WINDOW_BLOCKS:
            block = end.waiting.popleft()
            end.waiting_bytes -= block.span.length
            number, end.next_block = end.next_block, end.next_block + 1
            end.flight[number] = block
            self._transmit_block(end, number)

    def _transmit_block(self, end: End, number: int) -> None:
        block, connection = end.flight[number], end.connection
        assert connection is not None
        if block.checksum is None:
            block.checksum = checksum_of(block.source)
        now_ns = self.network.world.now_ns
        end.lane_ns = max(end.lane_ns, now_ns) + self.network.transfer_ns(block.span.length)
        other = connection.other(end)
        at_ns = end.lane_ns + self.network.latency_ns()
        self.network.world.at(
            at_ns, other.links.process, other.links.block_comes, connection, end, other, number
        )

    def block_comes(self, connection: Connection, source: End, end: End, number: int) -> None:
        if not connection.alive or not source.links.process.alive:
            return
        if connection.is_late(
            source, self.process, self.block_comes, connection, source, end, number
        ):
            return
        if self.network.world.now_ns < end.writing_ns:  # a lane brings one block after the other
            self.network.world.at(
                end.writing_ns, self.process, self.block_comes, connection, source, end, number
            )
            return
        block = source.flight.get(number)
        if block is None:
            return
        if number in end.seen:
            self._answer(connection, source, end, number, None)
            return
        place = self._receiver.place(end.node, block.span)
        if place is None:
            self._answer(connection, source, end, number, "the other side does not want it")
            return
        # read as late as can be: a source that does not stand still shows
        data = bytearray(block.source)
        if self.network.flips and self.random.random() < self.network.flips:
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        half = len(data) // 2
        if half and self.random.random() < self.network.wires.halves:
            place[:half] = data[:half]
            delay_ns = self.network.latency_ns()
            end.writing_ns = self.network.world.now_ns + delay_ns
            self.process.after(
                delay_ns,
                self._second_half,
                connection,
                source,
                end,
                number,
                block.span,
                place,
                data,
            )
        else:
            place[:] = data
            self._whole(connection, source, end, number, block.span, place)

    def _second_half(
        self,
        connection: Connection,
        source: End,
        end: End,
        number: int,
        span: Span,
        place: memoryview,
        data: bytearray,
    ) -> None:
        if connection.alive:  # else nothing is written any more: it comes again, or never
            half = len(data) // 2
            place[half:] = data[half:]
            self._whole(connection, source, end, number, span, place)

    def _whole(
        self,
        connection: Connection,
        source: End,
        end: End,
        number: int,
        span: Span,
        place: memoryview,
    ) -> None:
        block = source.flight.get(number)
        if block is None:
            return
        found = checksum_of(place)
        if found != block.checksum:
            self.count("blocks damaged")
            self._answer(
                connection,
                source,
                end,
                number,
                "it arrived damaged every time: does its source change?",
            )
            return
        end.seen.add(number)
        source.links.count("blocks sent")
        self._answer(connection, source, end, number, None)
        self._receiver.block(end.node, span, found)

    def _answer(
        self, connection: Connection, source: End, end: End, number: int, why: str | None
    ) -> None:
        if connection.carries_from(end):
            delay_ns = self.network.latency_ns()
            source.links.process.after(
                delay_ns, source.links.block_answered, connection, source, number, why
            )

    def block_answered(
        self, connection: Connection, end: End, number: int, why: str | None
    ) -> None:
        block = end.flight.get(number)
        if block is None or not connection.alive:
            return
        if why is not None and "damaged" in why and block.tries < MAX_TRIES:
            block.tries += 1
            self._transmit_block(end, number)
            return
        del end.flight[number]
        block.done(why)
        if not end.over:
            self._pump(end)
            self._relieved(end)

    def _relieved(self, end: End) -> None:
        if (
            end.owes_writable
            and not end.over
            and 2 * end.waiting_bytes <= self.network.wires.queue_bytes
        ):
            end.owes_writable = False
            self._receiver.writable(end.node)
