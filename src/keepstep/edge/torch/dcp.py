"""DCP: one generation's state to a checkpoint in PyTorch's Distributed Checkpoint format, and back.

Writing comes in as the trees of *all* ranks in one process and goes out as a checkpoint that
`torch.distributed.checkpoint.load` and `dcp_to_torch_save` read without keepstep: the names are DCP's own, the plans go through
its planner, the files through its writer. Reading comes in as a checkpoint and the live tree and goes out as a new
tree; it needs no process group. Never writes into a live tensor, never hands out a byte that was not verified.

Beside the state's own names a checkpoint holds `keepstep.tree` (the tree's shape: DCP forgets empty containers and turns
keys into text) and, for a value that differs between ranks, `ranks.<r>.<name>` with each rank's own; the plain
name then holds rank 0's.

Invariant: what `read_checkpoint` returns to rank r of the same world size equals, byte for byte, what rank r gave.
"""

from __future__ import annotations

import io
import os
import posixpath
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Any

import torch

# The one private name: only torch's own flattening can promise torch's own names.
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from keepstep.edge.store import Draft, Manifest, Progress, Store
from keepstep.errors import ConfigError, DamageError, IdentityError, LayoutError
from keepstep.model.layout import Shard

OURS = "keepstep"
TREE = f"{OURS}.tree"
RANKS = "ranks"
SHOWN_DIFFERENCES = 5


@dataclass
class RankState:
    """One rank's state. `shards` says by `id(tensor)` which tensors of the tree are boxes of a larger one."""

    rank: int
    tree: dict[str, Any]
    shards: dict[int, Shard] = field(default_factory=dict)


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint gives one rank. `unmapped`: names of values that differed between the ranks that wrote them and
    came from rank 0's, because there are now more or fewer ranks."""

    tree: dict[str, Any]
    manifest: Manifest
    unmapped: tuple[str, ...]


# ---------------------------------------------------------------------------------------------- writing


def write_checkpoint(
    store: Store,
    step: int,
    job: str,
    states: Sequence[RankState],
    metrics: Mapping[str, float],
    fingerprint: Mapping[str, Any],
    progress: Progress | None = None,
) -> Manifest:
    """Write all ranks' state, publish it, read it back. Nothing to do when the step is there and intact.

    Raises StoreError when it cannot be written, DamageError when it reads back differently, LayoutError when the ranks'
    shards do not make whole tensors, IdentityError when another job's checkpoint is in its place. After any of them every
    other step is as it was and this one has no new checkpoint, except when the store fails while it is being read back:
    then it is there, unproven.
    """
    ranks = [s.rank for s in states]
    if ranks != list(range(len(states))) or not states:
        raise ConfigError(f"expected the states of ranks 0 to n-1 in order, found those of {ranks}")
    present = store.intact(step)
    if present is not None and present.job != job:
        raise IdentityError(f"{store.url(step)}: expected a checkpoint of job {job!r}, found one of {present.job!r}")
    if present is not None:
        return present
    values = _per_rank_values([_flat(state) for state in states])
    plans, metadata = _plan(values)
    planned_bytes = sum(_planned_bytes(plan, v) for plan, v in zip(plans, values, strict=True))
    store.remove(step)  # at most a damaged one
    written_bytes = 0

    def wrote(count: int) -> None:
        nonlocal written_bytes
        written_bytes += count
        if progress is not None:
            progress(written_bytes, max(2 * planned_bytes, written_bytes))  # the other half is reading it back

    with store.draft(step, wrote) as draft:
        _write_files(draft, plans, values, metadata)
        manifest = Manifest(job, step, len(states), dict(metrics), time.time_ns(), dict(fingerprint), dict(draft.files))
        draft.publish(manifest)
    try:
        total = manifest.total_bytes
        return store.verify(step, progress and (lambda done, _: progress(total + done, 2 * total)))
    except DamageError:
        store.remove(step)
        raise


@dataclass(frozen=True)
class _Value:
    """What a rank has under a name: a tensor (perhaps a part of a larger one) or the bytes of a pickled value."""

    path: tuple[str | int, ...]
    data: torch.Tensor | bytes
    shard: Shard | None = None

    def same_as(self, other: _Value) -> bool:
        if isinstance(self.data, bytes) or isinstance(other.data, bytes):
            return type(self.data) is type(other.data) and self.data == other.data
        return self.shard == other.shard and _equal_bytes(self.data, other.data)


