"""Read: a checkpoint and the live tree to a new tree, for one rank of any world size.

Comes in: a checkpoint and the live tree. Goes out: a tree of new CPU tensors, shaped by the
checkpoint. Needs no process group. Never writes into a live tensor, never hands out a byte that was
not verified.

Invariant: what `read_checkpoint` returns to rank r of the same world size equals, byte for byte,
what rank r gave.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from keepstep.edge.store.manifest import Manifest
from keepstep.edge.store.store import Store
from keepstep.edge.torch.dcp.files import CheckpointFiles
from keepstep.edge.torch.dcp.metadata import CheckpointReader
from keepstep.edge.torch.dcp.tree import RANKS, TREE, grown
from keepstep.edge.torch.pickles.checked import Vocabulary, load_torch
from keepstep.edge.torch.pickles.known import Known
from keepstep.edge.torch.tree import is_plain
from keepstep.errors import LayoutError

SHOWN_DIFFERENCES = 5


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint gives one rank. `unmapped`: names of values that differed between the ranks
    that wrote them and came from rank 0's, because there are now more or fewer ranks."""

    tree: dict[str, Any]
    manifest: Manifest
    unmapped: tuple[str, ...]


def read_checkpoint(
    store: Store,
    step: int,
    rank: int,
    world_size: int,
    template: Mapping[str, Any],
    *,
    params: Mapping[str, Mapping[Any, torch.Tensor]] | None = None,
    free: Collection[str] = (),
    grown_names: Collection[str] = (),
    vocabulary: Vocabulary | None = None,
) -> Loaded:
    """One rank's state, shaped by the checkpoint, in new CPU tensors; DTensors where the template
    has them.

    template: the live tree, by the names it was written under.
    params: for each optimizer's name its parameters by their number in its state dict, so that
        optimizer state that does not exist yet is placed as its parameter is.
    free: names whose tensors may have changed shape since (a sampler's history): taken as
        the checkpoint has them.
    grown_names: the same of single tensors, by their whole names.
    vocabulary: what values may consist of; None for plain types.
    Raises LayoutError, before any value is read, when the checkpoint is of another shape;
    UntrustedError;
    DamageError and StoreError.
    """
    manifest = store.read_manifest(step)
    reader = CheckpointReader(store.url(manifest.name), vocabulary or Known())
    reader.fs = CheckpointFiles(lambda name: store.open(manifest, name))  # type: ignore[assignment]
    reader.path = store.url(manifest.name)
    metadata = reader.read_metadata()
    stored = metadata.state_dict_metadata
    own = f"{RANKS}.{rank}." if world_size == manifest.world_size else None

    def source(name: str) -> str:
        return f"{own}{name}" if own and f"{own}{name}" in stored else name

    outline = _read(reader, metadata, {source(TREE): None})[source(TREE)]
    places = [
        replace(p, source=source(p.name), is_free=p.is_free or p.name in grown_names)
        for p in _places(outline, template, params or {}, free)
    ]
    _check_shape(store.url(manifest.name), outline, template, places, stored, {*free, *grown_names})
    loaded = _read(reader, metadata, {p.source: _target(p, stored[p.source]) for p in places})
    values = {p.name: _placed(p, loaded[p.source]) for p in places}
    differed = (
        set() if own else {name.split(".", 2)[2] for name in stored if name.startswith(f"{RANKS}.")}
    )
    return Loaded(
        grown(outline, values, template),
        manifest,
        tuple(p.name for p in places if p.name in differed),
    )


