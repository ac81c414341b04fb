"""Mailboxes over real unix sockets: what the kernel guarantees. What any `Box` does is in
tests/contracts/test_box.py."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.core.wire.codec import NotAMessage
from keepstep.core.wire.conversations import KEEPER_WITH_NODE, RANK_WITH_KEEPER
from keepstep.edge.net.unix_socket import Mailbox, listen
from keepstep.model.bounds import MAX_PACKET_BYTES
from keepstep.model.messages.keeper_rank import Goodbye, JoinVote, PageChanged, Released
from keepstep.model.snapshot import Stamp


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Mailbox, Mailbox]]:
    """A rank's end, and its keeper's."""
    server = listen(tmp_path / "box.sock")
    rank = Mailbox.connect(tmp_path / "box.sock", 5, RANK_WITH_KEEPER)
    keeper = Mailbox(server.accept()[0], KEEPER_WITH_NODE)
    yield rank, keeper
    rank.close()
    keeper.close()
    server.close()


def test_the_kernel_names_the_peer(pair: tuple[Mailbox, Mailbox]) -> None:
    assert pair[1].peer() == (os.getpid(), os.getuid()) and pair[1].pid == os.getpid()


def test_a_peer_that_ends_is_none_after_what_it_said(pair: tuple[Mailbox, Mailbox]) -> None:
    rank, keeper = pair
    rank.send(Goodbye(0, True, "ended well"))
    rank.close()
    assert keeper.recv(5) == Goodbye(0, True, "ended well")
    assert keeper.recv(5) is None
    assert keeper.send(Released()) is False


def test_silence_is_a_timeout(pair: tuple[Mailbox, Mailbox]) -> None:
    with pytest.raises(TimeoutError, match="no message within 0 s"):
        pair[0].recv(0)


def test_nonsense_is_no_message_however_long_one_waits(pair: tuple[Mailbox, Mailbox]) -> None:
    rank, keeper = pair
    rank._sock.send(b"hello")
    with pytest.raises(TimeoutError):
        keeper.recv(0)
    rank._sock.send(b"hello again")
    rank.send(PageChanged(3))
    assert keeper.recv(5) == PageChanged(3)


def test_the_largest_message_fits_and_a_larger_one_is_not_sent(
    pair: tuple[Mailbox, Mailbox],
) -> None:
    rank, keeper = pair
    held = JoinVote(0, 1, 1, tuple(Stamp(10**18, 10**18) for _ in range(1550)))
    assert MAX_PACKET_BYTES - 2000 < len(RANK_WITH_KEEPER.encode(held)) <= MAX_PACKET_BYTES
    assert rank.send(held) and keeper.recv(5) == held
    with pytest.raises(NotAMessage):
        rank.send(JoinVote(0, 1, 1, tuple(Stamp(10**18, 10**18) for _ in range(2000))))


def test_who_does_not_read_misses_a_poke(pair: tuple[Mailbox, Mailbox]) -> None:
    rank, keeper = pair
    for _ in range(100_000):
        rank.poke(PageChanged(3))
    assert keeper.recv(5) == PageChanged(3)


def test_nobody_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Mailbox.connect(tmp_path / "box.sock", 5, RANK_WITH_KEEPER)
    listen(tmp_path / "box.sock").close()  # a listener that died left its file
    with pytest.raises(ConnectionRefusedError):
        Mailbox.connect(tmp_path / "box.sock", 5, RANK_WITH_KEEPER)


def test_what_listens_for_another_user_is_not_spoken_with(tmp_path: Path) -> None:
    server = listen(tmp_path / "box.sock")
    another = os.getuid() + 1
    with pytest.raises(PermissionError, match=rf"process {os.getpid()} there is user"):
        Mailbox.connect(tmp_path / "box.sock", 5, RANK_WITH_KEEPER, uid=another)
    assert server.accept()[0].recv(100) == b"", "hung up on, with nothing said"
    server.close()


def test_the_next_listener_takes_the_dead_one_s_place_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "box.sock"
    listen(path).close()
    server = listen(path)
    Mailbox.connect(path, 5, RANK_WITH_KEEPER).close()
    assert path.stat().st_mode & 0o777 == 0o600
    server.close()


def test_a_connection_of_another_kind_is_heard_to_its_end(tmp_path: Path) -> None:
    server = listen(tmp_path / "box.sock")
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(str(tmp_path / "box.sock"))
    box = Mailbox(server.accept()[0], KEEPER_WITH_NODE)
    stranger.send(b"x" * (MAX_PACKET_BYTES + 1000))
    stranger.close()
    assert box.recv(5) is None
    box.close()
    server.close()
