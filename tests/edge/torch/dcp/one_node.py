"""A checkpoint of a job of one node, written in this process: one act after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keepstep.edge.store.manifest import Manifest
from keepstep.edge.store.store import Store
from keepstep.edge.torch.dcp.tree import RankState
from keepstep.edge.torch.dcp.write import already_there, publish, survey, write_part
from keepstep.model.checkpoint import CheckpointAttempt
from keepstep.model.snapshot import Stamp


def write_checkpoint(
    store: Store,
    step: int,
    job: str,
    states: Sequence[RankState],
    metrics: Mapping[str, float],
    fingerprint: Mapping[str, Any],
    progress: Callable[[int], None] | None = None,
) -> Manifest:
    """All acts for a job of one node, in this process. Nothing to do when the step is there and
    intact.

    progress: called with the bytes of every write and of every block read back.
    Raises what the acts raise. After that every other step is as it was and this one has no new
    checkpoint.
    """
    number = store.named(step).attempt + store.exists(step)
    attempt = CheckpointAttempt(job, Stamp(step, 0), number, (len(states),))
    present = already_there(store, attempt)
    if present is not None:
        return present
    with store.draft(attempt.name, progress) as draft:
        values = survey(draft, attempt, 0, states)
        write_part(draft, attempt, 0, values, metrics, fingerprint)
        return publish(draft, attempt, 1)
