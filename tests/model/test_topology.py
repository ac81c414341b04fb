"""Policies read what they print, refuse what cannot be, and a topology is whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import ConfigError
from keepstep.model.topology import (
    Auto,
    Copies,
    Group,
    NoRedundancy,
    Parity,
    Policy,
    ReedSolomon,
    Topology,
    TopologyNode,
    parse_policy,
    topology,
)

few = st.integers(2, 100)
policies = st.one_of(
    st.just(NoRedundancy()),
    st.just(Auto()),
    st.builds(Copies, few),
    st.builds(Parity, few),
    st.builds(ReedSolomon, few, st.integers(1, 9)),
)


@given(policies)
def test_a_policy_reads_what_it_prints(policy: Policy) -> None:
    assert parse_policy(str(policy)) == policy


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "copies",
            "copies:",
            "copies:1",
            "copies:-2",
            "copies:2.0",
            "copies:2:3",
            "copies:٣",
            "Copies:2",
            "none:1",
            "auto:2",
        ),
        *(
            "parity:1",
            "parity:x",
            "parity:256",
            "rs:4",
            "rs:4+",
            "rs:+2",
            "rs:0+2",
            "rs:4+0",
            "rs:4+2+1",
            "rs:200+56",
            "raid5",
        ),
    ],
)
def test_what_is_no_policy_is_refused_with_expected_and_found(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected none, copies:M .* found") as refusal:
        parse_policy(text)
    assert repr(text) in str(refusal.value)


def test_racks_are_the_nodes_in_them() -> None:
    assert topology(5, ["a", "b", "a", "b", "c"]).racks == {"a": (0, 2), "b": (1, 3), "c": (4,)}
    assert topology(3).racks == {}


def test_a_topology_that_is_not_whole_is_refused() -> None:
    for nodes in [
        (),
        (TopologyNode(1),),
        (TopologyNode(0), TopologyNode(2)),
        (TopologyNode(0, "a"), TopologyNode(1)),
    ]:
        with pytest.raises(ConfigError, match="expected"):
            Topology(nodes)
    with pytest.raises(ConfigError, match="each of 3 nodes, found 2"):
        topology(3, ["a", "b"])


def test_the_holders_of_a_group_begin_with_the_owner() -> None:
    assert Group((4, 5, 6), 2).holders(5) == (5, 6, 4)
    assert Group((4, 5, 6), 1, ring=True).holders(6) == (6, 4)
    assert Group((4, 5, 6, 7), 1).needed == 3
    assert Group((4, 5, 6), 2).needed == Group((4, 5, 6), 1, ring=True).needed == 1
