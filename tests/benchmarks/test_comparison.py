"""Prediction: what strikes do to a simulated job; and a drill that was recorded went as it is
predicted."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.prediction.comparison import NOTHING, Comparison, Run, compare, predict, set_against
from benchmarks.prediction.drawn import Drawn, Resumption, draw
from benchmarks.prediction.measured_plan import MeasuredPlan
from benchmarks.prediction.pace import Aftermath, Pace
from benchmarks.prediction.record import Record
from benchmarks.prediction.schedule import Strike
from keepstep.model.snapshot import Phase
from keepstep.model.units import MIB, MS_NS, S_NS
from keepstep.sim.protocol.wire.network import Wires

PACE = Pace(
    forward_ns=(40 * MS_NS,),
    collective_ns=(20 * MS_NS,),
    rest_ns=(10 * MS_NS,),
    update_ns=(28 * MS_NS,),
    stall_ns=(2 * MS_NS,),
    capture_ns=(MS_NS,),
    copy_ns=(2 * MS_NS,),
    seal_ns=(MS_NS,),
    failures=Aftermath(notice_ns=(5 * MS_NS,), rank_start_ns=(S_NS,)),
)
ONE_NODE = MeasuredPlan(
    nodes=1,
    ranks_per_node=2,
    steps=1 << 31,
    policy="none",
    names_phases=True,
    checks=False,
    lost_pokes=0.0,
    act_ns=1,
    pace=PACE,
    load_ns=10 * MS_NS,
)
THREE_NODES = replace(
    ONE_NODE,
    nodes=3,
    ranks_per_node=1,
    policy="copies:2",
    wires=Wires(checks=False, measured_bytes_per_s=(MIB,)),
)


def strike(
    kind: str, phase: Phase | None, step: int | None, since_ms: float = 0, **more: object
) -> Strike:
    about = {"rank": 0, "nodes": (), "resumed": True, **more}
    return Strike(kind, phase=phase, step=step, since_ns=int(since_ms * MS_NS), **about)  # type: ignore[arg-type]


def outcome(
    plan: MeasuredPlan, *strikes: Strike, settled: bool = True, seed: int = 0
) -> list[tuple[int, str, int]]:
    """(after how many strikes, source, steps lost) of each resumption."""
    found = predict(Drawn(plan, strikes, settled, (), plan.policy, ()), seed)
    assert not found.wrong and not found.overdue, found
    return [(r.strikes, r.source, r.lost_steps) for r in found.resumptions]


@pytest.mark.parametrize(
    ("when", "lost"),
    [
        # What was done and is not sealed yet is lost; what was not done by all is not lost, since
        # nobody had it.
        (strike("kill", Phase.CAPTURE, 5, 1), 1),
        (strike("torn", Phase.SEAL, 5), 1),
        (strike("kill", Phase.SEAL, 5, 2), 0),
        (strike("kill", Phase.FORWARD, 5, 30), 0),
        (strike("kill", Phase.UPDATE, 5, 5), 0),
        (strike("stop", Phase.SEAL, 5, for_ns=300 * MS_NS), 1),
        (strike("stop", Phase.BACKWARD, 5, for_ns=300 * MS_NS), 0),
        # The newest snapshot is damaged, and nobody has overwritten the one before it.
        (strike("flip", Phase.FORWARD, 5, 30), 1),
    ],
    ids=str,
)
def test_what_is_lost_depends_on_where_in_its_step_a_rank_ends(when: Strike, lost: int) -> None:
    assert outcome(ONE_NODE, when) == [(1, "own memory", lost)]


@pytest.mark.parametrize(("slots", "expected"), [(2, ("fresh", 4)), (3, ("own memory", 1))])
def test_a_damaged_snapshot_costs_all_where_a_survivor_has_overwritten_the_one_before(
    slots: int, expected: tuple[str, int]
) -> None:
    """The survivor ends its step, since its peer had given what it needs, and captures it."""
    found = outcome(replace(ONE_NODE, slots=slots), strike("flip", Phase.UPDATE, 5, 1))
    assert found == [(1, *expected)]


def test_a_keeper_that_dies_costs_nothing_and_with_it_a_rank_no_more_than_alone() -> None:
    keeper = strike("keeper-kill", Phase.FORWARD, 4, 30)
    assert outcome(ONE_NODE, keeper, settled=False) == []
    assert outcome(
        ONE_NODE, keeper, strike("kill", None, None, 7, resumed=False, gap_ns=7 * MS_NS)
    ) == [(2, "own memory", 0)]


def test_a_killed_agent_has_its_ranks_started_anew() -> None:
    assert outcome(ONE_NODE, strike("agent-kill", Phase.BACKWARD, 4)) in (
        [(1, "own memory", 0)],
        [(1, "own memory", 1)],
    )


def test_one_that_strikes_while_all_load_has_them_load_again() -> None:
    second = strike("kill", Phase.RESTORE, None, 0.1, rank=1, resumed=False, gap_ns=S_NS)
    assert outcome(ONE_NODE, strike("torn", Phase.SEAL, 5), second) == [(2, "own memory", 1)]


def test_a_lost_node_is_given_copies_and_a_second_one_before_they_are_whole_is_too_many() -> None:
    lost = strike("kill-node", Phase.BACKWARD, 9, nodes=(1,), rank=1)
    [(count, source, steps)] = outcome(THREE_NODES, lost)
    assert (count, source) == (1, "copies") and steps <= 1  # whether they are whole by then
    ((_, source, steps),) = outcome(replace(THREE_NODES, store=True), replace(lost, nodes=(1, 2)))
    assert (source, steps) == ("fresh", 8)


def test_parity_gives_a_lost_node_its_snapshots_back() -> None:
    lost = strike("kill-node", Phase.BACKWARD, 9, nodes=(2,), rank=2)
    [(count, source, steps)] = outcome(replace(THREE_NODES, policy="parity:3"), lost)
    assert (count, source) == (1, "parity") and steps <= 1


def test_a_link_that_is_back_soon_costs_nothing() -> None:
    assert (
        outcome(
            THREE_NODES,
            strike("link-down", Phase.FORWARD, 5, nodes=(1,), rank=1, for_ns=500 * MS_NS),
            settled=False,
        )
        == []
    )


def test_steps_are_counted_from_where_all_went_on() -> None:
    """The same distance, whatever was lost before."""
    found = predict(
        Drawn(
            ONE_NODE,
            (strike("torn", Phase.SEAL, 5), strike("torn", Phase.SEAL, 5)),
            True,
            (),
            "none",
            (),
        ),
        0,
    )
    assert [r.step for r in found.resumptions] == [3, 7]


def test_a_moment_that_does_not_come_is_counted_and_the_strike_comes_then() -> None:
    # nobody asks for checkpoints
    found = predict(Drawn(ONE_NODE, (strike("kill", Phase.PERSIST, 5),), True, (), "none", ()), 0)
    assert found.overdue == 1 and len(found.resumptions) == 1


def test_the_same_seed_is_the_same_run() -> None:
    drawn = Drawn(
        THREE_NODES,
        (strike("kill-node", Phase.UPDATE, 9, nodes=(1,), rank=1),),
        True,
        (),
        "copies:2",
        (),
    )
    assert predict(drawn, 3) == predict(drawn, 3)


# -- what is set against what


def of(*resumptions: Resumption) -> Run:
    return Run(resumptions, 0, "")


def test_what_no_seed_predicts_does_not_agree() -> None:
    strikes = (strike("kill", Phase.SEAL, 1), strike("kill", Phase.SEAL, 1))
    own, store = Resumption(1, 3, "own memory", 1), Resumption(2, 9, "store", 4)
    drawn = Drawn(ONE_NODE, strikes, True, (own, store), "none", ())
    agrees = set_against(drawn, [of(own, store), of(own, replace(store, lost_steps=5))])
    assert agrees.agrees and [row.agrees for row in agrees.rows] == [True, True]
    assert agrees.rows[1].predicted == Counter({("store", 4): 1, ("store", 5): 1})
    assert (agrees.lost_steps.seen, agrees.lost_steps.predicted) == (5, (5, 6))
    for runs in (
        [of(own, replace(store, source="copies"))],
        [of(own)],
        [of(own, replace(store, lost_steps=3))],
    ):
        assert not set_against(drawn, runs).agrees
    missed = set_against(drawn, [of(own)])
    assert missed.rows[1].predicted == Counter({NOTHING: 1}) and not missed.resumptions.agrees
    assert not set_against(drawn, [replace(of(own, store), wrong="a keeper crashed")]).agrees


# -- a drill that was recorded: see recorded/README.md


@pytest.fixture(scope="module")
def recorded() -> Drawn:
    return draw(
        Record.from_json(
            json.loads((Path(__file__).parent / "recorded" / "drill.json").read_text())
        )
    )


@pytest.fixture(scope="module")
def compared(recorded: Drawn) -> Comparison:
    return compare(recorded, range(10))


def test_a_recorded_drill_went_as_it_is_predicted(recorded: Drawn, compared: Comparison) -> None:
    """What was seen is in the record; that a kill in a capture costs its step, and one between
    captures none, is certain."""
    assert recorded.seen == (
        Resumption(1, 7, "own memory", 1),
        Resumption(2, 16, "copies", 1),
        Resumption(4, 35, "own memory", 0),
    )
    assert compared.agrees and compared.overdue == 0, compared
    capture, node, update = compared.rows
    assert (capture.what, node.what, update.what) == ("kill", "kill-node", "keeper-kill + kill")
    assert capture.predicted == Counter({("own memory", 1): 10}) and update.predicted == Counter(
        {("own memory", 0): 10}
    )
    assert {source for source, _ in node.predicted} == {"copies"} and max(
        node.predicted, key=node.predicted.__getitem__
    ) == ("copies", 1)
    assert set(compared.resumptions.predicted) == {3}


def test_captures_that_take_no_time_do_not_predict_what_was_seen(recorded: Drawn) -> None:
    """The comparison tells a model that is wrong: without durations of captures and copies nothing
    but the step under way is lost."""
    pace = replace(recorded.plan.pace, capture_ns=(1,), copy_ns=(1,), seal_ns=(1,))
    quick = replace(recorded, plan=replace(recorded.plan, pace=pace))
    late = tuple(
        replace(s, phase=Phase.SEAL, since_ns=MS_NS) if s.kind == "kill" else s
        for s in recorded.strikes
    )
    found = compare(replace(quick, strikes=late), range(5))
    assert not found.agrees and not found.rows[0].agrees
