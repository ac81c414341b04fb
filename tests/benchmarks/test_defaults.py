"""What the benchmark of the defaults makes of the steps it was given."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # as when it is started

from benchmarks.defaults import Block, cores, figures, rounds_of, verdict


def block(draw: random.Random, is_on: bool, more: float = 0.0, looks: float = 0.0) -> Block:
    """Sixteen steps of about 50 ms; each eighth takes `looks` longer, all take `more` longer."""
    spans = [
        0.05 * draw.gauss(1, 0.01) * (1 + more * is_on + looks * is_on * (number % 8 == 0))
        for number in range(16)
    ]
    took = {"agent": 0.002 if is_on else 0.001, "keeper": 0.004, "prober": 0.004 * is_on}
    return Block(is_on, tuple(spans), 0.9 * sum(spans), took)


def drawn(rounds: int, **more: float) -> list[Block]:
    draw = random.Random(3)
    turned = ((True, False), (False, True))
    return [block(draw, is_on, **more) for n in range(rounds) for is_on in turned[n % 2]]


@pytest.mark.parametrize("more", [0.0, 0.01, 0.05])
def test_what_each_step_costs_more_is_found_whoever_is_first(more: float) -> None:
    found = figures(rounds_of(drawn(200, more=more)), draws=200)
    for name in ("a step", "its median", "its p99", "processor time"):
        share, low, high = found[name]
        assert low <= share <= high
        assert abs(share - more) < 0.004, name


def test_looks_in_some_steps_are_in_a_step_and_in_its_p99_and_not_in_its_median() -> None:
    found = figures(rounds_of(drawn(200, looks=0.08)), draws=50)
    assert abs(found["a step"][0] - 0.01) < 0.003
    assert abs(found["its median"][0]) < 0.003 and found["its p99"][0] > 0.05


def test_the_prober_works_on_account_of_all_time() -> None:
    """It stands still half of the time, and looks as often for that."""
    found = cores(rounds_of(drawn(50)))
    assert found["agent"] == pytest.approx((0.0025, 0.00125), rel=0.02)
    assert found["keeper"] == pytest.approx((0.005, 0.005), rel=0.02)
    assert found["prober"] == (pytest.approx(0.0025, rel=0.02), 0.0)


REPORT: dict[str, Any] = {
    "no_verdict": None,
    "lost": [],
    "ranks": [
        {"more": {"a step": (0.003, 0.002, 0.004)}},
        {"more": {"a step": (0.001, -0.001, 0.004)}},
    ],
    "cores": {"agent": (0.002, 0.001), "keeper": (0.005, 0.005), "prober": (0.002, 0.0)},
}


def test_the_verdict_is_of_the_worse_rank_and_of_all_processes() -> None:
    assert verdict(REPORT).startswith("met: +0.30% of a step")
    slow, nobody_knows = ({"more": {"a step": (0.007, low, 0.01)}} for low in (0.006, 0.001))
    assert verdict({**REPORT, "ranks": [*REPORT["ranks"], slow]}).startswith("NOT met")
    assert verdict({**REPORT, "ranks": [nobody_knows]}).startswith("open")
    busy = {**REPORT["cores"], "keeper": (0.007, 0.0)}
    assert verdict({**REPORT, "cores": busy}).startswith("NOT met")
    assert verdict({**REPORT, "lost": ["prober"]}).startswith("no verdict: ended")
    assert verdict({**REPORT, "no_verdict": "no verdict: the load"}) == "no verdict: the load"
