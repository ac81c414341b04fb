"""State: from the objects a user protects to tensors with names plus one pickled tree, and back.

Comes in: modules, optimizers, anything with `state_dict`/`load_state_dict`, tensors, picklable
values. Goes out: a list of items (a tensor's place and kind) and the tree's bytes, in which every
tensor is an index. The pickler's `reducer_override` sees every tensor wherever it hides (in lists,
in custom objects) and leaves plain values to the fast path. Tensors that share memory, type and
shape are kept once: tied weights stay tied.

A DTensor contributes its local part; the layout says which box of the whole it is.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

# what torch's own DCP uses
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from keepstep.edge.torch.foreign_draws import ForeignDraws
from keepstep.edge.torch.loader import Loaders
from keepstep.edge.torch.rng import put_back, read_rng
from keepstep.errors import ConfigError
from keepstep.model.layout import Layout, Shard, TensorSpec, lay_out

RNG = "rng"
LOADERS = "loaders"
ABOUT = "<about>"
# random states and loaders, which are always kept, and names of our own in checkpoints
RESERVED = {RNG, LOADERS, ABOUT, "keepstep", "ranks"}


@dataclass(frozen=True, slots=True)
class StateItem:
    """A tensor to keep: `local` is a plain tensor whose memory is the truth; `lazy` ones stand
    still until the next update.

    `address` is where its bytes lie as they are to be kept, None when they must go through torch.
    """

    spec: TensorSpec
    local: torch.Tensor
    lazy: bool
    address: int | None = None


@dataclass(frozen=True, slots=True)
class State:
    """One rank's state at one moment: tensors by reference, everything else already pickled."""

    items: tuple[StateItem, ...]
    objects: bytes
    layout: Layout

    @property
    def payload_bytes(self) -> int:
        return self.layout.objects_offset + len(self.objects)


def bare(module: torch.nn.Module) -> torch.nn.Module:
    """The user's module inside DistributedDataParallel and torch.compile, whose prefixes must not
    reach the names."""
    while True:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            module = module.module
        elif hasattr(module, "_orig_mod"):
            module = module._orig_mod  # type: ignore[assignment]
        else:
            return module


def unwrapped(value: Any) -> Any:
    """The optimizer inside a wrapper (Accelerate's), which has none of torch's hooks."""
    while isinstance(value, torch.optim.Optimizer) and not hasattr(
        value, "_optimizer_step_pre_hooks"
    ):
        value = value.optimizer  # type: ignore[attr-defined]
    return value


def kind_of(value: Any) -> str:
    """`module`, `optimizer`, `tensor`, `stateful` or `value`."""
    if isinstance(value, torch.nn.Module):
        return "module"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(value, torch.Tensor):
        return "tensor"
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return "stateful"
    return "value"


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The optimizer's parameters in the order its state dict numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor on this rank."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        local = tensor.to_local()
        return local.wait() if hasattr(local, "wait") else local.detach()


