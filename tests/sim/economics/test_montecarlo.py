"""Monte Carlo: scripted failures against sums made by hand, properties of every walk, and means
against exact expectations."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.economics.costs import ClusterPolicy, parse_cluster_policy
from keepstep.errors import ConfigError
from keepstep.model.cluster import DAY_S, Cluster, FailureKind, Scope
from keepstep.model.topology import Copies
from keepstep.sim.economics.montecarlo import DrawnFailure, WalkOutcome, draw, prepare, run, walk
from tests.model.ten_nodes import NODE, TEN_NODES

RANK = FailureKind("rank", Scope.RANK, 0.1)
RACK = FailureKind("rack", Scope.RACK, 0.01)
SILENT = FailureKind("silent", Scope.NODE, 0.01, latency_s=1000.0)
HANG = FailureKind("hang", Scope.RANK, 0.01, detection_s=600.0)

CLUSTER = replace(TEN_NODES, failures=(RANK, NODE, RACK, SILENT, HANG), nodes_per_rack=2)
# moving bytes costs nothing
FREE = replace(CLUSTER, network_gbps=8e9, store_gbps=1e9, network_idle_ratio=1.0)
DAY = 1.0


def walked(
    policy: str, *failures: tuple[float, FailureKind, int], cluster: Cluster = CLUSTER
) -> WalkOutcome:
    happened = [DrawnFailure(at_s, kind, node) for at_s, kind, node in failures]
    return walk(cluster, prepare(cluster, parse_cluster_policy(policy)), happened, DAY, 0)


def test_without_failures_all_time_is_training() -> None:
    found = walked("copies:2/store:1h", cluster=FREE)
    assert found.useful_s == pytest.approx(DAY_S) and found.lost_s == found.down_s == 0
    assert walked("store:1h").stalled_s == pytest.approx(DAY_S * 0.5 / 3600.5), (
        "the copy to the host, once an hour"
    )


def test_a_dead_rank_costs_the_step_and_the_restart() -> None:
    found = walked("copies:2", (1007.0, RANK, 3), cluster=FREE)
    assert found.lost_s == pytest.approx(7.0, abs=0.01) and found.recovered == {
        "own": 1,
        "peers": 0,
        "store": 0,
    }
    assert found.down_s == pytest.approx(5 + 0.5 + 60, abs=0.01)


def test_a_failure_just_after_the_step_finds_that_step_not_yet_sealed() -> None:
    """Half a second to the host: at 1000.2 s the state of 1000 s is on its way, and 990 s is what
    there is."""
    assert walked("copies:2", (1000.2, RANK, 3), cluster=FREE).lost_s == pytest.approx(
        10.2, abs=0.01
    )
    assert walked("copies:2", (1000.6, RANK, 3), cluster=FREE).lost_s == pytest.approx(
        0.6, abs=0.01
    )


def test_a_lost_node_also_costs_the_wait_for_another() -> None:
    found = walked("copies:2", (1007.0, NODE, 3), cluster=FREE)
    assert found.recovered["peers"] == 1 and found.down_s == pytest.approx(
        5 + 600 + 0.5 + 60, abs=0.01
    )


def test_spares_are_taken_at_once_and_the_next_one_must_wait() -> None:
    one = walked("copies:2/spares:1", (1007.0, NODE, 3), cluster=FREE)
    assert one.down_s == pytest.approx(5 + 0.5 + 60, abs=0.01)
    # Up again at 1072.5; the second is lost at 1100 and waits for the first one's replacement,
    # ordered at 1012.
    two = walked("copies:2/spares:1", (1007.0, NODE, 3), (1100.0, NODE, 6), cluster=FREE)
    assert two.down_s == pytest.approx(65.5 + (1612 - 1100) + 60.5, abs=0.01)
    late = walked("copies:2/spares:1", (1007.0, NODE, 3), (9000.0, NODE, 6), cluster=FREE)
    assert late.down_s == pytest.approx(2 * 65.5, abs=0.01), "the replacement became the spare"


def test_a_rack_takes_its_nodes_and_memory_survives_it() -> None:
    found = walked("copies:2", (1007.0, RACK, 3), cluster=FREE)
    assert found.recovered == {"own": 0, "peers": 1, "store": 0}
    apart = replace(FREE, nodes_per_rack=5)
    assert walked("copies:2", (1007.0, RACK, 3), cluster=apart).recovered["peers"] == 1, (
        "placed apart"
    )
    with pytest.raises(ConfigError, match="copies:2"):
        prepare(replace(FREE, nodes_per_rack=10), ClusterPolicy(Copies(2)))


def test_two_nodes_of_a_group_during_one_recovery_need_the_store() -> None:
    plain = replace(FREE, nodes_per_rack=0, failures=(NODE,))
    together = walked("copies:2/store:1h", (5000.0, NODE, 0), (5010.0, NODE, 1), cluster=plain)
    assert together.recovered == {"own": 0, "peers": 1, "store": 1}
    assert together.lost_s == pytest.approx(1400, abs=1), "back to the checkpoint of the first hour"
    elsewhere = walked("copies:2/store:1h", (5000.0, NODE, 0), (5010.0, NODE, 2), cluster=plain)
    assert elsewhere.recovered == {"own": 0, "peers": 2, "store": 0}
    later = walked("copies:2/store:1h", (5000.0, NODE, 0), (7000.0, NODE, 1), cluster=plain)
    assert later.recovered == {"own": 0, "peers": 2, "store": 0}
    three = walked("rs:3+2/store:1h", (5000.0, NODE, 0), (5010.0, NODE, 1), cluster=plain)
    assert three.recovered == {"own": 0, "peers": 2, "store": 0}


def test_until_the_copies_are_made_again_the_partner_must_not_go() -> None:
    """Up again at 5000 + 5 + 600 + 1.5 + 60 s; two seconds later everything is held twice."""
    plain = replace(CLUSTER, nodes_per_rack=0, failures=(NODE,))
    assert (
        walked("copies:2", (5000.0, NODE, 0), (5667.5, NODE, 1), cluster=plain).recovered["store"]
        == 1
    )
    assert (
        walked("copies:2", (5000.0, NODE, 0), (5669.5, NODE, 1), cluster=plain).recovered["store"]
        == 0
    )


def test_in_the_ring_it_is_neighbours_that_hurt() -> None:
    """Of five nodes with two copies three are a ring, where any two are neighbours; with three
    copies all five, and three must go."""
    five = replace(FREE, nodes=5, nodes_per_rack=0, failures=(NODE,), memory_bytes=200e9)
    assert (
        walked("copies:2", (5000.0, NODE, 2), (5010.0, NODE, 4), cluster=five).recovered["store"]
        == 1
    )
    assert (
        walked("copies:3", (5000.0, NODE, 0), (5010.0, NODE, 1), cluster=five).recovered["store"]
        == 0
    )
    three = (5000.0, NODE, 0), (5010.0, NODE, 1), (5020.0, NODE, 3)
    assert walked("copies:3", *three, cluster=five).recovered["store"] == 0, (
        "0, 1 and 3 leave 4 and 2 beside each"
    )
    three = (5000.0, NODE, 0), (5010.0, NODE, 1), (5020.0, NODE, 2)
    assert walked("copies:3", *three, cluster=five).recovered["store"] == 1


def test_a_failure_during_recovery_starts_it_anew_and_loses_nothing_more() -> None:
    found = walked("copies:2", (1007.0, RANK, 3), (1050.0, RANK, 5), cluster=FREE)
    assert found.lost_s == pytest.approx(7.0, abs=0.01) and found.down_s == pytest.approx(
        1050 - 1007 + 65.5, abs=0.01
    )


def test_after_falling_back_to_the_store_a_software_failure_stays_there() -> None:
    plain = replace(FREE, nodes_per_rack=0, failures=(NODE,))
    found = walked(
        "copies:2/store:1h", (5000.0, NODE, 0), (5010.0, NODE, 1), (5020.0, RANK, 5), cluster=plain
    )
    assert found.recovered == {"own": 0, "peers": 1, "store": 2} and found.lost_s == pytest.approx(
        1400, abs=1
    )


def test_a_silent_error_goes_back_to_before_it_began() -> None:
    found = walked("copies:2/store:1000s", (5500.0, SILENT, 0), cluster=FREE)
    assert found.recovered["store"] == 1 and found.lost_s == pytest.approx(1500, abs=1), (
        "4,500 s were right, 4,000 s are stored"
    )
    again = walked("copies:2/store:1000s", (5500.0, SILENT, 0), (6200.0, SILENT, 0), cluster=FREE)
    assert again.recovered["store"] == 2, "and the checkpoints made since the error are wrong too"
    assert again.lost_s > found.lost_s + 1000


def test_a_silent_error_that_is_noticed_soon_finds_a_checkpoint_still_being_written() -> None:
    """The store takes 100 s: of 1,150 s of work 1,100 were right, and the checkpoint of 1,000 s is
    the newest there is."""
    soon = replace(SILENT, latency_s=50.0)
    assert walked("copies:2/store:100s", (1200.0, soon, 0)).lost_s == pytest.approx(
        1200 * 100 / 101 - 1000, abs=1
    )


def test_everybody_waits_for_the_node_that_comes_last() -> None:
    slowly = replace(NODE, name="slowly", detection_s=600.0)
    found = walked("copies:2", (5000.0, slowly, 0), (5010.0, NODE, 4), cluster=FREE)
    assert found.down_s == pytest.approx(600 + 600 + 0.5 + 60, abs=0.01), (
        "the second one's replacement is there long before"
    )


def test_a_hang_takes_longer_to_see() -> None:
    assert walked("copies:2", (1007.0, HANG, 3), cluster=FREE).down_s == pytest.approx(
        600 + 0.5 + 60, abs=0.01
    )


def test_in_process_recovery_restarts_faster() -> None:
    assert walked("copies:2/in-process", (1007.0, RANK, 3), cluster=FREE).down_s == pytest.approx(
        5 + 0.5 + 10, abs=0.01
    )


def test_without_copies_a_dead_rank_resumes_from_memory_and_a_lost_node_from_the_store() -> None:
    found = walked("none/store:1h", (5007.0, RANK, 3), (9000.0, NODE, 3), cluster=FREE)
    assert found.recovered == {"own": 1, "peers": 0, "store": 1}


def test_a_recovery_that_the_end_cuts_short_counts_until_the_end() -> None:
    found = walked("copies:2", (DAY_S - 10, RANK, 3), cluster=FREE)
    assert found.down_s == pytest.approx(10) and found.total_s == pytest.approx(DAY_S)


kinds = st.sampled_from([RANK, NODE, RACK, SILENT, HANG])
happenings = st.lists(st.tuples(st.floats(0, DAY_S), kinds, st.integers(0, 9)), max_size=40)
POLICIES = [
    "store:3h",
    "store:max",
    "none",
    "copies:2",
    "copies:3/spares:2",
    "parity:4/in-process",
    "rs:3+2/store:1h",
]


@given(happened=happenings, policy=st.sampled_from(POLICIES))
def test_whatever_happens_the_account_is_whole(
    happened: list[tuple[float, FailureKind, int]], policy: str
) -> None:
    found = walked(policy, *sorted(happened, key=lambda one: one[0]))
    assert found.total_s == pytest.approx(DAY_S)
    assert min(found.useful_s, found.lost_s, found.stalled_s, found.down_s) >= -1e-6
    assert sum(found.recovered.values()) == found.failures == len(happened)


@given(happened=happenings)
def test_more_checkpoints_that_cost_nothing_never_lose_more(
    happened: list[tuple[float, FailureKind, int]],
) -> None:
    free = replace(FREE, store_stall_s=0.0)
    script = sorted(happened, key=lambda one: one[0])
    assert (
        walked("store:100s", *script, cluster=free).lost_s
        <= walked("store:1000s", *script, cluster=free).lost_s + 1e-6
    )


def test_seeds_repeat_and_differ() -> None:
    assert draw(CLUSTER, 30, 7) == draw(CLUSTER, 30, 7) != draw(CLUSTER, 30, 8)
    cases = [prepare(CLUSTER, parse_cluster_policy(policy)) for policy in ("copies:2", "store:3h")]
    first, again = run(CLUSTER, cases, 30, 3), run(CLUSTER, cases, 30, 3)
    assert first == again and [outcome.seed for outcome in first[0]] == [0, 1, 2]
    assert [a.failures for a in first[0]] == [b.failures for b in first[1]], (
        "policies meet the same failures"
    )


def test_as_many_failures_of_each_kind_as_were_asked_for() -> None:
    found = [failure.kind.name for seed in range(20) for failure in draw(CLUSTER, 100, seed)]
    for kind in CLUSTER.failures:
        expected = kind.per_node_day * 10 * 100 * 20
        assert abs(found.count(kind.name) - expected) < 4 * math.sqrt(expected)
    times = [failure.at_s for failure in draw(CLUSTER, 100, 0)]
    assert times == sorted(times) and times[-1] < 100 * DAY_S


@pytest.mark.parametrize("per_day", [5.0, 40.0, 150.0])
def test_the_mean_is_the_exact_expectation(per_day: float) -> None:
    """Failures that need no node and a store that is free: work that lasts, and recoveries that
    begin anew, are exact."""
    crashes = FailureKind("crash", Scope.RANK, per_day / FREE.nodes)
    cluster = replace(FREE, failures=(crashes,), store_stall_s=0.0)
    case = prepare(cluster, parse_cluster_policy("store:20m"))
    (found,) = run(cluster, [case], 60, 30)
    ratios = [outcome.effective_ratio for outcome in found]
    rate = per_day / DAY_S
    exact = case.charges.store.lasting_ratio(rate) * math.exp(-rate * (5 + 60))
    assert abs(fmean(ratios) - exact) < 4 * stdev(ratios) / math.sqrt(len(ratios)) + 20 * 60 / (
        60 * DAY_S
    )


@pytest.mark.parametrize(("days", "seeds"), [(0, 1), (-1, 1), (1, 0), (1e9, 1), (float("nan"), 1)])
def test_what_cannot_be_simulated_is_refused(days: float, seeds: int) -> None:
    with pytest.raises(ConfigError, match="expected more than 0"):
        run(CLUSTER, [prepare(CLUSTER, ClusterPolicy(None))], days, seeds)


def test_more_failures_than_anybody_waits_for_are_refused() -> None:
    often = replace(CLUSTER, failures=(replace(RANK, per_node_day=1e6),))
    with pytest.raises(
        ConfigError, match=r"expected at most 1,000,000 a seed, found about 10,000,000"
    ):
        run(often, [prepare(often, ClusterPolicy(None))], 1, 1)
