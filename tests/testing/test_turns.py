"""Turns: the same seed gives the same ones, only of what can be done here, and sometimes two at
once."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import ConfigError
from keepstep.testing.faults import ETCD_RESTART, STORE_KINDS, check
from keepstep.testing.turns import MOST_GAP_MS, WEIGHTS, Shape, draw_turns, possible

SHAPES = st.builds(Shape, st.integers(2, 5), st.integers(1, 4), st.just(150.0), st.just(3000.0))


@given(st.integers(0, 1000), SHAPES)
def test_a_seed_gives_one_sequence_and_it_fits_the_job(seed: int, shape: Shape) -> None:
    kinds = tuple(WEIGHTS)
    turns = list(islice(draw_turns(seed, shape, kinds), 40))
    assert turns == list(islice(draw_turns(seed, shape, kinds), 40))
    for turn in turns:
        assert 0 <= turn.gap_ms <= MOST_GAP_MS
        faults = turn.at(7)
        assert {fault.step for fault in faults} == {7} and 1 <= len(faults) <= 2
        check(faults, shape.nproc, 8, shape.nodes, etcd=True)
        first, *second = faults
        has_second = first.ends_a_rank or first.kind in ("keeper-kill", *STORE_KINDS)
        assert has_second or not second
        assert all(fault.ends_a_rank for fault in second)


def test_every_kind_comes_and_a_tenth_of_the_deadly_ones_have_a_second() -> None:
    turns = list(islice(draw_turns(3, Shape(3, 2, 150.0, 3000.0), tuple(WEIGHTS)), 4000))
    assert {turn.faults[0].kind for turn in turns} == set(WEIGHTS)
    deadly = [turn for turn in turns if turn.faults[0].ends_a_rank]
    assert 0.08 < sum(len(turn.faults) == 2 for turn in deadly) / len(deadly) < 0.12
    flaps = [turn.faults[0].for_ms for turn in turns if turn.faults[0].kind == "link-down"]
    assert min(f for f in flaps if f) < 1500 and max(f for f in flaps if f) > 3500, (
        "some links come back in time, some do not"
    )
    rough = [turn for turn in turns if turn.faults[0].kind in STORE_KINDS]
    both = [turn for turn in rough if len(turn.faults) == 2]
    assert 0.2 < len(both) / len(rough) < 0.4
    for store, kill in (turn.faults for turn in both):
        assert kill.ends_a_rank and store.for_ms and 0 <= (kill.after_ms or 0) <= store.for_ms


def test_another_seed_gives_another_sequence() -> None:
    shape = Shape(1, 2, 50.0, 3000.0)
    first, second = (list(islice(draw_turns(seed, shape, ("kill", "stop")), 20)) for seed in (1, 2))
    assert first != second


def test_what_can_be_done_here() -> None:
    everywhere = {"kill", "stop", "torn", "keeper-kill", "agent-kill", "flip", *STORE_KINDS}
    assert set(possible("", 1, namespaces=False, small_store=False, etcd=False)) == everywhere
    assert set(possible("", 2, namespaces=True, small_store=True, etcd=True)) == set(WEIGHTS)
    assert possible("torn,kill", 1, namespaces=False, small_store=False, etcd=False) == (
        "torn",
        "kill",
    )
    for text in ("kill-node", "full", ETCD_RESTART, "kill,murder", ","):
        with pytest.raises(ConfigError, match="expected some of kill"):
            possible(text, 1, namespaces=False, small_store=False, etcd=False)
