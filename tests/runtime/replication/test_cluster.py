"""Real keepers of several nodes: what they protect, what a node's loss costs, what crosses the wire
for it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepstep.core.wire.conversations import RANK_WITH_KEEPER
from keepstep.edge.os.processes import ensure_keeper
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.node_safety_file import read_node_safety
from keepstep.edge.shm.slot import rank_dir, slot_paths
from keepstep.model.mesh import Mesh
from keepstep.model.messages.keeper_rank import BeginMesh
from keepstep.model.units import MIB
from keepstep.testing.cluster import KeeperCluster, wait_for


@pytest.mark.parametrize(
    ("policy", "nodes"),
    [("copies:2", 2), ("none", 2), ("parity:3", 3), ("rs:2+2", 4), ("copies:2", 3)],
)
def test_every_step_is_committed(tmp_path: Path, policy: str, nodes: int) -> None:
    with KeeperCluster(tmp_path, nodes, policy) as cluster:
        assert cluster.resume().source == "fresh"
        cluster.train(0, 5)
        assert cluster.committed() == [5] * nodes


@pytest.mark.parametrize(
    ("policy", "nodes", "lost"),
    [
        ("copies:2", 2, (0,)),
        ("copies:2", 3, (1,)),
        ("copies:3", 3, (0, 2)),
        ("parity:3", 3, (1,)),
        ("rs:2+2", 4, (0, 3)),
        ("parity:4", 4, (0,)),
    ],
)
def test_lost_nodes_come_back_from_the_others(
    tmp_path: Path, policy: str, nodes: int, lost: tuple[int, ...]
) -> None:
    with KeeperCluster(tmp_path, nodes, policy, per_node=2) as cluster:
        cluster.resume()
        cluster.train(0, 6)
        for machine in cluster.machines:
            machine.kill_ranks()
        cluster.replace(*lost)
        offer = cluster.resume()
        assert (offer.source, offer.step) == ("memory", 6)
        fetched = [e for m in cluster.machines for e in m.events() if e.kind == "fetched"]
        assert sorted(e.data["rank"] for e in fetched) == sorted(
            r for n in lost for r in (2 * n, 2 * n + 1)
        )
        cluster.train(7, 9)


def test_a_dead_process_moves_no_bytes(tmp_path: Path) -> None:
    with KeeperCluster(tmp_path, 3, "copies:2") as cluster:
        cluster.resume()
        cluster.train(0, 4)
        before = cluster.wire_bytes()
        offer = cluster.restart()
        assert (offer.source, offer.step) == ("memory", 4)
        assert cluster.wire_bytes() == before


def test_more_lost_than_the_policy_survives_is_told(tmp_path: Path) -> None:
    with KeeperCluster(tmp_path, 4, "copies:2") as cluster:
        cluster.resume()
        cluster.train(0, 3)
        for machine in cluster.machines:
            machine.kill_ranks()
        cluster.replace(2, 3)  # a whole group
        offer = cluster.resume()
        assert (
            offer.source == "fresh" and "no node's memory has anything of ranks 2, 3" in offer.why
        )


@pytest.mark.parametrize("node", [0, 1])
def test_a_keeper_that_dies_costs_nothing(tmp_path: Path, node: int) -> None:
    with KeeperCluster(tmp_path, 2, "copies:2") as cluster:
        cluster.resume()
        cluster.train(0, 3)
        cluster.machines[node].kill_keeper()
        for rank in cluster.ranks:
            rank.step(4)
        cluster.adopt(node)
        cluster.wait_committed(4)
        cluster.train(5, 7)
        offer = cluster.restart()
        assert (offer.source, offer.step) == ("memory", 7)


@pytest.mark.parametrize("policy", ["copies:2", "parity:3"])
def test_a_second_node_lost_while_restoring(tmp_path: Path, policy: str) -> None:
    """Before the first one is protected again: the store's turn, or the survivors' step when the
    policy covers it."""
    with KeeperCluster(tmp_path, 3, policy) as cluster:
        cluster.resume()
        cluster.train(0, 3)
        for machine in cluster.machines:
            machine.kill_ranks()
        cluster.replace(1)
        cluster.begin_mesh()
        cluster.hear()
        for machine in cluster.machines:
            machine.kill_ranks()
        cluster.replace(1)  # the replacement itself goes again: the others still have all of it
        offer = cluster.resume()
        assert (offer.source, offer.step) == ("memory", 3)
        cluster.train(4, 5)


@pytest.mark.parametrize("policy", ["copies:2", "parity:3"])
def test_ranks_may_live_elsewhere_after_a_restart(tmp_path: Path, policy: str) -> None:
    with KeeperCluster(tmp_path, 3, policy) as cluster:
        cluster.resume()
        cluster.train(0, 3)
        for machine in cluster.machines:
            machine.kill_ranks()
        cluster.machines = [cluster.machines[2], cluster.machines[0], cluster.machines[1]]
        offer = cluster.resume()
        assert (offer.source, offer.step) == ("memory", 3)
        cluster.train(4, 6)
        for machine in cluster.machines:
            machine.kill_ranks()
        cluster.replace(0)
        assert cluster.resume().step == 6


def test_a_node_lost_in_the_middle_of_copying(tmp_path: Path) -> None:
    """Whatever had arrived of the step under way: everybody goes back to one step, at most one
    back."""
    for seed in range(4):
        with KeeperCluster(tmp_path / str(seed), 2, "copies:2", nbytes=20_000_000) as cluster:
            cluster.resume()
            cluster.train(0, 3)
            for rank in cluster.ranks:
                rank.step(4)
            if seed % 2:
                cluster.hear()
            for machine in cluster.machines:
                machine.kill_ranks()
            cluster.replace(seed // 2)
            offer = cluster.resume()
            assert offer.source == "memory" and offer.step in (3, 4)


def test_a_flipped_bit_in_a_copy_is_found_and_mended(tmp_path: Path) -> None:
    with KeeperCluster(tmp_path, 2, "copies:2", scrub_every_s=0.2) as cluster:
        cluster.resume()
        cluster.train(0, 3)
        cluster.flip("held", 1, rank=0, step=3, at=4096 + 777)
        wait_for(
            lambda: any("damaged" in e.kind for e in cluster.machines[1].events()), cluster.story
        )
        wait_for(lambda: (0, 3) in cluster.held().get(1, []), cluster.story)
        for machine in cluster.machines:
            machine.kill_ranks()
        cluster.replace(0)
        offer = cluster.resume()
        assert (offer.source, offer.step) == ("memory", 3)


def test_a_flipped_bit_in_a_parity_is_found_and_mended(tmp_path: Path) -> None:
    with KeeperCluster(tmp_path, 3, "parity:3", scrub_every_s=0.2) as cluster:
        cluster.resume()
        cluster.train(0, 3)
        cluster.flip("parity", 1, rank=1, step=3, at=4096 + 777)
        wait_for(
            lambda: any("damaged" in e.kind for e in cluster.machines[1].events()), cluster.story
        )
        wait_for(lambda: (1, 3) in cluster.held().get(1, []), cluster.story)
        for machine in cluster.machines:
            machine.kill_ranks()
        cluster.replace(0)
        offer = cluster.resume()
        assert (offer.source, offer.step) == ("memory", 3)


@pytest.mark.parametrize(("policy", "nodes"), [("copies:2", 2), ("parity:3", 3)])
def test_a_flipped_bit_in_a_snapshot_itself_is_mended_from_the_others(
    tmp_path: Path, policy: str, nodes: int
) -> None:
    with KeeperCluster(tmp_path, nodes, policy, scrub_every_s=0.2) as cluster:
        cluster.resume()
        cluster.train(0, 3)
        cluster.flip(".", 1, rank=1, step=3, at=4096 + 777)
        wait_for(
            lambda: any(e.kind == "mended" for e in cluster.machines[1].events()), cluster.story
        )
        offer = cluster.restart()
        assert (offer.source, offer.step) == ("memory", 3)


def test_a_snapshot_that_cannot_be_fetched_leaves_its_ranks_slots_as_they_are(
    tmp_path: Path,
) -> None:
    """The rank has them mapped and goes on with them: were one of their files gone, what is
    captured into it could never be protected."""
    with KeeperCluster(tmp_path, 2, "copies:2") as cluster:
        cluster.resume()
        cluster.train(0, 5)
        job_dir = cluster.machines[0].settings.job_dir
        before = slot_paths(MEMORY, job_dir, 0)
        cluster.flip(".", 0, rank=0, step=5, at=4096 + 777)
        cluster.flip("held", 1, rank=0, step=5, at=4096 + 777)
        assert cluster.restart().step == 4
        assert any(e.kind == "fetch-failed" for e in cluster.machines[0].events())
        assert (
            slot_paths(MEMORY, job_dir, 0) == before
            and list(rank_dir(job_dir, 0).glob("fetched-*")) == []
        )
        cluster.train(5, 9)


def test_which_nodes_may_be_lost(tmp_path: Path) -> None:
    with KeeperCluster(tmp_path, 4, "copies:2") as cluster:

        def told(node: int) -> dict[str, Any]:
            return read_node_safety(MEMORY, cluster.machines[node].settings.job_dir) or {}

        cluster.resume()
        cluster.train(0, 3)
        wait_for(lambda: all(told(n).get("any_nodes") == 1 for n in range(4)), lambda: str(told(0)))
        assert (
            told(3)["why"] == "any one of 4 nodes may be lost" and told(3)["policy"] == "copies:2"
        )
        for machine in cluster.machines:
            machine.kill_ranks()
        cluster.machines[1].vanish()
        wait_for(lambda: told(0).get("critical") == {"0": [0, 1]}, lambda: str(told(0)))
        assert told(0)["safe"] == [2, 3]


MOSTLY_SHARED_BYTES = 9 * MIB  # two whole blocks that all ranks agree in, and one of their own


def replica(rank: int, step: int, nbytes: int) -> bytes:
    """As of data-parallel ranks: equal but for the end."""
    return random.Random(step).randbytes(8 * MIB) + random.Random(f"{rank}/{step}").randbytes(
        nbytes - 8 * MIB
    )


def test_what_replicas_agree_in_does_not_cross_the_wire(tmp_path: Path) -> None:
    with KeeperCluster(
        tmp_path, 2, "copies:2", nbytes=MOSTLY_SHARED_BYTES, state=replica
    ) as cluster:
        cluster.resume()
        cluster.train(0, 2)
        a_step = 2 * (MOSTLY_SHARED_BYTES - 8 * MIB)
        assert 3 * a_step < cluster.wire_bytes() < 3 * a_step + 200_000
        for machine in cluster.machines:
            machine.kill_ranks()
        cluster.replace(0)
        offer = cluster.resume()  # which compares every restored byte
        assert (offer.source, offer.step) == ("memory", 2)


@pytest.mark.parametrize("node", [0, 1])
def test_a_keeper_that_dies_while_its_ranks_ask_where_to_resume(tmp_path: Path, node: int) -> None:
    with KeeperCluster(tmp_path, 2, "copies:2") as cluster:
        cluster.resume()
        cluster.train(0, 3)
        for machine in cluster.machines:
            machine.kill_ranks()
        cluster.begin_mesh()
        machine = cluster.machines[node]
        machine.kill_keeper()
        machine.start()
        for rank in machine.ranks:
            rank.box.close()
            rank.box = ensure_keeper(rank.settings, RANK_WITH_KEEPER)
            rank.join()  # before the keeper has heard of any mesh
        assert machine.box is not None and cluster.members is not None
        members = tuple(
            replace(m, incarnation=machine.incarnation) if m.node == node else m
            for m in cluster.members
        )
        machine.box.send(BeginMesh(Mesh(cluster.mesh_version, node, members, cluster.secret)))

        def all_go() -> bool:
            cluster.hear()
            return all(r.epoch is not None for r in cluster.ranks)

        wait_for(all_go, cluster.story)
        assert {r.offer and r.offer.step for r in cluster.ranks} == {3}
