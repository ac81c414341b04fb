"""PodReplacement: whom it deletes, whom never, and with what sentence it ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.recovery.pod_replacement import (
    FRESH_S,
    RESTARTED_WITHIN_S,
    SETTLED_S,
    WITHIN_S,
    Delete,
    PodReplacement,
    is_kin,
    place_of,
)
from keepstep.model.pods import Pod

BEGAN_S = 1e9
LONG_AGO_S = BEGAN_S - 3600
JOBSET = "jobset.sigs.k8s.io/jobset-name"
INDEX = "batch.kubernetes.io/job-completion-index"


def pod(index: int, training: str = "train", **changed: object) -> Pod:
    made = Pod(
        name=f"{training}-{index}-first",
        uid=f"uid-{training}-{index}",
        addresses=(f"10.0.{index}.7",),
        machine=f"gpu-{index}",
        controller=f"job-of-{training}",
        labels={JOBSET: training, INDEX: str(index)},
        started_s=LONG_AGO_S,
        is_ready=True,
    )
    return replace(made, **changed)  # type: ignore[arg-type]


def other(index: int, **changed: object) -> Pod:
    """In its place."""
    made = {"name": f"train-{index}-other", "uid": f"other-{index}", "addresses": ("10.0.9.7",)}
    return pod(index, **{**made, "machine": "gpu-9", "started_s": BEGAN_S, **changed})


def asked_by_first(address: str = "10.0.2.7", may_force: bool = False) -> PodReplacement:
    return PodReplacement([address], "train-0-first", may_force, BEGAN_S)


ALL = [pod(index) for index in range(4)]
DELETED = Delete("train-2-first", "uid-train-2")


def test_a_pod_that_runs_and_is_not_heard_is_deleted_once_and_awaited() -> None:
    replacement = asked_by_first()
    assert replacement.look(ALL, BEGAN_S) is None
    assert replacement.look(ALL, BEGAN_S + SETTLED_S) == DELETED
    leaving = [*ALL[:2], pod(2, is_leaving=True, grace_s=120.0), ALL[3]]
    assert replacement.look(leaving, BEGAN_S + 20) is None
    rest = [each for each in ALL if each != ALL[2]]
    pending = other(2, started_s=None, is_ready=False, machine="")
    assert replacement.look([*rest, pending], BEGAN_S + 30) is None
    assert replacement.look([*rest, other(2)], BEGAN_S + 40) == (
        "pod train-2-other runs on gpu-9 after 40 s, in place of train-2-first, which was deleted"
    )


def test_a_container_that_the_platform_starts_again_in_its_pod_keeps_its_memory() -> None:
    replacement = asked_by_first()
    ended = [*ALL[:2], pod(2, started_s=None, is_ready=False), ALL[3]]
    assert replacement.look(ended, BEGAN_S) is None
    assert replacement.look(ended, BEGAN_S + SETTLED_S + 1) is None
    again = [*ALL[:2], pod(2, started_s=BEGAN_S + 12), ALL[3]]
    told = replacement.look(again, BEGAN_S + 13)
    assert isinstance(told, str) and "its memory is still there" in told
    slow = asked_by_first()
    assert slow.look(ended, BEGAN_S) is None
    assert slow.look(ended, BEGAN_S + RESTARTED_WITHIN_S) == DELETED


def test_one_that_was_started_again_before_anybody_looked_is_left_alone() -> None:
    again = [*ALL[:2], pod(2, started_s=BEGAN_S - 5), ALL[3]]
    assert "runs again on gpu-2" in str(asked_by_first().look(again, BEGAN_S))


@pytest.mark.parametrize(
    "foreign",
    [
        pod(2, training="somebody-elses"),
        replace(pod(2), labels={}, controller="another-job"),
        replace(pod(2), labels={}, controller=None),
    ],
    ids=["of another training", "of another controller", "of nobody"],
)
def test_a_pod_of_others_is_never_deleted_though_it_has_the_address(foreign: Pod) -> None:
    """An address is given away again."""
    pods = [ALL[0], ALL[1], foreign, ALL[3]]
    replacement = asked_by_first()
    looked = [replacement.look(pods, BEGAN_S + after_s) for after_s in (0, 20, 100, WITHIN_S)]
    assert looked[:3] == [None] * 3
    assert "has that address, and no new one has come" in str(looked[3])


def test_who_cannot_find_itself_deletes_nothing() -> None:
    told = PodReplacement(["10.0.2.7"], "gpu-0", False, BEGAN_S).look(ALL, BEGAN_S)
    assert told == (
        "no pod 'gpu-0' among the 4 of this namespace: nothing was deleted; set POD_NAME from "
        "metadata.name"
    )


def test_nobody_deletes_itself() -> None:
    """On the network of its machine a pod has an address that others have, too."""
    replacement = asked_by_first("10.0.0.7")
    assert [replacement.look(ALL, BEGAN_S + after_s) for after_s in (0, 20, 100)] == [None] * 3


def test_a_machine_that_does_not_answer_is_named_and_forced_only_if_that_is_wanted() -> None:
    leaving = [*ALL[:2], pod(2, is_leaving=True, grace_s=30.0), ALL[3]]
    for may_force in (False, True):
        replacement = asked_by_first(may_force=may_force)
        acts = [replacement.look(ALL, BEGAN_S + SETTLED_S)]
        acts += [replacement.look(leaving, BEGAN_S + at) for at in range(11, int(WITHIN_S) + 1)]
        assert acts[0] == DELETED
        forced = [act for act in acts[1:] if isinstance(act, Delete)]
        assert forced == ([replace(DELETED, by_force=True)] if may_force else [])
        assert "its machine gpu-2 does not say that it has" in str(acts[-1])
        assert "kubectl delete pod train-2-first --force" in str(acts[-1])


def test_who_waits_for_room_is_named_with_the_platforms_words() -> None:
    rest = [each for each in ALL if each != ALL[2]]
    pending = other(2, started_s=None, is_ready=False, waits_for="4 Insufficient nvidia.com/gpu.")
    replacement = asked_by_first()
    replacement.look(ALL, BEGAN_S)
    assert replacement.look([*rest, pending], BEGAN_S + WITHIN_S) == (
        "nobody is in its place after 300 s: pod train-2-other waits: "
        "4 Insufficient nvidia.com/gpu."
    )


@pytest.mark.parametrize(
    ("controller", "told"),
    [("job-of-train", "its controller has made no other"), (None, "nothing makes another one")],
)
def test_where_nobody_comes_the_reason_is_told(controller: str | None, told: str) -> None:
    lost = pod(2, controller=controller)
    replacement = asked_by_first()
    replacement.look([ALL[0], lost], BEGAN_S)
    assert told in str(replacement.look([ALL[0]], BEGAN_S + WITHIN_S))


def test_kin_is_of_one_jobset_one_group_or_one_controller() -> None:
    name, group = "leaderworkerset.sigs.k8s.io/name", "leaderworkerset.sigs.k8s.io/group-index"
    worker = "leaderworkerset.sigs.k8s.io/worker-index"
    leader = Pod("lws-0", "a", controller="set", labels={name: "lws", group: "0", worker: "0"})
    follower = Pod("lws-0-1", "b", controller="b", labels={name: "lws", group: "0", worker: "1"})
    apart = Pod("lws-1", "c", controller="set", labels={name: "lws", group: "1", worker: "0"})
    assert is_kin(follower, leader) and not is_kin(apart, leader)
    assert place_of(follower) != place_of(leader)
    one, two = Pod("web-0", "a", controller="set"), Pod("web-1", "b", controller="set")
    assert is_kin(one, two) and not is_kin(one, Pod("web-2", "c"))
    assert place_of(one) == ("web-0",)


PODS = st.builds(
    pod,
    index=st.integers(0, 3),
    training=st.sampled_from(["train", "another"]),
    started_s=st.sampled_from([None, LONG_AGO_S, BEGAN_S - FRESH_S + 1, BEGAN_S + 30]),
    is_leaving=st.booleans(),
    uid=st.sampled_from(["a", "b", "c", "d"]),
)


@given(
    st.lists(st.lists(PODS, max_size=5, unique_by=lambda each: each.uid), min_size=1, max_size=8),
    st.booleans(),
)
def test_whatever_is_seen_at_most_one_pod_is_deleted_and_it_is_the_lost_one(
    seen: list[list[Pod]], may_force: bool
) -> None:
    me = pod(0, uid="me", addresses=("10.0.0.1",))
    replacement = PodReplacement(["10.0.2.7"], me.name, may_force, BEGAN_S)
    deleted: list[Delete] = []
    for number, pods in enumerate(seen):
        pods = [me, *(each for each in pods if each.name != me.name)]
        act = replacement.look(pods, BEGAN_S + 45 * number)
        if isinstance(act, str):
            break
        if act is not None:
            [found] = [each for each in pods if each.uid == act.uid]
            assert is_kin(found, me) and found.name != me.name
            assert number > 0 and found.uid in {each.uid for each in seen[0]}
            deleted.append(act)
    assert len({act.uid for act in deleted}) <= 1
    assert [act.by_force for act in deleted] in ([], [False], [False, True], [True])
    assert may_force or True not in [act.by_force for act in deleted]
