"""Checkpoint format: the states of simulated ranks as files of a checkpoint. See
`ports.CheckpointFormat`; `edge/torch/dcp/format.py` writes the real ones.

    __<rank>_<attempt>.distcp     a rank's state
    .metadata                     which file is whose

Comes in: pinned slots and attempts. Goes out: files of a draft, and a rank's state again. What
nodes say of their parts is what real ones say (`edge/store/parts.py`).

Invariant: a manifest names only what was read back, and no state that is not what its survey said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

from keepstep.edge.shm.slot import Slot
from keepstep.edge.store.draft import Draft
from keepstep.edge.store.manifest import FORMAT_VERSION, Manifest, seal, unseal
from keepstep.edge.store.parts import (
    CheckpointPart,
    PartItem,
    Sketch,
    Survey,
    part_from_bytes,
    part_to_bytes,
    survey_from_bytes,
    survey_to_bytes,
)
from keepstep.edge.store.store import Store
from keepstep.errors import DamageError, LayoutError
from keepstep.model.checkpoint import CheckpointAttempt
from keepstep.ports import Clock
from keepstep.sim.protocol.job.oracle import MIXED_BYTES, advance

INDEX = ".metadata"
STATE = "state"


@dataclass(frozen=True)
class SurveyedStates:
    """A node's, by rank; they look into the slots' memory. `loss`: of its first rank."""

    states: Mapping[int, memoryview]
    loss: float


class SimFormat:
    """Over one store."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def already_there(self, attempt: CheckpointAttempt) -> bool:
        """See `ports.CheckpointFormat`."""
        return self._store.intact_of(attempt.stamp, attempt.job) is not None

    def survey(
        self, draft: Draft, attempt: CheckpointAttempt, node: int, slots: Sequence[Slot]
    ) -> SurveyedStates:
        """See `ports.CheckpointFormat`."""
        states = {}
        losses = []
        for slot in slots:
            header, layout = slot.verify()
            states[header.rank] = slot.payload[: layout.segments[0].spec.nbytes]
            losses.append(header.loss)
        if list(states) != list(attempt.ranks_of(node)):
            raise LayoutError(f"node {node} was to write {attempt.ranks_of(node)}, has {states}")
        survey = {rank: {STATE: _sketch(state)} for rank, state in states.items()}
        self._write(
            draft, attempt.survey_name(node), survey_to_bytes(attempt, node, survey, draft.signer)
        )
        return SurveyedStates(states, losses[0])

    def write_part(
        self, draft: Draft, attempt: CheckpointAttempt, node: int, values: SurveyedStates
    ) -> int:
        """See `ports.CheckpointFormat`."""
        surveys = self._surveys(draft, attempt)
        items = []
        for rank, state in values.states.items():
            if _sketch(state) != surveys[rank][STATE]:
                raise DamageError(f"the state of rank {rank} is not the one of its survey")
            name = attempt.data_name(rank)
            self._write(draft, name, state)
            items.append(PartItem(rank, STATE, None, name, 0, len(state)))
        files = {item.file: draft.files[item.file] for item in items}
        part = CheckpointPart({"loss": values.loss}, {}, files, tuple(items))
        self._write(
            draft, attempt.part_name(node), part_to_bytes(attempt, node, part, draft.signer)
        )
        return sum(item.bytes for item in items)

    def publish(self, draft: Draft, attempt: CheckpointAttempt) -> Manifest:
        """See `ports.CheckpointFormat`."""
        parts = [self._part(draft, attempt, node) for node in range(len(attempt.ranks))]
        items = [item for part in parts for item in part.items]
        if [item.rank for item in items] != list(range(attempt.world_size)):
            raise LayoutError(f"expected the states of {attempt.world_size} ranks, found {items}")
        index = {"format": FORMAT_VERSION, "files": [item.file for item in items]}
        self._write(draft, INDEX, seal(index))
        files = {name: sums for part in parts for name, sums in part.files.items()}
        manifest = Manifest(
            job=attempt.job,
            step=attempt.stamp.step,
            world_size=attempt.world_size,
            metrics=parts[0].metrics,
            wall_ns=self._clock.wall_ns(),
            fingerprint={},
            files={**files, INDEX: draft.files[INDEX]},
            epoch=attempt.stamp.epoch,
            attempt=attempt.number,
            timeline=attempt.timeline,
        )
        draft.publish(manifest)
        return manifest

    def _surveys(self, draft: Draft, attempt: CheckpointAttempt) -> Survey:
        """Of all nodes."""
        said: dict[int, Mapping[str, Sketch]] = {}
        for node in range(len(attempt.ranks)):
            raw, where = draft.read_small(attempt.survey_name(node))
            said.update(survey_from_bytes(raw, where, attempt, node, draft.signer))
        return said

    def _part(self, draft: Draft, attempt: CheckpointAttempt, node: int) -> CheckpointPart:
        raw, where = draft.read_small(attempt.part_name(node))
        return part_from_bytes(raw, where, attempt, node, draft.signer)

    def _write(self, draft: Draft, name: str, data: bytes | memoryview) -> None:
        with draft.open(name) as file:
            file.write(data)
        draft.read_back([name])


def read_state(store: Store, step: int, rank: int, nbytes: int) -> bytes:
    """What this rank goes on from: its state of that step; or, if so many ranks have not written
    it, `nbytes` made of what all states of the step were made of. Raises DamageError, StoreError.
    """
    manifest = store.read_manifest(step)
    where = store.place(manifest.name, INDEX).where
    names = unseal(_read_file(store, manifest, INDEX), where)["files"]
    if rank < len(names):
        return _read_file(store, manifest, names[rank])
    mixed = _read_file(store, manifest, names[0])[:MIXED_BYTES]
    return advance(mixed, rank, step, nbytes)


def _read_file(store: Store, manifest: Manifest, name: str) -> bytes:
    return b"".join(store.open(manifest, name).blocks())


def _sketch(state: memoryview) -> Sketch:
    return Sketch((STATE,), xxhash.xxh3_64_hexdigest(state), len(state), "uint8", (len(state),))
