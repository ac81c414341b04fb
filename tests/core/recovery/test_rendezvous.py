"""Attempts: ids are given once, stay, and are inherited."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.recovery.rendezvous import (
    Silence,
    assign,
    disagreement,
    has_seat,
    members_of,
    mesh_version,
    missing,
    present,
)
from keepstep.model.attempts import VACANT, Arrival
from keepstep.model.mesh import Member, Mesh

maybe_ids = st.one_of(st.none(), st.integers(-1, 7))


def arrival(
    name: str, node: int | None = None, node_rank: int | None = None, nodes: int = 3
) -> Arrival:
    return Arrival(name, f"host-{name}", 7, 1, 2, nodes, nodes, node=node, node_rank=node_rank)


def test_the_first_attempt_goes_by_order_of_arrival() -> None:
    assert assign([arrival("a"), arrival("b"), arrival("c")]) == (0, 1, 2)


def test_a_seat_is_known_by_its_keeper() -> None:
    seats = [None, arrival("a"), VACANT]
    assert has_seat(seats, "host-a", 7, 1)
    assert not any(
        has_seat(seats, *other) for other in [("host-b", 7, 1), ("host-a", 8, 1), ("host-a", 7, 2)]
    )


def test_who_was_asked_to_be_a_node_is_it() -> None:
    assert assign([arrival("a", node_rank=2), arrival("b"), arrival("c", node_rank=0)]) == (2, 1, 0)


def test_two_asked_to_be_the_same_node_are_two_nodes() -> None:
    assert assign([arrival("a", node_rank=0), arrival("b", node_rank=0), arrival("c")]) == (0, 1, 2)


def test_a_replacement_inherits_the_id_of_the_lost_node_whenever_it_comes() -> None:
    for at in range(3):
        arrivals = [arrival("b", node=2), arrival("a", node=0)]
        arrivals.insert(at, arrival("new", node_rank=0))
        assert assign(arrivals)[at] == 1, "what it was asked to be is taken"


@given(st.lists(st.tuples(maybe_ids, maybe_ids), min_size=1, max_size=8))
def test_ids_are_a_permutation_and_those_of_before_stay(
    asked: list[tuple[int | None, int | None]],
) -> None:
    arrivals = [arrival(str(at), node, rank, len(asked)) for at, (node, rank) in enumerate(asked)]
    ids = assign(arrivals)
    assert sorted(ids) == list(range(len(asked)))
    for at, (node, _) in enumerate(asked):
        former = [n for n, _ in asked]
        if node in range(len(asked)) and former.count(node) == 1:
            assert ids[at] == node
    next_attempt = [replace(a, node=i) for a, i in zip(arrivals, ids, strict=True)]
    assert assign(next_attempt[::-1]) == ids[::-1], (
        "nobody moves when all come again, in whatever order"
    )
    assert Mesh(0, 0, members_of(arrivals), "s").world_size == 2 * len(asked)


def test_an_attempt_that_was_closed_has_fewer_nodes() -> None:
    assert present([arrival("a"), VACANT, arrival("c"), None]) == [0, 2]
    assert assign([arrival("c", node=2), arrival("a", node=0)]) == (1, 0), (
        "who was the last node of three is that of two"
    )


def test_members_are_in_the_order_of_their_ids() -> None:
    a, b = arrival("a", node=1, nodes=2), replace(arrival("b", node=0, nodes=2), rack="r")
    assert members_of([a, b]) == (Member(0, "host-b", 7, 1, 2, "r"), Member(1, "host-a", 7, 1, 2))


def test_who_came_and_did_not_answer_is_named_by_its_node() -> None:
    arrivals = [arrival("a", node=2), arrival("b", node=0), arrival("c")]
    assert missing(arrivals, [True, True, False]) == "node 1 on host-c"
    assert missing(arrivals, [False, True, False]) == "node 2 on host-a and node 1 on host-c"


def test_who_says_nothing_new_is_gone() -> None:
    silence = Silence(10)
    assert silence.gone({0: None, 1: "a"}, 0) == []
    assert silence.gone({0: None, 1: "b"}, 9) == []
    assert silence.gone({0: None, 1: "b"}, 10) == [0], "it never said anything"
    assert silence.gone({0: "x", 1: "b"}, 18) == []
    assert silence.gone({1: "b"}, 19) == [1]
    assert silence.gone({0: "x", 1: "b"}, 28) == [1], (
        "nobody listened to 0 in between: it begins anew"
    )
    assert silence.gone({0: "x", 1: "c"}, 38) == [0]


@given(
    st.lists(st.lists(st.integers(-1, 9), min_size=3, max_size=3), min_size=1, max_size=6),
    st.integers(0, 9),
)
def test_the_mesh_version_grows_whatever_they_have_seen(lives: list[list[int]], first: int) -> None:
    """In each attempt some keepers are new ones; one agent was there before and knows the mesh
    before."""
    before = -1
    for number, seen in enumerate(lives):
        arrivals = [
            replace(arrival(str(at)), newest_version=newest)
            for at, newest in enumerate([*seen, before])
        ]
        now = mesh_version(number, first, arrivals)
        assert now > max(before, *seen) and now >= first + number
        before = now


@pytest.mark.parametrize(
    ("mine", "sentence"),
    [
        ({"nodes": 2}, "--nnodes: expected 3, as on host-b, found 2"),
        ({"min_nodes": 1}, "--nnodes: expected 3:3, as on host-b, found 1:3"),
        (
            {"rack": "r1"},
            "rack: expected a rack for all nodes or for none, found r1 here and None on host-b",
        ),
        ({"node": 5, "ranks": 9, "redundancy": "auto"}, None),
    ],
)
def test_what_cannot_meet_is_said(mine: dict[str, object], sentence: str | None) -> None:
    assert disagreement(replace(arrival("a"), **mine), arrival("b")) == sentence  # type: ignore[arg-type]


def test_nodes_that_are_told_other_redundancies_do_not_meet() -> None:
    """One of them decides for all: who had asked for copies had none, and was not told."""
    none, two = (replace(arrival("a"), redundancy=policy) for policy in ("none", "copies:2"))
    said = disagreement(two, none)
    assert said is not None and said.startswith(
        f"redundancy: expected none, as on {none.host}, found copies:2"
    )
    assert disagreement(two, two) is None
