"""Pod replacing, from the loss to the last sentence, by the official client against a cluster's
answers over HTTP; time is the cluster's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.edge.kubernetes.pods_api import PodsApi
from keepstep.runtime.agent.pod_replacing import replaced
from tests.edge.kubernetes.cluster import BEGAN_S, NO_ROOM, Cluster, kubeconfig, served

ME = "train-nodes-0-0-first"
LOST = "train-nodes-0-2-first"
Replace = Callable[..., str]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def replace(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replace]:
    with served(cluster) as url:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config", url)))
        api = PodsApi.found()

        def act(may_force: bool = False, pause: Callable[[float], None] | None = None) -> str:
            each = pause or cluster.pass_s
            return replaced(api, ["10.0.2.7"], ME, may_force, lambda: cluster.now_s, each)

        yield act


def names(cluster: Cluster) -> list[str]:
    return sorted(cluster.pods)


def test_a_lost_pod_is_deleted_and_the_one_in_its_place_awaited(
    cluster: Cluster, replace: Replace
) -> None:
    uid = cluster.pods[LOST]["metadata"]["uid"]
    told = replace()
    assert told.startswith("pod train-nodes-0-2-other runs on gpu-9 after 2")
    assert told.endswith(f"in place of {LOST}, which was deleted")
    [deletion] = cluster.deletions
    assert deletion["name"] == LOST and deletion["preconditions"] == {"uid": uid}
    assert "gracePeriodSeconds" not in deletion
    assert names(cluster) == [
        "train-nodes-0-0-first",
        "train-nodes-0-1-first",
        "train-nodes-0-2-other",
        "train-nodes-0-3-first",
    ]


def test_a_container_that_comes_back_by_itself_is_left_alone(
    cluster: Cluster, replace: Replace
) -> None:
    cluster.runs(LOST, None, restarts=1)

    def pause(duration_s: float) -> None:
        cluster.pass_s(duration_s)
        if cluster.now_s >= BEGAN_S + 20:
            cluster.runs(LOST, cluster.now_s, restarts=2)

    told = replace(pause=pause)
    assert "its container was started anew, and its memory is still there" in told
    assert cluster.deletions == []


def test_a_machine_that_is_off_holds_its_pod_until_somebody_says_so(
    cluster: Cluster, replace: Replace
) -> None:
    cluster.silent = {"gpu-2"}
    told = replace()
    assert "its machine gpu-2 does not say that it has" in told
    assert len(cluster.deletions) == 1 and LOST in cluster.pods


def test_by_force_another_pod_takes_its_place(cluster: Cluster, replace: Replace) -> None:
    cluster.silent = {"gpu-2"}
    told = replace(may_force=True)
    assert told.endswith(f"in place of {LOST}, which was deleted by force")
    first, second = cluster.deletions
    assert "gracePeriodSeconds" not in first and second["gracePeriodSeconds"] == 0
    assert first["preconditions"] == second["preconditions"]
    assert cluster.now_s - BEGAN_S >= 120, "its own grace is over by then"


def test_what_it_waits_for_is_told(cluster: Cluster, replace: Replace) -> None:
    cluster.has_room = False
    assert replace() == (
        f"nobody is in its place after 300 s: pod train-nodes-0-2-other waits: {NO_ROOM}"
    )


def test_without_a_controller_nobody_comes(cluster: Cluster, replace: Replace) -> None:
    cluster.makes_others = False
    assert "its controller has made no other" in replace()


def test_a_server_that_fails_is_asked_again(cluster: Cluster, replace: Replace) -> None:
    """While it lists, and while it deletes: the deletion is asked for until it is heard."""

    def pause(duration_s: float) -> None:
        cluster.pass_s(duration_s)
        passed_s = cluster.now_s - BEGAN_S
        cluster.refuses = {"list": 500} if passed_s < 5 else {"delete": 503}
        if passed_s >= 25:
            cluster.refuses = {}

    cluster.refuses = {"list": 500}
    assert replace(pause=pause).endswith("which was deleted")
    assert len(cluster.deletions) == 1


def test_one_that_never_answers_is_given_up(cluster: Cluster, replace: Replace) -> None:
    cluster.refuses = {"list": 500}
    told = replace(pause=lambda duration_s: cluster.pass_s(60 * duration_s))
    assert told.startswith("no answer within 300 s: the API server answered 500")


def test_who_may_not_ends_at_once(cluster: Cluster, replace: Replace) -> None:
    cluster.refuses = {"delete": 403}
    assert "needs get, list and delete of pods (examples/kubernetes/rbac.yaml)" in replace()
    assert cluster.now_s - BEGAN_S < 20
