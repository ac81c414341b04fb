"""Tree: a rank's state as named values, as DCP names them, and the tree again.

Comes in: a tree of containers, tensors and other values. Goes out: values by name, what others need
to know of each, and the tree's shape in plain values. Never copies a tensor.

Invariant: `grown(outline(tree, ...), values, ...)` is the tree, container by container, and what is
one object under several names in the one is so in the other.
"""

from __future__ import annotations

import copy
import ctypes
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
import xxhash

# A private name: only torch's own flattening can promise torch's own names.
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from keepstep.edge.store.parts import Sketch
from keepstep.edge.torch.depth import as_deep_as_pickles
from keepstep.edge.torch.pickles.inert import save_torch
from keepstep.edge.torch.tree import is_plain
from keepstep.errors import ConfigError, LayoutError
from keepstep.model.layout import Shard

OURS = "keepstep"
TREE = f"{OURS}.tree"
RANKS = "ranks"

_KINDS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict"}
_OPENED = (*_KINDS, defaultdict, Counter)
_ATOMS = (int, float, complex, bool, str, bytes, type(None))  # which of two it is nobody can tell


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

    path: tuple[Any, ...]
    data: torch.Tensor | bytes
    shard: Shard | None = None

    def sketch(self) -> Sketch:
        # A key may be of the program's own, such as a member of an enumeration.
        path = tuple(key if isinstance(key, (str, int)) else str(key) for key in self.path)
        if isinstance(self.data, bytes):
            return Sketch(path, xxhash.xxh3_128_hexdigest(self.data), len(self.data))
        tensor = self.data.contiguous()
        return Sketch(
            path=path,
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
    with as_deep_as_pickles():
        return _flat(state)


def _flat(state: RankState) -> dict[str, Value]:
    tree = {name: _openable(name, value, state.shards) for name, value in state.tree.items()}
    try:
        leaves, paths = flatten_state_dict(tree)
    except ValueError as error:
        raise LayoutError(
            f"rank {state.rank}: expected one name for every value, found {error}"
        ) from error
    values = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, torch.Tensor) and is_plain(leaf):
            values[name] = Value(paths[name], leaf.detach(), state.shards.get(id(leaf)))
        else:
            whole = leaf.value if isinstance(leaf, _Whole) else leaf
            values[name] = Value(paths[name], save_torch(whole))
    values[TREE] = Value((OURS, "tree"), save_torch(outline(tree, (), leaves, {})))
    return values


@dataclass(frozen=True, eq=False, slots=True)
class _Whole:
    """A container that DCP would open, and that is kept as one value."""

    value: Any


def _openable(name: str, node: Any, shards: Container[int]) -> Any:
    """What DCP may open of a value by this name, so that it can be put together again."""
    look = _Look(shards)
    look.at(node)
    if (look.is_ring and not look.has_shards) or (look.is_twice and not look.has_tensors):
        return _Whole(node)
    return _named(name, _opened(node))


class _Look:
    """What is in a value. A container that is in it twice, or in itself, is so again only where
    one pickle has all of it; tensors have names of their own, which others read them by."""

    def __init__(self, shards: Container[int]) -> None:
        self.is_ring = self.is_twice = self.has_tensors = self.has_shards = False
        self._shards = shards
        self._seen: set[int] = set()
        self._above: set[int] = set()

    def at(self, node: Any) -> None:
        """Look at what is in this one, too."""
        if isinstance(node, torch.Tensor):
            self.has_tensors = True
            self.has_shards |= id(node) in self._shards
        if not isinstance(node, (Mapping, list)) or not node:
            return
        self.is_ring |= id(node) in self._above
        self.is_twice |= id(node) in self._seen
        if id(node) in self._seen:
            return
        self._seen.add(id(node))
        self._above.add(id(node))
        for inner in node.values() if isinstance(node, Mapping) else node:
            self.at(inner)
        self._above.discard(id(node))


def _opened(node: Any) -> Any:
    """The same with what only looks like a dict kept whole: nobody could make it again of its
    items."""
    if isinstance(node, Mapping):
        if type(node) not in _OPENED:
            return _Whole(node)
        inner = {key: _opened(value) for key, value in node.items()}
        if all(inner[key] is value for key, value in node.items()):
            return node
        made = _emptied(node)
        made.update(inner)
        return made
    if type(node) is list:
        items = [_opened(value) for value in node]
        return node if all(map(is_, items, node)) else items
    return node


def _named(name: str, node: Any) -> Any:
    """The same, kept whole where two of its values would have one name: keys may have dots in
    them, or print alike."""
    try:
        flatten_state_dict({name: node})
    except ValueError:
        return _Whole(node)
    return node


def _emptied(node: Any) -> Any:
    """One like it: a defaultdict with its factory."""
    made = copy.copy(node)
    made.clear()
    return made


def outline(
    node: Any, path: tuple[Any, ...], leaves: Mapping[str, Any], firsts: dict[int, str]
) -> Any:
    """A tree's shape in plain values: a leaf is its name, a list a list, a mapping (kind, [(key,
    shape), ...]), where a kind is a name or an empty mapping. A leaf that has been met by another
    name is {name: that one}. `firsts`: those, by id, which is theirs while `leaves` holds them."""
    name = ".".join(map(str, path))
    if name in leaves and leaves[name] is node:
        first = name if type(node) in _ATOMS else firsts.setdefault(id(node), name)
        return name if first == name else {name: first}
    if isinstance(node, Mapping):
        kind = _KINDS.get(type(node)) or _emptied(node)
        pairs = node.items()
        return kind, [(key, outline(inner, (*path, key), leaves, firsts)) for key, inner in pairs]
    return [outline(inner, (*path, at), leaves, firsts) for at, inner in enumerate(node)]


def grown(node: Any, values: Mapping[str, Any], live: Any) -> Any:
    """The inverse of `outline`."""
    if isinstance(node, str):
        return values[node]
    if isinstance(node, dict):
        [first] = node.values()
        return values[first]
    if isinstance(node, list):
        return [grown(sub, values, None) for sub in node]
    kind, pairs = node
    made: Any = OrderedDict() if kind == "OrderedDict" else {}
    if not isinstance(kind, str):
        made = _emptied(kind)
    for key, sub in pairs:
        made[key] = grown(sub, values, live.get(key) if isinstance(live, Mapping) else None)
    if kind == "OrderedDict" and hasattr(live, "_metadata"):
        made._metadata = live._metadata  # the versions a module's state dict carries along
    return made
