"""Keepers of several nodes without agents, as under torchrun and srun: ranks change nodes; the
memory stays until all have ended."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from keepstep.core.wire.conversations import RANK_WITH_KEEPER
from keepstep.edge.os.processes import ensure_keeper
from keepstep.model.messages.keeper_rank import CountTraffic, Goodbye
from keepstep.testing.cluster import ClusterMachine, KeeperCluster, wait_for
from tests.pidfds import ends


@pytest.mark.parametrize(
    ("policy", "nodes"), [("copies:2", 2), ("copies:2", 4), ("parity:3", 3), ("rs:2+2", 4)]
)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_is_lost_and_the_ranks_change_their_nodes(
    tmp_path: Path, policy: str, nodes: int, lost: int
) -> None:
    """A launcher that orders nodes by address puts the replacement anywhere; a rank may come to the
    very node that kept its copy."""
    with KeeperCluster(tmp_path, nodes, policy) as cluster:
        cluster.resume()
        cluster.train(0, 3)
        for machine in cluster.machines:
            machine.kill_ranks()
        cluster.replace(lost)
        cluster.machines = [*cluster.machines[1:], cluster.machines[0]]
        cluster.secret = secrets.token_hex(16)  # as sessions do, which make one for each start
        offer = cluster.resume()
        assert (offer.source, offer.step) == ("memory", 3)
        cluster.train(4, 5)


class Keeper:
    """A machine's keeper, with whom no agent is any more."""

    def __init__(self, machine: ClusterMachine) -> None:
        assert machine.box is not None
        self.machine, self.pidfd = machine, os.pidfd_open(machine.keeper_pid())
        machine.box.close()
        machine.box = None

    def say_bye(self) -> None:
        for rank in self.machine.ranks:
            assert rank.box.send(Goodbye(rank.rank, True, "ended well"))

    def still_answers(self) -> bool:
        """Says so itself, after it has heard and decided all that was said to it before."""
        box = ensure_keeper(self.machine.settings, RANK_WITH_KEEPER)
        box.send(CountTraffic())
        answer = box.recv(20)
        box.close()
        return answer is not None and not self.has_gone(0)

    def has_gone(self, within_s: float = 20) -> bool:
        return ends(self.pidfd, within_s)

    def end(self) -> bool:
        """Whether it went by itself, with the memory, because all ended well."""
        gone = self.has_gone()
        os.close(self.pidfd)
        return (
            gone
            and not self.machine.settings.job_dir.exists()
            and [e.data["ok"] for e in self.machine.events() if e.kind == "job-over"] == [True]
        )


def test_keepers_go_when_the_ranks_of_all_nodes_ended_well(tmp_path: Path) -> None:
    with KeeperCluster(tmp_path, 3, "copies:2", per_node=2) as cluster:
        cluster.resume()
        cluster.train(0, 2)
        keepers = [Keeper(machine) for machine in cluster.machines]
        for keeper in keepers[:2]:
            keeper.say_bye()
            assert keeper.still_answers()
        keepers[2].say_bye()
        assert all(keeper.end() for keeper in keepers), cluster.story()


def test_what_a_node_holds_outlives_its_own_ranks_good_end(tmp_path: Path) -> None:
    """Node 0's ranks have ended well when node 1 is lost in the last step: everything node 1 had is
    in node 0's memory alone."""
    with KeeperCluster(tmp_path, 2, "copies:2") as cluster:
        cluster.resume()
        cluster.train(0, 3)
        ended = Keeper(cluster.machines[0])
        ended.say_bye()
        assert ended.still_answers()
        os.close(ended.pidfd)
        cluster.machines[1].kill_ranks()
        cluster.machines[0].kill_ranks()
        cluster.replace(1)
        cluster.machines[0].start()
        offer = cluster.resume()
        assert (offer.source, offer.step) == ("memory", 3)


def test_a_leading_keeper_that_died_meanwhile_is_told_again_who_ended(tmp_path: Path) -> None:
    with KeeperCluster(tmp_path, 2, "copies:2") as cluster:
        cluster.resume()
        cluster.train(0, 2)
        follower = Keeper(cluster.machines[1])
        follower.say_bye()
        assert follower.still_answers()
        cluster.machines[0].kill_keeper()
        cluster.adopt(0)
        assert cluster.members is not None
        wait_for(
            lambda: any(e.kind == "rank-attached" for e in cluster.machines[0].events()),
            cluster.story,
        )
        leader = Keeper(cluster.machines[0])
        leader.say_bye()
        assert all([leader.end(), follower.end()]), cluster.story()
