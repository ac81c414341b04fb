"""Lanes: what one TCP connection after another carries between two keepers.

Lane 0 carries messages, the others blocks: straight from the memory the sender names into the
memory the receiver names. Each open connection has a thread that receives and one that sends; both
spend their time in system calls and checksums, without the GIL. Messages that lie ready go in one
system call, and what came in one is confirmed at once. Comes in: messages and blocks to send,
connections to carry them. Goes out: calls of the `Receiver`, on those threads.

Invariant: once `quiet` returns after a cut, nothing of that lane touches any block's memory any
more.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import xxhash

from keepstep.coding.checksum import checksum
from keepstep.edge.net.tcp import queued_bytes, round_trip_ns, yield_to_others
from keepstep.edge.net.traffic import Flow, Outgoing, Traffic
from keepstep.model.messages.peers import (
    BlockAnswer,
    BlockResult,
    Confirmed,
    KeeperMessage,
    LinkGoodbye,
    LinkMessage,
    Ping,
    Pong,
)
from keepstep.model.units import KIB, MIB, S_NS
from keepstep.model.wire import (
    BlockComing,
    BlockHeader,
    BlockWhole,
    Received,
    Refusal,
    Refused,
)

if TYPE_CHECKING:
    from keepstep.core.wire.connection import Connection

CHUNK_BYTES = 1 * MIB  # received and hashed at once: the bytes are still in the cache
DRAIN_BYTES = 256 * KIB
BATCH_BYTES = 64 * KIB  # of messages sent or received at once

_WHY_NOT = {
    "got": None,
    "unwanted": "the other side does not want it",
    "damaged": "it arrived damaged every time: does its source change?",
}


Item = tuple[int, KeeperMessage | Outgoing]  # with its number on the wire


class Lane:
    """One lane. Subclasses say what it carries: `_next` and `_rewind` are called with the lock
    held, the others without."""

    # received at once; 0: exactly what the connection wants next, so that a block's bytes stay in
    # the socket
    _ahead_bytes = 0

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._ready = threading.Condition(traffic.lock)  # there may be something to send
        traffic.ready.append(self._ready)
        self._turn = threading.Lock()  # held while a connection is carried
        self._sock: socket.socket | None = None
        self._cut: str | None = None
        # after which `_next` is to be asked again, though nothing has come
        self._pause_s: float | None = None

    def carry(self, sock: socket.socket, wire: Connection, opening: bytes) -> str:
        """Send `opening`, then carry traffic until the connection is cut; closes it and returns
        why."""
        with self._turn, contextlib.closing(sock):
            with self._traffic.lock:
                if self._traffic.ended is not None:
                    return self._traffic.ended
                self._sock, self._cut = sock, None
                self._rewind()
            self._begin()
            writer = threading.Thread(
                target=self._write, args=(sock, wire), name=f"to-{self._traffic.node}", daemon=True
            )
            try:
                sock.sendall(opening)
                writer.start()
                self._read(sock, wire)
            except OSError as error:
                self.cut(error.strerror or str(error))
            finally:
                self.cut("interrupted")
                if writer.ident is not None:
                    writer.join()
                with self._traffic.lock:
                    self._sock, why = None, self._cut or ""
                self.away(why)
            return why

    def cut(self, why: str) -> None:
        """Break the connection, if there is one. The first reason counts."""
        with self._traffic.lock:
            if self._sock is not None and self._cut is None:
                self._cut = why
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
            self._ready.notify()

    def away(self, why: str) -> None:
        """Its connection is no more, or could not be made."""

    def quiet(self) -> None:
        """Return when no connection is carried. Not from a thread that carries one."""
        with self._turn:
            pass

    # sending

    def _write(self, sock: socket.socket, wire: Connection) -> None:
        try:
            while item := self._wait():
                messages = bytearray()
                while item is not None and not isinstance(item[1], Outgoing):
                    messages += wire.message(item[1], item[0])
                    item = self._try_next() if len(messages) < BATCH_BYTES else None
                if messages:
                    self._send(sock, messages)
                if item is not None and isinstance(item[1], Outgoing):
                    self._send_block(sock, wire, item[0], item[1])
                    self._traffic.relieved()
        except OSError as error:
            self.cut(error.strerror or str(error))

    def _wait(self) -> Item | None:
        """What to send next, when there is anything; None once the connection is cut."""
        with self._ready:
            while self._cut is None:
                if item := self._next():
                    return item
                self._ready.wait(self._pause_s)
        return None

    def _try_next(self) -> Item | None:
        with self._traffic.lock:
            return self._next() if self._cut is None else None

    def _send_block(
        self, sock: socket.socket, wire: Connection, number: int, block: Outgoing
    ) -> None:
        # before: none leave uncounted when it breaks half way
        self._traffic.counts.add("block bytes sent", block.span.length)
        found = checksum(block.source) if block.checksum is None else block.checksum
        sock.sendall(wire.block(BlockHeader(block.span, found, number)), socket.MSG_MORE)
        self._send_source(sock, block.source)

    def _send_source(self, sock: socket.socket, source: memoryview) -> None:
        self._send(sock, source)

    def _send(self, sock: socket.socket, data: bytearray | memoryview) -> None:
        pacer = self._traffic.pacer
        if pacer is None:
            sock.sendall(data)
            return
        for at in range(0, len(data), pacer.chunk_bytes):
            chunk = data[at : at + pacer.chunk_bytes]
            pacer.take(len(chunk))
            sock.sendall(chunk)

    # receiving

    def _read(self, sock: socket.socket, wire: Connection) -> None:
        while self._cut is None:
            data = memoryview(sock.recv(self._ahead_bytes or wire.wanted))
            if not data:
                return self.cut("closed by the other side")
            while data and self._cut is None:
                piece, data = data[: wire.wanted], data[wire.wanted :]
                event = wire.receive(piece)
                if isinstance(event, Received):
                    self._take(event.message, event.number)
                elif isinstance(event, BlockComing):
                    self._block(sock, wire, event.header)
                elif isinstance(event, Refused):
                    self._traffic.counts.refused(event)
                    if wire.closed:
                        return self.cut(str(event))
                    self._skip(event.number)
            self._settle()

    def _refuse(self, why: str) -> None:
        self._traffic.counts.refused(Refused(Refusal.MALFORMED, why))
        self.cut(why)

    def _begin(self) -> None:
        """A connection is there, nothing has crossed it."""

    def _rewind(self) -> None:
        raise NotImplementedError

    def _next(self) -> Item | None:
        raise NotImplementedError

    def _take(self, message: KeeperMessage, number: int) -> None:
        raise NotImplementedError

    def _skip(self, number: int) -> None:
        """A message came that nobody here understands."""

    def _settle(self) -> None:
        """All that came at once has been taken."""

    def _block(self, sock: socket.socket, wire: Connection, header: BlockHeader) -> None:
        self._refuse(f"a block where only messages go: {header.span}")


class MessageLane(Lane):
    """Numbered messages, each confirmed; between them pings, pongs and confirmations, which may be
    lost.

    Its connection is the link's pulse: the link is as well as this lane is.
    """

    _ahead_bytes = BATCH_BYTES

    def __init__(self, traffic: Traffic) -> None:
        super().__init__(traffic)
        self._owes_got = False  # numbered messages came that are not confirmed yet
        # the newest of each kind: an older one says nothing more
        self._passing: dict[str, KeeperMessage] = {}

    def say(self, message: KeeperMessage) -> None:
        """Send once, before anything that waits."""
        with self._traffic.lock:
            self._passing[message.KIND] = message
            self._ready.notify()

    def away(self, why: str) -> None:
        with self._traffic.lock:
            self._traffic.books.health.cut(why, time.monotonic_ns())
            self._traffic.flushing.notify_all()

    def _begin(self) -> None:
        traffic = self._traffic
        with traffic.lock:
            traffic.books.health.opened(time.monotonic_ns())
        if not traffic.opened.is_set():
            traffic.receiver.up(traffic.node)
            traffic.opened.set()

    def _rewind(self) -> None:
        self._passing.clear()
        self._owes_got = False
        self._traffic.books.outbox.rewind()

    def _next(self) -> Item | None:
        if self._passing:
            return 0, self._passing.pop(next(iter(self._passing)))
        return self._traffic.books.outbox.next()

    def _take(self, message: KeeperMessage, number: int) -> None:
        traffic, now_ns = self._traffic, time.monotonic_ns()
        with traffic.lock:
            traffic.books.health.heard(now_ns)
        if number:
            if traffic.books.inbox.is_new(number):
                if isinstance(message, LinkGoodbye):
                    traffic.bye = message.reason
                elif isinstance(message, LinkMessage):
                    why = f"{message.KIND} with a number"
                    traffic.counts.refused(Refused(Refusal.MALFORMED, why))
                else:
                    traffic.receiver.message(traffic.node, message)
            self._owes_got = True
        elif isinstance(message, Ping):
            self.say(Pong(message.sent_ns))
        elif isinstance(message, Pong):
            traffic.round_trip_ns = now_ns - message.sent_ns
        elif isinstance(message, Confirmed):
            with traffic.lock:
                traffic.books.outbox.confirmed(message.number)
                traffic.flushing.notify_all()
            traffic.relieved()
        else:
            self._refuse(f"{message.KIND} without a number")

    def _skip(self, number: int) -> None:
        if number:  # or it would come again with every connection
            self._traffic.books.inbox.is_new(number)
            self._owes_got = True

    def _settle(self) -> None:
        if self._owes_got:
            self._owes_got = False
            self.say(Confirmed(self._traffic.books.inbox.last))


class BlockLane(Lane):
    """Blocks, each answered: got, damaged (it is sent again) or unwanted.

    Of several lanes each side sends its blocks on every other one: there its answers to the other
    side's never wait behind a block. With a gate a block is begun, and goes on, only as far as the
    gate says.
    """

    def __init__(self, traffic: Traffic, index: int) -> None:
        super().__init__(traffic)
        self._books = traffic.books.lanes[index]
        self._is_ours = len(traffic.books.lanes) == 1 or index % 2 == (0 if traffic.dials else 1)
        self._answers: deque[BlockAnswer] = deque()
        self._granted_bytes = 0  # by the gate, and not yet sent

    def _begin(self) -> None:
        assert self._sock is not None
        with contextlib.suppress(OSError):
            yield_to_others(self._sock)

    def _rewind(self) -> None:
        self._granted_bytes = 0
        self._answers.clear()  # what was not answered comes again
        self._books.flight.rewind()

    def _next(self) -> Item | None:
        if self._answers:
            return 0, self._answers.popleft()
        self._pause_s = None
        if again := self._books.flight.next_again():
            self._traffic.counts.add("blocks sent again")
            return again
        if not self._is_ours:
            return None
        if (
            self._traffic.waiting
            and self._books.flight.has_room()
            and self._may_go(self._traffic.waiting[0].span.length)
        ):
            block = self._traffic.waiting.popleft()
            self._traffic.waiting_bytes -= block.span.length
            return self._books.flight.start(block, block.span.length), block
        return None

    def _may_go(self, nbytes: int) -> bool:
        """With the lock held: some of so many bytes, if the gate says so."""
        gate, sock = self._traffic.gate, self._sock
        if gate is None or sock is None or self._granted_bytes:
            return True
        flow = Flow(self._traffic.node, queued_bytes(sock), round_trip_ns(sock))
        self._granted_bytes, wait_ns = gate.ask(nbytes, flow)
        self._pause_s = None if self._granted_bytes else wait_ns / S_NS
        return self._granted_bytes > 0

    def _send_source(self, sock: socket.socket, source: memoryview) -> None:
        if self._traffic.gate is None:
            return self._send(sock, source)
        at = 0
        while at < len(source):
            with self._ready:
                while not self._may_go(len(source) - at):
                    if self._cut is not None:
                        raise ConnectionError(self._cut)
                    self._ready.wait(self._pause_s)
                piece, self._granted_bytes = source[at : at + self._granted_bytes], 0
            self._send(sock, piece)
            at += len(piece)

    def _take(self, message: KeeperMessage, number: int) -> None:
        if not isinstance(message, BlockAnswer):
            return self._refuse(f"{message.KIND} where only blocks go")
        flight = self._books.flight
        with self._traffic.lock:
            block = (
                flight.damaged(message.number)
                if message.result == "damaged"
                else flight.landed(message.number)
            )
            self._ready.notify()
        if block is not None:
            block.done(_WHY_NOT[message.result])

    def _block(self, sock: socket.socket, wire: Connection, header: BlockHeader) -> None:
        traffic, span = self._traffic, header.span
        repeated = header.number in self._books.seen
        place = None if repeated else traffic.receiver.place(traffic.node, span)
        if place is None:
            if not self._drain(sock, span.length):
                return
            wire.block_received(header.checksum)
            return self._answer(header, "got" if repeated else "unwanted")
        assert place.nbytes == span.length, f"a place of {place.nbytes} bytes for {span.length}"
        found = self._fill(sock, place)
        if found is None:
            return
        if isinstance(wire.block_received(found), BlockWhole):
            self._books.seen.add(header.number)
            traffic.receiver.block(traffic.node, span, found)
            self._answer(header, "got")
        else:
            traffic.counts.add("blocks damaged")
            self._answer(header, "damaged")

    def _answer(self, header: BlockHeader, result: BlockResult) -> None:
        with self._traffic.lock:
            self._answers.append(BlockAnswer(header.number, result))
            self._ready.notify()

    def _fill(self, sock: socket.socket, place: memoryview) -> int | None:
        """Receive straight into `place`; the checksum of what came, or None when cut."""
        summed, at = xxhash.xxh3_64(), 0
        try:
            while at < len(place):
                got = 0 if self._cut is not None else sock.recv_into(place[at : at + CHUNK_BYTES])
                if not got:
                    self.cut("closed by the other side in the middle of a block")
                    return None
                summed.update(place[at : at + got])
                at += got
        finally:
            self._traffic.counts.add("block bytes received", at)
        return summed.intdigest()

    def _drain(self, sock: socket.socket, nbytes: int) -> bool:
        scratch = memoryview(bytearray(min(nbytes, DRAIN_BYTES)))
        while nbytes:
            got = sock.recv_into(scratch[:nbytes])
            if not got:
                self.cut("closed by the other side in the middle of a block")
                return False
            self._traffic.counts.add("block bytes received", got)
            nbytes -= got
        return True
