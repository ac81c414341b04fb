"""The board over a real store: what one node shows the others see, its newest word alone, also
after its agent was replaced."""

from __future__ import annotations

import socket

import pytest

from keepstep.edge.torch.tcp_store import TcpStoreClient, meet_embedded
from keepstep.runtime.agent.evidence_board import RoundBoard


def hosted() -> TcpStoreClient:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    return meet_embedded(("127.0.0.1", port), "t/")


def test_what_a_node_shows_the_others_see() -> None:
    kv = hosted()
    boards = [RoundBoard(kv.another, 3, nodes=3) for _ in range(2)]
    assert boards[0].read() == {}
    boards[0].post(0, "a")
    boards[1].post(1, "b")
    boards[0].post(0, "c")
    assert boards[0].read() == boards[1].read() == {0: "c", 1: "b"}
    boards[0].post(0, "c")  # the same again
    RoundBoard(kv.another, 3, nodes=3).post(1, "from the next agent of node 1")
    assert boards[0].read() == {0: "c", 1: "from the next agent of node 1"}
    boards[0].post(0, "")
    assert list(boards[1].read()) == [1], "who shows nothing is not there"
    assert RoundBoard(kv.another, 4, nodes=3).read() == {}, "another round's"


def test_a_board_that_cannot_be_reached_is_an_oserror() -> None:
    kv = hosted()
    client = kv.another()
    board = RoundBoard(lambda: client, 0, nodes=2)
    board.post(0, "a")
    del kv  # and its store with it
    with pytest.raises(OSError, match="the meeting point"):
        board.post(0, "b")
