"""Values: saved plain values into the ones that the program holds.

A program holds its lists, arrays and objects by reference, so what is saved goes into the very
objects where that can be: dicts, lists, deques, sets, arrays, tensors, generators of random
numbers, and objects with attributes or slots, however nested. What cannot be changed in place
(numbers, tuples, arrays of another shape) replaces what is there, in its container or in
`job.state`.

Tensors: a saved tensor that is the same memory as one that has been loaded elsewhere (a module's
weight) is that live one again. A live tensor is written only if nothing else uses its memory; else
the saved one takes its place.
"""

from __future__ import annotations

import copy
import copyreg
import logging
import random
import sys
import types
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from enum import Enum
from fractions import Fraction
from functools import partial
from pathlib import PurePath
from typing import Any
from uuid import UUID

import torch

from keepstep.edge.torch.dtensors import is_dtensor
from keepstep.edge.torch.in_place import overlaps_itself
from keepstep.edge.torch.parts import PlaceOfPart
from keepstep.edge.torch.tree import local_part

# What is one in a process: a saved one is the live one.
BY_NAME = (type, types.FunctionType, types.ModuleType, logging.Logger, Enum)
_UNCHANGING = (int, float, complex, str, bytes, tuple, frozenset, PurePath, UUID, Fraction)
_CONTAINERS = (dict, list, set, deque, bytearray)
_BARE = (*_CONTAINERS, defaultdict)
_BOUND = (types.MethodType, types.BuiltinFunctionType, partial)


def write_tensor(live: torch.Tensor, saved: torch.Tensor) -> None:
    """Into memory that is there. Of an expanded tensor the first of the values that are one."""
    with torch.no_grad():
        if live.layout is not torch.strided:
            if live.layout is not torch.sparse_coo:
                live.resize_as_sparse_(saved)  # to as many values
        elif not is_dtensor(live) and not live.is_nested:
            for dim, (size, stride) in enumerate(zip(live.shape, live.stride(), strict=True)):
                if stride == 0 and size > 1:
                    live, saved = live.narrow(dim, 0, 1), saved.narrow(dim, 0, 1)
        live.copy_(saved)


