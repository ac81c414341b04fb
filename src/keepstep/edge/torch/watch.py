"""Watch: whether the parts are, but for the bytes of their tensors, what they were when they were
gathered last.

A step changes values and seldom anything else, yet every `state_dict` builds all of its names and
tensors anew. So what a state dict is made of is remembered instead: the containers that modules and
optimizers keep their tensors in, what lies in them, and how each tensor looks (`looks.py`). All of
it is compared by identity, in calls that take one list of everything: no frame of Python's for each
tensor.

Only what torch's own classes tell of themselves can be known this way. A module with a hook, with
extra state, or with a state dict of its own making is not watched: it is asked each time.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, TypeGuard

import torch

from keepstep.edge.torch.dtensors import is_dtensor
from keepstep.edge.torch.looks import Looks
from keepstep.edge.torch.parts import bare, parameters_of
from keepstep.edge.torch.tree import is_plain

_MODULE_DICTS = (
    "_parameters",
    "_buffers",
    "_modules",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)
_MODULE_CONTAINERS = (*_MODULE_DICTS, "_non_persistent_buffers_set")
_MODULE_METHODS = (
    "state_dict",
    "_save_to_state_dict",
    "get_extra_state",
    "named_parameters",
    "named_buffers",
    "named_modules",
    "_named_members",
)
_OPTIMIZER_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
_OPTIMIZER_CONTAINERS = ("state", *_OPTIMIZER_HOOKS)

_END = (object(),)

_training = itemgetter("training")
_groups = attrgetter("param_groups")
_parameters = itemgetter("params")
_of_module = itemgetter(*_MODULE_CONTAINERS)
_of_optimizer = attrgetter(*_OPTIMIZER_CONTAINERS)
_own_methods = {name: getattr(torch.nn.Module, name) for name in _MODULE_METHODS}
_own_state_dict = torch.optim.Optimizer.state_dict
_DICTS = (dict, OrderedDict, defaultdict)


def can_watch(part: Any) -> bool:
    """Whether all that this part tells of itself is known to the watch."""
    if isinstance(part, torch.nn.Module):
        return all(map(_is_plain_module, bare(part).modules()))
    if isinstance(part, torch.optim.Optimizer):
        return _is_plain_optimizer(part)
    return isinstance(part, torch.Tensor) and _is_plain_tensor(part)


def _is_plain_tensor(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and is_plain(tensor) and not is_dtensor(tensor)


def _is_plain_module(module: torch.nn.Module) -> bool:
    own = vars(module)
    tensors = (*module._parameters.values(), *module._buffers.values())
    return (
        _has_own_methods(type(module))
        and own.keys().isdisjoint(_MODULE_METHODS)
        and all(type(own[name]) in _DICTS for name in _MODULE_DICTS)
        and type(own["_non_persistent_buffers_set"]) is set
        and not own["_state_dict_hooks"]
        and not own["_state_dict_pre_hooks"]
        and all(t is None or _is_plain_tensor(t) for t in tensors)
    )


def _has_own_methods(kind: type) -> bool:
    """Whether they are torch's."""
    return all(getattr(kind, name) is method for name, method in _own_methods.items())


