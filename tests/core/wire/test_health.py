"""A link's health: who is away is told dead in time and never before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.wire.health import Health, LinkTimeouts
from keepstep.model.wire import Cut, Dead, SendPing

SECOND = 1_000_000_000
PATIENCE = LinkTimeouts(
    ping_ns=SECOND,
    silence_ns=5 * SECOND,
    dead_ns=20 * SECOND,
    retry_first_ns=SECOND // 20,
    retry_max_ns=SECOND,
)


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
    assert well.decide(hour) is None and away.decide(hour) is None
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


def test_a_stranger_at_its_address_does_not_change_why_it_is_away() -> None:
    known, unknown = Health(PATIENCE, 0), Health(PATIENCE, 0)
    known.opened(0)
    known.cut("reset", 0)
    for health in (known, unknown):
        health.cut("malformed: expected record 1, found 104", 3, is_stranger=True)
        for second in range(22):
            asked = health.decide(second * SECOND)
        assert isinstance(asked, Dead)
        assert asked.why.endswith("reset" if health is known else "found 104")


def test_only_a_quiet_link_is_pinged() -> None:
    health = Health(PATIENCE, 0)
    health.opened(0)
    asked = []
    for tenth in range(1, 31):
        now_ns = tenth * SECOND // 10
        if tenth <= 20:
            health.heard(now_ns)
        asked.append(health.decide(now_ns))
    assert asked == [None] * 29 + [SendPing()]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["opened", "cut", "heard", "nothing"]), st.integers(1, 4 * SECOND)
        ),
        max_size=60,
    )
)
def test_asked_no_more_than_it_wants_it_misses_nothing(story: list[tuple[str, int]]) -> None:
    """Asked only when it is due: dead, cut and ping come no later than `ping_ns` after their time,
    and never before."""
    now_ns = away_since = heard = 0
    health, is_open, late = Health(PATIENCE, 0), False, PATIENCE.ping_ns
    for what, then in story:
        until_ns = now_ns + then
        while health.due_ns <= until_ns:
            now_ns = max(now_ns, health.due_ns)
            asked = health.decide(now_ns)
            assert now_ns < health.due_ns <= now_ns + PATIENCE.ping_ns
            away_ns, silent_ns = now_ns - away_since, now_ns - heard
            if is_open:
                assert silent_ns <= PATIENCE.silence_ns + late
                assert isinstance(asked, Cut) == (silent_ns > PATIENCE.silence_ns)
            else:
                assert isinstance(asked, Dead) == (away_ns > PATIENCE.dead_ns)
            if isinstance(asked, Dead):
                assert away_ns <= PATIENCE.dead_ns + late
                return
            if isinstance(asked, Cut):
                health.cut(asked.why, now_ns)
                is_open, away_since = False, now_ns
        now_ns = until_ns
        if what == "opened" and not is_open:
            health.opened(now_ns)
            is_open, heard = True, now_ns
        elif what == "cut":
            health.cut("test", now_ns)
            is_open, away_since = False, now_ns if is_open else away_since
        elif what == "heard" and is_open:
            health.heard(now_ns)
            heard = now_ns
