"""Fault specs: what they say, what they refuse, and that chance is repeatable."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import ConfigError
from keepstep.testing.faults import (
    DRAWN,
    ETCD_RESTART,
    KINDS,
    LINK_KINDS,
    NODE_KINDS,
    PHASES,
    PLACES,
    PROTECT,
    SITES,
    SLOWNESS_KINDS,
    STORE_KINDS,
    Fault,
    check,
    draw,
    from_plan,
    kinds_of,
    parse,
    to_plan,
    with_triggers,
)


@st.composite
def faults(draw_: st.DrawFn) -> Fault:
    kind = draw_(st.sampled_from(KINDS))
    if kind in SITES:
        return Fault(
            kind,
            draw_(st.integers(0, 7)),
            draw_(st.integers(0, 1000)),
            site=draw_(st.sampled_from(SITES[kind])),
            bit=draw_(st.none() | st.integers(0, 31)) if kind == "bitflip" else None,
            factor=float(draw_(st.integers(-9, 10**5))) if kind == "spike" else None,
            times=draw_(st.integers(0, 50)),
        )
    if kind in SLOWNESS_KINDS:
        factor = float(draw_(st.integers(2, 50)))
        return Fault(kind, draw_(st.integers(0, 7)), draw_(st.integers(0, 1000)), factor=factor)
    where = draw_(st.sampled_from(PLACES.get(kind, ("",))))
    rank, step = draw_(st.integers(0, 7)), draw_(st.integers(0, 1000))
    if kind in NODE_KINDS:
        nodes = tuple(sorted(draw_(st.sets(st.integers(0, 7), min_size=1))))
        after_ms = draw_(st.none() | st.integers(0, 500).map(float))
        for_ms = float(draw_(st.integers(0, 5000))) if kind in LINK_KINDS else None
        return Fault(
            kind,
            0,
            step,
            draw_(st.sampled_from((*PHASES, PROTECT))),
            where,
            after_ms,
            nodes,
            for_ms,
        )
    if kind in (ETCD_RESTART, *STORE_KINDS):
        return Fault(
            kind,
            rank,
            step,
            "forward",
            where,
            draw_(st.none() | st.just(7.0)),
            for_ms=float(draw_(st.integers(0, 5000))),
        )
    if kind in ("kill", "stop", "keeper-kill") and draw_(st.booleans()):
        return Fault(
            kind,
            rank,
            step,
            draw_(st.sampled_from(("forward", "restore"))),
            where,
            float(draw_(st.integers(0, 500))),
        )
    return Fault(kind, rank, step, draw_(st.sampled_from(PHASES)), where)


@given(faults())
def test_a_spec_says_all_of_a_fault(fault: Fault) -> None:
    assert parse(str(fault)) == fault
    assert from_plan(json.loads(json.dumps(to_plan([fault])))) == (fault,)


def test_defaults() -> None:
    assert parse("kill:step=3") == Fault("kill", 0, 3, "forward")
    assert parse("torn:step=3").phase == "seal"
    assert parse("full:step=3") == Fault("full", 0, 3, "persist", "store")
    assert parse("flip:step=3").where == "arena"
    assert parse("slow:step=3") == Fault("slow", 0, 3, factor=1.5)
    assert parse("cpu-quota:step=3,rank=1") == Fault("cpu-quota", 1, 3, factor=0.3)
    assert parse("cpu-quota:step=3,factor=0.05").slows_by == pytest.approx(20)
    assert parse("cpu-quota:step=3,factor=2").slows_by == 1
    assert parse("slow:step=3,factor=4").slows_by == 4 and parse("kill:step=3").slows_by == 1
    assert parse("kill-node:node=2+1,step=3") == Fault("kill-node", 0, 3, "forward", nodes=(1, 2))


@pytest.mark.parametrize(
    ("text", "expected", "found"),
    [
        ("murder:step=1", "one of kill, stop", "'murder'"),
        ("kill", "step=", "none"),
        ("kill:step=1,phase=lunch", "one of forward, backward", "'lunch'"),
        ("kill:step=-1", "a whole number, 0 or more", "'-1'"),
        ("kill:step=one", "a whole number, 0 or more", "'one'"),
        ("kill:step=1,step=2", "step= once", "'step=2'"),
        ("slow:step=1,factor=1", "factor= above 1", "1"),
        ("cpu-quota:step=1,factor=0", "factor= above 0", "0"),
        ("slow:step=1,phase=update", "rank=, step= or factor=", "'phase=update'"),
        ("kill:step=1,speed=2", "rank=, step=, phase=, where= or after=", "'speed=2'"),
        ("kill:step=1,rank", "rank=, step=", "'rank'"),
        ("kill:step=1,where=store", "no where=", "'store'"),
        ("flip:step=1,where=moon", "where= one of arena, store", "'moon'"),
        ("torn:step=1,after=5", "after= with what is done from outside", "torn"),
        ("kill:step=1,phase=seal,after=5", "phase=forward or restore", "phase=seal"),
        ("kill:step=1,phase=protect", "phase= one of forward", "'protect'"),
        ("kill-node:step=1", "node=", "none"),
        ("kill-node:node=1,rank=1,step=1", "node=, step=", "'rank=1'"),
        ("kill-node:node=1+,step=1", "node= a whole number", "''"),
        ("link-down:node=1,step=1", "for=", "none"),
        ("etcd-restart:step=1", "for=", "none"),
        ("store-hangs:step=1", "for=", "none"),
        ("store-slow:step=1,for=long", "a whole number, 0 or more", "'long'"),
        ("store-flaky:step=1,for=9,phase=seal,after=5", "phase=forward or restore", "phase=seal"),
        ("store-refuses:node=1,step=1,for=9", "rank=, step=", "'node=1'"),
        ("bitflip:site=moon,step=1", "site= one of weight, grad, reduced", "'moon'"),
        ("bitflip:step=1,bit=32", "bit= 0 to 31", "32"),
        ("bitflip:step=1,bit=high", "a whole number, 0 or more", "'high'"),
        ("bitflip:site=grad", "step=", "none"),
        ("bitflip:step=1,phase=seal", "site=, rank=, step=, bit= or times=", "'phase=seal'"),
        ("nan:step=1,bit=3", "site=, rank=, step= or times=", "'bit=3'"),
        ("spike:site=weight,step=1", "site= one of batch, grad, reduced", "'weight'"),
        ("spike:step=1,factor=nan", "factor= a number", "'nan'"),
        ("spike:step=1,factor=much", "factor= a number", "'much'"),
    ],
)
def test_a_wrong_spec_names_expected_and_found(text: str, expected: str, found: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text)
    said = str(error.value)
    assert (
        text in said
        and expected in said.partition("expected")[2]
        and found in said.partition("found")[2]
    ), said


def test_a_fault_outside_the_job_is_refused() -> None:
    check([Fault("kill", 1, 59)], nproc=2, steps=60)
    with pytest.raises(ConfigError, match=r"rank= below 2 .* found 2"):
        check([Fault("kill", 2, 5)], nproc=2, steps=60)
    with pytest.raises(ConfigError, match=r"step= below 60 .* found 60"):
        check([Fault("kill", 0, 60)], nproc=2, steps=60)
    check([Fault("kill", 7, 5), Fault("kill-node", 0, 5, nodes=(0, 3))], nproc=2, steps=60, nodes=4)
    with pytest.raises(ConfigError, match=r"node= below 4 .* found 4"):
        check([Fault("kill-node", 0, 5, nodes=(0, 4))], nproc=2, steps=60, nodes=4)
    with pytest.raises(ConfigError, match=r"more than one node .* found 1"):
        check([Fault("kill-node", 0, 5, nodes=(0,))], nproc=2, steps=60)
    with pytest.raises(ConfigError, match=r"expected one node .* found 2"):
        check([Fault("full", 0, 5, where="arena")], nproc=2, steps=60, nodes=2)


def test_a_restore_is_caused_by_a_kill_of_the_same_step() -> None:
    restore = parse("kill:rank=1,step=20,phase=restore")
    assert with_triggers([restore]) == [Fault("kill", 1, 20), restore]
    for cause in ("kill:step=20", "flip:step=20", "full:step=20,where=arena"):
        assert with_triggers([parse(cause), restore]) == [parse(cause), restore]
    for no_cause in ("keeper-kill:step=20", "full:step=20", "kill:step=10"):
        assert with_triggers([parse(no_cause), restore]) == [
            parse(no_cause),
            Fault("kill", 1, 20),
            restore,
        ]
    again = parse("stop:step=20,phase=restore")
    assert with_triggers([restore, again]) == [Fault("kill", 1, 20), restore, again]


@given(
    st.integers(),
    st.integers(1, 60),
    st.integers(1, 4),
    st.lists(st.sampled_from((*DRAWN, "kill-node")), min_size=1),
)
def test_drawn_faults_can_happen(seed: int, count: int, nproc: int, kinds: list[str]) -> None:
    nodes = 4 if "kill-node" in kinds else 1
    drawn = draw(seed, count, nproc, kinds, nodes=nodes)
    assert drawn == draw(seed, count, nproc, kinds, nodes=nodes)
    assert len(drawn) == count
    check(drawn, nproc, max(f.step for f in drawn) + 1, nodes)
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


def test_a_campaign_of_nodes_loses_one_or_two_at_every_phase() -> None:
    drawn = draw(1, 600, 1, kinds_of("", nodes=4), nodes=4)
    lost = [f for f in drawn if f.kind == "kill-node"]
    assert {f.phase for f in lost} == {*PHASES, PROTECT}
    assert {node for f in lost for node in f.nodes} == set(range(4)) and {
        len(f.nodes) for f in lost
    } == {1, 2}
    assert {f.rank for f in drawn if not f.nodes} == set(range(4))


def test_kinds_of_a_campaign() -> None:
    assert kinds_of("kill,torn") == ("kill", "torn")
    assert kinds_of("") == DRAWN and kinds_of("kill-node", nodes=2) == ("kill-node",)
    for wrong in ("full", "kill,lunch", ",", "kill-node"):
        with pytest.raises(ConfigError, match="expected some of kill"):
            kinds_of(wrong)
