"""NIXL buffers: registered memory by which blocks cross between keepers, and the keeper's end of
the process that has it (`nixl_process.py`).

Comes in: bytes to fill a buffer with; offers of other keepers, and which of their buffers to read.
Goes out: what was read, as soon as all of it is here. Half of the buffers are filled here, half are
read into: so a read never waits for one that waits for the other side.

Invariant: a buffer that is read into belongs to that read until the process has said that it is
over, also when whoever asked has gone. So what comes late overwrites nothing of anybody's.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from keepstep.edge.net.buffer_orders import (
    MEMORY_BYTES,
    PACKET_BYTES,
    BufferOrder,
    OrderAnswer,
    OrderKind,
)
from keepstep.edge.net.tcp import interface_of
from keepstep.edge.os.own_modules import module_words
from keepstep.errors import KeeperError
from keepstep.model.buffers import BUFFER_BYTES, BUFFERS, BufferOffer, BufferRecord

log = logging.getLogger("keepstep")

PROCESS_MODULE = "keepstep.edge.net.nixl_process"  # stands on its command line
READY_S = 30.0  # it imports numpy and looks for devices
END_WITHIN_S = 1.0
SHUN_S = 60.0  # a node from which a read has failed is not read from for so long
LOOK_S = 0.1
NOT_READ = "a read of its buffers failed"
# What the process is given of the keeper's environment, whose rest may hold secrets.
PASSED = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "TMPDIR")
PASSED_OF = ("UCX_", "NIXL_", "NCCL_IB_", "LC_")


def nixl_environ(environ: dict[str, str], host: str) -> dict[str, str]:
    """Of the process. RDMA alone, unless `UCX_TLS` says otherwise; TCP only on the interface that
    has `host`."""
    passed = {
        name: value
        for name, value in environ.items()
        if name in PASSED or name.startswith(PASSED_OF)
    }
    ways = passed.setdefault("UCX_TLS", "ib")
    if "tcp" in ways.split(","):
        is_loopback = host.startswith("127.")
        passed.setdefault("UCX_NET_DEVICES", interface_of(host) or ("lo" if is_loopback else "all"))
    # memory is registered by hand: UCX need not follow what is mapped, nor catch signals
    defaults = {"UCX_MEM_EVENTS": "n", "UCX_ERROR_SIGNALS": "", "NIXL_LOG_LEVEL": "WARN"}
    return {**defaults, **passed, "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True, slots=True)
class BufferSource:
    """Another keeper's buffers. `peer`: its number among those that were loaded."""

    node: int
    peer: int
    offer: BufferOffer


@dataclass(eq=False)
class _Asked:
    """An order that waits for its answer. `buffer`: what a read fills; `is_given_up`: whoever asked
    has gone, so that it is free when the answer comes."""

    buffer: int | None = None
    over: threading.Event = field(default_factory=threading.Event)
    answer: OrderAnswer | None = None
    is_given_up: bool = False


