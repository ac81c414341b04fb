"""Pod replacement: what is done about the pod of a lost node, and when another one is in its place.

Comes in: the pods of a namespace, as often as somebody looks. Goes out: the deletion of one pod, or
the sentence with which it is over.

A pod is deleted only when it is of the same training as the one that asks, is not that one itself,
and its containers have run since before the loss: an address may be another pod's by now, and a
container that the platform has started again in its pod is back with all its memory. It is deleted
by its uid, so never another one of that name. Nothing is deleted by force, which lets a controller
start another pod while the first may still run on a machine that nobody hears, unless it is wanted.

Invariant: at most one pod is deleted, and by force only after it was asked to end and had its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keepstep.model.pods import KINSHIP, PLACE, Pod

FRESH_S = (
    120.0  # a node counts as lost after some 10 s; who has started within this is another life
)
SETTLED_S = 10.0  # a pod that runs may be about to end: its container is then started again in it
RESTARTED_WITHIN_S = (
    60.0  # a container that ended is started again by its machine, at first at once
)
ENDED_WITHIN_S = 30.0  # beyond its grace: its machine does not answer
GRACE_S = 30.0  # the platform's own, where a pod says nothing
WITHIN_S = 300.0  # as long as the other nodes wait


@dataclass(frozen=True, slots=True)
class Delete:
    """by_force: without waiting for the word of the machine."""

    name: str
    uid: str
    by_force: bool = False


def is_kin(pod: Pod, me: Pod) -> bool:
    """Whether both are of one training."""
    for names in KINSHIP:
        mine = [me.labels.get(name) for name in names]
        if all(mine):
            return [pod.labels.get(name) for name in names] == mine
    return pod.controller is not None and pod.controller == me.controller


def place_of(pod: Pod) -> tuple[str, ...]:
    """What a pod that is to replace this one has, too."""
    found = tuple(pod.labels[name] for name in PLACE if name in pod.labels)
    return found or (pod.name,)


class PodReplacement:
    """Of one lost node. addresses: its own; me: the name of the pod that asks."""

    def __init__(self, addresses: Sequence[str], me: str, may_force: bool, began_s: float) -> None:
        self._addresses, self._me = set(addresses), me
        self._may_force = may_force
        self._began_s = began_s
        self._lost: Pod | None = None
        self._is_new = True
        self._deleted_s: float | None = None
        self._was_forced = False

    def look(self, pods: Sequence[Pod], now_s: float) -> Delete | str | None:
        """What is to be done; the last sentence; None: look again."""
        me = next((pod for pod in pods if pod.name == self._me), None)
        if me is None:
            return (
                f"no pod {self._me!r} among the {len(pods)} of this namespace: nothing was "
                "deleted; set POD_NAME from metadata.name"
            )
        kin = [pod for pod in pods if pod.name != self._me and is_kin(pod, me)]
        if self._is_new:
            self._is_new = False
            self._lost = next((pod for pod in kin if self._addresses & set(pod.addresses)), None)
        lost = self._lost
        now = next((pod for pod in kin if lost is not None and pod.uid == lost.uid), None)
        if now is not None and self._is_back(now):
            return (
                f"pod {now.name} runs again on {now.machine}: its container was started anew, and "
                "its memory is still there"
            )
        follower = next((pod for pod in kin if self._follows(pod)), None)
        if follower is not None and follower.is_ready:
            return self._replaced(follower, now_s)
        if now_s - self._began_s >= WITHIN_S:
            return self._given_up(now, follower, kin)
        return None if now is None else self._end(now, now_s)

    # -- who is who

    def _is_back(self, pod: Pod) -> bool:
        return self._deleted_s is None and not pod.is_leaving and self._is_fresh(pod)

    def _is_fresh(self, pod: Pod) -> bool:
        return pod.started_s is not None and pod.started_s > self._began_s - FRESH_S

    def _follows(self, pod: Pod) -> bool:
        """Whether it is in the lost one's place."""
        if pod.is_leaving:
            return False
        if self._lost is None:  # gone before anybody looked: all that is known is that it is new
            return pod.started_s is None or self._is_fresh(pod)
        return pod.uid != self._lost.uid and place_of(pod) == place_of(self._lost)

    # -- what is done about the lost one

    def _end(self, pod: Pod, now_s: float) -> Delete | None:
        if self._deleted_s is not None or pod.is_leaving:
            return self._force(pod, now_s)
        waited_s = now_s - self._began_s
        if waited_s < (SETTLED_S if pod.started_s is not None else RESTARTED_WITHIN_S):
            return None
        self._deleted_s = now_s
        return Delete(pod.name, pod.uid)

    def _force(self, pod: Pod, now_s: float) -> Delete | None:
        if self._deleted_s is None:  # by somebody else
            self._deleted_s = now_s
        if not self._may_force or self._was_forced or not self._is_stuck(pod, now_s):
            return None
        self._was_forced = True
        return Delete(pod.name, pod.uid, by_force=True)

    def _is_stuck(self, pod: Pod, now_s: float) -> bool:
        grace_s = GRACE_S if pod.grace_s is None else pod.grace_s
        return self._deleted_s is not None and now_s - self._deleted_s >= grace_s + ENDED_WITHIN_S

    # -- the last sentence

    def _replaced(self, follower: Pod, now_s: float) -> str:
        took = f"after {now_s - self._began_s:.0f} s"
        where = f"pod {follower.name} runs on {follower.machine or 'a machine'} {took}"
        if self._lost is None:
            return f"{where}; no pod of this training had that address any more"
        forced = " by force" if self._was_forced else ""
        gone = "was deleted" + forced if self._deleted_s is not None else "was gone"
        return f"{where}, in place of {self._lost.name}, which {gone}"

    def _given_up(self, now: Pod | None, follower: Pod | None, kin: Sequence[Pod]) -> str:
        head = f"nobody is in its place after {WITHIN_S:.0f} s"
        if follower is not None:
            why = f": {follower.waits_for}" if follower.waits_for else ""
            return f"{head}: pod {follower.name} waits{why}"
        if now is not None:
            return (
                f"{head}: pod {now.name} is to end, and its machine {now.machine} does not say "
                f"that it has. If that machine is off: kubectl delete pod {now.name} --force"
            )
        if self._lost is None:
            return (
                f"{head}: none of the {len(kin)} other pods of this training has that address, and "
                "no new one has come: look at what made them"
            )
        if self._lost.controller is None:
            return f"{head}: pod {self._lost.name} is gone, and nothing makes another one"
        return f"{head}: pod {self._lost.name} is gone, and its controller has made no other"
