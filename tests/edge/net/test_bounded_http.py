"""Strangers who say nothing, or half a request, cost a served process nothing it would miss."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from urllib.request import urlopen

import pytest

from keepstep.edge.net.bounded_http import MAX_CONNECTIONS, BoundedServer, serve


@pytest.fixture
def server() -> Iterator[BoundedServer]:
    def application(environ: object, start_response: object) -> list[bytes]:
        start_response("200 OK", [])  # type: ignore[operator]
        return [b"numbers"]

    made = serve(application, "127.0.0.1", 0)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.close()
    thread.join()


@pytest.mark.parametrize("said", [b"", b"GET /metrics HTT"])
def test_many_strangers_neither_keep_a_reader_out_nor_pile_up(
    server: BoundedServer, said: bytes
) -> None:
    before = threading.active_count()
    strangers = []
    for _ in range(5 * MAX_CONNECTIONS):
        stranger = socket.create_connection(("127.0.0.1", server.server_port))
        stranger.sendall(said)
        strangers.append(stranger)
    with urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=30) as answer:
        assert answer.read() == b"numbers"
    for stranger in strangers[: 4 * MAX_CONNECTIONS]:
        stranger.settimeout(30)
        assert stranger.recv(1) == b"", "hung up on, for others came later"
    assert threading.active_count() <= before + MAX_CONNECTIONS + 1
    for stranger in strangers:
        stranger.close()


def test_as_many_as_there_is_room_for_stay(server: BoundedServer) -> None:
    strangers = [
        socket.create_connection(("127.0.0.1", server.server_port))
        for _ in range(MAX_CONNECTIONS - 1)
    ]
    with urlopen(f"http://127.0.0.1:{server.server_port}/", timeout=30) as answer:
        answer.read()  # by now those before are served too
    for stranger in strangers:
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.recv(1)
        stranger.close()


def test_who_is_connected_when_it_closes_is_hung_up_on(server: BoundedServer) -> None:
    stranger = socket.create_connection(("127.0.0.1", server.server_port))
    stranger.sendall(b"GET /")
    with urlopen(f"http://127.0.0.1:{server.server_port}/", timeout=30) as answer:
        answer.read()  # by now the one before is served too
    server.close()
    stranger.settimeout(30)
    assert stranger.recv(1) == b""
    stranger.close()


def test_who_is_being_answered_is_not_pushed_out() -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def application(environ: object, start_response: object) -> list[bytes]:
        has_begun.set()
        may_end.wait(30)
        start_response("200 OK", [])  # type: ignore[operator]
        return [b"numbers"]

    server = serve(application, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    reader = socket.create_connection(("127.0.0.1", server.server_port))
    reader.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    assert has_begun.wait(30)
    strangers = [
        socket.create_connection(("127.0.0.1", server.server_port))
        for _ in range(2 * MAX_CONNECTIONS)
    ]
    strangers[0].settimeout(30)
    assert strangers[0].recv(1) == b"", "it was the oldest that had not asked"
    may_end.set()
    reader.settimeout(30)
    assert reader.recv(100).startswith(b"HTTP/1.0 200")
    server.close()
    thread.join()
    for connection in (reader, *strangers):
        connection.close()
