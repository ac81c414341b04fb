"""Block channel: blocks, each answered: got, damaged (it is sent again) or unwanted.

Comes in: blocks that wait in the link's queue, bytes that arrive. Goes out: block headers and
answers as frames, the blocks' own bytes straight from the memory their sender names, and on the
other side straight into the memory their receiver names: nothing is copied here. Encrypted bytes
pass through a buffer of one piece on each side. Each side hashes a block once, and has its MAC made
or its bytes encrypted once, outside of any lock.

Each side sends its blocks on every other channel: its streams. Its answers to the other side's
never wait behind a block. All streams of one side take from the same queue, so that a slow one
holds up only what it carries; one that is broken sends that again when it has another connection,
and nobody else does. With a gate a block is begun, and goes on, only as far as the gate says.
"""

from __future__ import annotations

from keepstep.core.wire.arrivals import PIECE_BYTES, Deciphered, Placed, Unwanted, Wanted
from keepstep.core.wire.channel import NOTHING, Channel, Line, Pieces, refuse
from keepstep.core.wire.connection import Connection
from keepstep.core.wire.delivery import Flight, Seen
from keepstep.core.wire.macs import TAG_BYTES
from keepstep.core.wire.seals import Sealing
from keepstep.core.wire.traffic import Outgoing, Traffic
from keepstep.model.units import KIB
from keepstep.model.wire import (
    BlockComing,
    BlockHeader,
    BlockWhole,
    Received,
    Refused,
    Signal,
    Signalled,
    Span,
)

FRAME_BYTES = 4 * KIB  # of a frame, received at once

_WHY_NOT = {
    Signal.BLOCK_GOT: None,
    Signal.BLOCK_UNWANTED: "the other side does not want it",
    Signal.BLOCK_DAMAGED: "it arrived damaged every time: by the network, or its source changes",
}


class BlockChannel(Channel):
    """Channel 1 or one behind it."""

    def __init__(self, traffic: Traffic, index: int) -> None:
        super().__init__(traffic, index)
        self.flight: Flight[Outgoing] = Flight(traffic.options.window_bytes)
        self.seen = Seen()
        self.stream = (index - 1) // 2  # its number among those of its side
        self.is_ours = (index - 1) % 2 == (0 if traffic.dials else 1)

    @property
    def has_more(self) -> bool:
        """There is a block to send, if there is room for it."""
        return self.flight.has_again or (self.is_used and bool(self._traffic.waiting))

    @property
    def is_used(self) -> bool:
        """Blocks of this side go over it."""
        return self.is_ours and self.stream < self._traffic.streams.in_use

    @property
    def is_idle(self) -> bool:
        """Nothing is under way on it."""
        return not self.flight.items()

    def open(self, wire: Connection, line: Line) -> BlockStream:
        self.flight.rewind()
        return BlockStream(self._traffic, self, wire, line)


