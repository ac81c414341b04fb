"""Replay: what a journal tells of a job's failures, and what its own policy and others make of
them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.core.economics.costs import parse_cluster_policy
from keepstep.errors import ConfigError
from keepstep.model.cluster import DAY_S, Scope
from keepstep.sim.economics.montecarlo import prepare, walk
from keepstep.sim.economics.replay import replay
from tests.core.economics.test_goodput import at, comes_back, dies, ends, starts
from tests.model.ten_nodes import TEN_NODES

# Training begins at 1 s. After 1 s a rank dies, after 3 more a node is missed; a second each until
# all train on. Steps of 100 ms.
FORMED = [at(900, "attempt-formed", hosts=["a:1", "b:1"], world_size=2)]
LOST_NODE = [at(6000, "node-lost", node=1), at(6000, "lost-notice", "rank 0")]
FIRST = [*dies(2000, completed=9), *comes_back(3000, step=8, lost=1)]
SECOND = [*LOST_NODE, *comes_back(7000, step=37, lost=1, epoch=3)]
EVENTS = [*FORMED, *starts(), *FIRST, *SECOND, *ends(9000)]


def test_failures_lie_on_a_clock_that_begins_with_training() -> None:
    found = replay(EVENTS)
    assert [(round(f.at_s, 2), f.kind.scope, f.node) for f in found.failures] == [
        (1.0, Scope.RANK, 0),
        (5.0, Scope.NODE, 1),
    ]
    assert (found.nodes, found.ranks, found.redone_steps) == (2, 2, 2)
    assert found.seconds == pytest.approx(8.0, abs=0.01) and found.recovery_s == pytest.approx(
        1.0, abs=0.01
    )
    assert found.iteration_s == pytest.approx(0.1, rel=0.05)
    assert found.effective_ratio == pytest.approx((8.0 - 2 * 1.0 - 2 * 0.1) / 8.0, abs=0.01)


def test_time_between_two_launches_is_nobodys() -> None:
    again = [
        *starts(100_000),
        *dies(102_000, completed=59),
        *comes_back(103_000, step=58, lost=1, epoch=5),
        *ends(104_000),
    ]
    assert [round(f.at_s, 1) for f in replay([*EVENTS, *again]).failures] == [1.0, 5.0, 9.0]


def test_the_policy_that_met_them_is_predicted_as_it_was() -> None:
    """Memory at once: nothing but the step under way is lost. The store only: everything since the
    last checkpoint."""
    found = replay(EVENTS)
    cluster = found.cluster(replace(TEN_NODES, state_bytes=1e6))
    assert (cluster.nodes, cluster.gpus_per_node, cluster.failures) == (2, 1, ())
    memory, store = (
        walk(
            cluster,
            prepare(cluster, parse_cluster_policy(text)),
            found.failures,
            found.seconds / DAY_S,
            0,
        )
        for text in ("copies:2/spares:2", "store:1h/spares:2")
    )
    assert memory.recovered == {"own": 1, "peers": 1, "store": 0} and store.recovered["store"] == 2
    assert store.redone_steps > memory.redone_steps >= 0
    assert memory.total_s == pytest.approx(found.seconds)


@pytest.mark.parametrize("events", [[], starts()], ids=["nothing", "no step"])
def test_a_journal_without_training_is_refused(events: list[object]) -> None:
    with pytest.raises(ConfigError, match="expected the journal of a job that trained"):
        replay(events)  # type: ignore[arg-type]
