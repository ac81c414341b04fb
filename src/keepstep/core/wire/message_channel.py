"""Message channel: numbered messages, which are confirmed; between them signals, which may be lost.

Comes in: messages in the link's outbox, bytes that arrive. Goes out: frames, and calls of the
receiver. Messages that lie ready go in one piece; what has come is confirmed when it is much, or
when the link is quiet.

Its connection is the link's pulse: the link is as well as this channel is.
"""

from __future__ import annotations

from keepstep.core.wire.channel import NOTHING, Channel, Line, Pieces, refuse
from keepstep.core.wire.connection import Connection
from keepstep.core.wire.delivery import Inbox
from keepstep.core.wire.traffic import Traffic
from keepstep.model.messages.peers import KeeperMessage, LinkGoodbye, LinkStreams
from keepstep.model.units import KIB
from keepstep.model.wire import BlockComing, Received, Refused, Signal, Signalled

BATCH_BYTES = 64 * KIB  # sent or received at once
MAX_UNCONFIRMED = 32  # messages that came, before they are confirmed though the link is not quiet


class MessageChannel(Channel):
    """Channel 0."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__(traffic, 0)
        self._inbox = Inbox()
        self._stream: MessageStream | None = None

    def open(self, wire: Connection, line: Line) -> MessageStream:
        self._traffic.outbox.rewind()
        self._stream = MessageStream(self._traffic, self._inbox, wire, line)
        return self._stream

    def away(self, why: str, now_ns: int, is_stranger: bool = False) -> None:
        self._stream = None
        self._traffic.health.cut(why, now_ns, is_stranger)

    def ping(self) -> None:
        """With the lock held: ask, on the present connection if there is one, whether anybody is
        there."""
        if self._stream is not None:
            self._stream.say(Signal.PING)


class MessageStream:
    """See `Stream`."""

    pause_ns: int | None = None

    def __init__(self, traffic: Traffic, inbox: Inbox, wire: Connection, line: Line) -> None:
        self._traffic = traffic
        self._inbox = inbox
        self._wire = wire
        self._line = line
        self._buffer = memoryview(bytearray(BATCH_BYTES))
        self._signals: list[Signal] = []  # to be sent
        self._taken = inbox.last  # all messages up to this number have been taken here
        self._owed = 0  # how many came since the last confirmation

    # sending

    def say(self, signal: Signal) -> None:
        """With the lock held: send it, before anything that waits."""
        if signal not in self._signals:
            self._signals.append(signal)
            self._line.wake()

    def next_pieces(self) -> Pieces:
        if not self._signals and not self._traffic.outbox.has_more and self._owed < MAX_UNCONFIRMED:
            return NOTHING  # looked at without the lock: what comes now says `wake` afterwards
        with self._traffic.lock:
            signals: list[tuple[Signal, int]] = []
            if self._signals:
                signals = [(signal, 0) for signal in self._signals]
                self._signals.clear()
            bodies = self._next_bodies()
            if self._owed >= MAX_UNCONFIRMED or (self._owed and signals):
                self._owed = 0
                signals.append((Signal.CONFIRMED, self._taken))
        frames = [self._wire.signal(signal, number) for signal, number in signals]
        frames += [self._wire.encoded(body, number) for number, body in bodies]
        return (b"".join(frames),) if frames else NOTHING

    def _next_bodies(self) -> list[tuple[int, bytes]]:
        """As many as go at once."""
        bodies: list[tuple[int, bytes]] = []
        nbytes = 0
        while nbytes < BATCH_BYTES and (item := self._traffic.outbox.next()) is not None:
            bodies.append(item)
            nbytes += len(item[1])
        return bodies

    # receiving

    awaits_all = False

    def get_buffer(self) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int, now_ns: int) -> None:
        with self._traffic.lock:
            self._traffic.health.heard(now_ns)
        data = self._buffer[:nbytes]
        numbered = 0
        at = 0
        while at < nbytes and self._line.closing is None:
            event, at = self._wire.read(data, at)
            match event:
                case Received():
                    numbered += 1
                    self._take(event.message, event.number)
                case Signalled():
                    self._signalled(event.signal, event.number)
                case Refused():
                    numbered += 1
                    self._passed_over(event)
                case BlockComing():
                    why = f"a block where only messages go: {event.header.span}"
                    refuse(self._traffic, self._line, why)
        if numbered:
            self._settle(numbered)

    def _take(self, message: KeeperMessage, number: int) -> None:
        if not self._inbox.is_new(number):
            return
        if isinstance(message, LinkGoodbye):
            self._traffic.said_bye(message.reason)
        elif isinstance(message, LinkStreams):
            self._traffic.told_streams(message)
        else:
            self._traffic.receiver.message(self._traffic.node, message)

    def _signalled(self, signal: Signal, number: int) -> None:
        if signal is Signal.CONFIRMED:
            with self._traffic.lock:
                self._traffic.outbox.confirmed(number)
            self._traffic.relieved()
        elif signal is Signal.PING:
            with self._traffic.lock:
                self.say(Signal.PONG)
        elif signal is not Signal.PONG:
            refuse(self._traffic, self._line, f"{signal.name} where no blocks go")

    def _passed_over(self, refused: Refused) -> None:
        """Something came that nobody here understands."""
        self._traffic.refused(refused)
        if self._wire.closed:
            self._line.cut(str(refused))
        else:  # or it would come again with every connection
            self._inbox.is_new(refused.number)

    def _settle(self, numbered: int) -> None:
        """So many messages that came at once have been taken, and are to be confirmed."""
        with self._traffic.lock:
            self._taken = self._inbox.last
            self._owed += numbered
            if self._owed >= MAX_UNCONFIRMED:
                self._line.wake()
