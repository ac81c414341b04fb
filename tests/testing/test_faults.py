"""Fault specs: what they say, what they refuse, and that chance is repeatable."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import ConfigError
from keepstep.testing.faults import DRAWN, KINDS, PHASES, PLACES, Fault, check, draw, kinds_of, parse, to_plan, with_triggers


@st.composite
def faults(draw_: st.DrawFn) -> Fault:
    kind = draw_(st.sampled_from(KINDS))
    where = draw_(st.sampled_from(PLACES.get(kind, ("",))))
    rank, step = draw_(st.integers(0, 7)), draw_(st.integers(0, 1000))
    if kind in ("kill", "stop", "keeper-kill") and draw_(st.booleans()):
        return Fault(kind, rank, step, draw_(st.sampled_from(("forward", "restore"))), where, float(draw_(st.integers(0, 500))))
    return Fault(kind, rank, step, draw_(st.sampled_from(PHASES)), where)


@given(faults())
def test_a_spec_says_all_of_a_fault(fault: Fault) -> None:
    assert parse(str(fault)) == fault
    (plain,) = json.loads(json.dumps(to_plan([fault])))
    assert Fault(**plain) == fault


def test_defaults() -> None:
    assert parse("kill:step=3") == Fault("kill", 0, 3, "forward")
    assert parse("torn:step=3").phase == "seal"
    assert parse("full:step=3") == Fault("full", 0, 3, "persist", "store")
    assert parse("flip:step=3").where == "arena"


@pytest.mark.parametrize(
    ("text", "expected", "found"),
    [
        ("murder:step=1", "one of kill, stop", "'murder'"),
        ("kill", "step=", "none"),
        ("kill:step=1,phase=lunch", "one of forward, backward", "'lunch'"),
        ("kill:step=-1", "a whole number, 0 or more", "'-1'"),
        ("kill:step=one", "a whole number, 0 or more", "'one'"),
        ("kill:step=1,step=2", "step= once", "'step=2'"),
        ("kill:step=1,speed=2", "rank=, step=, phase=, where= or after=", "'speed=2'"),
        ("kill:step=1,rank", "rank=, step=", "'rank'"),
        ("kill:step=1,where=store", "no where=", "'store'"),
        ("flip:step=1,where=moon", "where= one of arena, store", "'moon'"),
        ("torn:step=1,after=5", "after= with kill, stop or keeper-kill", "torn"),
        ("kill:step=1,phase=seal,after=5", "phase=forward or restore", "phase=seal"),
    ],
)
def test_a_wrong_spec_names_expected_and_found(text: str, expected: str, found: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text)
    said = str(error.value)
    assert text in said and expected in said.partition("expected")[2] and found in said.partition("found")[2], said


def test_a_fault_outside_the_job_is_refused() -> None:
    check([Fault("kill", 1, 59)], nproc=2, steps=60)
    with pytest.raises(ConfigError, match=r"rank= below 2 .* found 2"):
        check([Fault("kill", 2, 5)], nproc=2, steps=60)
    with pytest.raises(ConfigError, match=r"step= below 60 .* found 60"):
        check([Fault("kill", 0, 60)], nproc=2, steps=60)


def test_a_restore_is_caused_by_a_kill_of_the_same_step() -> None:
    restore = parse("kill:rank=1,step=20,phase=restore")
    assert with_triggers([restore]) == [Fault("kill", 1, 20), restore]
    for cause in ("kill:step=20", "flip:step=20", "full:step=20,where=arena"):
        assert with_triggers([parse(cause), restore]) == [parse(cause), restore]
    for no_cause in ("keeper-kill:step=20", "full:step=20", "kill:step=10"):
        assert with_triggers([parse(no_cause), restore]) == [parse(no_cause), Fault("kill", 1, 20), restore]
    again = parse("stop:step=20,phase=restore")
    assert with_triggers([restore, again]) == [Fault("kill", 1, 20), restore, again]


@given(st.integers(), st.integers(1, 60), st.integers(1, 4), st.lists(st.sampled_from(DRAWN), min_size=1))
def test_drawn_faults_can_happen(seed: int, count: int, nproc: int, kinds: list[str]) -> None:
    drawn = draw(seed, count, nproc, kinds)
    assert drawn == draw(seed, count, nproc, kinds)
    assert len(drawn) == count
    check(drawn, nproc, max(f.step for f in drawn) + 1)
    assert [f.step for f in drawn] == sorted(f.step for f in drawn)
    assert with_triggers(drawn) == drawn  # every restore has its cause
    assert {f.kind for f in drawn} <= {*kinds, "kill"}


def test_a_campaign_meets_every_kind_every_phase_and_the_outside() -> None:
    drawn = draw(1, 400, 2)
    assert {f.kind for f in drawn} == set(DRAWN)
    assert {f.phase for f in drawn} == set(PHASES)
    outside = [f.after_ms for f in drawn if f.after_ms is not None]
    assert len(outside) > 50 and min(outside) < 5 and max(outside) > 35
    assert draw(2, 400, 2) != drawn


def test_kinds_of_a_campaign() -> None:
    assert kinds_of("kill,torn") == ("kill", "torn")
    for wrong in ("full", "kill,lunch", ""):
        with pytest.raises(ConfigError, match="expected some of kill"):
            kinds_of(wrong)
