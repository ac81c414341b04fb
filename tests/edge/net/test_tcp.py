"""What sockets tell of their link, on loopback."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from keepstep.edge.net.tcp import (
    BULK_PRIORITY,
    TcpOptions,
    dial,
    interface_of,
    listen,
    queued_bytes,
    round_trip_ns,
    yield_to_others,
)
from keepstep.model.units import KIB, S_NS


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far = server.accept()[0]
    yield near, far
    near.close()
    far.close()


def test_what_the_other_side_has_no_room_for_is_queued(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair
    near.setblocking(False)
    sent = 0
    try:
        while True:
            sent += near.send(b"x" * 65536)
    except BlockingIOError:
        pass
    assert 0 < queued_bytes(near) <= sent
    got = 0
    while got < sent:
        got += len(far.recv(1 << 20))
    assert queued_bytes(far) == 0
    near.close()
    assert queued_bytes(near) == 0


def test_a_round_trip_is_known_once_something_was_answered(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair
    near.sendall(b"x")
    far.sendall(far.recv(1))
    near.recv(1)
    assert 0 < round_trip_ns(near) < S_NS
    near.close()
    assert round_trip_ns(near) == 0


def test_blocks_yield_to_others(pair: tuple[socket.socket, socket.socket]) -> None:
    yield_to_others(pair[0])
    yield_to_others(pair[1], dscp=1)
    for end in pair:
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == BULK_PRIORITY
    assert [end.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) for end in pair] == [0, 4]


def test_buffers_follow_the_link_unless_they_are_set() -> None:
    """A size that is set turns the kernel's own choice off."""

    def sizes(sock: socket.socket) -> list[int]:
        options = (socket.SO_SNDBUF, socket.SO_RCVBUF)
        return [sock.getsockopt(socket.SOL_SOCKET, option) for option in options]

    for options in (TcpOptions(), TcpOptions(buffer_bytes=64 * KIB)):
        with (
            socket.socket() as untouched,
            listen(("127.0.0.1", 0), options) as server,
            dial(server.getsockname(), "127.0.0.1", options) as near,
        ):
            untouched.connect(server.getsockname())
            is_set = options.buffer_bytes is not None
            assert sizes(near)[0] == 128 * KIB if is_set else sizes(near) == sizes(untouched)


def test_whose_address_it_is() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("198.18.255.254") == ""


@pytest.mark.parametrize("address", ["198.18.0.7", "198.18.0.8"], ids=["first", "another"])
def test_an_interface_with_the_longest_name_is_found(address: str) -> None:
    name = "fifteen-letters"
    ask = f"from keepstep.edge.net.tcp import interface_of; print(interface_of({address!r}))"
    script = (
        f"ip link set lo name {name} && ip address add 198.18.0.7/32 dev {name} && "
        f"ip address add 198.18.0.8/32 dev {name} && "
        f"exec {shlex.quote(sys.executable)} -c {shlex.quote(ask)}"
    )
    apart = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]
    allowed = subprocess.run([*apart, "ip", "link"], capture_output=True, text=True)
    if allowed.returncode:
        pytest.skip(f"needs a network namespace of its own: {allowed.stderr.strip()}")
    found = subprocess.run([*apart, "sh", "-c", script], capture_output=True, text=True)
    assert found.stdout.strip() == name, found.stderr
