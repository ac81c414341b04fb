"""Bugs planted on purpose: the swarm finds each of them, or it would not find ours either.

Here the quickest; all of them with `-m soak`, or as a table with `python -m tests.swarm.planted`.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.swarm.planted.bugs import Bug, all_bugs
from tests.swarm.planted.hunt import hunt

BUGS = all_bugs()
QUICK_SEEDS = 8
QUICK = [
    "the fence is skipped",
    "the page tells of a snapshot before it is sealed",
    "a seat that somebody else has taken",
    "a lease is taken before it is over",
    "a copy is acknowledged before it is compared",
    "a commit of what is only sealed",
    "each rank follows its own span",
]
HUNT_S = 1200


def named(bug: Bug) -> str:
    return bug.name


@pytest.mark.parametrize("bug", BUGS, ids=named)
def test_each_is_one_mistake_in_the_code_as_it_is(bug: Bug) -> None:
    planted = bug.planted_source()
    compile(planted, bug.module, "exec")
    assert planted != bug.path.read_text()


def test_each_room_has_ten_of_its_own_or_more() -> None:
    counts = Counter(bug.room for bug in BUGS)
    assert counts.pop("neighbours") >= 5  # they show only beside somebody else
    assert set(counts) == {"agent", "rank", "replication"} and min(counts.values()) >= 10
    assert len({bug.name for bug in BUGS}) == len(BUGS)


@pytest.mark.parametrize("name", QUICK)
def test_the_quickest_are_found(name: str) -> None:
    assert hunt(name, end=QUICK_SEEDS).seed is not None


def test_nothing_is_found_where_nothing_is_planted() -> None:
    assert hunt(end=QUICK_SEEDS).wrong == ""


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug.plan], ids=named)
def test_nothing_is_found_in_the_jobs_of_a_bug_that_is_not_planted(bug: Bug) -> None:
    assert hunt(bug.name, end=QUICK_SEEDS, planted=False).wrong == ""


@pytest.mark.soak
@pytest.mark.timeout(HUNT_S)
@pytest.mark.parametrize("bug", BUGS, ids=named)
def test_each_is_found(bug: Bug) -> None:
    assert hunt(bug.name).seed is not None


@pytest.mark.soak
@pytest.mark.timeout(HUNT_S)
def test_nothing_is_found_in_all_seeds_where_nothing_is_planted() -> None:
    assert hunt().wrong == ""