class Refill:
    """For one restore. `same`: the address of a copy to the address of what it is a copy of.
    `are_plain`: saved parameters are plain tensors, as in a checkpoint."""

    def __init__(self, same: Mapping[int, int], are_plain: bool = False) -> None:
        self._same = same
        self._are_plain = are_plain
        self._live_of: dict[tuple[Any, ...], torch.Tensor] = {}
        self._taken: set[int] = set()  # memory that is written already, or belongs to a part
        self._done: dict[int, Any] = {}  # by the saved object's id: what stands for it
        self._kept: list[Any] = []  # so that no id is used twice
        self.replaced: list[str] = []

    def loaded(self, saved: Any, live: Any) -> None:
        """This saved tensor is in that live one."""
        if isinstance(saved, torch.Tensor) and isinstance(live, torch.Tensor):
            if saved.numel() and saved.layout is torch.strided:
                self._live_of.setdefault(self._memory(saved), live)
                self._kept.append(saved)
            self.belongs(live)

    def belongs(self, live: Any) -> None:
        """A part's tensor: nothing else is written over it."""
        if isinstance(live, torch.Tensor) and live.layout is torch.strided:
            self._taken.add(local_part(live).untyped_storage().data_ptr())

    def top(self, name: str, live: Any, saved: Any) -> Any:
        """What `job.state` has under a name from now on."""
        found = self._fill(live, saved)
        if found is not live and _changes(live):
            self.replaced.append(
                f"{name}: the saved {type(saved).__name__} could not be put into the one that was "
                "passed; it is in job.state"
            )
        return found

    def _fill(self, live: Any, saved: Any) -> Any:
        """The live object with the saved content, or what takes its place."""
        if isinstance(saved, PlaceOfPart):
            return live
        if isinstance(saved, (int, float, str, bytes)) or saved is None:
            return saved
        if id(saved) in self._done:
            return self._done[id(saved)]
        self._kept.append(saved)
        if isinstance(saved, torch.Tensor):
            found = self._tensor(live, saved)
        elif isinstance(saved, _BOUND):
            found = self._bound(live, saved)
        elif type(live) is not type(saved) or isinstance(saved, BY_NAME):
            found = self._inside(saved)
        else:
            self._done[id(saved)] = live  # for a ring of references
            found = self._same_type(live, saved)
        self._done[id(saved)] = found
        return found

    def _bound(self, live: Any, saved: Any) -> Any:
        """A method is bound to the object that its own is now, and so is what a partial calls."""
        if isinstance(saved, partial):
            was = live.func if isinstance(live, partial) else None
            func = self._fill(was, saved.func)
            args = [self._fill(None, arg) for arg in saved.args]
            options = {name: self._fill(None, value) for name, value in saved.keywords.items()}
            saved.__setstate__((func, tuple(args), options, saved.__dict__ or None))  # type: ignore[attr-defined]
            return saved
        owner = saved.__self__
        if owner is None or isinstance(owner, BY_NAME):
            return saved
        own = self._fill(getattr(live, "__self__", None), owner)
        if own is owner:
            return saved
        if isinstance(saved, types.MethodType):
            return types.MethodType(saved.__func__, own)
        return getattr(own, saved.__name__)

    def _inside(self, saved: Any) -> Any:
        """A saved object that takes a live one's place; tensors in it may be live ones."""
        if type(saved) is not tuple:
            self._done[id(saved)] = saved  # for a ring of references
        if type(saved) is dict:
            for key, value in saved.items():
                saved[key] = self._fill(None, value)
        elif type(saved) is list:
            saved[:] = [self._fill(None, value) for value in saved]
        elif type(saved) is tuple:
            return tuple(self._fill(None, value) for value in saved)
        elif hasattr(saved, "__dict__") and not isinstance(saved, BY_NAME):
            for name, value in list(saved.__dict__.items()):
                saved.__dict__[name] = self._fill(None, value)
        return saved

    def _same_type(self, live: Any, saved: Any) -> Any:
        """The content, and what may be beside it: a class of the program's own has attributes."""
        found = self._content(live, saved)
        has_more = isinstance(live, _CONTAINERS) and type(live) not in _BARE
        if found is live and has_more and not isinstance(live, Counter):  # which pickles none
            self._attributes(live, saved)
        return found

    def _content(self, live: Any, saved: Any) -> Any:
        if isinstance(live, dict):
            filled = {
                self._fill(None, key): self._fill(live.get(key), value)
                for key, value in saved.items()
            }
            live.clear()
            live.update(filled)
            if isinstance(live, defaultdict):
                live.default_factory = self._fill(live.default_factory, saved.default_factory)
        elif isinstance(live, list):
            live[:] = list(self._each(live, saved))
        elif isinstance(live, deque):
            if live.maxlen != saved.maxlen:
                return saved
            filled_items = list(self._each(live, saved))
            live.clear()
            live.extend(filled_items)
        elif isinstance(live, tuple):
            return self._tuple(live, saved)
        elif isinstance(live, bytearray):
            live[:] = saved
        elif isinstance(live, set):
            filled_set = {self._fill(None, item) for item in saved}
            live.clear()
            live |= filled_set
        elif isinstance(live, random.Random):
            live.setstate(saved.getstate())
        else:
            return self._array(live, saved)
        return live

    def _each(self, live: Any, saved: Any) -> Iterator[Any]:
        beside = list(live)
        for index, value in enumerate(saved):
            yield self._fill(beside[index] if index < len(beside) else None, value)

    def _tuple(self, live: Any, saved: Any) -> Any:
        filled = list(self._each(live, saved))
        if len(filled) == len(live) and all(a is b for a, b in zip(filled, live, strict=True)):
            return live
        return type(live)(*filled) if hasattr(live, "_fields") else tuple(filled)

    def _array(self, live: Any, saved: Any) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            if isinstance(live, numpy.ndarray):
                if live.shape != saved.shape or live.dtype != saved.dtype:
                    return saved
                if not live.flags.writeable:
                    return saved
                live[...] = saved
                return live
            if isinstance(live, numpy.random.Generator):
                live.bit_generator.state = saved.bit_generator.state
                return live
            if isinstance(live, numpy.random.RandomState):
                live.set_state(saved.get_state(legacy=False))
                return live
        return self._object(live, saved)

    def _object(self, live: Any, saved: Any) -> Any:
        """Attributes and slots of an object that pickles as objects do."""
        kind = type(live)
        if not _pickles_as_objects_do(kind) or not _has_content(live):
            return saved
        if hasattr(kind, "__setstate__"):
            state = copy.copy(saved.__reduce_ex__(2)[2])
            if state is None:
                return saved
            live.__setstate__(self._fill(copy.copy(live.__reduce_ex__(2)[2]), state))
            return live
        parameters = getattr(kind, "__dataclass_params__", None)
        if parameters is not None and parameters.frozen:
            return saved
        self._attributes(live, saved)
        return live

    def _attributes(self, live: Any, saved: Any) -> None:
        kind = type(live)
        keeps_to_itself = getattr(kind, "__getstate__", None) is not getattr(
            object, "__getstate__", None
        )
        for name in _slots(kind):
            if hasattr(saved, name):
                value = getattr(saved, name)
                object.__setattr__(live, name, self._fill(getattr(live, name, None), value))
            elif hasattr(live, name) and not keeps_to_itself:
                object.__delattr__(live, name)
        if hasattr(live, "__dict__") and live.__dict__ is not live:
            before = dict(live.__dict__)
            if not keeps_to_itself:
                live.__dict__.clear()
            for name, value in saved.__dict__.items():
                live.__dict__[name] = self._fill(before.get(name), value)

    def _tensor(self, live: Any, saved: torch.Tensor) -> torch.Tensor:
        if saved.layout is not torch.strided or saved.is_quantized or saved.is_nested:
            return saved
        known = self._live_of.get(self._memory(saved)) if saved.numel() else None
        if known is not None:
            likes = live if self._are_plain else saved
            is_parameter = isinstance(likes, torch.nn.Parameter)
            is_same_kind = is_parameter == isinstance(known, torch.nn.Parameter)
            return known if is_same_kind else known.detach()
        found = saved
        if self._may_be_written(live, saved):
            write_tensor(live, saved)
            found = live
            if type(live).__module__.partition(".")[0] != "torch":  # a class of the program's
                self._attributes(live, saved)
        self.loaded(saved, found)
        return found

    def _is_of_kind(self, live: Any, saved: torch.Tensor) -> bool:
        """A checkpoint does not tell parameters from other tensors."""
        if self._are_plain and not is_dtensor(saved):
            return isinstance(live, torch.Tensor) and not is_dtensor(live)
        return type(live) is type(saved) and live.requires_grad == saved.requires_grad

    def _memory(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        local = local_part(tensor)
        address = local.data_ptr()
        address = self._same.get(address, address)
        return address, local.dtype, tuple(local.shape)

    def _may_be_written(self, live: Any, saved: torch.Tensor) -> bool:
        return (
            self._is_of_kind(live, saved)
            and live.layout is torch.strided
            and live.shape == saved.shape
            and live.dtype == saved.dtype
            and live.stride() == saved.stride()
            and live.is_leaf
            and not live.is_conj()
            and not live.is_neg()
            and not overlaps_itself(local_part(live))
            and _same_placement(live, saved)
            and local_part(live).untyped_storage().data_ptr() not in self._taken
        )


def _same_placement(live: torch.Tensor, saved: torch.Tensor) -> bool:
    if is_dtensor(live) and is_dtensor(saved):
        return live.device_mesh == saved.device_mesh and live.placements == saved.placements
    return True


def _changes(live: Any) -> bool:
    """Whether a program that holds this object would see it change."""
    if isinstance(live, (*BY_NAME, *_UNCHANGING)):
        return False
    changing = ("__dict__", "__setitem__", "__next__", "add", "append")
    return any(_slots(type(live))) or any(hasattr(live, name) for name in changing)


def _has_content(live: Any) -> bool:
    """Whether there is something in it that can be changed: else what it is was said when it was
    made."""
    kind = type(live)
    return hasattr(live, "__dict__") or any(_slots(kind)) or hasattr(kind, "__setstate__")


def _pickles_as_objects_do(kind: Any) -> bool:
    """Whether all that an object is stands in its attributes and slots."""
    if kind is types.SimpleNamespace:
        return True
    is_made_of = hasattr(kind, "__getnewargs__") or hasattr(kind, "__getnewargs_ex__")
    if is_made_of or kind in copyreg.dispatch_table:
        return False
    plain: Any = object
    return kind.__reduce__ is plain.__reduce__ and kind.__reduce_ex__ is plain.__reduce_ex__


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                yield f"_{base.__name__.lstrip('_')}{name}" if _is_private(name) else name


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")