class BlockStream:
    """See `Stream`."""

    def __init__(
        self, traffic: Traffic, channel: BlockChannel, wire: Connection, line: Line
    ) -> None:
        self._traffic = traffic
        self._channel = channel
        self._wire = wire
        self._line = line
        self.pause_ns: int | None = None
        self._answers: list[tuple[Signal, int]] = []  # to be sent
        self._rest: memoryview | None = None  # of the block that is being sent
        self._granted_bytes = 0  # by the gate, and not yet sent
        self._frame = memoryview(bytearray(FRAME_BYTES))
        self._arriving: Wanted | Unwanted | None = None
        # of a piece that is encrypted; made for the first block that is, of which most links of a
        # large job have none
        self._scratch_out: memoryview | None = None
        self._scratch_in: memoryview | None = None

    # sending

    def next_pieces(self) -> Pieces:
        self.pause_ns = None
        if self._rest is not None:
            if len(self._rest):
                return self._next_of_block(self._rest)
            self._rest = None
            self._traffic.relieved()
        if not self._answers and not self._channel.has_more:
            return NOTHING  # looked at without the lock: what comes now says `wake` afterwards
        item = None
        with self._traffic.lock:
            answers = self._answers
            self._answers = []
            if not answers:
                item = self._next_block()
        if answers:
            return (b"".join([self._wire.signal(answer, number) for answer, number in answers]),)
        return NOTHING if item is None else self._begin_block(*item)

    def _next_block(self) -> tuple[int, Outgoing] | None:
        """With the lock held: the block whose turn it is, and its number."""
        traffic = self._traffic
        flight = self._channel.flight
        if (again := flight.next_again()) is not None:
            traffic.counts.add("blocks sent again")
            return again
        if not self._channel.has_more or not flight.has_room():
            return None
        if not self._may_go(traffic.waiting[0].span.length):
            return None
        block = traffic.unqueue()
        return flight.start(block, block.span.length), block

    def _begin_block(self, number: int, block: Outgoing) -> Pieces:
        # before: none leave uncounted when it breaks half way
        self._traffic.counts.add("block bytes sent", block.span.length)
        checksum = block.checksum
        if checksum is None:
            checksum = self._traffic.options.hashing.checksum(block.source)
        header = self._wire.block(BlockHeader(block.span, checksum, number), block.source)
        return (header, *self._next_of_block(block.source))

    def _next_of_block(self, rest: memoryview) -> Pieces:
        """What is left of a block, or as much of it as may go now."""
        self._rest = rest
        sealing = self._wire.sealing
        nbytes = len(rest) if sealing is None else min(len(rest), PIECE_BYTES)
        if self._traffic.options.gate is not None:
            with self._traffic.lock:
                if not self._may_go(len(rest)):
                    return NOTHING
                nbytes = min(nbytes, self._granted_bytes)
                self._granted_bytes -= nbytes
        self._rest = rest[nbytes:]
        piece = rest[:nbytes]
        return (piece,) if sealing is None else self._sealed(sealing, piece)

    def _sealed(self, sealing: Sealing, piece: memoryview) -> Pieces:
        """Behind the last piece of a block goes its tag."""
        if self._scratch_out is None:
            self._scratch_out = memoryview(bytearray(PIECE_BYTES))
        out = self._scratch_out[: len(piece)]  # what it held before is out: this is asked for
        sealing.update(piece, out)
        return (out,) if self._rest else (out, sealing.tag())

    def _may_go(self, nbytes: int) -> bool:
        """With the lock held: some of so many bytes, if the gate says so."""
        gate = self._traffic.options.gate
        if gate is None or self._granted_bytes:
            return True
        self._granted_bytes, wait_ns = gate.ask(nbytes, self._line.flow())
        if not self._granted_bytes:
            self.pause_ns = wait_ns
            self._traffic.streams.held_back()
        return self._granted_bytes > 0

    # receiving

    @property
    def awaits_all(self) -> bool:
        return self._arriving is not None

    def get_buffer(self) -> memoryview:
        if self._arriving is not None:
            return self._arriving.next()
        return self._frame[: self._wire.readable]

    def buffer_updated(self, nbytes: int, now_ns: int) -> None:
        if self._arriving is not None:
            self._traffic.counts.add("block bytes received", nbytes)
            if self._arriving.took(nbytes):
                self._arrived(self._arriving)
            return
        data = self._frame[:nbytes]
        at = 0
        while at < nbytes and self._line.closing is None:
            event, at = self._wire.read(data, at)
            match event:
                case Signalled():
                    self._answered(event.signal, event.number, now_ns)
                case BlockComing():
                    self._coming(event.header)
                case Received():
                    refuse(self._traffic, self._line, "a message where only blocks go")
                case Refused():
                    self._traffic.refused(event)
                    if self._wire.closed:
                        self._line.cut(str(event))

    def _answered(self, answer: Signal, number: int, now_ns: int) -> None:
        if answer not in _WHY_NOT:
            return refuse(self._traffic, self._line, f"{answer.name} where only blocks go")
        traffic = self._traffic
        flight = self._channel.flight
        needs_more = False
        with traffic.lock:
            if answer is Signal.BLOCK_DAMAGED:
                block = flight.damaged(number)
            else:
                block = flight.landed(number)
            if block is None or traffic.waiting:
                self._line.wake()  # there is room for another one, or this one goes again
            if block is not None:
                nbytes = block.span.length
                needs_more = traffic.streams.landed(now_ns, nbytes, bool(traffic.waiting))
        if block is not None:
            block.done(_WHY_NOT[answer])
        if needs_more:
            traffic.more_streams()

    def _coming(self, header: BlockHeader) -> None:
        traffic = self._traffic
        is_repeated = header.number in self._channel.seen
        place = None
        if not is_repeated and self._claim(header.span):
            place = traffic.receiver.place(traffic.node, header.span)
        if place is None:
            answer = Signal.BLOCK_GOT if is_repeated else Signal.BLOCK_UNWANTED
            tag_bytes = 0 if self._wire.unsealing is None else TAG_BYTES
            self._arriving = Unwanted(header, answer, tag_bytes)
        else:
            assert place.nbytes == header.span.length, (
                f"a place of {place.nbytes} bytes for {header.span.length}"
            )
            self._arriving = self._arrival(header, place)

    def _claim(self, span: Span) -> bool:
        """Whether those bytes come here and on no other stream: the one that they come on already
        sees to them, also when it breaks over them."""
        index = self._channel.index
        with self._traffic.lock:
            return self._traffic.arriving.setdefault(span, index) == index

    def _arrival(self, header: BlockHeader, place: memoryview) -> Wanted:
        begun = self._traffic.options.hashing.begin()
        unsealing = self._wire.unsealing
        if unsealing is None:
            return Placed(header, place, begun, self._wire.begin_block_mac())
        if self._scratch_in is None:
            self._scratch_in = memoryview(bytearray(PIECE_BYTES))
        return Deciphered(header, place, begun, unsealing, self._scratch_in)

    def _arrived(self, arrived: Wanted | Unwanted) -> None:
        """All of a block's bytes are there."""
        self._arriving = None
        header = arrived.header
        if isinstance(arrived, Unwanted):
            self._wire.block_received(header.checksum, header.tag)
            return self._answer(header, arrived.answer)
        found = arrived.hash.intdigest()
        if isinstance(self._wire.block_received(found, arrived.tag()), BlockWhole):
            self._channel.seen.add(header.number)
            self._traffic.receiver.block(self._traffic.node, header.span, found)
            self._answer(header, Signal.BLOCK_GOT)
        else:
            self._traffic.counts.add("blocks damaged")
            self._traffic.counts.damage(self._traffic.node)
            self._answer(header, Signal.BLOCK_DAMAGED)

    def _release(self, span: Span) -> None:
        """With the lock held: they may come again, on any stream."""
        if self._traffic.arriving.get(span) == self._channel.index:
            del self._traffic.arriving[span]

    def _answer(self, header: BlockHeader, answer: Signal) -> None:
        with self._traffic.lock:
            self._release(header.span)
            self._answers.append((answer, header.number))
            self._line.wake()