def _flat(state: RankState) -> dict[str, _Value]:
    """A rank's values under DCP's names, its tree's shape among them."""
    for name in (OURS, RANKS):
        if name in state.tree:
            raise ConfigError(f"the name {name!r} is taken in a checkpoint: expected another name for this part of the state")
    try:
        leaves, paths = flatten_state_dict(state.tree)
    except ValueError as error:
        raise LayoutError(f"rank {state.rank}: expected one name for every value, found {error}") from error
    values = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor):
            values[name] = _Value(paths[name], leaf.detach(), state.shards.get(id(leaf)))
        else:
            values[name] = _Value(paths[name], _pickled(leaf))
    values[TREE] = _Value((OURS, "tree"), _pickled(_outline(state.tree, (), leaves)))
    return values


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _equal_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    # As bytes, because NaN is not equal to itself and -0.0 is equal to 0.0.
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def _per_rank_values(flats: Sequence[dict[str, _Value]]) -> list[dict[str, _Value]]:
    """What each rank has to offer to the checkpoint: shared values under their name, differing ones under each rank's as well."""
    offers: list[dict[str, _Value]] = [{} for _ in flats]
    for name in dict.fromkeys(name for flat in flats for name in flat):
        holders = {rank: flat[name] for rank, flat in enumerate(flats) if name in flat}
        first: dict[tuple[int, ...] | None, _Value] = {}
        for value in holders.values():
            first.setdefault(_offsets(value), value)
        alike = all(value.same_as(first[_offsets(value)]) for value in holders.values())
        for rank, value in holders.items():
            if alike or value is first[_offsets(value)]:
                offers[rank][name] = value
            if not alike:
                offers[rank][f"{RANKS}.{rank}.{name}"] = _Value((RANKS, str(rank), *value.path), value.data)
    return offers


def _offsets(value: _Value) -> tuple[int, ...] | None:
    return value.shard.offsets if value.shard else None


def _plan(values: Sequence[dict[str, _Value]]) -> tuple[list[SavePlan], Metadata]:
    """DCP's own global plan: what several ranks offer is written once, by the one with the least to write."""
    local = []
    for offer in values:
        items = [_write_item(name, value) for name, value in offer.items()]
        local.append(SavePlan(items, planner_data={name: value.path for name, value in offer.items()}))
    try:
        plans, metadata = DefaultSavePlanner().create_global_plan(local)
    except ValueError as error:
        raise LayoutError(f"expected shards that make whole tensors, found: {error}") from error
    wholes = {name: value.shard.global_shape for offer in values for name, value in offer.items() if value.shard}
    for name, shape in wholes.items():  # DCP does not check this for a single rank
        stored = metadata.state_dict_metadata.get(name)
        found = sum(prod(chunk.sizes) for chunk in stored.chunks) if isinstance(stored, TensorStorageMetadata) else 0
        if found != prod(shape):
            raise LayoutError(f"{name}: expected shards that make {list(shape)}, found {found} elements")
    return plans, metadata


def _write_item(name: str, value: _Value) -> WriteItem:
    if isinstance(value.data, bytes):
        return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
    sizes = value.data.size()
    whole = torch.Size(value.shard.global_shape) if value.shard else sizes
    offsets = torch.Size(value.shard.offsets) if value.shard else torch.Size([0] * len(sizes))
    kind = WriteItemType.SHARD if value.shard else WriteItemType.TENSOR
    properties = TensorProperties.create_from_tensor(value.data)
    data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, whole)
    return WriteItem(MetadataIndex(name, offsets), kind, tensor_data=data)


def _planned_bytes(plan: SavePlan, values: Mapping[str, _Value]) -> int:
    data = (values[item.index.fqn].data for item in plan.items)
    return sum(len(d) if isinstance(d, bytes) else d.nbytes for d in data)


class _Source(DefaultSavePlanner):
    """Gives DCP's writer one rank's values: the tensors themselves, and what is pickled already."""

    def __init__(self, values: Mapping[str, _Value]) -> None:
        super().__init__()
        self._values = values

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = self._values[write_item.index.fqn].data
        return io.BytesIO(data) if isinstance(data, bytes) else data


def _write_files(draft: Draft, plans: list[SavePlan], values: Sequence[Mapping[str, _Value]], metadata: Metadata) -> None:
    url = draft.store.url(draft.step)
    writer = FileSystemWriter(url, sync_files=False, per_thread_copy_ahead=0)  # the draft syncs; there is no device to copy from
    writer.fs = _Files(draft.open, draft)  # type: ignore[assignment]  # as torch's own FsspecWriter does
    writer.path = url
    writer.set_up_storage_writer(is_coordinator=True)
    try:
        plans = writer.prepare_global_plan(plans)
        results = [writer.write_data(plan, _Source(v)).wait() for plan, v in zip(plans, values, strict=True) if plan.items]
        writer.finish(metadata, results)
    except RuntimeError as error:
        if draft.failure is not None:  # torch.save answers a failed write with an error about its own position in the file
            raise draft.failure from error
        raise


# ---------------------------------------------------------------------------------------------- reading


