"""What is said in few words is, with the mesh, all that was known."""

from __future__ import annotations

import itertools
from collections.abc import Set
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.redundancy.node_safety import abbreviate, node_lines, ranges, spell_out
from keepstep.core.redundancy.placement import place
from keepstep.core.redundancy.survival import Losable, which_can_be_lost
from keepstep.core.wire.messages import decode, encode
from keepstep.model.mesh import Member, Mesh
from keepstep.model.messages.peers import SafetyWord
from keepstep.model.snapshot import Stamp
from keepstep.model.topology import parse_policy, topology

POLICIES = ("none", "copies:2", "copies:3", "parity:4", "rs:2+2")


def mesh_of(nodes: int) -> Mesh:
    return Mesh(
        7,
        0,
        tuple(Member(n, f"10.0.{n // 256}.{n % 256}", 1, 1000 + n, 8) for n in range(nodes)),
        "s" * 16,
    )


def heard(losable: Losable, linked: Set[int], mesh: Mesh, is_committed: bool = True) -> SafetyWord:
    """As another node takes it from the link."""
    word = abbreviate(mesh, "x", "it was asked for", Stamp(41, 1), is_committed, losable, linked)
    found = decode(encode(word))
    assert isinstance(found, SafetyWord)
    return found


@given(st.data())
def test_what_is_said_is_what_was_known(data: st.DataObject) -> None:
    nodes = data.draw(st.sampled_from((4, 8, 12)))
    placement = place(parse_policy(data.draw(st.sampled_from(POLICIES))), topology(nodes, None))  # type: ignore[arg-type]
    alive = data.draw(st.sets(st.integers(0, nodes - 1)))
    proven = {
        node: data.draw(st.sampled_from([holders, (node,), ()]))
        for node, holders in placement.holders.items()
    }
    losable = which_can_be_lost(placement, alive, proven)
    mesh = mesh_of(nodes)
    word = heard(losable, alive, mesh)
    story = spell_out(word, mesh)
    assert story == spell_out(word, mesh, None, node_lines(word, mesh))
    assert tuple(story["safe"]) == losable.safe
    assert {
        int(node): tuple(owners) for node, owners in story["critical"].items()
    } == losable.critical
    assert tuple(story["out_of_reach"]) == losable.out_of_reach
    assert (story["any_nodes"], story["why"], story["step"], story["is_committed"]) == (
        losable.any_nodes,
        losable.why,
        41,
        True,
    )
    assert {n["node"] for n in story["nodes"] if n["linked"]} == alive
    assert [n["incarnation"] for n in story["nodes"]] == [1000 + n for n in range(nodes)]


def test_who_was_expendable_stays_so_with_the_same_keepers_until_the_next_commit() -> None:
    mesh, other = (
        mesh_of(4),
        Mesh(
            8,
            0,
            tuple(
                replace(m, incarnation=m.incarnation + (m.node == 2)) for m in mesh_of(4).members
            ),
            "s" * 16,
        ),
    )
    placement = place(parse_policy("copies:2"), topology(4, None))  # type: ignore[arg-type]

    def told(proven: dict[int, tuple[int, ...]], is_committed: bool) -> SafetyWord:
        losable = which_can_be_lost(placement, range(4), proven)
        return heard(losable, set(range(4)), mesh, is_committed)

    everywhere, nowhere_else = dict(placement.holders), {node: (node,) for node in range(4)}
    first = spell_out(told(everywhere, True), mesh)
    assert first["expendable"] == first["safe"] == [0, 1, 2, 3]
    again = spell_out(told(nowhere_else, False), mesh, first)
    assert (again["safe"], again["expendable"]) == ([], [0, 1, 2, 3])
    assert spell_out(told(nowhere_else, False), other, first)["expendable"] == []
    assert spell_out(told(nowhere_else, True), mesh, again)["expendable"] == []


@pytest.mark.parametrize("policy", ["none", "copies:2"])
@pytest.mark.parametrize("lost", [(), (17, 18, 9000)])
def test_it_is_short_however_many_nodes_there_are(policy: str, lost: tuple[int, ...]) -> None:
    nodes = 12_500
    placement = place(parse_policy(policy), topology(nodes, None))  # type: ignore[arg-type]
    alive = set(range(nodes)) - set(lost)
    losable = which_can_be_lost(placement, alive, placement.holders)
    assert len(encode(heard(losable, alive, mesh_of(nodes)))) < 1000


@given(st.sets(st.integers(0, 30)))
def test_ranges_name_each_once(numbers: set[int]) -> None:
    told = ranges(numbers)
    assert sorted(n for first, last in told for n in range(first, last + 1)) == sorted(numbers)
    assert all(after[0] > before[1] + 1 for before, after in itertools.pairwise(told))
