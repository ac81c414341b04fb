"""Link: what two lives of two keepers have with each other: its channels, who is at the other end,
and whether it is over.

A link outlives its connections. Comes in: messages and blocks to send, connections that are proven
or lost, what the other side says of its streams. Goes out: which connection carries which channel,
which channels are dialled, over which road, and when again, and that the link is up or over. Who
may be linked with whom is decided by the table (`link_table.py`), which owns this.

Invariant: at most one connection carries a channel, and a link that has ended is over only when
none does: from then on nothing touches any block's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keepstep.core.wire.block_channel import BlockChannel
from keepstep.core.wire.channel import Channel
from keepstep.core.wire.endpoint import Endpoint
from keepstep.core.wire.message_channel import MessageChannel
from keepstep.core.wire.roads import Road, road, width
from keepstep.core.wire.traffic import Outgoing, Traffic
from keepstep.model.links import LinkCount
from keepstep.model.messages.peers import KeeperAddress, LinkStreams
from keepstep.model.units import S_NS
from keepstep.model.wire import Address, Cut, Dead, Dial, Flow, Identity, SendPing

# a stream whose own addresses could not be dialled goes over others for so long at least
DETOUR_NS = 60 * S_NS


@dataclass(frozen=True, slots=True)
class Ended:
    """How a link ended. `tell`: the receiver hears of it. `is_loss`: nobody said goodbye."""

    why: str
    tell: bool
    is_loss: bool


class PeerLink:
    """`address`: where the other side is dialled; may change at any time. `wanted`: the incarnation
    it was made for. `before`: the link with that node that has ended and is not over: until it is,
    this one carries nothing."""

    def __init__(
        self,
        traffic: Traffic,
        address: Address | None,
        wanted: int,
        before: PeerLink | None,
        mine: Sequence[Address],
    ) -> None:
        """mine: all addresses at which this keeper is reached."""
        self.node = traffic.node
        self.dials = traffic.dials
        self.address = address
        self.id: int | None = None  # the accepting side learns it
        self.peer: Identity | None = None  # who is there, once anybody was
        self.ended: Ended | None = None
        self.is_over = False
        self.is_up = False  # the receiver was told
        self.is_leaving = False  # goodbye was said
        self._before = before
        self._is_finishing = False
        self._when_over: list[Callable[[], None]] = []
        self._wanted = wanted
        self._traffic = traffic
        self._mine = mine
        self._others: tuple[Address, ...] | None = None  # where the other side is reached, too
        self._told: int | None = None  # over how many streams this side sends
        self._asked = 1  # over how many the other side does
        self._messages = MessageChannel(traffic)
        self._channels: dict[int, Channel] = {0: self._messages}  # those that there have been
        self._used: list[BlockChannel] = []  # those that this side has sent over
        traffic.streams.at_least(len(mine))
        self._carried: dict[int, Endpoint] = {}  # by channel
        self._parked: dict[int, Endpoint] = {}  # by channel: waits for the one it replaces
        self.due_ns = traffic.health.due_ns

    @property
    def incarnation(self) -> int:
        """Of who is there, or who is waited for."""
        return self.peer.incarnation if self.peer is not None else self._wanted

    @property
    def is_open(self) -> bool:
        """A connection carries messages now."""
        return self.is_up and self._traffic.health.is_open

    @property
    def is_flushed(self) -> bool:
        """All messages are confirmed, or cannot be: the other side is away."""
        return not self._traffic.outbox or not self._traffic.health.is_open

    def is_with(self, peer: Identity, asked: Dial) -> bool:
        return self.id == asked.link and self.peer == peer

    # what the keeper sends

    def send(self, body: bytes) -> bool:
        """A message, encoded. False when there is no room, or the link has ended."""
        with self._traffic.lock:
            if self.ended is not None or not self._traffic.outbox.put(body):
                self._traffic.counts.add("would block")
                return self._traffic.turned_away()
            self._wake(0)
            return True

    def send_block(self, block: Outgoing) -> bool:
        with self._traffic.lock:
            if self.ended is not None or not self._traffic.queue(block):
                self._traffic.counts.add("would block")
                return self._traffic.turned_away()
            for channel in self._used[: self._traffic.streams.in_use]:
                self._wake(channel.index)
            return True

    def _wake(self, index: int) -> None:
        endpoint = self._carried.get(index)
        if endpoint is not None:
            endpoint.wake()

    def flow(self) -> Flow:
        """With the lock held: of all its streams."""
        flows = [each.flow_of_connection() for index, each in self._carried.items() if index]
        return Flow(
            self.node,
            sum(flow.queued_bytes for flow in flows),
            min((flow.round_trip_ns for flow in flows if flow.round_trip_ns), default=0),
        )

    def sent_counts(self) -> dict[int, LinkCount]:
        """By stream: what its connection has carried of this side's blocks."""
        with self._traffic.lock:
            return {index: each.sent_counts() for index, each in self._carried.items() if index}

    # its streams

    def heard_of_streams(self, said: LinkStreams) -> None:
        """Over how many streams the other side sends, and where it is reached."""
        with self._traffic.lock:
            self._asked = max(self._asked, said.streams)
            self._others = tuple(said.addresses[1:])
            self._traffic.streams.at_least(width(len(self._mine), 1 + len(self._others)))

    def undialled(self) -> list[int]:
        """The channels that are to be dialled from here and are not yet. Each is told once. With
        several addresses the second stream waits until it is known which of the other side's goes
        with its own."""
        with self._traffic.lock:
            streams = (self._traffic.streams.in_use, self._asked)
            if len(self._mine) > 1 and self._others is None:
                streams = (1, 1)
            ours, theirs = range(1, 2 * streams[0], 2), range(2, 2 * streams[1] + 1, 2)
            wanted = [index for index in (*ours, *theirs) if index not in self._channels]
            for index in wanted:
                self._channel(index)
            return sorted(wanted)

    def to_say(self) -> LinkStreams | None:
        """What the other side does not know of this one's streams and addresses. Between two that
        have one address each there is nothing to say before there are more streams."""
        with self._traffic.lock:
            streams = self._traffic.streams.in_use
            has_several = len(self._mine) > 1 or bool(self._others)
            is_first = has_several and self._told is None
            is_news = not self.dials and streams > (self._told or 1)
            if not is_news and not is_first:
                return None
            self._told = streams
            addresses = tuple(KeeperAddress(*address) for address in self._mine)
            return LinkStreams(streams, addresses)

    def _channel(self, index: int) -> Channel:
        """With the lock held: made when it is needed first."""
        known = self._channels.get(index)
        if known is None:
            block_channel = BlockChannel(self._traffic, index)
            known = self._channels[index] = block_channel
            if block_channel.is_ours:
                self._used.append(block_channel)
                self._used.sort(key=lambda channel: channel.index)
        return known

    def road(self, index: int) -> Road:
        """Over which addresses that channel is dialled next."""
        assert self.address is not None
        stream = (index - 1) // 2 if index else 0
        mine = [host for host, _ in self._mine]
        theirs = (self.address, *(self._others or ()))
        return road(mine, theirs, stream, self._channels[index].in_vain)

    # its connections

    def wait_for_older(self, call: Callable[[], None]) -> bool:
        """Whether an earlier link with that node is not over: then `call` is called when it is."""
        if self._before is not None and self._before._then(call):
            return True
        self._before = None
        return False

    def take(self, endpoint: Endpoint) -> bool:
        """A proven connection belongs to this link. False when it is not carried: not yet, because
        it waits for the one that it replaces, or never, because the link has ended."""
        older: list[Endpoint] = []
        with self._traffic.lock:
            self._channel(endpoint.index)
            why = self.ended.why if self.ended is not None else None
            carried = self._carried.get(endpoint.index)
            if endpoint.is_lost:
                return False
            if why is None and carried is None:
                self._carried[endpoint.index] = endpoint
                return True
            if why is None and carried is not None:
                older = [carried, *self._parked_at(endpoint.index)]
                self._parked[endpoint.index] = endpoint
        if why is not None:
            endpoint.cut(why)
        for one in older:
            one.cut("replaced by a new connection")
        return False

    def _parked_at(self, index: int) -> list[Endpoint]:
        return [self._parked[index]] if index in self._parked else []

    def begin(self, endpoint: Endpoint, now_ns: int) -> bool:
        """It is carried from now on. True the first time that messages are: the link is up."""
        is_first = False
        if endpoint.index == 0:
            with self._traffic.lock:
                self._traffic.health.opened(now_ns)
                is_first = not self.is_up and self.ended is None
            if is_first:
                self._traffic.receiver.up(self.node)
                self.is_up = True
        with self._traffic.lock:
            channel = self._channels[endpoint.index]
            channel.carried_ns = now_ns
            endpoint.begin(channel.open(endpoint.wire, endpoint))
        return is_first

    def lose(self, endpoint: Endpoint, why: str, now_ns: int) -> Endpoint | None:
        """That connection is over. The one that waited for it, if there is one."""
        index = endpoint.index
        with self._traffic.lock:
            if self._parked.get(index) is endpoint:
                del self._parked[index]
            if self._carried.get(index) is not endpoint:
                return None
            del self._carried[index]
            self._traffic.counts.add("connections lost")
            channel = self._channels[index]
            channel.failures = 1
            channel.in_vain = 0
            channel.finals = 0
            channel.away(why, now_ns)
            return self._parked.pop(index, None)

    def unreachable(
        self, index: int, why: str, is_final: bool, now_ns: int, is_stranger: bool = False
    ) -> int:
        """A connection could not be made; `is_stranger`: who answered there is not known to
        be that node. How often in a row the refusal was final."""
        channel = self._channels[index]
        with self._traffic.lock:
            channel.failures += 1
            channel.in_vain += 1
            channel.finals = channel.finals + 1 if is_final else 0
            channel.away(why, now_ns, is_stranger)
            return channel.finals

    def redial_ns(self, index: int) -> int | None:
        """How long to wait before that channel is dialled again; None: not at all."""
        if self.ended is not None:
            return None
        return self._traffic.options.timeouts.retry_ns(self._channels[index].failures)

    # its life

    def look(self, now_ns: int) -> Cut | Dead | None:
        """Ask for its health; says ping where that is asked for."""
        with self._traffic.lock:
            asked = self._traffic.health.decide(now_ns)
            self.due_ns = self._traffic.health.due_ns
            if not isinstance(asked, SendPing):
                return asked
            self._messages.ping()
            return None

    def leave_detours(self, now_ns: int) -> None:
        """A stream that could not be dialled over its own addresses tries them again, once in a
        while and with nothing under way. On the other side it changes nothing."""
        with self._traffic.lock:
            idle = [
                self._carried[channel.index]
                for channel in self._channels.values()
                if isinstance(channel, BlockChannel)
                and channel.in_vain
                and channel.is_idle
                and channel.index in self._carried
                and now_ns - channel.carried_ns > DETOUR_NS
            ]
        for endpoint in idle:
            endpoint.cut("back to its own addresses")

    def cut_messages(self, why: str) -> bool:
        """End the connection that carries messages; False when that was done before."""
        endpoint = self._carried.get(0)
        return endpoint is not None and endpoint.cut(why)

    def end(self, ended: Ended) -> bool:
        """Take nothing any more, and cut its connections; False when that was done before."""
        with self._traffic.lock:
            if self.ended is not None:
                return False
            self.ended = ended
            endpoints = [*self._carried.values(), *self._parked.values()]
        for endpoint in endpoints:
            endpoint.cut(ended.why)
        return True

    def _then(self, call: Callable[[], None]) -> bool:
        """Have `call` called once this is over; False when it is already."""
        with self._traffic.lock:
            if self.is_over:
                return False
            self._when_over.append(call)
            return True

    def finish(self) -> list[Callable[[], None]] | None:
        """If it has ended and no connection carries it: what was under way is lost, the receiver is
        told, and it is over. What is to be called then; None when it is not over by this."""
        with self._traffic.lock:
            ended = self.ended
            if ended is None or self._carried or self._is_finishing:
                return None
            self._is_finishing = True
            lost = [
                block
                for channel in self._channels.values()
                if isinstance(channel, BlockChannel)
                for block in channel.flight.items()
            ]
            lost += self._traffic.waiting
        try:
            for block in lost:
                block.done(ended.why)
            if ended.tell:
                self._traffic.receiver.dead(self.node, ended.why, ended.is_loss)
        finally:
            with self._traffic.lock:
                self.is_over = True
                calls = self._when_over
                self._when_over = []
        return calls
