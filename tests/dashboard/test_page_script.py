"""What the page's script makes of what it is told, run by node: without a browser, so without the
page itself."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.dashboard.ages import human_age
from keepstep.model.units import MS_NS, human_bytes
from tests.dashboard.test_delta import needs_node, run_script

pytestmark = needs_node


def test_ages_and_sizes_are_those_of_the_terminal() -> None:
    times_ms = [0, 400, 9_949, 12_000, 119_000, 180_000, 9_000_000, 345_600_000]
    found = run_script("(g, page) => g.map(page.age)", times_ms)
    assert found == [human_age(ms * MS_NS) for ms in times_ms]
    sizes = [0, 1023, 1024, 3 << 20, 5 << 30, 7 << 40]
    assert run_script("(g, page) => g.map(page.size)", sizes) == list(map(human_bytes, sizes))


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("", range(20)),
        ("3", [3]),
        ("3, 8-10", [3, 8, 9, 10]),
        ("17-", [17, 18, 19]),
        ("4 5", [4, 5]),
        ("99", []),
    ],
)
def test_ranks_are_found_by_their_numbers(text: str, ranks: Any) -> None:
    code = "(g, page) => [...Array(20).keys()].filter(page.meant(g))"
    assert run_script(code, text) == list(ranks)


@pytest.mark.parametrize("text", ["rank three", "3-2-1", "-", "1.5", "<b>"])
def test_what_names_no_ranks_is_told(text: str) -> None:
    assert run_script("(g, page) => page.meant(g)", text) is None


def test_those_that_call_for_a_look_are_chosen_and_counted() -> None:
    tones = {0: "good", 1: "bad", 2: "warn", 3: "quiet", 4: "good"}
    rows = [[str(rank), {"tone": tone}] for rank, tone in tones.items()]
    chosen = run_script("(g, page) => page.chosenRanks(g, '', 'odd').map(([r]) => r)", rows)
    assert chosen == ["1", "2"]
    words = run_script("(g, page) => page.rankCounts(g)", rows)
    assert words == "5 ranks: 2 as they should be, 1 to look at, 1 gone, 1 done"


def test_the_bars_of_a_recovery_follow_each_other() -> None:
    stages = [
        {"at_ms": 0, "took_us": 0},
        {"at_ms": 100, "took_us": 100_000},
        {"at_ms": 400, "took_us": 300_000},
    ]
    bars = run_script("(g, page) => g.map((stage) => page.barOf(stage, 400))", stages)
    assert bars == [[0, 0], [0, 25], [25, 75]]


def test_a_line_stays_in_its_box() -> None:
    points = [[0, -1], [500, 50], [1000, 100], [2000, 100]]
    line = run_script("(g, page) => page.polyline(g, 1000, 100)", points)
    assert line == "0.0,100.0 500.0,52.5 1000.0,5.0 1000.0,5.0"