def _is_plain_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Tensors by name for each parameter, and nothing else."""
    return (
        type(optimizer).state_dict is _own_state_dict
        and "state_dict" not in vars(optimizer)
        and type(optimizer.state) in _DICTS
        and not any(getattr(optimizer, name, True) for name in _OPTIMIZER_HOOKS)
        and _are_of(optimizer.state, parameters_of(optimizer))
        and all(map(_is_plain_entry, optimizer.state.values()))
    )


def _are_of(keys: Iterable[Any], parameters: Iterable[torch.Tensor]) -> bool:
    return {id(key) for key in keys} <= {id(p) for p in parameters}


def _is_plain_entry(entry: Any) -> bool:
    return type(entry) is dict and all(
        value is None or (isinstance(value, torch.Tensor) and _is_plain_tensor(value))
        for value in entry.values()
    )


class Watch:
    """Over parts by their paths. Modules and tensors must be such as `can_watch`; of other
    optimizers only the groups are watched, of other parts nothing."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._parts = dict(parts)
        self._wrapped = [p for p in parts.values() if isinstance(p, torch.nn.Module)]
        self._roots = [bare(p) for p in self._wrapped]
        self._modules = list({id(m): m for root in self._roots for m in root.modules()}.values())
        self._kinds = set(map(type, self._modules))
        self._optimizers = [p for p in parts.values() if isinstance(p, torch.optim.Optimizer)]
        self._plain = [o for o in self._optimizers if can_watch(o)]
        self._frames = list(self._frames_now())
        self._containers = list(self._find_containers())
        self._sizes = list(self._sizes_now())
        self._filled = [c for c in self._containers if c]  # the others stay empty, their sizes say
        self._filled_dicts = [c for c in self._filled if isinstance(c, dict)]
        self._contents = list(self._contents_now())
        self._tensors = self._find_tensors()
        self._looks = Looks(self._tensors)

    def watches(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether its state is watched, too."""
        return any(map(is_, self._plain, repeat(optimizer)))

    def is_as_it_was(self, parts: Mapping[str, Any]) -> bool:
        """Whether these are the same parts and all that is watched of them is the same."""
        return (
            list(parts) == list(self._parts)
            and _same(self._parts.values(), parts.values())
            and _same(self._frames, self._frames_now())
            and all(map(_has_own_methods, self._kinds))
            and list(self._sizes_now()) == self._sizes
            and _same(self._contents, self._contents_now())
            and self._looks.are(self._tensors)
        )

    def modes(self) -> list[bool]:
        """Of all modules, which of them train."""
        return list(map(_training, map(vars, self._modules)))

    def _frames_now(self) -> Iterator[Any]:
        """What everything else hangs on."""
        owners = list(map(vars, self._modules))
        return chain(
            map(type, self._parts.values()),
            map(bare, self._wrapped),
            owners,
            map(type, self._modules),
            chain.from_iterable(map(_of_module, owners)),
            map(_groups, self._optimizers),
            map(_parameters, chain.from_iterable(map(_groups, self._optimizers))),
            chain.from_iterable(map(_of_optimizer, self._plain)),
        )

    def _find_containers(self) -> Iterator[Any]:
        for module in self._modules:
            yield from _of_module(vars(module))
        for optimizer in self._optimizers:
            yield optimizer.param_groups
            yield from map(_parameters, optimizer.param_groups)
        for optimizer in self._plain:
            yield from _of_optimizer(optimizer)
            yield from optimizer.state.values()

    def _sizes_now(self) -> Iterator[int]:
        """Of the owners as well: a method of one object's own would make it longer."""
        owners = (*self._modules, *self._plain)
        return map(len, chain(self._containers, map(vars, owners)))

    def _contents_now(self) -> Iterator[Any]:
        """What lies in the containers, which are of the sizes that they were of."""
        values = chain.from_iterable(map(dict.values, self._filled_dicts))
        return chain(chain.from_iterable(self._filled), values)

    def _find_tensors(self) -> list[torch.Tensor]:
        found = [p for p in self._parts.values() if isinstance(p, torch.Tensor)]
        for module in self._modules:
            found += filter(_is_there, module._parameters.values())
            found += filter(_is_there, module._buffers.values())
        for optimizer in self._optimizers:
            found += parameters_of(optimizer)
        for optimizer in self._plain:
            for entry in optimizer.state.values():
                found += filter(_is_there, entry.values())
        return list({id(t): t for t in found}.values())


def _is_there(value: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return value is not None


def _same(before: Iterable[Any], now: Iterable[Any]) -> bool:
    """Whether they are the very same objects, and as many."""
    return all(map(is_, chain(before, _END), chain(now, _END)))
