"""TCP links: a keeper's links to those of other nodes as `ports.Links`: `edge/net/peers.py` with
the books and the wire of `core/`.

The address is reserved at once, because others are told where to dial before this keeper is told
which node it is.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

from keepstep.core.wire.connection import NONCE_BYTES, Connection
from keepstep.core.wire.link import Link as Books
from keepstep.core.wire.link import Patience
from keepstep.edge.net.peers import PeerOptions, Peers
from keepstep.edge.net.tcp import TcpOptions
from keepstep.edge.net.traffic import Flow, Gate
from keepstep.errors import KeeperError
from keepstep.model.messages.peers import MeshMessage
from keepstep.model.units import S_NS
from keepstep.model.wire import Identity, Span
from keepstep.ports import Receiver

MAX_MESSAGES = 10_000
LANES = 2  # for blocks, one a direction


class LockedGate:
    """See `edge.net.traffic.Gate`. Asked on any thread, asks the gate one at a time."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._lock = threading.Lock()

    def ask(self, nbytes: int, flow: Flow) -> tuple[int, int]:
        """See `edge.net.traffic.Gate`."""
        with self._lock:
            return self._gate.ask(nbytes, flow)


class TcpLinks:
    """See `ports.Links`."""

    def __init__(
        self,
        job_hash: bytes,
        incarnation: int,
        address: tuple[str, int],
        dead_ns: int,
        receiver: Receiver,
        gate: Gate | None = None,
    ) -> None:
        """See `ports.OpenLinks`. `gate`: says when blocks may go, and is asked by one thread at
        a time; without one they always may."""
        self._job_hash, self._incarnation, self._receiver, self._gate = (
            job_hash,
            incarnation,
            receiver,
            LockedGate(gate) if gate is not None else None,
        )
        self._patience = Patience.within(dead_ns)
        self._tcp = TcpOptions(unacked_s=self._patience.silence_ns / S_NS)
        self._reserved: socket.socket | None = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # Bound and not listening: the listener can bind beside it once the node's number is known.
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._reserved.bind(address)
        except (OSError, ValueError) as error:  # ValueError: it is no host name at all
            self._reserved.close()
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise KeeperError(
                f"host: expected an address of this machine with port {address[1]} free, "
                f"found {address[0]!r}: {why}"
            ) from error
        self.address: tuple[str, int] = self._reserved.getsockname()[:2]
        self._who: tuple[int, bytes] | None = None
        self._peers: Peers | None = None

    def be(self, node: int, secret: bytes) -> None:
        if self._who == (node, secret):
            return
        if self._peers is not None:
            self._peers.close("another number")
        me = Identity(self._job_hash, node, self._incarnation)
        self._who, self._peers = (node, secret), None
        self._peers = Peers(
            me,
            lambda admit, dial: Connection(me, secret, os.urandom(NONCE_BYTES), admit, dial),
            lambda now_ns: Books(
                now_ns, patience=self._patience, lanes=LANES, max_messages=MAX_MESSAGES
            ),
            self._receiver,
            PeerOptions(bind=self.address, tcp=self._tcp, gate=self._gate),
        )
        self._free()

    def _free(self) -> None:
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

    def connect(self, node: int, address: tuple[str, int], incarnation: int = 0) -> None:
        assert self._peers is not None
        self._peers.connect(node, address, incarnation)

    def send(self, node: int, message: MeshMessage) -> bool:
        assert self._peers is not None
        return self._peers.send(node, message)

    def send_block(
        self,
        node: int,
        span: Span,
        source: memoryview,
        done: Callable[[str | None], None],
        checksum: int | None = None,
    ) -> bool:
        assert self._peers is not None
        return self._peers.send_block(node, span, source, done, checksum)

    def is_open(self, node: int) -> bool:
        return self._peers is not None and self._peers.is_open(node)

    def counts(self) -> dict[str, int]:
        return self._peers.counts.snapshot() if self._peers is not None else {}

    def close(self, reason: str = "closing") -> None:
        if self._peers is not None:
            self._peers.close(reason)
        self._free()
