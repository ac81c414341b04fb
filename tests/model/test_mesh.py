"""Mesh: which ranks live where, and what cannot be a mesh."""

from __future__ import annotations

import pytest

from keepstep.errors import ConfigError
from keepstep.model.mesh import Member, Mesh


def mesh(*ranks: int, racks: tuple[str | None, ...] = (), node: int = 0) -> Mesh:
    named = racks or (None,) * len(ranks)
    members = tuple(
        Member(i, f"10.0.0.{i}", 7000 + i, i + 1, count, rack)
        for i, (count, rack) in enumerate(zip(ranks, named, strict=True))
    )
    return Mesh(3, node, members, "a secret of some length")


def test_ranks_follow_the_nodes() -> None:
    m = mesh(2, 1, 3)
    assert [list(m.ranks_of(n)) for n in range(3)] == [[0, 1], [2], [3, 4, 5]]
    assert m.node_of == {0: 0, 1: 0, 2: 1, 3: 2, 4: 2, 5: 2}
    assert m.world_size == 6 and m.leads and not mesh(1, 1, node=1).leads


def test_racks_are_for_all_nodes_or_for_none() -> None:
    assert mesh(1, 1, racks=("a", "b")).topology.racks == {"a": (0,), "b": (1,)}
    assert mesh(1, 1, racks=("a", None)).topology.racks == {}


def test_what_is_no_mesh() -> None:
    with pytest.raises(ConfigError, match="expected nodes 0 to N-1"):
        Mesh(0, 2, mesh(1, 1).members, "s")
    with pytest.raises(ConfigError, match="at least one rank"):
        mesh(1, 0)