def by_address(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is, byte for byte, what is to be kept."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _address(tensor: torch.Tensor) -> int:
    return local_part(tensor).data_ptr() if isinstance(tensor, DTensor) else tensor.data_ptr()


class Values(dict[str, Any]):
    """The plain values by name. Only those that `protect` was given: another one would not be
    restored."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in self:
            raise ConfigError(
                f"job.state: expected one of {sorted(self)}, found {name!r}; name it in "
                "protect() first"
            )
        super().__setitem__(name, value)


@dataclass
class Protected:
    """Everything a user protects, by name. `values` are plain Python values, changed through
    `job.state`."""

    objects: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    # lazily copied once, found torn, copied at the boundary since
    eager_names: set[str] = field(default_factory=set)
    lazy: bool = True
    loaders: Loaders = field(default_factory=lambda: Loaders(ForeignDraws()))
    # by name, with what they were made from
    _specs: dict[str, tuple[Any, TensorSpec]] = field(default_factory=dict)
    _layout: Layout = field(default_factory=lambda: lay_out([]))
    _about: tuple[Any, dict[str, Any]] | None = None

    @classmethod
    def of(cls, stateful: Mapping[str, Any], lazy: bool) -> Protected:
        """Raises ConfigError on a reserved name or on nothing to protect."""
        if not stateful:
            raise ConfigError(
                "protect() expected at least one thing to protect, such as model=model, and "
                "found none"
            )
        for name in sorted(RESERVED & stateful.keys()):
            raise ConfigError(
                f"the name {name!r} is taken (reserved: {', '.join(sorted(RESERVED))}); give "
                "yours another one"
            )
        stateful = {name: unwrapped(value) for name, value in stateful.items()}
        values = Values((k, v) for k, v in stateful.items() if kind_of(v) == "value")
        return cls({k: v for k, v in stateful.items() if k not in values}, values, lazy=lazy)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [v for v in self.objects.values() if isinstance(v, torch.optim.Optimizer)]

    def about(self) -> dict[str, Any]:
        """What each thing is, in JSON's types: compared before anything is loaded."""
        sizes = [
            len(group["params"])
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        ]
        if self._about is None or self._about[0] != sizes:
            shapes = {
                k: [[str(p.dtype), list(p.shape)] for p in parameters_of(v)]
                for k, v in self.objects.items()
                if isinstance(v, torch.optim.Optimizer)
            }
            kinds = {k: kind_of(v) for k, v in {**self.objects, **self.values}.items()}
            self._about = (sizes, {"kinds": kinds, "optimizer_parameters": shapes})
        return self._about[1]

    def tree(self) -> dict[str, Any]:
        """The nested state, RNG first."""
        tree: dict[str, Any] = {RNG: read_rng()}
        for name, value in self.objects.items():
            if isinstance(value, torch.nn.Module):
                tree[name] = bare(value).state_dict()
            else:
                tree[name] = value if isinstance(value, torch.Tensor) else value.state_dict()
        return {**tree, **self.values, LOADERS: self.loaders.state_dict()}

    def gather(self) -> State:
        """Name every tensor and pickle the rest. Runs on the trainer's thread; copies no tensor,
        leaves random states as they were."""
        tree = self.tree()
        names: dict[int, str] = {}
        _name_tensors(tree, "", names)
        still = self._still_addresses() if self.lazy else frozenset()
        pickler = _TreePickler(names, still, self.eager_names, self._specs)
        try:
            pickler.dump({ABOUT: self.about(), **tree})
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{_unpicklable(tree)}: expected something that can be pickled, found: {error}"
            ) from error
        put_back(tree[RNG])
        items = tuple(pickler.items)
        specs = [i.spec for i in items]
        # mostly the very same objects, which compare at once
        if specs != [s.spec for s in self._layout.segments]:
            self._layout = lay_out(specs)
        return State(items, pickler.buffer.getvalue(), self._layout)

    def _still_addresses(self) -> frozenset[int]:
        # Only what a torch optimizer owns is known to stand still until its pre-step hook has run.
        addresses = set()
        for optimizer in self.optimizers:
            for parameter in parameters_of(optimizer):
                addresses.add(_address(parameter))
            for state in optimizer.state.values():
                addresses.update(_address(v) for v in state.values() if isinstance(v, torch.Tensor))
        return frozenset(addresses)


def _unpicklable(tree: dict[str, Any]) -> str:
    """Which of the protected things cannot be pickled."""
    for name, value in tree.items():
        try:
            _TreePickler({}, frozenset(), set(), {}).dump(value)
        except (pickle.PicklingError, AttributeError, TypeError):
            return name
    return "the state"


