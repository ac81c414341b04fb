"""Ports of RDMA adapters, on looks ten seconds apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from keepstep.core.parts.nics import Nics
from keepstep.model.parts import NicReading, PartHealth, PortReading
from keepstep.model.units import S_NS

EVERY_NS = 10 * S_NS


def port(**changes: Any) -> PortReading:
    counters = dict.fromkeys(("downed", "recovered", "symbol_errors", "received_errors"), 0)
    more = dict.fromkeys(("packets", "out_of_sequence", "sequence_errors", "timeouts"), 0)
    return PortReading("mlx5_0", 1, **{"state": 4, **counters, **more, **changes})


def play(looks: Sequence[PortReading | None]) -> list[PartHealth]:
    """What is said of the port at each look; None: it is gone."""
    judge, said = Nics(), []
    for number, look in enumerate(looks):
        readings = [] if look is None else [look]
        at_ns = (number + 1) * EVERY_NS
        found = [h for h in judge.add(readings, at_ns) if h.part == "nic mlx5_0/1"]
        said += found
        assert all(health.seen_ns == at_ns for health in found)
    return said


def letters(looks: Sequence[PortReading | None]) -> str:
    return "".join({"ok": "o", "bad": "B", "unknown": "u"}[each.health] for each in play(looks))


def test_a_port_that_is_active_and_counts_nothing_is_well() -> None:
    assert letters([port(packets=n * 10**9) for n in range(40)]) == "o" * 40


def test_one_that_goes_down_or_away_is_sick_while_it_is() -> None:
    assert letters([port(), port(state=1), port(state=1), port(), port()]) == "ooBBo"
    assert letters([port(), port(state=2), port()]) == "ooo", "a look is not enough"
    assert letters([port(), None, None]) == "ooB"
    assert play([port(), port(state=1), port(state=1)])[-1].why == "its port is down"
    assert play([port(state=1)] * 5) == [], "one that never was active is missed by nobody"


@pytest.mark.parametrize("counter", ["downed", "recovered"])
def test_flaps_are_those_of_a_nic(counter: str) -> None:
    assert letters([port(), port(**{counter: 1}), port(**{counter: 1})]) == "ooo"
    flapped = play([port(), port(**{counter: 1}), port(**{counter: 2})])[-1]
    assert flapped.health == "bad"
    assert flapped.why == "its link went down 2 times within five minutes"
    quiet = [port(**{counter: 2})] * 40
    assert letters([port(), port(**{counter: 1}), *quiet])[-1] == "o"
    # counters that were set back (perfquery -R) are no flaps
    assert letters([port(**{counter: 90}), port(), port(), port(**{counter: 1})]) == "oooo"


@pytest.mark.parametrize("counter", ["symbol_errors", "received_errors"])
def test_damage_is_counted_over_five_minutes(counter: str) -> None:
    """Two each ten seconds are sixty in five minutes; two a minute are ten; one is not."""
    fast = letters([port(**{counter: 2 * n}) for n in range(30)])
    assert fast.index("B") == 5
    assert "B" in letters([port(**{counter: 2 * (n // 6)}) for n in range(60)])
    assert "B" not in letters([port(**{counter: n // 6}) for n in range(60)])
    anew = [port(**{counter: 5000}), *[port(**{counter: n // 12}) for n in range(20)]]
    assert "B" not in letters(anew), "it was set back"


@pytest.mark.parametrize("counter", ["sequence_errors", "timeouts"])
def test_what_is_sent_again_counts_beside_what_was_sent(counter: str) -> None:
    lossy = [port(packets=n * 10_000, **{counter: 2 * n}) for n in range(30)]
    said = play(lossy)[-1]
    assert said.health == "bad" and "packets were lost 58 times among 290000 sent" in said.why
    busy = [port(packets=n * 1_000_000, **{counter: 2 * n}) for n in range(30)]
    assert "B" not in letters(busy)


def test_what_arrives_out_of_sequence_accuses_nobody() -> None:
    """Adaptive routing lets packets overtake each other."""
    looks = [port(packets=n * 1000, out_of_sequence=n * 500) for n in range(30)]
    assert letters(looks) == "o" * 30


@pytest.mark.parametrize(
    ("counter", "most"), [("downed", 255), ("recovered", 255), ("symbol_errors", 65_535)]
)
def test_a_counter_at_its_end_counts_no_more(counter: str, most: int) -> None:
    said = play([port(**{counter: most})] * 40)
    assert {each.health for each in said} == {"unknown"}
    assert "perfquery -R" in said[-1].why
    assert letters([port(**{counter: most + 1})] * 3) == "ooo", "this one is wider"


def test_of_what_nothing_can_be_read_nothing_is_known() -> None:
    silent = PortReading("mlx5_0", 1, 4)
    assert letters([silent] * 3) == "uuu"
    assert letters([port(state=None)] * 3) == "uuu"
    assert letters([port(downed=None, recovered=None, symbol_errors=None)] * 3) == "ooo"


def test_it_says_nothing_of_the_interface_beside_it() -> None:
    judge = Nics()
    found = judge.add([NicReading("ib0", True, 0, 0, 0, 0, 0, 0), port()], EVERY_NS)
    assert [(each.part, each.health) for each in found] == [
        ("nic ib0", "ok"),
        ("nic mlx5_0/1", "ok"),
    ]
