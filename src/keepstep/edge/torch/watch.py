"""Watch: whether the parts are, but for the bytes of their tensors, what they were when they were
gathered last.

A step changes values and seldom anything else, yet every `state_dict` builds all of its names and
tensors anew. So what a state dict is made of is remembered instead: the containers that modules and
optimizers keep their tensors in, what lies in them, and how each tensor looks (`looks.py`). All of
it is compared by identity, in calls that take one list of everything: no frame of Python's for each
tensor. Where dicts count their changes (`dict_changes.py`) they are not looked into.

Only what torch's own classes tell of themselves can be known this way. A module with a hook, with
extra state, or with a state dict of its own making is not watched: it is asked each time.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, TypeVar

import torch

from keepstep.edge.torch.dict_changes import can_count, changes_of
from keepstep.edge.torch.dtensors import is_dtensor
from keepstep.edge.torch.looks import Looks
from keepstep.edge.torch.parts import bare, parameters_of
from keepstep.edge.torch.tree import is_plain

SHELF = 128  # modules, or parameters' states: what they touch is a few hundred KiB

_MODULE_DICTS = (
    "_parameters",
    "_buffers",
    "_modules",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)
_MODULE_FIELDS = ("training", *_MODULE_DICTS, "_non_persistent_buffers_set")
_MODULE_METHODS = (
    "state_dict",
    "_save_to_state_dict",
    "get_extra_state",
    "named_parameters",
    "named_buffers",
    "named_modules",
    "_named_members",
)
OPTIMIZER_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
_OPTIMIZER_CONTAINERS = ("state", *OPTIMIZER_HOOKS)

_END = (object(),)

_groups = attrgetter("param_groups")
_parameters = itemgetter("params")
_of_module = itemgetter(*_MODULE_FIELDS)
_of_optimizer = attrgetter(*_OPTIMIZER_CONTAINERS)
_T = TypeVar("_T")

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
        and not any(getattr(optimizer, name, True) for name in OPTIMIZER_HOOKS)
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


class _Containers:
    """What lies in some containers, by identity. Into dicts that count their changes it looks only
    when a count has moved."""

    def __init__(self, containers: Iterable[Any]) -> None:
        found = list(containers)
        self._empty = [c for c in found if not c]
        filled = [c for c in found if c]
        self._dicts = [c for c in filled if can_count(c)]
        self._changes = changes_of(self._dicts)
        self._inside = _Inside(self._dicts)
        self._uncounted = _Inside([c for c in filled if not can_count(c)])

    def are_as_they_were(self) -> bool:
        return (
            not any(self._empty)
            and self._uncounted.is_as_it_was()
            and (self._changes == changes_of(self._dicts) or self._are_after_all())
        )

    def _are_after_all(self) -> bool:
        """Whether they hold the same, however often they were written to."""
        changes = changes_of(self._dicts)
        if not self._inside.is_as_it_was():
            return False
        self._changes = changes
        return True


class _Inside:
    """Containers that hold something, and what."""

    def __init__(self, containers: Sequence[Any]) -> None:
        self._containers = containers
        self._dicts = [c for c in containers if isinstance(c, dict)]
        self._sizes = list(map(len, containers))
        self._items = list(self._items_now())

    def is_as_it_was(self) -> bool:
        sizes = list(map(len, self._containers))
        return sizes == self._sizes and all(map(is_, self._items, self._items_now()))

    def _items_now(self) -> Iterator[Any]:
        values = chain.from_iterable(map(dict.values, self._dicts))
        return chain(chain.from_iterable(self._containers), values)


class _Shelf:
    """A part of what is watched, small enough to stay in a processor's cache from the first look
    to the last. `containers` hold what is watched."""

    def __init__(self, containers: Iterable[Any], tensors: Iterable[torch.Tensor]) -> None:
        self._containers = _Containers(containers)
        self.tensors = list({id(tensor): tensor for tensor in tensors}.values())
        self._looks = Looks(self.tensors)

    @property
    def versions(self) -> list[int]:
        """The tensors' counters at the last look."""
        return self._looks.versions

    def is_as_it_was(self) -> bool:
        return self._containers.are_as_they_were() and self._looks.are(self.tensors)


