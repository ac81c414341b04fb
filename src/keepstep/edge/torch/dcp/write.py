"""Write: the states of all ranks of a job, which several nodes hold, to one checkpoint.

    survey      each node says what its ranks have (the leader first clears the place)
    write_part  each node makes the plan from all surveys, writes its share, reads it back, and
                says what it wrote
    publish     the leader puts the parts together, and the manifest last

Each act begins when everybody has ended the one before; who watches over that is the caller. Comes
in: the trees of a node's ranks. Goes out: files in the store. Never writes into a tensor, never
talks to another node.

Invariant: a manifest appears only after every byte it names has been read back and was right.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemWriter,
    _StorageInfo,  # every DCP checkpoint's metadata is made of these, so torch cannot rename it
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from keepstep.edge.store.draft import Draft
from keepstep.edge.store.manifest import Manifest
from keepstep.edge.store.parts import (
    CheckpointPart,
    PartItem,
    Sketch,
    part_from_bytes,
    part_to_bytes,
    survey_from_bytes,
    survey_to_bytes,
)
from keepstep.edge.store.store import Store
from keepstep.edge.torch.dcp.files import CheckpointFiles
from keepstep.edge.torch.dcp.plan import WritePlan, make_plan
from keepstep.edge.torch.dcp.tree import RankState, Value, flat
from keepstep.errors import ConfigError, DamageError, LayoutError
from keepstep.model.checkpoint import CheckpointAttempt

METADATA = ".metadata"

NodeValues = dict[int, dict[str, Value]]  # a node's values, by rank and name


def already_there(store: Store, attempt: CheckpointAttempt) -> Manifest | None:
    """The checkpoint of this state, when it is there and every byte is as written."""
    return store.intact_of(attempt.stamp, attempt.job)


def survey(
    draft: Draft, attempt: CheckpointAttempt, node: int, states: Sequence[RankState]
) -> NodeValues:
    """Say what the node's ranks have. Raises ConfigError, LayoutError, StoreError, DamageError."""
    expected, found = list(attempt.ranks_of(node)), [s.rank for s in states]
    if expected != found or not states:
        raise ConfigError(
            f"node {node}: expected the states of ranks {expected}, found those of {found}"
        )
    values = {state.rank: flat(state) for state in states}
    sketches = {
        rank: {name: value.sketch() for name, value in own.items()} for rank, own in values.items()
    }
    _write_small(
        draft, attempt.survey_name(node), survey_to_bytes(attempt, node, sketches, draft.signer)
    )
    return values


def write_part(
    draft: Draft,
    attempt: CheckpointAttempt,
    node: int,
    values: NodeValues,
    metrics: Mapping[str, float],
    fingerprint: Mapping[str, Any],
) -> CheckpointPart:
    """Write what the plan leaves to this node, and last what that was.

    Raises LayoutError when the ranks' shards do not make whole tensors; StoreError, DamageError or
    IdentityError when a survey is missing, torn or another attempt's; StoreError when it cannot be
    written; DamageError when it reads back differently.
    """
    plan = _plan(draft, attempt)
    items: list[PartItem] = []
    for rank in attempt.ranks_of(node):
        items += _write_rank(draft, attempt.data_name(rank), rank, plan, values[rank])
    names = sorted({item.file for item in items})
    draft.read_back(names)
    part = CheckpointPart(
        metrics, fingerprint, {name: draft.files[name] for name in names}, tuple(items)
    )
    _write_small(draft, attempt.part_name(node), part_to_bytes(attempt, node, part, draft.signer))
    return part


def publish(draft: Draft, attempt: CheckpointAttempt, wall_ns: int) -> Manifest:
    """Let the checkpoint exist. `wall_ns`: when that is.

    Raises StoreError when a part is missing, DamageError when one is torn or a file has gone,
    IdentityError when one is another attempt's, LayoutError when it is not what the plan says.
    """
    plan = _plan(draft, attempt)
    parts = [_part(draft, attempt, node) for node in range(len(attempt.ranks))]
    located = [
        r
        for node, (part, where) in enumerate(parts)
        for r in _located(attempt, node, plan, part, where)
    ]
    with _draft_errors(draft):
        _writer(draft, draft.open).finish(plan.metadata, [located])
    draft.read_back([METADATA])
    files = {name: sums for part, _ in parts for name, sums in part.files.items()} | {
        METADATA: draft.files[METADATA]
    }
    said = parts[0][0]  # the loss and the shape of the objects are those of rank 0
    manifest = Manifest(
        attempt.job,
        attempt.stamp.step,
        attempt.world_size,
        said.metrics,
        wall_ns,
        said.fingerprint,
        files,
        attempt.stamp.epoch,
        attempt.number,
        attempt.timeline,
    )
    draft.publish(manifest)
    return manifest


