"""Open links: a keeper's links as `ports.OpenLinks` asks for them: the state machines of
`core/wire/` with the sockets of `edge/net/`."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from keepstep.coding.aes_gcm import AesGcm
from keepstep.coding.checksum import checksum, running_checksum
from keepstep.coding.gmac import gmac
from keepstep.core.wire.connection import KEEPERS_FORMAT, NONCE_BYTES, WireFormat
from keepstep.core.wire.health import LinkTimeouts
from keepstep.core.wire.link_table import Entropy, LinkTable, Shell
from keepstep.core.wire.streams import StreamLimits
from keepstep.core.wire.traffic import Gate, Hashing, LinkOptions
from keepstep.edge.net.nixl_buffers import NixlBuffers
from keepstep.edge.net.peers import nobody_told
from keepstep.edge.net.tcp_links import TcpLinks
from keepstep.edge.os.needs import NO_NIXL, has_nixl, has_package
from keepstep.errors import KeeperError
from keepstep.model.wire import Flow, Identity
from keepstep.ports import Receiver

HASHING = Hashing(checksum, running_checksum)
_NO_CRYPTOGRAPHY = (
    "expected the package cryptography, which `on` needs, and it is not here: "
    "pip install 'keepstep[secure]'"
)


def wire_format(block_mac: str, encrypt: bool = False) -> WireFormat:
    """What is encrypted needs no MACs beside it. Raises KeeperError when links need what cannot be
    had."""
    if encrypt:
        if not has_package("cryptography"):
            raise KeeperError(f"encrypt: {_NO_CRYPTOGRAPHY}")
        return replace(KEEPERS_FORMAT, new_cipher=AesGcm)
    if block_mac == "off":
        return KEEPERS_FORMAT
    new = gmac if has_package("cryptography") else None
    needs = block_mac == "on"
    if needs and new is None:
        raise KeeperError(f"block_mac: {_NO_CRYPTOGRAPHY}")
    return replace(KEEPERS_FORMAT, new_block_mac=new, needs_block_mac=needs)


class LockedGate:
    """See `core/wire/traffic.Gate`. Asked on any thread, asks the gate one at a time."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._lock = threading.Lock()

    def ask(self, nbytes: int, flow: Flow) -> tuple[int, int]:
        """See `core/wire/traffic.Gate`."""
        with self._lock:
            return self._gate.ask(nbytes, flow)


def new_link_table(
    me: Identity, secret: bytes, receiver: Receiver, shell: Shell, options: LinkOptions
) -> LinkTable:
    """A table of links for a shell of several threads."""
    return LinkTable(
        me=me,
        secret=secret,
        receiver=receiver,
        shell=shell,
        options=options,
        entropy=Entropy(lambda: os.urandom(NONCE_BYTES), time.monotonic_ns()),
        new_lock=threading.Lock,
    )


def open_tcp_links(
    job_hash: bytes,
    incarnation: int,
    address: tuple[str, int],
    dead_ns: int,
    receiver: Receiver,
    gate: Gate | None = None,
    block_mac: str = "auto",
    streams: StreamLimits | None = None,
    more_hosts: Sequence[str] = (),
    transport: str = "tcp",
    refused: Callable[[str, str], None] = nobody_told,
    copy_dscp: int = 0,
) -> TcpLinks:
    """See `ports.OpenLinks`. `gate`: says when blocks may go, and is asked by one thread at a
    time; without one they always may. `block_mac`: auto, on or off. `streams`: as many as help,
    unless given. `more_hosts`: addresses of other interfaces of this node. `transport`: tcp, or
    nixl for blocks by registered memory. `refused`: who came to the door and did not knock right,
    and why; on any thread. `copy_dscp`: the class of packets that carry copies, 0 for that of all.

    Raises KeeperError when the address is not this node's, or links need what cannot be had."""
    timeouts = LinkTimeouts.within(dead_ns)
    locked = LockedGate(gate) if gate is not None else None
    wire_format(block_mac)  # what it needs is missed now
    options = LinkOptions(HASHING, timeouts, streams or StreamLimits(), gate=locked)

    buffers = _new_buffers(address[0]) if transport == "nixl" else None

    def new_table(me: Identity, secret: bytes, encrypt: bool, shell: Shell) -> LinkTable:
        format = replace(wire_format(block_mac, encrypt), has_buffers=buffers is not None)
        return new_link_table(me, secret, receiver, shell, replace(options, format=format))

    try:
        return TcpLinks(
            job_hash,
            incarnation,
            address,
            timeouts.silence_ns,
            new_table,
            more_hosts,
            buffers,
            refused,
            copy_dscp,
        )
    except KeeperError:
        if buffers is not None:
            buffers.close()
        raise


def _new_buffers(host: str) -> NixlBuffers:
    """Raises KeeperError when there is no NIXL, or it finds no way."""
    if not has_nixl():
        raise KeeperError(f"transport: {NO_NIXL}")
    return NixlBuffers(host)
