"""WritePlan: which rank writes which value, and the checkpoint's metadata.

Comes in: what every rank of the job has, as the surveys tell it. Goes out: DCP's own global plan.
Sees no data and no store.

A pure function of the surveys, in the order of the ranks: every node makes the same plan by itself,
and nobody has to hand it out. A value that several ranks have alike is offered by all of them and
written once, by the one with the least to write by then, so replicated state is spread over all
ranks and nodes. Whether they have it alike is told by digests (XXH3, 128 bits), not by the kind of
parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from keepstep.edge.store.parts import Sketch
from keepstep.edge.torch.dcp.tree import RANKS
from keepstep.errors import LayoutError


@dataclass(frozen=True)
class WritePlan:
    """By rank: what it has, what of it it writes, and under which of its own names it has that."""

    ranks: Sequence[Mapping[str, Sketch]]
    plans: Sequence[SavePlan]
    own_names: Sequence[Mapping[str, str]]
    metadata: Metadata


def make_plan(ranks: Sequence[Mapping[str, Sketch]]) -> WritePlan:
    """`ranks`: each rank's values by name. Raises LayoutError when their boxes do not make whole
    tensors."""
    offers, own_names = _offers(ranks)
    local = [
        SavePlan(
            [_write_item(n, s) for n, s in offer.items()],
            planner_data={n: s.path for n, s in offer.items()},
        )
        for offer in offers
    ]
    try:
        plans, metadata = DefaultSavePlanner().create_global_plan(local)
    except ValueError as error:
        raise LayoutError(f"expected shards that make whole tensors, found: {error}") from error
    wholes = {
        name: sketch.shard.global_shape
        for offer in offers
        for name, sketch in offer.items()
        if sketch.shard
    }
    for name, shape in wholes.items():  # DCP does not check this for a single rank
        stored = metadata.state_dict_metadata.get(name)
        found = (
            sum(prod(chunk.sizes) for chunk in stored.chunks)
            if isinstance(stored, TensorStorageMetadata)
            else 0
        )
        if found != prod(shape):
            raise LayoutError(
                f"{name}: expected shards that make {list(shape)}, found {found} elements"
            )
    return WritePlan(ranks, plans, own_names, metadata)


def _offers(
    ranks: Sequence[Mapping[str, Sketch]],
) -> tuple[list[dict[str, Sketch]], list[dict[str, str]]]:
    """What each rank has to offer: shared values under their name, differing ones under each rank's
    as well."""
    offers: list[dict[str, Sketch]] = [{} for _ in ranks]
    own_names: list[dict[str, str]] = [{} for _ in ranks]
    for name in dict.fromkeys(name for sketches in ranks for name in sketches):
        holders = {rank: sketches[name] for rank, sketches in enumerate(ranks) if name in sketches}
        first: dict[tuple[int, ...] | None, Sketch] = {}
        for sketch in holders.values():
            first.setdefault(sketch.offsets, sketch)
        alike = all(sketch == first[sketch.offsets] for sketch in holders.values())
        for rank, sketch in holders.items():
            offered = {name: sketch} if alike or sketch is first[sketch.offsets] else {}
            if not alike:
                offered[f"{RANKS}.{rank}.{name}"] = replace(
                    sketch, path=(RANKS, str(rank), *sketch.path), shard=None
                )
            offers[rank].update(offered)
            own_names[rank].update(dict.fromkeys(offered, name))
    return offers, own_names


def _write_item(name: str, sketch: Sketch) -> WriteItem:
    if sketch.dtype is None:
        return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
    sizes = torch.Size(sketch.shape)
    whole = torch.Size(sketch.shard.global_shape) if sketch.shard else sizes
    offsets = torch.Size(sketch.shard.offsets) if sketch.shard else torch.Size([0] * len(sizes))
    kind = WriteItemType.SHARD if sketch.shard else WriteItemType.TENSOR
    data = TensorWriteData(
        ChunkStorageMetadata(offsets, sizes), TensorProperties(getattr(torch, sketch.dtype)), whole
    )
    return WriteItem(MetadataIndex(name, offsets), kind, tensor_data=data)