class NixlBuffers:
    """Safe to call from any thread. `close` it at the end."""

    def __init__(self, host: str) -> None:
        """Raises KeeperError when blocks cannot cross this way."""
        self._memory = os.memfd_create("keepstep-buffers", os.MFD_CLOEXEC)
        os.ftruncate(self._memory, MEMORY_BYTES)
        self._lock = threading.Lock()
        self._is_closed = False
        self._send_lock = threading.Lock()
        self._to_fill = list(range(BUFFERS))
        self._to_read = list(range(BUFFERS, 2 * BUFFERS))
        self._readable = threading.Condition(self._lock)
        self._asked: dict[int, _Asked] = {}
        self._numbers = itertools.count(1)
        self._shunned: dict[int, float] = {}
        self._counts: Counter[str] = Counter()
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *module_words(PROCESS_MODULE, str(self._memory))],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                pass_fds=[self._memory],
                env=nixl_environ(dict(os.environ), host),
                start_new_session=True,
            )
        first = self._first_word()
        if first is None or first.failed:
            self._end()
            why = "it ended" if first is None else first.text.decode(errors="replace")
            raise KeeperError(
                "transport: expected NIXL with a network card that UCX reaches by RDMA, found none "
                f"({why}); what else UCX can take is said by UCX_TLS (docs/operations.md)"
            )
        self.offer = BufferOffer(first.address, BUFFER_BYTES, BUFFERS, first.text)
        self.is_alive = True
        self._reader = threading.Thread(target=self._hear, name="nixl", daemon=True)
        self._reader.start()

    def _first_word(self) -> OrderAnswer | None:
        self._orders.settimeout(READY_S)
        try:
            packet = self._orders.recv(PACKET_BYTES)
        except OSError:
            return None
        self._orders.settimeout(None)
        return OrderAnswer.from_bytes(packet) if packet else None

    def close(self) -> None:
        """Nothing is read any more. To be said again changes nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        with contextlib.suppress(OSError):
            self._orders.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._end()

    def _end(self) -> None:
        # nothing it has is missed
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_WITHIN_S)
        self._orders.close()
        os.close(self._memory)

    # what is sent

    def take(self) -> int | None:
        """A buffer to fill; None: none is free, or nobody can read them."""
        with self._lock:
            if not self._to_fill or not self.is_alive:
                return None
            is_first = len(self._to_fill) == BUFFERS
            buffer = self._to_fill.pop()
        if is_first:
            self._order(BufferOrder(OrderKind.AWAKE))
        return buffer

    def fill(self, buffer: int, data: memoryview) -> None:
        """Without the GIL, as a system call."""
        put = os.pwritev(self._memory, [data], buffer * BUFFER_BYTES)
        assert put == data.nbytes, f"{put} of {data.nbytes} bytes fit"

    def give(self, buffers: list[int]) -> None:
        """Taken ones are free again."""
        with self._lock:
            self._to_fill.extend(buffers)
            is_last = len(self._to_fill) == BUFFERS
        if buffers and is_last:
            self._order(BufferOrder(OrderKind.REST))

    # what is received

    def load(self, node: int, offer: BufferOffer, within_s: float) -> BufferSource | None:
        """That keeper's buffers, to be read from; None: they are not to be had from here now."""
        if time.monotonic() < self._shunned.get(node, 0) or not self.is_alive:
            return None
        peer = next(self._numbers)
        asked = self._ask(BufferOrder(OrderKind.LOAD, peer, peer, agent=offer.agent))
        asked.over.wait(within_s)
        answer = asked.answer
        if answer is None or answer.failed:
            self._shun(node, "its buffers cannot be reached", answer)
            return None
        return BufferSource(node, peer, offer)

    def unload(self, source: BufferSource) -> None:
        """What was loaded is needed no more."""
        self._order(BufferOrder(OrderKind.UNLOAD, peer=source.peer))

    def read(
        self,
        source: BufferSource,
        record: BufferRecord,
        within_s: float,
        is_over: Callable[[], bool],
    ) -> int | None:
        """The buffer that now holds what the record names: to be `done_with`. None: it did not
        come in time, or cannot. `is_over`: nobody waits any more."""
        until = time.monotonic() + within_s
        with self._readable:
            if not self._readable.wait_for(lambda: self._to_read, within_s):
                buffer = None
            else:
                buffer = self._to_read.pop()
        if buffer is None:
            self._shun(source.node, NOT_READ, None)
            return None
        offer = source.offer
        order = BufferOrder(
            OrderKind.READ,
            next(self._numbers),
            source.peer,
            offer.address + record.buffer * offer.buffer_bytes,
            record.length,
            buffer,
        )
        asked = self._ask(order, buffer)
        while not asked.over.wait(LOOK_S) and time.monotonic() < until and not is_over():
            pass
        with self._lock:
            answer = asked.answer
            asked.is_given_up = answer is None
            if answer is not None and not answer.failed:
                self._counts["block bytes received by NIXL"] += record.length
                return buffer
        if not is_over():
            self._shun(source.node, NOT_READ, answer)
        return None

    def look_at(self, buffer: int, at: int, into: memoryview) -> int:
        """So many bytes from there on."""
        return os.preadv(self._memory, [into], buffer * BUFFER_BYTES + at)

    def done_with(self, buffer: int) -> None:
        """What was read is not looked at any more."""
        with self._readable:
            self._to_read.append(buffer)
            self._readable.notify()

    def _shun(self, node: int, what: str, answer: OrderAnswer | None) -> None:
        """Nothing is read from there for a while: blocks come over TCP."""
        why = "no answer" if answer is None else answer.text.decode(errors="replace")
        self._shunned[node] = time.monotonic() + SHUN_S
        with self._lock:
            self._counts["reads by NIXL failed"] += 1
        log.warning("transport: node %d: %s (%s): its blocks come over TCP", node, what, why)

    def counts(self) -> dict[str, int]:
        """For people."""
        with self._lock:
            return dict(self._counts)

    # the process

    def _ask(self, order: BufferOrder, buffer: int | None = None) -> _Asked:
        asked = _Asked(buffer=buffer)
        with self._lock:
            self._asked[order.number] = asked
        if not self._order(order):
            self._heard(OrderAnswer(order.number, True, 0, b"the process is gone"))
        return asked

    def _order(self, order: BufferOrder) -> bool:
        try:
            with self._send_lock:
                self._orders.send(order.to_bytes())
        except OSError:
            return False
        return self.is_alive

    def _hear(self) -> None:
        with contextlib.suppress(OSError):
            while packet := self._orders.recv(PACKET_BYTES):
                self._heard(OrderAnswer.from_bytes(packet))
        self.is_alive = False
        with self._lock:
            left = list(self._asked)
        for number in left:
            self._heard(OrderAnswer(number, True, 0, b"the process is gone"))

    def _heard(self, answer: OrderAnswer) -> None:
        with self._readable:
            asked = self._asked.pop(answer.number, None)
            if asked is None:
                return
            asked.answer = answer
            if asked.buffer is not None and (answer.failed or asked.is_given_up):
                self._to_read.append(asked.buffer)
                self._readable.notify()
        asked.over.set()