class _Modules(_Shelf):
    """Some modules without those inside them. They may not get more or fewer attributes, for the
    same reason as optimizers."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = modules
        self._kinds = list(map(type, modules))
        self._own = list(map(vars, modules))
        self._changes = changes_of(self._own)
        self._sizes = list(map(len, self._own))
        self._fields = self._fields_now()
        containers = [f for f in self._fields if not isinstance(f, bool)]
        tensors = [t for m in modules for t in (*m._parameters.values(), *m._buffers.values())]
        super().__init__(containers, [t for t in tensors if t is not None])

    @property
    def modes(self) -> list[bool]:
        """Which of them train, as it was at the last look."""
        return self._fields[:: len(_MODULE_FIELDS)]

    def is_as_it_was(self) -> bool:
        return (
            all(map(is_, self._own, map(vars, self._modules)))
            and all(map(is_, self._kinds, map(type, self._modules)))
            and (self._changes == changes_of(self._own) or self._are_after_all())
            and super().is_as_it_was()
        )

    def _are_after_all(self) -> bool:
        """Whether their fields are the same, but for the modes, which may be any."""
        changes = changes_of(self._own)
        if list(map(len, self._own)) != self._sizes:
            return False
        fields = self._fields_now()
        self._fields[:: len(_MODULE_FIELDS)] = fields[:: len(_MODULE_FIELDS)]
        if not all(map(is_, self._fields, fields)):
            return False
        self._changes = changes
        return True

    def _fields_now(self) -> list[Any]:
        return list(chain.from_iterable(map(_of_module, self._own)))


class Watch:
    """Over parts by their paths. Modules and tensors must be such as `can_watch`; of other
    optimizers only the groups are watched, of other parts nothing."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self._parts = dict(parts)
        self._wrapped = [p for p in parts.values() if isinstance(p, torch.nn.Module)]
        roots = [bare(p) for p in self._wrapped]
        modules = list({id(m): m for root in roots for m in root.modules()}.values())
        self._kinds = set(map(type, modules))
        self._optimizers = [p for p in parts.values() if isinstance(p, torch.optim.Optimizer)]
        self._plain = [o for o in self._optimizers if can_watch(o)]
        self._frame = list(self._frame_now())
        self._attributes = self._attributes_now()
        self._modules = [_Modules(some) for some in _in_shelves(modules)]
        self._shelves = [*self._modules, *self._other_shelves()]

    def watches(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether its state is watched, too."""
        return any(map(is_, self._plain, repeat(optimizer)))

    def is_as_it_was(self, parts: Mapping[str, Any]) -> bool:
        """Whether these are the same parts and all that is watched of them is the same."""
        with torch.enable_grad():  # else guards see nothing that learns
            return (
                list(parts) == list(self._parts)
                and _same(self._parts.values(), parts.values())
                and _same(self._frame, self._frame_now())
                and self._attributes == self._attributes_now()
                and all(map(_has_own_methods, self._kinds))
                and all(shelf.is_as_it_was() for shelf in self._shelves)
            )

    def modes(self) -> list[bool]:
        """Of all modules, which of them train, as it was at the last look."""
        return [mode for shelf in self._modules for mode in shelf.modes]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that are watched; one may be there twice."""
        return list(chain.from_iterable(shelf.tensors for shelf in self._shelves))

    def versions(self) -> Iterator[int]:
        """Their counters at the last look."""
        return chain.from_iterable(shelf.versions for shelf in self._shelves)

    def _frame_now(self) -> Iterator[Any]:
        """What everything else hangs on."""
        return chain(
            map(type, self._parts.values()),
            map(bare, self._wrapped),
            map(_groups, self._optimizers),
            map(_parameters, chain.from_iterable(map(_groups, self._optimizers))),
            chain.from_iterable(map(_of_optimizer, self._plain)),
        )

    def _attributes_now(self) -> list[int]:
        """How many the optimizers have: a method of one object's own is one more."""
        return list(map(len, map(vars, self._plain)))

    def _other_shelves(self) -> Iterator[_Shelf]:
        containers = list(chain.from_iterable(map(_of_optimizer, self._plain)))
        for optimizer in self._optimizers:
            containers += [optimizer.param_groups, *map(_parameters, optimizer.param_groups)]
        yield _Shelf(containers, ())
        for optimizer in self._plain:
            for entries in _in_shelves(list(optimizer.state.values())):
                values = [value for entry in entries for value in entry.values()]
                yield _Shelf(entries, [value for value in values if value is not None])
        tensors = [p for p in self._parts.values() if isinstance(p, torch.Tensor)]
        for optimizer in self._optimizers:
            tensors += parameters_of(optimizer)
        for some in _in_shelves(self._not_in_modules(tensors)):
            yield _Shelf((), some)

    def _not_in_modules(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        known = {id(p) for module in self._wrapped for p in module.parameters()}
        return [tensor for tensor in tensors if id(tensor) not in known]


def _in_shelves(things: list[_T]) -> Iterator[list[_T]]:
    for at in range(0, len(things), SHELF):
        yield things[at : at + SHELF]


def _same(before: Iterable[Any], now: Iterable[Any]) -> bool:
    """Whether they are the very same objects, and as many."""
    return all(map(is_, chain(before, _END), chain(now, _END)))
