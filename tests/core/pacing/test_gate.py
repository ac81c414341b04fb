"""The gate: what may go onto the link while ranks train, in virtual time: a trainer whose
collectives come and go, a link that drains."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.pacing.gate import (
    LATE_NS,
    LATE_STEPS,
    LEARNING_NS,
    LEAST_WAIT_NS,
    MOST_WAIT_NS,
    STILL_NS,
    STILL_STEPS,
    Room,
    Terms,
    grant,
    is_late,
    room,
)
from keepstep.core.pacing.schedule import MOST_STEPS, Cost
from keepstep.core.pacing.step_profile import FULL_STEPS, Idle, Profile, Rhythm
from keepstep.model.rhythm import NO_STEP, Gap, Pulse, StepSeen
from keepstep.model.units import MS_NS, S_NS

COST = Cost(MS_NS // 5, 50_000_000)  # 400 Mbit/s
TERMS = Terms(COST, 100_000, 400_000, 4096)
# of a collective that begins when nothing said it would
TOLERANCE_NS = COST.of(TERMS.reserve_bytes)
PROFILE = Profile(
    FULL_STEPS,
    300 * MS_NS,
    2,
    (
        Idle(0, 0, 50 * MS_NS, 0),
        Idle(1, 150 * MS_NS, 40 * MS_NS, 0),
        Idle(2, 290 * MS_NS, 10 * MS_NS, 0),
    ),
)

rooms = st.lists(
    st.builds(Room, st.none() | st.integers(0, 100 * MS_NS), st.integers(-MS_NS, 100 * MS_NS)),
    max_size=4,
)
terms = st.builds(
    lambda alpha, rate, chunk, parts, least: Terms(Cost(alpha, rate), chunk, chunk * parts, least),
    *(
        st.integers(0, MS_NS),
        st.integers(10**6, 10**10),
        st.integers(1, 10**8),
        st.integers(1, 8),
        st.integers(1, 10**5),
    ),
)


@given(st.integers(-5, 10**6), st.integers(0, 10 * S_NS))
def test_who_is_late_stays_late_and_nobody_is_who_follows_a_plan(age: int, step_ns: int) -> None:
    assert not is_late(min(age, MOST_STEPS), step_ns)
    assert not is_late(min(age, LATE_NS // max(1, step_ns)), step_ns) or not step_ns
    assert not is_late(age, step_ns) or is_late(age + 1, step_ns)
    assert is_late(max(age, LATE_STEPS + 1 + LATE_NS // max(1, step_ns)), step_ns)


@given(rooms, st.integers(1, 10**9), st.integers(0, 10**9), terms)
def test_every_grant(found: list[Room], want: int, under_way: int, terms: Terms) -> None:
    given_ = grant(found, want, under_way, terms)
    bounds = [r.left_ns for r in found if r.left_ns is not None]
    if not bounds:
        assert given_.nbytes == want
        return
    assert given_.nbytes <= min(want, terms.chunk_bytes)
    if given_.nbytes:
        # each of two roundings up
        assert terms.cost.of(given_.nbytes + under_way) <= min(bounds) + 1
        assert not under_way or under_way + given_.nbytes <= terms.reserve_bytes
    else:
        assert LEAST_WAIT_NS <= given_.wait_ns <= MOST_WAIT_NS


def test_a_rank_that_does_not_train_bounds_nothing() -> None:
    assert room(None, PROFILE, 0) == room(Pulse(NO_STEP, 0, 0, 0), PROFILE, 0) == Room(None)
    assert room(Pulse(5, 0, 1, 0), Profile(20, 300 * MS_NS, 0, ()), 1) == Room(None)


def test_a_network_that_does_not_change_its_mind_is_nobodys() -> None:
    long = Profile(20, 2 * S_NS, 1, (Idle(0, 0, S_NS, 0),))
    for pulse in (Pulse(5, 0, 1, 0), Pulse(5, 1, 0, 0)):
        assert room(pulse, PROFILE, STILL_NS).left_ns == 0 and room(
            pulse, PROFILE, STILL_NS + 1
        ) == Room(None)
        assert room(pulse, long, STILL_STEPS * long.step_ns).left_ns == 0
        assert room(pulse, long, STILL_STEPS * long.step_ns + 1) == Room(None)


def test_what_is_left_of_a_span() -> None:
    assert room(Pulse(5, 1, 0, 7), PROFILE, 7) == Room(round(0.95 * 40 * MS_NS))
    assert room(Pulse(5, 1, 0, 7), PROFILE, 7 + 30 * MS_NS) == Room(8 * MS_NS)
    assert room(Pulse(5, 1, 0, 7), PROFILE, 7 + 39 * MS_NS) == Room(0)
    assert room(Pulse(5, 3, 0, 7), PROFILE, 7) == Room(0)  # the profile knows of two collectives
    assert room(Pulse(5, 2, 0, 7), PROFILE, 7 + 30 * MS_NS) == Room(0)


def test_without_a_profile_only_what_is_seen_counts() -> None:
    assert room(Pulse(5, 1, 0, 0), None, 100) == Room(LEARNING_NS)
    assert room(Pulse(5, 1, 1, 0), None, 100).left_ns == 0


def test_while_it_is_busy_it_is_asked_when_that_may_be_over() -> None:
    busy = room(Pulse(5, 1, 1, 0), PROFILE, 20 * MS_NS)
    assert busy == Room(0, 80 * MS_NS)
    assert grant([busy], 1000, 0, TERMS).wait_ns == MOST_WAIT_NS
    nearly = room(Pulse(5, 1, 1, 0), PROFILE, 96 * MS_NS)
    assert grant([nearly], 1000, 0, TERMS).wait_ns == 2 * MS_NS
    assert (
        grant([room(Pulse(5, 1, 1, 0), PROFILE, 150 * MS_NS)], 1000, 0, TERMS).wait_ns
        == LEAST_WAIT_NS
    )


# -- in virtual time


@dataclass
class Trace:
    """What went over the link: (from, to) of each chunk, and of each collective."""

    chunks: list[tuple[int, int]] = field(default_factory=list)
    nbytes: int = 0
    collectives: list[tuple[int, int]] = field(default_factory=list)
    profiles: list[str] = field(default_factory=list)
    boundaries: list[int] = field(default_factory=list)

    def overlaps_ns(self, since_ns: int = 0) -> list[int]:
        """Of each collective: for how long chunks met it."""
        return [
            sum(max(0, min(b, d) - max(a, c)) for c, d in self.chunks)
            for a, b in self.collectives
            if a >= since_ns
        ]


# for each step (idle, busy) in turn; the last busy is 0
Steps = Sequence[Sequence[tuple[int, int]]]


def trained(steps: Steps, step_bytes: Callable[[int], int]) -> Trace:
    """One rank that does these steps, and copies of so many bytes that are ready when the step with
    that number begins."""
    trace, rhythm, now_ns, free_ns, want, next_ask_ns = Trace(), Rhythm(), 0, 0, 0, 0
    for number, parts in enumerate(steps):
        began_ns, gaps, entered = now_ns, [], 0
        want += step_bytes(number)
        trace.boundaries.append(now_ns)
        for idle_ns, busy_ns in parts:
            for length_ns, pending in ((idle_ns, 0), (busy_ns, 1)):
                entered += pending and bool(busy_ns)
                pulse, until_ns = Pulse(number, entered, pending, now_ns), now_ns + length_ns
                while want and max(now_ns, next_ask_ns) < until_ns:
                    now_ns = max(now_ns, next_ask_ns)
                    under_way = max(0, free_ns - now_ns) * COST.bytes_per_s // S_NS
                    found = grant([room(pulse, rhythm.profile, now_ns)], want, under_way, TERMS)
                    next_ask_ns = now_ns + max(found.wait_ns, MS_NS // 20)
                    if found.nbytes:
                        start_ns, free_ns = (
                            max(now_ns, free_ns),
                            max(now_ns, free_ns) + COST.of(found.nbytes),
                        )
                        trace.chunks.append((start_ns, free_ns))
                        trace.nbytes += found.nbytes
                        want -= found.nbytes
                if pending and busy_ns:
                    trace.collectives.append((until_ns - length_ns, until_ns))
                elif length_ns:
                    gaps.append(Gap(entered, until_ns - length_ns, until_ns))
                now_ns = until_ns
        if rhythm.saw(StepSeen(number, began_ns, now_ns, entered, tuple(gaps))):
            trace.profiles.append(rhythm.why)
    return trace


def rhythmic(
    steps: int, spans: list[tuple[int, int]], jitter: float, seed: int
) -> list[list[tuple[int, int]]]:
    rng = random.Random(seed)
    return [
        [(round(a * rng.gauss(1, jitter)), round(b * rng.gauss(1, jitter))) for a, b in spans]
        for _ in range(steps)
    ]


# idle 75 of 295 ms: 3.5 MB
USUAL = [(30 * MS_NS, 120 * MS_NS), (25 * MS_NS, 100 * MS_NS), (20 * MS_NS, 0)]
LONGER = [(12 * MS_NS, 260 * MS_NS), (60 * MS_NS, 200 * MS_NS), (15 * MS_NS, 0)]


@pytest.mark.parametrize("seed", range(3))
def test_a_copy_a_step_meets_no_collective_and_is_through_in_its_step(seed: int) -> None:
    trace = trained(
        rhythmic(60, USUAL, 0.005, seed), lambda number: 2_000_000 if number >= FULL_STEPS else 0
    )
    assert trace.nbytes == 40 * 2_000_000
    assert max(trace.overlaps_ns()) == 0
    for number in range(FULL_STEPS, 59):
        begin, end = trace.boundaries[number : number + 2]
        spent_ns = sum(d - c for c, d in trace.chunks if begin <= c < end)
        assert spent_ns >= 2_000_000 * S_NS // COST.bytes_per_s


@pytest.mark.parametrize("seed", range(3))
def test_while_a_rhythm_is_learnt_little_is_met(seed: int) -> None:
    trace = trained(rhythmic(12, USUAL, 0.02, seed), lambda number: 1_000_000)
    assert trace.nbytes > 2_000_000
    assert max(trace.overlaps_ns()) <= LEARNING_NS


@pytest.mark.parametrize("seed", range(3))
def test_another_rhythm_is_planned_anew_and_meanwhile_no_collective_is_met_for_longer_than_is_said(
    seed: int,
) -> None:
    steps = rhythmic(40, USUAL, 0.01, seed) + rhythmic(40, LONGER, 0.01, seed)
    trace = trained(steps, lambda number: 1_500_000)
    assert sum(why.startswith("the rhythm has changed") for why in trace.profiles) == 1
    assert max(trace.overlaps_ns()) <= TOLERANCE_NS
    assert max(trace.overlaps_ns(trace.boundaries[46])) == 0
    assert trace.nbytes >= 75 * 1_500_000


def test_a_rhythm_that_jitters_wildly_is_still_met_for_no_longer_than_is_said() -> None:
    trace = trained(rhythmic(80, USUAL, 0.2, 1), lambda number: 2_000_000)
    assert trace.nbytes > 20 * 2_000_000
    assert max(trace.overlaps_ns()) <= TOLERANCE_NS


def test_what_does_not_fit_into_a_step_waits_for_the_next_ones() -> None:
    trace = trained(
        rhythmic(60, USUAL, 0.0, 0),
        lambda number: 5_000_000 if number >= FULL_STEPS and number % 2 == 0 else 0,
    )
    assert trace.nbytes >= 19 * 5_000_000
    assert max(trace.overlaps_ns()) == 0
