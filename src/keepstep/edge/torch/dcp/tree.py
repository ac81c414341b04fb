"""Tree: a rank's state as named values, as DCP names them, and the tree again.

Comes in: a tree of containers, tensors and other values. Goes out: values by name, what others need
to know of each, and the tree's shape in plain values. Never copies a tensor.

Invariant: `grown(outline(tree, ...), values, ...)` is the tree, container by container.
"""

from __future__ import annotations

import ctypes
import io
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

# A private name: only torch's own flattening can promise torch's own names.
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from keepstep.edge.store.parts import Sketch
from keepstep.errors import ConfigError, LayoutError
from keepstep.model.layout import Shard

OURS = "keepstep"
TREE = f"{OURS}.tree"
RANKS = "ranks"


@dataclass
class RankState:
    """One rank's state. `shards` says by `id(tensor)` which tensors of the tree are boxes of a
    larger one."""

    rank: int
    tree: dict[str, Any]
    shards: dict[int, Shard] = field(default_factory=dict)


@dataclass(frozen=True)
class Value:
    """What a rank has under a name: a tensor (perhaps a part of a larger one) or the bytes of a
    pickled value."""

    path: tuple[str | int, ...]
    data: torch.Tensor | bytes
    shard: Shard | None = None

    def sketch(self) -> Sketch:
        if isinstance(self.data, bytes):
            return Sketch(self.path, xxhash.xxh3_128_hexdigest(self.data), len(self.data))
        tensor = self.data.contiguous()
        return Sketch(
            path=self.path,
            # Its bytes, because NaN is not equal to itself and -0.0 is equal to 0.0.
            digest=xxhash.xxh3_128_hexdigest(raw_bytes(tensor)),
            bytes=tensor.nbytes,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.size()),
            shard=self.shard,
        )


def raw_bytes(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_char]:
    """The bytes of a contiguous CPU tensor, not copied: they are valid while it lives. (Its own way
    to them, `numpy()`, needs a package that torch can do without.)"""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


def flat(state: RankState) -> dict[str, Value]:
    """A rank's values under DCP's names, its tree's shape among them. Raises ConfigError,
    LayoutError."""
    for name in (OURS, RANKS):
        if name in state.tree:
            raise ConfigError(
                f"the name {name!r} is taken in a checkpoint: expected another name for this "
                "part of the state"
            )
    try:
        leaves, paths = flatten_state_dict(state.tree)
    except ValueError as error:
        raise LayoutError(
            f"rank {state.rank}: expected one name for every value, found {error}"
        ) from error
    values = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor):
            values[name] = Value(paths[name], leaf.detach(), state.shards.get(id(leaf)))
        else:
            values[name] = Value(paths[name], _pickled(leaf))
    values[TREE] = Value((OURS, "tree"), _pickled(outline(state.tree, (), leaves)))
    return values


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def outline(node: Any, path: tuple[Any, ...], leaves: Mapping[str, Any]) -> Any:
    """A tree's shape in plain values: a leaf is its name, a list a list, a mapping (kind, [(key,
    shape), ...])."""
    name = ".".join(map(str, path))
    if name in leaves and leaves[name] is node:
        return name
    if isinstance(node, Mapping):
        kind = "OrderedDict" if isinstance(node, OrderedDict) else "dict"
        return kind, [(key, outline(value, (*path, key), leaves)) for key, value in node.items()]
    return [outline(value, (*path, index), leaves) for index, value in enumerate(node)]


def grown(node: Any, values: Mapping[str, Any], live: Any) -> Any:
    """The inverse of `outline`."""
    if isinstance(node, str):
        return values[node]
    if isinstance(node, list):
        return [grown(sub, values, None) for sub in node]
    kind, pairs = node
    made: dict[Any, Any] = OrderedDict() if kind == "OrderedDict" else {}
    for key, sub in pairs:
        made[key] = grown(sub, values, live.get(key) if isinstance(live, Mapping) else None)
    if kind == "OrderedDict" and hasattr(live, "_metadata"):
        made._metadata = live._metadata  # type: ignore[attr-defined]  # the versions a module's state dict carries along
    return made