def read_checkpoint(
    store: Store,
    step: int,
    rank: int,
    world_size: int,
    template: Mapping[str, Any],
    *,
    params: Mapping[str, Mapping[Any, torch.Tensor]] | None = None,
    free: Collection[str] = (),
) -> Loaded:
    """One rank's state, shaped by the checkpoint, in new CPU tensors; DTensors where the template has them.

    template: the live tree, by the names it was written under.
    params: for each optimizer's name its parameters by their number in its state dict, so that optimizer state that
        does not exist yet is placed as its parameter is.
    free: names whose tensors may have changed shape since (a sampler's history): taken as the checkpoint has them.
    Raises LayoutError, before any value is read, when the checkpoint is of another shape; DamageError and StoreError.
    """
    manifest = store.read_manifest(step)
    reader = FileSystemReader(store.url(step))
    reader.fs = _Files(lambda name: store.open(manifest, name))  # type: ignore[assignment]
    reader.path = store.url(step)
    metadata = reader.read_metadata()
    stored = metadata.state_dict_metadata
    own = f"{RANKS}.{rank}." if world_size == manifest.world_size else None

    def source(name: str) -> str:
        return f"{own}{name}" if own and f"{own}{name}" in stored else name

    outline = _read(reader, metadata, {source(TREE): None})[source(TREE)]
    places = [_Place(source(p.name), p.name, p.live, p.owner) for p in _places(outline, template, params or {}, free)]
    _check_shape(store.url(step), outline, template, places, stored, free)
    loaded = _read(reader, metadata, {p.source: _target(p, stored[p.source]) for p in places})
    values = {p.name: _placed(p, loaded[p.source]) for p in places}
    differed = set() if own else {name.split(".", 2)[2] for name in stored if name.startswith(f"{RANKS}.")}
    return Loaded(_grown(outline, values, template), manifest, tuple(p.name for p in places if p.name in differed))


def _read(reader: FileSystemReader, metadata: Metadata, targets: dict[str, Any]) -> dict[str, Any]:
    """DCP's own load, without its collectives: tensors into `targets`, other values in their place."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(targets, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()
    return targets


class _Nothing(Enum):
    """What stands in for a live value where there is none."""

    YET = "the live state may still grow this value"
    KNOWN = "the live state has other values here, not this one"


@dataclass(frozen=True)
class _Place:
    """A value of the checkpoint and where it goes. `owner`: the parameter whose optimizer state it is."""

    source: str
    name: str
    live: Any
    owner: torch.Tensor | None

    @property
    def is_own(self) -> bool:
        """Stored for this rank alone, so a DTensor's local part rather than the whole."""
        return self.source != self.name

    def like(self, size: torch.Size) -> torch.Tensor | None:
        """The live tensor of this size whose placement the value takes."""
        for tensor in (self.live, self.owner):
            if isinstance(tensor, torch.Tensor) and self.size_of(tensor) == size:
                return tensor
        return None

    def size_of(self, tensor: torch.Tensor) -> torch.Size:
        return tensor.to_local().size() if self.is_own and isinstance(tensor, DTensor) else tensor.size()


def _outline(node: Any, path: tuple[Any, ...], leaves: Mapping[str, Any]) -> Any:
    """A tree's shape in plain values: a leaf is its name, a list a list, a mapping (kind, [(key, shape), ...])."""
    name = ".".join(map(str, path))
    if name in leaves and leaves[name] is node:
        return name
    if isinstance(node, Mapping):
        kind = "OrderedDict" if isinstance(node, OrderedDict) else "dict"
        return kind, [(key, _outline(value, (*path, key), leaves)) for key, value in node.items()]
    return [_outline(value, (*path, index), leaves) for index, value in enumerate(node)]


def _grown(node: Any, values: Mapping[str, Any], live: Any) -> Any:
    """The inverse of `_outline`."""
    if isinstance(node, str):
        return values[node]
    if isinstance(node, list):
        return [_grown(sub, values, None) for sub in node]
    kind, pairs = node
    made: dict[Any, Any] = OrderedDict() if kind == "OrderedDict" else {}
    for key, sub in pairs:
        made[key] = _grown(sub, values, live.get(key) if isinstance(live, Mapping) else None)
    if kind == "OrderedDict" and hasattr(live, "_metadata"):
        made._metadata = live._metadata  # type: ignore[attr-defined]  # the versions a module's state dict carries along
    return made


def _places(
    outline: Any, template: Mapping[str, Any], params: Mapping[str, Mapping[Any, torch.Tensor]], free: Collection[str]
) -> Iterator[_Place]:
    for name, node in outline[1]:
        yield from _walk(node, _Nothing.YET if name in free else template.get(name, _Nothing.YET), params.get(name, {}))


