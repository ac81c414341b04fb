"""Summary: rows by hand."""

from __future__ import annotations

from keepstep.model.cluster import DAY_S
from keepstep.sim.economics.montecarlo import WalkOutcome
from keepstep.sim.economics.presets import PRESETS
from keepstep.sim.economics.summary import summarise

CLUSTER = PRESETS["p4d-16"]


def outcome(seed: int, useful_ratio: float, lost_steps: int) -> WalkOutcome:
    lost_s = lost_steps * CLUSTER.iteration_s
    rest_s = DAY_S * (1 - useful_ratio) - lost_s
    return WalkOutcome(
        "copies:2",
        seed,
        4,
        lost_steps,
        DAY_S * useful_ratio,
        lost_s,
        0.0,
        rest_s,
        {"own": 1, "peers": 2, "store": 1},
    )


def test_gpu_hours_and_money_count_idle_spares() -> None:
    row = summarise(CLUSTER, 4, 1e9, [outcome(0, 0.8, 10), outcome(1, 0.6, 30)], gpu_hour_cost=2.0)
    assert row.gpu_hours == 20 * 8 * 24 and row.cost == 2 * row.gpu_hours
    useful = 16 * 8 * 24 * 0.7
    assert abs(row.wasted_gpu_hours - (row.gpu_hours - useful)) < 1e-6
    assert (
        row.cost_per_useful_gpu_hour is not None
        and abs(row.cost_per_useful_gpu_hour - row.cost / useful) < 1e-9
    )
    assert row.wasted_cost is not None and abs(row.wasted_cost - 2 * row.wasted_gpu_hours) < 1e-6


def test_steps_shares_and_spread() -> None:
    row = summarise(CLUSTER, 0, 1e9, [outcome(0, 0.8, 10), outcome(1, 0.6, 30)], None)
    assert abs(row.lost_steps.mean - 20) < 1e-9 and abs(row.lost_steps_per_failure - 5) < 1e-9
    assert (
        row.memory_ratio == 0.75
        and row.memory_ratio_interval[0] < 0.75 < row.memory_ratio_interval[1]
    )
    ratio = row.effective_ratio
    assert ratio.low is not None and ratio.high is not None and ratio.low < ratio.mean < ratio.high
    assert ratio.least <= ratio.p10 <= ratio.median <= ratio.p90 <= ratio.most and row.cost is None


def test_one_seed_has_no_interval_and_no_work_no_price() -> None:
    row = summarise(CLUSTER, 0, 0.0, [WalkOutcome("store:3h", 0, 0, 0.0, 0.0, 0.0, DAY_S)], 1.0)
    assert (
        row.effective_ratio.low is None
        and row.effective_ratio.median == 0
        and row.cost_per_useful_gpu_hour is None
    )
    assert row.lost_steps_per_failure == 0 and row.memory_ratio == 1
