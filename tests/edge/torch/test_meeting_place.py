"""Meeting places: each attempt's ranks meet in a store of their own, and what cannot be reached is
said."""

from __future__ import annotations

import socket

import pytest

from keepstep.edge.torch.meeting_place import StoreMeetingPlaces, local_address
from keepstep.edge.torch.tcp_store import join_store
from keepstep.errors import ConfigError, MeetingError
from keepstep.testing.etcd import free_ports

PATIENCE_S = 30.0


def test_every_place_is_a_fresh_one_also_at_the_same_port() -> None:
    places = StoreMeetingPlaces()
    port = places.open("127.0.0.1", 0)
    join_store(("127.0.0.1", port), PATIENCE_S).set("of", "the attempt before")
    again = places.open("127.0.0.1", port)
    assert again == port
    assert not join_store(("127.0.0.1", again), PATIENCE_S).check(["of"])
    places.close()


def test_a_port_that_is_asked_for_is_the_one() -> None:
    [port] = free_ports(1)
    places = StoreMeetingPlaces()
    assert places.open("127.0.0.1", port) == port
    places.close()


def test_own_address() -> None:
    assert local_address(("127.0.0.1", 1)) == local_address(("localhost", 1)) == "127.0.0.1"
    with pytest.raises(
        ConfigError, match="expected a reachable host, found 'no.such.host.invalid'"
    ):
        local_address(("no.such.host.invalid", 1))


def test_a_name_that_is_loopback_only_here_is_refused() -> None:
    """As Debian's /etc/hosts has it for the machine's own name; `0` is another name of loopback
    that every resolver knows."""
    with pytest.raises(ConfigError, match="found that '0' means 127.0.0.1 here: set --host"):
        local_address(("0", 1))


def test_a_taken_port_for_the_ranks_is_said() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(MeetingError, match=r"for the ranks to meet at 127\.0\.0\.1:"),
    ):
        StoreMeetingPlaces().open("127.0.0.1", server.getsockname()[1])


def test_at_an_address_it_listens_there_alone() -> None:
    place = StoreMeetingPlaces()
    port = place.open("127.0.0.1", 0)
    socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))
    place.close()
