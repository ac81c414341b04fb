"""A pod, as far as the replacement of a lost node needs to know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# By what pods are of one training, the most specific first: each a set of labels.
KINSHIP = (
    ("jobset.sigs.k8s.io/jobset-name",),
    ("leaderworkerset.sigs.k8s.io/name", "leaderworkerset.sigs.k8s.io/group-index"),
    ("batch.kubernetes.io/job-name",),
)
# By what one pod takes another one's place in it, where the name does not say so.
PLACE = (
    "jobset.sigs.k8s.io/replicatedjob-name",
    "jobset.sigs.k8s.io/job-index",
    "batch.kubernetes.io/job-completion-index",
    "leaderworkerset.sigs.k8s.io/worker-index",
)


@dataclass(frozen=True, slots=True)
class Pod:
    """addresses: those it has now. controller: the uid of what made it and makes another one; None
    for a pod that nobody replaces. labels: with the annotations that say the same. started_s: since
    when all its containers have run, in seconds since 1970; None while one does not. leaving: it is
    being deleted, or over. grace_s: how long its machine may take to end it. waits_for: in the
    platform's words, why it does not run."""

    name: str
    uid: str
    addresses: tuple[str, ...] = ()
    machine: str = ""
    controller: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    started_s: float | None = None
    is_ready: bool = False
    is_leaving: bool = False
    grace_s: float | None = None
    waits_for: str = ""
