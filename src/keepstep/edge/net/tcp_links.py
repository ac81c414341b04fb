"""TCP links: a keeper's links to those of other nodes as `ports.Links`: `edge/net/peers.py`, made
anew with each number that this keeper is given.

The addresses are reserved at once, because others are told where to dial before this keeper is told
which node it is. They are told the first; the others a link tells its other side itself.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from keepstep.edge.net.nixl_buffers import NixlBuffers
from keepstep.edge.net.peers import PeerOptions, Peers, nobody_told
from keepstep.edge.net.tcp import TcpOptions
from keepstep.errors import KeeperError
from keepstep.model.links import LinkCount
from keepstep.model.messages.peers import MeshMessage
from keepstep.model.units import S_NS
from keepstep.model.wire import Address, Identity, Span

if TYPE_CHECKING:
    from keepstep.core.wire.link_table import LinkTable, Shell

NewLinkTable = Callable[[Identity, bytes, bool, "Shell"], "LinkTable"]


class TcpLinks:
    """See `ports.Links`."""

    def __init__(
        self,
        job_hash: bytes,
        incarnation: int,
        address: Address,
        silence_ns: int,
        new_table: NewLinkTable,
        more_hosts: Sequence[str] = (),
        buffers: NixlBuffers | None = None,
        refused: Callable[[str, str], None] = nobody_told,
        copy_dscp: int = 0,
    ) -> None:
        """`silence_ns`: bytes that the other kernel has not acknowledged for so long break a
        connection. `new_table(me, secret, encrypt, shell)`: the table of links of that keeper.
        `more_hosts`: addresses of other interfaces of this node. `buffers`: closed with the links.
        `refused`: see `PeerOptions`. `copy_dscp`: see `TcpOptions`.

        Raises KeeperError when an address is not this node's, or taken.
        """
        self._job_hash = job_hash
        self._incarnation = incarnation
        self._buffers = buffers
        self._new_table = new_table
        self._refused = refused
        self._tcp = TcpOptions(unacked_s=silence_ns / S_NS, copy_dscp=copy_dscp)
        self._reserved: list[socket.socket] = []
        try:
            for each in (address, *((host, 0) for host in more_hosts)):
                self._reserved.append(_reserve(each))
        except KeeperError:
            self._free()
            raise
        self._addresses: list[Address] = [sock.getsockname()[:2] for sock in self._reserved]
        self.address: Address = self._addresses[0]
        self._who: tuple[int, bytes, bool] | None = None
        self._peers: Peers | None = None

    def be(self, node: int, secret: bytes, encrypt: bool = False) -> None:
        who = (node, secret, encrypt)
        if self._who == who and self._peers is not None:
            self._peers.begin_mesh()
            return
        if self._peers is not None:
            self._peers.close("another number")
        self._who = who
        self._peers = None
        me = Identity(self._job_hash, node, self._incarnation)
        self._peers = Peers(
            lambda shell: self._new_table(me, secret, encrypt, shell),
            PeerOptions(
                bind=self.address,
                more=tuple(self._addresses[1:]),
                tcp=self._tcp,
                buffers=self._buffers,
                refused=self._refused,
            ),
        )
        self._free()

    def _free(self) -> None:
        for sock in self._reserved:
            sock.close()
        self._reserved.clear()

    def connect(self, node: int, address: Address, incarnation: int = 0) -> None:
        assert self._peers is not None, "which node this is comes first"
        self._peers.connect(node, address, incarnation)

    def send(self, node: int, message: MeshMessage) -> bool:
        return self._peers is not None and self._peers.send(node, message)

    def send_block(
        self,
        node: int,
        span: Span,
        source: memoryview,
        done: Callable[[str | None], None],
        checksum: int | None = None,
    ) -> bool:
        return self._peers is not None and self._peers.send_block(
            node, span, source, done, checksum
        )

    def is_open(self, node: int) -> bool:
        return self._peers is not None and self._peers.is_open(node)

    def sent_counts(self) -> dict[tuple[int, int], LinkCount]:
        return self._peers.sent_counts() if self._peers is not None else {}

    def damaged(self) -> dict[int, int]:
        return self._peers.damaged() if self._peers is not None else {}

    def counts(self) -> dict[str, int]:
        by_links = self._peers.counts() if self._peers is not None else {}
        return by_links | (self._buffers.counts() if self._buffers is not None else {})

    def close(self, reason: str = "closing") -> None:
        if self._peers is not None:
            self._peers.close(reason)
        if self._buffers is not None:
            self._buffers.close()
        self._free()


def _reserve(address: Address) -> socket.socket:
    """Bound and not listening: a listener can bind beside it once the node's number is known.

    Raises KeeperError.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except (OSError, ValueError) as error:  # ValueError: it is no host name at all
        sock.close()
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise KeeperError(
            f"host: expected an address of this machine with port {address[1]} free, "
            f"found {address[0]!r}: {why}"
        ) from error
    return sock
