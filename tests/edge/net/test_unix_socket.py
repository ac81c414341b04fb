"""Mailboxes: whole messages in order, a peer's name from the kernel, a peer's end as an end."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.edge.net.unix_socket import MAX_PACKET_BYTES, Mailbox, listen


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Mailbox, Mailbox]]:
    server = listen(tmp_path / "box.sock")
    one = Mailbox.connect(tmp_path / "box.sock", timeout_s=5)
    other = Mailbox(server.accept()[0])
    yield one, other
    one.close()
    other.close()
    server.close()


def test_messages_arrive_whole_and_in_order(pair: tuple[Mailbox, Mailbox]) -> None:
    one, other = pair
    messages = [{"kind": "join", "holds": [[3, 1]]}, {}, {"text": "ü" * 1000}, {"kind": "bye"}]
    assert all(one.send(m) for m in messages)
    assert [other.recv(5) for _ in messages] == messages
    assert other.send({"kind": "offer"}) and one.recv(5) == {"kind": "offer"}


def test_the_kernel_names_the_peer(pair: tuple[Mailbox, Mailbox]) -> None:
    assert pair[1].peer() == (os.getpid(), os.getuid())


def test_a_peer_that_ends_is_none_after_what_it_said(pair: tuple[Mailbox, Mailbox]) -> None:
    one, other = pair
    one.send({"last": "words"})
    one.close()
    assert other.recv(5) == {"last": "words"}
    assert other.recv(5) is None
    assert other.send({"are": "you there"}) is False


def test_silence_is_a_timeout(pair: tuple[Mailbox, Mailbox]) -> None:
    with pytest.raises(TimeoutError, match="no message within 0 s"):
        pair[0].recv(0)


def test_the_largest_message_fits_and_a_larger_one_is_our_mistake(
    pair: tuple[Mailbox, Mailbox],
) -> None:
    one, other = pair
    largest = {"x": "a" * (MAX_PACKET_BYTES - len('{"x":""}'))}
    assert one.send(largest) and other.recv(5) == largest
    with pytest.raises(AssertionError):
        one.send({"x": "a" * MAX_PACKET_BYTES})


@pytest.mark.parametrize("packet", [b"hello", b"\xff\xfe", b"[1, 2]", b"3"])
def test_nonsense_is_a_peer_that_is_none_of_ours(tmp_path: Path, packet: bytes) -> None:
    server = listen(tmp_path / "box.sock")
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(str(tmp_path / "box.sock"))
    box = Mailbox(server.accept()[0])
    stranger.send(packet)
    assert box.recv(5) is None
    for sock in (box, stranger, server):
        sock.close()


def test_nobody_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Mailbox.connect(tmp_path / "box.sock", timeout_s=5)
    listen(tmp_path / "box.sock").close()  # a listener that died left its file
    with pytest.raises(ConnectionRefusedError):
        Mailbox.connect(tmp_path / "box.sock", timeout_s=5)


def test_the_next_listener_takes_the_dead_one_s_place_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "box.sock"
    listen(path).close()
    server = listen(path)
    Mailbox.connect(path, timeout_s=5).close()
    assert path.stat().st_mode & 0o777 == 0o600
    server.close()
