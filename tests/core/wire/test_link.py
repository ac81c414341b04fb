"""Links that break at any moment: what is sent arrives once and in order; who is away is told dead
in time and never before."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.wire.codec import NotAMessage
from keepstep.core.wire.link import (
    MAX_TRIES,
    WINDOW_BLOCKS,
    Flight,
    Health,
    Inbox,
    Outbox,
    Patience,
    Seen,
)
from keepstep.model.messages.peers import Ping
from keepstep.model.wire import Cut, Dead, SendPing

SECOND = 1_000_000_000
PATIENCE = Patience(
    ping_ns=SECOND,
    silence_ns=5 * SECOND,
    dead_ns=20 * SECOND,
    retry_first_ns=SECOND // 20,
    retry_most_ns=SECOND,
)


def ping(number: int) -> Ping:
    return Ping(number)


# messages


@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 8))
def test_messages_arrive_once_and_in_order_over_connections_that_break(
    seed: int, count: int, limit: int
) -> None:
    """Anything under way when a connection breaks is lost, in both directions."""
    rng = random.Random(seed)
    outbox, inbox = Outbox(limit), Inbox()
    forth: list[tuple[int, Ping]] = []
    back: list[int] = []
    put = 0
    arrived: list[Ping] = []
    while len(arrived) < count or len(outbox):
        action = rng.choice(
            ["put", "send", "send", "receive", "receive", "confirm", "confirm", "break"]
        )
        if action == "put" and put < count:
            put += outbox.put(ping(put))
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
    assert arrived == [ping(n) for n in range(count)]


def test_a_full_outbox_takes_nothing_and_a_confirmation_makes_room() -> None:
    outbox = Outbox(2)
    assert [outbox.put(ping(n)) for n in range(3)] == [True, True, False]
    outbox.confirmed(2)  # nothing was sent: not believed
    assert len(outbox) == 2
    assert outbox.next() == (1, ping(0))
    outbox.confirmed(99)
    assert len(outbox) == 1 and outbox.put(ping(2))


def test_a_message_no_peer_would_accept_is_not_taken() -> None:
    with pytest.raises(NotAMessage):
        Outbox(2).put(Ping("now"))  # type: ignore[arg-type]


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


# health


def test_the_wait_between_tries_doubles_up_to_a_bound() -> None:
    waits = [PATIENCE.retry_ns(attempt) for attempt in range(1, 9)]
    assert waits[:5] == [SECOND // 20, SECOND // 10, SECOND // 5, 2 * SECOND // 5, 4 * SECOND // 5]
    assert set(waits[5:]) == {SECOND} and PATIENCE.retry_ns(10_000) == SECOND


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["opened", "cut", "heard", "nothing"]), st.integers(1, 4 * SECOND)
        ),
        max_size=60,
    )
)
def test_dead_exactly_when_away_for_too_long(story: list[tuple[str, int]]) -> None:
    now = away_since = 7 * SECOND
    health = Health(PATIENCE, now)
    is_open = False
    for what, then in story:
        now += then
        if what == "opened" and not is_open:
            health.opened(now)
            is_open = True
        elif what == "cut":
            health.cut("test", now)
            is_open, away_since = False, now if is_open else away_since
        elif what == "heard" and is_open:
            health.heard(now)
        asked = health.decide(now)
        assert isinstance(asked, Dead) == (not is_open and now - away_since > PATIENCE.dead_ns)


def test_silence_cuts_and_pings_go_out_meanwhile() -> None:
    health = Health(PATIENCE, 0)
    health.opened(0)
    asked = [health.decide(second * SECOND) for second in range(1, 7)]
    assert asked == [SendPing()] * 5 + [Cut("silent for 6.00 s, longer than 5.00 s")]


def test_our_own_sleep_says_nothing_about_the_other_side() -> None:
    """SIGSTOP, a suspended machine: nobody is silent or dead because we did not look."""
    hour = 3600 * SECOND
    well, away = Health(PATIENCE, 0), Health(PATIENCE, 0)
    well.opened(0)
    away.opened(0)
    away.cut("flap", SECOND)
    assert well.decide(SECOND) == SendPing() and away.decide(SECOND) is None
    assert isinstance(well.decide(hour), SendPing) and away.decide(hour) is None
    assert any(isinstance(away.decide(hour + second * SECOND), Dead) for second in range(25))


def test_what_happened_while_we_slept_is_not_put_into_the_future() -> None:
    """Heard, or gone, just before we looked again: from then on the usual times hold."""
    hour = 3600 * SECOND
    well, away = Health(PATIENCE, 0), Health(PATIENCE, 0)
    well.opened(0)
    away.opened(0)
    well.heard(hour - 1)
    away.cut("flap", hour - 1)
    assert well.decide(hour) == SendPing() and away.decide(hour) is None
    asked = [
        (well.decide(hour + second * SECOND), away.decide(hour + second * SECOND))
        for second in range(1, 22)
    ]
    assert [isinstance(one, Cut) for one, _ in asked] == [second > 5 for second in range(1, 22)]
    assert [isinstance(other, Dead) for _, other in asked] == [
        second > 20 for second in range(1, 22)
    ]


def test_why_it_is_dead_names_the_last_trouble() -> None:
    health = Health(PATIENCE, 0)
    health.cut("10.0.0.7:4000: Connection refused", 3)
    asked = [health.decide(second * SECOND) for second in range(22)][-1]
    assert asked == Dead("away for 21.00 s, longer than 20.00 s: 10.0.0.7:4000: Connection refused")
