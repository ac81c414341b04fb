"""Economics: what a policy costs, by hand, and how a policy is written."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.economics.costs import (
    ClusterPolicy,
    Tier,
    charges,
    human_interval,
    interval,
    parse_cluster_policy,
)
from keepstep.errors import ConfigError
from keepstep.model.topology import Copies, NoRedundancy, Parity, ReedSolomon
from tests.model.ten_nodes import TEN_NODES


def test_copies_by_hand() -> None:
    """10 GB a node: 1 s on the wire, 2 s in its idle half, 0.5 s to the host; 100 s to the
    store."""
    found = charges(TEN_NODES, ClusterPolicy(Copies(2)), 4.0)
    assert found.own == Tier(10.0, 0.5, 0.5) and found.peers == Tier(10.0, 2.5, 1.5)
    assert found.store == Tier(10_800.0, 100.0, 100.0)
    assert found.pace_ratio == pytest.approx(10_800 / 10_801) and found.restart_s == 60.0
    assert found.memory_bytes == 40e9


def test_what_takes_longer_than_a_step_is_copied_every_few_steps() -> None:
    slow = replace(TEN_NODES, network_gbps=8)
    found = charges(slow, ClusterPolicy(Copies(2)), 4.0)
    assert (
        found.peers is not None
        and found.peers.interval_s == 20.0
        and found.peers.lag_s == pytest.approx(20.5)
    )


def test_a_code_sends_its_parity_and_fetches_what_it_rebuilds() -> None:
    parity, rs = (
        charges(TEN_NODES, ClusterPolicy(Parity(4)), 2.67),
        charges(TEN_NODES, ClusterPolicy(ReedSolomon(4, 2)), 3.0),
    )
    assert parity.peers is not None and (parity.peers.lag_s, parity.peers.fetch_s) == (2.5, 1.5)
    assert rs.peers is not None and (rs.peers.lag_s, rs.peers.fetch_s) == (4.5, 1.5)


def test_the_store_alone_stalls_and_is_as_fast_as_it_can_be() -> None:
    found = charges(replace(TEN_NODES, store_stall_s=25.0), ClusterPolicy(None, 0.0), 0.0)
    assert found.own is found.peers is None and found.store == Tier(100.0, 100.0, 100.0)
    assert found.pace_ratio == 0.8 and found.memory_bytes == 0
    assert charges(TEN_NODES, ClusterPolicy(None, 30.0), 0.0).store.interval_s == 100.0, (
        "whatever is asked for"
    )
    assert charges(TEN_NODES, ClusterPolicy(None, 144.0), 0.0).store.interval_s == 150.0, (
        "whole steps"
    )


def test_a_state_that_does_not_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        ConfigError,
        match=r"copies:5: expected at most 93\.1 GiB a node .*, "
        r"found a need of 93\.1 GiB: 10 x 9\.3 GiB",
    ):
        charges(TEN_NODES, ClusterPolicy(Copies(5)), 10.0)


def test_in_process_recovery_needs_its_time_said() -> None:
    assert charges(TEN_NODES, ClusterPolicy(Copies(2), in_process=True), 4.0).restart_s == 10.0
    with pytest.raises(
        ConfigError, match="expected in_process_restart_s in cluster 'ten', found none"
    ):
        charges(
            replace(TEN_NODES, in_process_restart_s=None),
            ClusterPolicy(Copies(2), in_process=True),
            4.0,
        )


@given(work_s=st.floats(0, 1e6), interval_s=st.floats(1, 1e4), lag_s=st.floats(0, 1e4))
def test_the_newest_state_is_one_that_can_be_used_already(
    work_s: float, interval_s: float, lag_s: float
) -> None:
    tier = Tier(interval_s, lag_s, 0.0)
    newest = tier.newest(work_s)
    assert newest == 0 or newest + lag_s <= work_s + 1e-6
    assert newest + interval_s + lag_s >= work_s - 1e-6


def test_a_failure_loses_lag_and_half_an_interval_on_average() -> None:
    draw, tier = random.Random(1), Tier(60.0, 40.0, 5.0)
    lost = [work - tier.newest(work) for work in (draw.uniform(1e4, 2e4) for _ in range(20_000))]
    assert sum(lost) / len(lost) + 5.0 == pytest.approx(tier.wasted_s, rel=0.01)


@pytest.mark.parametrize("per_s", [1e-5, 1e-3, 1e-2])
def test_lasting_work_is_what_runs_of_random_length_leave(per_s: float) -> None:
    draw, tier = random.Random(2), Tier(60.0, 40.0, 5.0)
    runs = [draw.expovariate(per_s) for _ in range(50_000)]
    assert sum(map(tier.newest, runs)) / sum(runs) == pytest.approx(
        tier.lasting_ratio(per_s), rel=0.02
    )


def test_lasting_work_at_the_ends() -> None:
    assert Tier(60.0, 40.0, 5.0).lasting_ratio(0.0) == 1.0
    assert Tier(1e6, 40.0, 5.0).lasting_ratio(1.0) == 0.0
    few = 1e-9
    assert Tier(60.0, 40.0, 5.0).lasting_ratio(few) == pytest.approx(1 - few * (40 + 30), abs=1e-12)


POLICIES = [
    ClusterPolicy(None),
    ClusterPolicy(None, 0.0),
    ClusterPolicy(Copies(2)),
    ClusterPolicy(NoRedundancy(), 90.0),
    ClusterPolicy(Parity(4), 1200.0, True, 3),
    ClusterPolicy(ReedSolomon(8, 2), 0.0, False, 0),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_policy_is_read_as_it_is_written(policy: ClusterPolicy) -> None:
    assert parse_cluster_policy(str(policy)) == policy


def test_policies_as_people_write_them() -> None:
    assert parse_cluster_policy("copies:2/spares:4/in-process/store:1h") == ClusterPolicy(
        Copies(2), 3600.0, True, 4
    )
    assert (
        str(ClusterPolicy(None)) == "store:3h"
        and human_interval(97.0) == "97s"
        and interval("1.5h", "") == 5400
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raid:5", "found 'raid:5'"),
        ("auto", "`keepstep plan` chooses"),
        ("copies:2/fast", "found 'fast' in 'copies:2/fast'"),
        ("copies:2/spares:-1", "found 'spares:-1'"),
        ("store:3h/store:1h", "found 'store:1h'"),
        ("store:often", "expected an interval such as 90s, 20m, 3h or max, found 'often'"),
        ("store:0s", "found '0s'"),
    ],
)
def test_what_is_no_policy_is_said(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_cluster_policy(text)
    assert words in str(caught.value)


def test_lasting_ratio_and_daly_are_one_formula() -> None:
    tier, per_s = Tier(600.0, 0.0, 0.0), 1 / 3600
    assert tier.lasting_ratio(per_s) == pytest.approx(600 / (3600 * math.expm1(600 / 3600)))