def _walk(
    node: Any, live: Any, params: Mapping[Any, torch.Tensor], owner: torch.Tensor | None = None, in_state: bool = False
) -> Iterator[_Place]:
    """Every value below `node` beside what is live there. Optimizer state comes into being with the first update, so
    there a value without a live counterpart is no difference, and its placement is its parameter's."""
    if isinstance(node, str):
        yield _Place(node, node, live, owner)
    elif isinstance(node, list):
        for index, sub in enumerate(node):
            yield from _walk(sub, live[index] if isinstance(live, list) and index < len(live) else _Nothing.YET, {}, owner, in_state)
    else:
        is_optimizer = {"state", "param_groups"} <= {key for key, _ in node[1]}
        for key, sub in node[1]:
            if isinstance(live, Mapping) and key in live:
                child = live[key]
            else:
                child = (
                    _Nothing.KNOWN if not in_state and (live is _Nothing.KNOWN or (isinstance(live, Mapping) and live)) else _Nothing.YET
                )
            if is_optimizer and key == "state":
                numbered = child if isinstance(child, Mapping) else {}
                for number, values in sub[1]:
                    yield from _walk(values, numbered.get(number, _Nothing.YET), {}, params.get(number), in_state=True)
            else:
                yield from _walk(sub, child, params, owner, in_state)


def _check_shape(
    where: str, outline: Any, template: Mapping[str, Any], places: Sequence[_Place], stored: Mapping[str, Any], free: Collection[str]
) -> None:
    """Raises LayoutError naming the first differences between the live state (expected) and the checkpoint (found)."""
    differences = []
    parts = {name for name, _ in outline[1]}
    if parts != set(template):
        differences.append(f"expected the parts {', '.join(sorted(template))}, found {', '.join(sorted(parts))}")
    for place in places:
        found = stored[place.source]
        tensor = f"{_dtype(found.properties.dtype)}{list(found.size)}" if isinstance(found, TensorStorageMetadata) else None
        if isinstance(place.live, torch.Tensor):
            expected = f"{_dtype(place.live.dtype)}{list(place.size_of(place.live))}"
            if tensor != expected:
                differences.append(f"{place.name}: expected {expected}, found {tensor or 'a value that is no tensor'}")
        elif place.live is _Nothing.KNOWN and tensor and place.name.split(".", 1)[0] in template:
            differences.append(f"{place.name}: expected nothing, found {tensor}")
    names = {place.name for place in places}
    strict = {name: value for name, value in template.items() if name not in free and name in parts}
    for name, leaf in flatten_state_dict(strict)[0].items():
        if isinstance(leaf, torch.Tensor) and name not in names and not name.startswith(tuple(_states(strict))):
            differences.append(f"{name}: expected {_dtype(leaf.dtype)}{list(leaf.size())}, found nothing")
    if differences:
        more = len(differences) - SHOWN_DIFFERENCES
        shown = differences[:SHOWN_DIFFERENCES] + ([f"and {more} more"] if more > 0 else [])
        raise LayoutError(f"{where} does not fit the live state: " + "; ".join(shown))


def _states(tree: Mapping[Any, Any], path: str = "") -> Iterator[str]:
    """The prefixes under which the optimizers of a tree keep their state."""
    if "state" in tree and "param_groups" in tree:
        yield f"{path}state."
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _states(value, f"{path}{key}.")


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _target(place: _Place, stored: Any) -> torch.Tensor | None:
    """Fresh memory to load into; None for a value that is no tensor."""
    if not isinstance(stored, TensorStorageMetadata):
        return None
    like = place.like(stored.size)
    if like is None or (place.is_own and isinstance(like, DTensor)):
        return torch.empty(stored.size, dtype=stored.properties.dtype)
    return torch.empty_like(like.detach(), dtype=stored.properties.dtype, device="cpu")


def _placed(place: _Place, value: Any) -> Any:
    """A rank's own part as the DTensor it is a part of; everything else as it was read."""
    like = place.like(value.size()) if place.is_own and isinstance(value, torch.Tensor) else None
    if not isinstance(like, DTensor):
        return value
    return DTensor.from_local(value, like.device_mesh, like.placements, run_check=False, shape=like.size(), stride=like.stride())


class _Files(FileSystemBase):
    """DCP's view of one checkpoint: its streams are those of a draft or verified ones, by the file's name alone."""

    def __init__(self, opened: Callable[[str], io.RawIOBase], draft: Draft | None = None) -> None:
        self._opened, self._draft = opened, draft

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.RawIOBase]:
        assert mode == ("rb" if self._draft is None else "wb"), mode
        with self._opened(posixpath.basename(path)) as stream:
            yield stream

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return posixpath.join(path, suffix)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        assert self._draft is not None
        self._draft.rename(posixpath.basename(path), posixpath.basename(new_path))

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return self._draft is not None and posixpath.basename(path) in self._draft.files

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        return path

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """The draft has made it."""

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        raise AssertionError(f"a draft begins empty and writes {path} once")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True
