"""Meeting: ranks that have heard the same make the same mesh, or all say the same about what cannot
be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import ConfigError
from keepstep.runtime.rank.bootstrap import Told, mesh_of, place_in_world

SECRET = "s" * 16


def told(
    node: int,
    rank: int,
    round_: int = 7,
    job: str = "t",
    rack: str | None = None,
    own_secret: bool = False,
) -> Told:
    fresh = "" if own_secret else f"fresh secret of rank {rank}"
    return Told(job, f"10.0.0.{node}", 4000, 100 + node, rack, own_secret, fresh, round_)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.data())
def test_all_ranks_make_the_same_mesh(ranks_of: list[int], data: st.DataObject) -> None:
    at = [node for node, ranks in enumerate(ranks_of) for _ in range(ranks)]
    rounds = data.draw(st.lists(st.integers(0, 1 << 50), min_size=len(at), max_size=len(at)))
    said = [told(node, rank, rounds[rank]) for rank, node in enumerate(at)]
    for rank, node in enumerate(at):
        mesh = mesh_of(said, rank, None)
        assert mesh.node == node and rank in mesh.ranks_of(node)
        assert [(m.host, m.incarnation, m.ranks) for m in mesh.members] == [
            (f"10.0.0.{n}", 100 + n, r) for n, r in enumerate(ranks_of)
        ]
        assert (mesh.version, mesh.secret) == (max(rounds), "fresh secret of rank 0")


def test_keepers_of_one_machine_are_two_nodes() -> None:
    said = [Told("t", "127.0.0.1", port, 1, None, False, "x", 1) for port in (4000, 4001)]
    assert [m.port for m in mesh_of(said, 0, None).members] == [4000, 4001]


def test_a_secret_of_ones_own_is_used_and_never_told() -> None:
    said = [told(0, 0, own_secret=True), told(1, 1, own_secret=True)]
    assert all(SECRET not in str(one) for one in said)
    assert mesh_of(said, 1, SECRET).secret == SECRET


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ([told(0, 0), told(1, 1), told(0, 2)], r"ranks of a node in a row .*--distribution=block"),
        ([told(0, 0), told(1, 1, job="u")], r"job: expected one name on all nodes, found t and u"),
        (
            [told(0, 0, own_secret=True), told(1, 1)],
            r"secret: expected one for all .* found one for rank 0, none for 1",
        ),
        (
            [told(0, 0), told(1, 1, rack="r")],
            r"rack: expected one for all .* found one for rank 1, none for 0",
        ),
    ],
)
def test_what_cannot_be_is_told_alike_on_every_rank(said: list[Told], why: str) -> None:
    errors = set()
    for rank in range(len(said)):
        with pytest.raises(ConfigError, match=why) as caught:
            mesh_of(said, rank, SECRET if said[rank].own_secret else None)
        errors.add(str(caught.value))
    assert len(errors) == 1


def test_without_a_process_group_the_launcher_has_told_the_rank() -> None:
    assert place_in_world({}) == (0, 1)
    assert place_in_world({"RANK": "2", "WORLD_SIZE": "3"}) == (2, 3)


def test_tasks_of_slurm_are_not_taken_for_ranks() -> None:
    """They may have nothing to do with each other; and two nodes that think they are alone would
    each resume where they like."""
    with pytest.raises(
        ConfigError,
        match=r"Slurm step of 8 tasks expected .*init_process_group\(\) before it, "
        "or RANK and WORLD_SIZE",
    ):
        place_in_world({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"})
    assert place_in_world({"SLURM_STEP_NUM_TASKS": "8", "RANK": "0", "WORLD_SIZE": "1"}) == (0, 1)
    # the batch script itself: no step
    assert place_in_world({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) == (0, 1)