def _name_tensors(tree: Any, name: str, names: dict[int, str]) -> None:
    """Fill `names` with the dotted path of every tensor in dicts, lists and tuples."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    prefix = f"{name}." if name else ""
    for key, value in pairs:
        if isinstance(value, torch.Tensor):
            names[id(value)] = f"{prefix}{key}"
        elif isinstance(value, (dict, list, tuple)):
            _name_tensors(value, f"{prefix}{key}", names)


def _fetch(index: int) -> torch.Tensor:
    raise AssertionError(f"tensor {index} fetched outside a TreeUnpickler")


def _as_leaf(tensor: torch.Tensor, is_parameter: bool, requires_grad: bool) -> torch.Tensor:
    """A tensor that learns: a plain one would come back deaf to its gradients."""
    return (
        torch.nn.Parameter(tensor, requires_grad)
        if is_parameter
        else tensor.requires_grad_(requires_grad)
    )


class _TreePickler(pickle.Pickler):
    def __init__(
        self,
        names: dict[int, str],
        still: frozenset[int],
        eager_names: set[str],
        specs: dict[str, tuple[Any, TensorSpec]],
    ) -> None:
        self.buffer = io.BytesIO()
        super().__init__(self.buffer, protocol=5)
        self.items: list[StateItem] = []
        self._names, self._still, self._eager_names, self._specs = names, still, eager_names, specs
        self._seen: dict[tuple[Any, ...], int] = {}

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not _is_plain(value):
            return NotImplemented
        is_parameter = isinstance(value, torch.nn.Parameter)
        if (
            value.is_leaf
            and (is_parameter or value.requires_grad)
            and not isinstance(value, DTensor)
        ):
            plain = value.detach()
            self._names[id(plain)] = self._names.get(id(value), f"<hidden {len(self.items)}>")
            return _as_leaf, (plain, is_parameter, value.requires_grad)
        local = local_part(value)
        look = (
            local.dtype,
            local.shape,
            local.stride(),
            local.device,
            local.is_conj(),
            local.is_neg(),
        )
        key = (local.data_ptr(), *look) if local.numel() else (id(value),)
        index = self._seen.get(key)
        if index is None:
            index = self._seen[key] = len(self.items)
            name = self._names.get(id(value), f"<hidden {index}>")
            address = local.data_ptr()
            lazy = address in self._still and name not in self._eager_names
            self.items.append(
                StateItem(
                    self._spec(name, value, local, look),
                    local,
                    lazy,
                    address if by_address(local) else None,
                )
            )
        return _fetch, (index,)

    def _spec(self, name: str, tensor: torch.Tensor, local: torch.Tensor, look: Any) -> TensorSpec:
        if isinstance(tensor, DTensor):
            look = (*look, tensor.shape, tensor.placements, tensor.device_mesh)
        known = self._specs.get(name)
        if known is None or known[0] != look:
            known = self._specs[name] = (look, _spec(name, tensor, local))
        return known[1]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Dense memory we can copy; sparse, quantized and other wrapped tensors go through pickle as a
    whole."""
    if tensor.is_meta:
        raise ConfigError(
            f"a tensor of shape {tuple(tensor.shape)} is on the meta device: it has no bytes "
            "to protect yet"
        )
    if isinstance(tensor, DTensor):
        return True
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
    )


def _spec(name: str, tensor: torch.Tensor, local: torch.Tensor) -> TensorSpec:
    shard = None
    if isinstance(tensor, DTensor):
        shape, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        if tuple(shape) != tuple(local.shape):
            raise ConfigError(
                f"{name}: placements {tensor.placements} are not a box of the whole tensor"
            )
        shard = Shard(tuple(tensor.shape), tuple(offsets))
    # A dimension of one may have any stride and still count as contiguous; an expanded tensor comes
    # back as a whole one.
    as_usual = (local.is_contiguous() and 1 not in local.shape) or 0 in local.stride()
    stride = None if as_usual else tuple(local.stride())
    return TensorSpec(
        name,
        str(local.dtype).removeprefix("torch."),
        tuple(local.shape),
        local.numel() * local.element_size(),
        stride,
        shard,
    )


class _TreeUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, fetch: Callable[[int], torch.Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._fetch = fetch

    def find_class(self, module: str, name: str) -> Any:
        return (
            self._fetch
            if (module, name) == (__name__, "_fetch")
            else super().find_class(module, name)
        )


def rebuild(
    objects: bytes, tensors: Sequence[torch.Tensor]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tree, about) from the pickled tree and its tensors. The bytes must have been verified: this
    unpickles them."""
    tree = _TreeUnpickler(objects, tensors.__getitem__).load()
    about = tree.pop(ABOUT)
    return tree, about