def _read(reader: CheckpointReader, metadata: Metadata, targets: dict[str, Any]) -> dict[str, Any]:
    """DCP's own load, without its collectives: tensors into `targets`, other values in their
    place."""
    planner = _Planner(reader.vocabulary)
    planner.set_up_planner(targets, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()
    return targets


class _Planner(DefaultLoadPlanner):
    """DCP's own, which would unpickle values with everything."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._vocabulary = vocabulary

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.state_dict[name] = load_torch(value.getvalue(), self._vocabulary)


class _Nothing(Enum):
    """What stands in for a live value where there is none."""

    YET = "the live state may still grow this value"
    KNOWN = "the live state has other values here, not this one"


@dataclass(frozen=True)
class _Place:
    """A value of the checkpoint and where it goes. `owner`: the parameter whose optimizer state it
    is. `is_free`: it may have another shape than the live one."""

    source: str
    name: str
    live: Any
    owner: torch.Tensor | None
    is_free: bool = False

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
        return (
            tensor.to_local().size()
            if self.is_own and isinstance(tensor, DTensor)
            else tensor.size()
        )


def _places(
    outline: Any,
    template: Mapping[str, Any],
    params: Mapping[str, Mapping[Any, torch.Tensor]],
    free: Collection[str],
) -> Iterator[_Place]:
    for name, node in outline[1]:
        live = template.get(name, _Nothing.YET)
        for place in _walk(node, live, params.get(name, {})):
            if name not in free:
                yield place
            else:
                known = place.live if isinstance(place.live, torch.Tensor) else _Nothing.YET
                yield replace(place, live=known, is_free=True)


def _walk(
    node: Any,
    live: Any,
    params: Mapping[Any, torch.Tensor],
    owner: torch.Tensor | None = None,
    in_state: bool = False,
) -> Iterator[_Place]:
    """Every value below `node` beside what is live there. Optimizer state comes into being with the
    first update, so there a value without a live counterpart is no difference, and its placement is
    its parameter's."""
    if isinstance(node, (str, dict)):  # a dict: it is what another name stands for, too
        [name] = [node] if isinstance(node, str) else node
        yield _Place(name, name, live, owner)
    elif isinstance(node, list):
        for index, sub in enumerate(node):
            yield from _walk(
                sub,
                live[index] if isinstance(live, list) and index < len(live) else _Nothing.YET,
                {},
                owner,
                in_state,
            )
    else:
        is_optimizer = {"state", "param_groups"} <= {key for key, _ in node[1]}
        for key, sub in node[1]:
            if isinstance(live, Mapping) and key in live:
                child = live[key]
            else:
                child = (
                    _Nothing.KNOWN
                    if not in_state
                    and (live is _Nothing.KNOWN or (isinstance(live, Mapping) and live))
                    else _Nothing.YET
                )
            if is_optimizer and key == "state":
                numbered = child if isinstance(child, Mapping) else {}
                for number, values in sub[1]:
                    yield from _walk(
                        values,
                        numbered.get(number, _Nothing.YET),
                        {},
                        params.get(number),
                        in_state=True,
                    )
            else:
                yield from _walk(sub, child, params, owner, in_state)


def _check_shape(
    where: str,
    outline: Any,
    template: Mapping[str, Any],
    places: Sequence[_Place],
    stored: Mapping[str, Any],
    free: Collection[str],
) -> None:
    """Raises LayoutError naming the first differences between the live state and the checkpoint."""
    differences = []
    parts = {name for name, _ in outline[1]}
    if (parts ^ set(template)) - set(free):
        differences.append(
            f"saved the parts {', '.join(sorted(parts))}, live {', '.join(sorted(template))}"
        )
    for place in places:
        if place.is_free:
            continue
        found = stored[place.source]
        tensor = (
            f"{_dtype(found.properties.dtype)}{list(found.size)}"
            if isinstance(found, TensorStorageMetadata)
            else None
        )
        if isinstance(place.live, torch.Tensor):
            if not is_plain(place.live):
                continue  # it is kept as a value
            expected = f"{_dtype(place.live.dtype)}{list(place.size_of(place.live))}"
            if tensor != expected:
                differences.append(
                    f"{place.name}: saved {tensor or 'a value that is no tensor'}, live {expected}"
                )
        elif place.live is _Nothing.KNOWN and tensor and _is_below(place.name, template):
            differences.append(f"{place.name}: saved {tensor}, live nothing")
    names = {place.name for place in places}
    strict = {name: value for name, value in template.items() if name not in free and name in parts}
    for name, leaf in flatten_state_dict(strict)[0].items():
        if (
            isinstance(leaf, torch.Tensor)
            and name not in names
            and name not in free
            and not name.startswith(tuple(_states(strict)))
        ):
            differences.append(
                f"{name}: saved nothing, live {_dtype(leaf.dtype)}{list(leaf.size())}"
            )
    if differences:
        more = len(differences) - SHOWN_DIFFERENCES
        shown = differences[:SHOWN_DIFFERENCES] + ([f"and {more} more"] if more > 0 else [])
        raise LayoutError(
            f"{where} does not fit the program: " + "; ".join(shown) + ". Nothing is loaded. Make "
            "the program as it was, or use another job name, or start over with KEEPSTEP_FRESH=1"
        )


def _is_below(name: str, template: Mapping[str, Any]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in template)


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
    is_part = place.is_own and isinstance(value, torch.Tensor) and is_plain(value)
    like = place.like(value.size()) if is_part else None
    if not isinstance(like, DTensor):
        return value
    return DTensor.from_local(
        value,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.size(),
        stride=like.stride(),
    )