# -- what the nodes said


def _plan(draft: Draft, attempt: CheckpointAttempt) -> WritePlan:
    sketches: list[Mapping[str, Sketch]] = []
    for node in range(len(attempt.ranks)):
        raw, where = draft.read_small(attempt.survey_name(node))
        said = survey_from_bytes(raw, where, attempt, node, draft.signer)
        sketches += [said[rank] for rank in attempt.ranks_of(node)]
    return make_plan(sketches)


def _part(draft: Draft, attempt: CheckpointAttempt, node: int) -> tuple[CheckpointPart, str]:
    raw, where = draft.read_small(attempt.part_name(node))
    return part_from_bytes(raw, where, attempt, node, draft.signer), where


def _write_small(draft: Draft, name: str, raw: bytes) -> None:
    with draft.open(name) as file:
        file.write(raw)
    draft.read_back([name])


def _located(
    attempt: CheckpointAttempt, node: int, plan: WritePlan, part: CheckpointPart, where: str
) -> Iterator[WriteResult]:
    """Where DCP finds what the node wrote, after a look whether that is what the plan left to
    it."""
    planned = {
        (rank, item.index.fqn, _offsets(item)): item.index
        for rank in attempt.ranks_of(node)
        for item in plan.plans[rank].items
    }
    written = {(item.rank, item.name, item.offsets): item for item in part.items}
    if planned.keys() != written.keys():
        rank, name, _ = next(iter(planned.keys() ^ written.keys()))
        raise LayoutError(
            f"{where}: expected the {len(planned)} values that the plan leaves to node "
            f"{node}, found {len(written)}; "
            f"they differ in {name} of rank {rank}: do all nodes have the same torch?"
        )
    for key, item in written.items():
        yield WriteResult(planned[key], item.bytes, _StorageInfo(item.file, item.at, item.bytes))


def _offsets(item: WriteItem) -> tuple[int, ...] | None:
    return None if item.index.offset is None else tuple(item.index.offset)


# -- DCP's writer


class _Source(DefaultSavePlanner):
    """Gives DCP's writer one rank's values: the tensors themselves, and what is pickled already."""

    def __init__(self, rank: int, plan: WritePlan, values: Mapping[str, Value]) -> None:
        super().__init__()
        self._rank, self._plan, self._values = rank, plan, values

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name = self._plan.own_names[self._rank][write_item.index.fqn]
        value, expected = self._values[name], self._plan.ranks[self._rank][name]
        found = value.sketch()
        if found != expected:  # others leave it to this rank because theirs was the same
            raise DamageError(
                f"{name} of rank {self._rank}: expected the bytes of its survey "
                f"({expected.digest}), found others ({found.digest})"
            )
        return io.BytesIO(value.data) if isinstance(value.data, bytes) else value.data


def _write_rank(
    draft: Draft, file: str, rank: int, plan: WritePlan, values: Mapping[str, Value]
) -> list[PartItem]:
    if not plan.plans[rank].items:
        return []
    with _draft_errors(draft):
        writer = _writer(draft, lambda _: draft.open(file))
        (own,) = writer.prepare_global_plan([plan.plans[rank]])
        results: list[WriteResult] = writer.write_data(own, _Source(rank, plan, values)).wait()
    located = [(r.index.fqn, r.index.offset, r.storage_data) for r in results]
    return [
        PartItem(rank, name, None if at is None else tuple(at), file, info.offset, info.length)
        for name, at, info in located
    ]


def _writer(draft: Draft, opened: Callable[[str], io.RawIOBase]) -> FileSystemWriter:
    url = draft.url
    # the draft syncs; there is no device to copy from
    writer = FileSystemWriter(url, sync_files=False, per_thread_copy_ahead=0)
    writer.fs = CheckpointFiles(opened, draft)  # type: ignore[assignment]  # as torch's own FsspecWriter does
    writer.path = url
    writer.set_up_storage_writer(is_coordinator=True)
    return writer


@contextmanager
def _draft_errors(draft: Draft) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # torch.save answers a failed write with an error about its own position in the file
        if draft.failure is not None:
            raise draft.failure from error
        raise
