"""Connections that break at any moment: what is sent arrives once and in order."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.wire.delivery import MAX_TRIES, WINDOW_BLOCKS, Flight, Inbox, Outbox, Seen


def body(number: int) -> bytes:
    return b"%d" % number


# messages


@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 8))
def test_messages_arrive_once_and_in_order_over_connections_that_break(
    seed: int, count: int, limit: int
) -> None:
    """Anything under way when a connection breaks is lost, in both directions."""
    rng = random.Random(seed)
    outbox, inbox = Outbox(limit), Inbox()
    forth: list[tuple[int, bytes]] = []
    back: list[int] = []
    put = 0
    arrived: list[bytes] = []
    while len(arrived) < count or len(outbox):
        action = rng.choice(
            ["put", "send", "send", "receive", "receive", "confirm", "confirm", "break"]
        )
        if action == "put" and put < count:
            put += outbox.put(body(put))
        elif action == "send" and (item := outbox.next()):
            forth.append(item)
        elif action == "receive" and forth:
            number, message = forth.pop(0)
            if inbox.is_new(number):
                arrived.append(message)
            back.append(inbox.last)
        elif action == "confirm" and back:
            outbox.confirmed(back.pop(0))
        elif action == "break" and rng.random() < 0.5:
            forth.clear()
            back.clear()
            outbox.rewind()
        assert len(outbox) <= limit
    assert arrived == [body(n) for n in range(count)]


def test_a_full_outbox_takes_nothing_and_a_confirmation_makes_room() -> None:
    outbox = Outbox(2)
    assert [outbox.put(body(n)) for n in range(3)] == [True, True, False]
    outbox.confirmed(2)  # nothing was sent: not believed
    assert len(outbox) == 2
    assert outbox.next() == (1, body(0))
    outbox.confirmed(99)
    assert len(outbox) == 1 and outbox.put(body(2))


# blocks


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_blocks_are_delivered_once_over_connections_that_break_and_bytes_that_flip(
    seed: int, count: int
) -> None:
    """All but those that were damaged `MAX_TRIES` times, which their sender is given back."""
    rng = random.Random(seed)
    flight: Flight[int] = Flight(window_bytes=1 << 20)
    seen = Seen()
    forth: list[tuple[int, int]] = []
    back: list[tuple[int, bool]] = []
    started = 0
    delivered: list[int] = []
    landed: list[int] = []
    given_up: list[int] = []
    while len(landed) + len(given_up) < count:
        action = rng.choice(["send", "send", "receive", "receive", "answer", "answer", "break"])
        if action == "send":
            if again := flight.next_again():
                forth.append(again)
            elif started < count and flight.has_room():
                forth.append((flight.start(started, nbytes=10), started))
                started += 1
        elif action == "receive" and forth:
            number, item = forth.pop(0)
            repeated, damaged = number in seen, rng.random() < 0.2
            if not repeated and not damaged:
                seen.add(number)
                delivered.append(item)
            back.append((number, damaged and not repeated))
        elif action == "answer" and back:
            number, damaged = back.pop(0)
            if damaged and (lost := flight.damaged(number)) is not None:
                given_up.append(lost)
            elif not damaged and (arrived := flight.landed(number)) is not None:
                landed.append(arrived)
        elif action == "break" and rng.random() < 0.1:
            forth.clear()
            back.clear()
            flight.rewind()
        assert len(flight.items()) <= WINDOW_BLOCKS
    assert len(set(delivered)) == len(delivered)
    assert sorted(landed + given_up) == list(range(count))
    assert set(landed) <= set(delivered)
    assert len(seen._above) <= WINDOW_BLOCKS


def test_the_window_closes_by_bytes_by_count_and_by_the_oldest() -> None:
    flight: Flight[str] = Flight(window_bytes=100)
    assert flight.has_room()
    large = flight.start("larger than the window", 1000)
    assert not flight.has_room()
    assert flight.landed(large) == "larger than the window" and flight.landed(large) is None
    oldest = flight.start("oldest", 1)
    for _ in range(WINDOW_BLOCKS - 1):
        assert flight.has_room()
        flight.landed(flight.start("passes it", 1))
    assert not flight.has_room(), "the other side may forget the oldest's number"
    flight.landed(oldest)
    assert flight.has_room()


def test_a_block_that_never_arrives_whole_is_given_up() -> None:
    flight: Flight[str] = Flight(window_bytes=100)
    number = flight.start("changes under our hands", 1)
    for _ in range(MAX_TRIES - 1):
        assert flight.damaged(number) is None
        assert flight.next_again() == (number, "changes under our hands")
    assert flight.damaged(number) == "changes under our hands"
    assert flight.next_again() is None and flight.items() == []
