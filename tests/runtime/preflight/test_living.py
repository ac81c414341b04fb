"""Whoever is gone is not waited for, and whoever only takes long is."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from keepstep.model.messages.preflight import NodeReady, PreflightSeat
from keepstep.runtime.preflight import living
from keepstep.runtime.preflight.living import hear_living
from keepstep.runtime.preflight.meeting import FleetSeats, PreflightMeeting
from tests.runtime.preflight.test_meeting import SharedWords

NAMES = {0: "word/0", 1: "word/1"}


@pytest.fixture
def door() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(living, "LOOK_EVERY_S", 0.05)


def seats(door: socket.socket) -> FleetSeats:
    port = door.getsockname()[1]
    one = PreflightSeat("host", "127.0.0.1", port, "machine", "t" * 32, 2, 1, "life")
    return FleetSeats(0, 0, (one, one))


def test_all_words_are_heard(door: socket.socket) -> None:
    meeting = PreflightMeeting(SharedWords(), None, "job")
    for node, name in NAMES.items():
        meeting.say(name, NodeReady(node))
    heard, gone = hear_living(meeting, seats(door), NAMES, NodeReady, 10.0)
    assert (heard, gone) == ({0: NodeReady(0), 1: NodeReady(1)}, {})


def test_one_that_listens_no_more_is_given_up_long_before_the_limit(door: socket.socket) -> None:
    meeting = PreflightMeeting(SharedWords(), None, "job")
    meeting.say(NAMES[0], NodeReady(0))
    fleet = seats(door)
    door.close()
    heard, gone = hear_living(meeting, fleet, NAMES, NodeReady, 600.0)
    assert heard == {0: NodeReady(0)} and "its process is gone" in gone[1]


def test_one_that_hangs_is_waited_for_until_the_limit(door: socket.socket) -> None:
    meeting = PreflightMeeting(SharedWords(), None, "job")
    meeting.say(NAMES[0], NodeReady(0))
    heard, gone = hear_living(meeting, seats(door), NAMES, NodeReady, 0.5)
    assert set(heard) == {0} and "it said nothing for 0 s" in gone[1]


def test_one_that_takes_long_is_heard(door: socket.socket) -> None:
    words = SharedWords()
    meeting, other = (PreflightMeeting(words, None, "job") for _ in range(2))
    meeting.say(NAMES[0], NodeReady(0))
    late = threading.Timer(0.4, lambda: other.say(NAMES[1], NodeReady(1)))
    late.start()
    heard, gone = hear_living(meeting, seats(door), NAMES, NodeReady, 60.0)
    late.join()
    assert set(heard) == {0, 1} and not gone
