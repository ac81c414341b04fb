"""DCP format: the slots of a node's ranks, written as PyTorch's Distributed Checkpoint format.

Comes in: pinned slots and attempts. Goes out: files of a draft, by `write.py`. See
`ports.CheckpointFormat`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keepstep.edge.shm.slot import Slot
from keepstep.edge.store.draft import Draft
from keepstep.edge.store.manifest import Manifest
from keepstep.edge.store.store import Store
from keepstep.edge.torch.dcp.tree import RankState
from keepstep.edge.torch.dcp.write import NodeValues, already_there, publish, survey, write_part
from keepstep.edge.torch.pickles.inert import Inert
from keepstep.edge.torch.plan import ABOUT, BESIDE
from keepstep.edge.torch.tree import rebuild, shared_names
from keepstep.edge.torch.views import overlay
from keepstep.model.checkpoint import CheckpointAttempt
from keepstep.model.layout import Shard
from keepstep.ports import Clock


@dataclass(frozen=True)
class SurveyedNode:
    """What is kept from a node's survey to its part. `metrics` and `fingerprint` are those of its
    first rank."""

    values: NodeValues
    metrics: Mapping[str, float]
    fingerprint: Mapping[str, Any]


class DcpFormat:
    """Over one store."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def already_there(self, attempt: CheckpointAttempt) -> bool:
        """See `ports.CheckpointFormat`."""
        return already_there(self._store, attempt) is not None

    def survey(
        self, draft: Draft, attempt: CheckpointAttempt, node: int, slots: Sequence[Slot]
    ) -> SurveyedNode:
        """See `ports.CheckpointFormat`. The values look into the slots' memory."""
        found = [_rank_state(slot) for slot in slots]
        _, fingerprint, loss = found[0]
        metrics = {} if math.isnan(loss) else {"loss": loss}
        values = survey(draft, attempt, node, [state for state, _, _ in found])
        return SurveyedNode(values, metrics, fingerprint)

    def write_part(
        self, draft: Draft, attempt: CheckpointAttempt, node: int, values: SurveyedNode
    ) -> int:
        """See `ports.CheckpointFormat`."""
        part = write_part(draft, attempt, node, values.values, values.metrics, values.fingerprint)
        return sum(file.bytes for file in part.files.values())

    def publish(self, draft: Draft, attempt: CheckpointAttempt) -> Manifest:
        """See `ports.CheckpointFormat`."""
        return publish(draft, attempt, self._clock.wall_ns())


def _rank_state(slot: Slot) -> tuple[RankState, dict[str, Any], float]:
    """The rank's state, laid over the slot; what its objects are; its loss."""
    header, layout = slot.verify()
    tensors = [overlay(slot, segment) for segment in layout.segments]
    shards: dict[int, Shard] = {
        id(tensor): segment.spec.shard
        for tensor, segment in zip(tensors, layout.segments, strict=True)
        if segment.spec.shard is not None
    }
    objects = bytes(slot.payload[layout.objects_offset : header.payload_bytes])
    tree = rebuild(objects, tensors, Inert)
    fingerprint = tree.pop(ABOUT)
    tree[BESIDE]["shared"] = shared_names(tree)
    return RankState(header.rank, tree, shards), fingerprint, header.loss
