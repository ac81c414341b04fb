"""Inert: a pickle in which what is not known stays what was written about it.

A process that only passes a state on (the one that writes checkpoints) must look into its
containers and find its tensors, and has no use for a program's own objects: it could not even
import their classes where they are in the script. So what is not known becomes a `Named` or an
`Unmade`, which is pickled as it was read. `uses_of` reads a pickle of the live program so,
to see what it names and what for.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from keepstep.edge.torch.pickles.checked import (
    DEPTH_OF_ARGUMENTS,
    OF_TYPE,
    NotPlainError,
    OnlyCalled,
    load_pickles,
)
from keepstep.edge.torch.pickles.known import ATTRIBUTE, Call, Known, Name

# The first in which a class within a class has a name, and a time that comes twice in a night is
# told from the other.
PROTOCOL = 4


@dataclass(frozen=True, slots=True)
class Named:
    """A class or function that is not known, by its name."""

    module: str
    name: str

    def __call__(self, *args: Any) -> Any:
        raise AssertionError(f"{self.module}.{self.name} is only a name here")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotPlainError


@dataclass(eq=False, slots=True)
class Unmade:
    """An object that is not made. `how` is the operation that would have made it from `source` and
    `args`, `steps` what would have been done to it since: the operation and its operands."""

    how: bytes
    source: Any
    args: tuple[Any, ...]
    options: dict[str, Any] | None = None
    steps: list[tuple[bytes, Any]] = field(default_factory=list)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotPlainError

    def __str__(self) -> str:
        """The same in every process, where its arguments are plain."""
        name = self.source.name if isinstance(self.source, Named) else "object"
        return f"{name}({', '.join(map(str, self.args))})"

    # As a list, a set and a dict, which it may be.

    def append(self, item: Any) -> None:
        self.extend([item])

    def extend(self, items: list[Any]) -> None:
        self.steps.append((pickle.APPENDS, items))

    def add(self, item: Any) -> None:
        self.steps.append((pickle.ADDITEMS, [item]))

    def __setitem__(self, key: Any, value: Any) -> None:
        self.steps.append((pickle.SETITEMS, [key, value]))


@dataclass(frozen=True, slots=True)
class Uses:
    """What pickles name that is not known, what of it they call, and of which classes they make
    objects without a call."""

    named: set[Name] = field(default_factory=set)
    called: set[Name] = field(default_factory=set)
    made: set[Name] = field(default_factory=set)


class Inert(Known):
    """See the module."""

    def __init__(self, calls: Mapping[Name, Call] | None = None) -> None:
        super().__init__(dict(calls or {}))
        self.uses = Uses()

    def find_other(self, module: str, name: str) -> Named:
        self.uses.named.add((module, name))
        return Named(module, name)

    def call(self, function: Any, args: tuple[Any, ...]) -> Any:
        if function == ATTRIBUTE and len(args) == 2 and isinstance(args[0], Named):
            return self.find_other(args[0].module, f"{args[0].name}.{args[1]}")
        is_of_type = function == OF_TYPE  # which calls its first
        called = args[0] if is_of_type and args else function
        if isinstance(called, Named):
            self.uses.called.add((called.module, called.name))
        if not _is_made((function, *args)):
            return Unmade(pickle.REDUCE, function, args)
        return super().call(function, args)

    def make(self, kind: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if not isinstance(kind, Named):
            return super().make(kind, args, options)
        self.uses.made.add((kind.module, kind.name))
        if options:
            return Unmade(pickle.NEWOBJ_EX, kind, args, options)
        return Unmade(pickle.NEWOBJ, kind, args)

    def build(self, made: Any, state: Any) -> None:
        if isinstance(made, Unmade):
            made.steps.append((pickle.BUILD, state))
        else:
            super().build(made, state)

    def holds(self, made: Any) -> bool:
        return isinstance(made, Unmade) or super().holds(made)


def _is_made(value: Any, depth: int = 0) -> bool:
    """Whether the arguments of a call are all there."""
    if isinstance(value, (Named, Unmade)):
        return False
    if type(value) in (tuple, list) and depth < DEPTH_OF_ARGUMENTS:
        return all(_is_made(inner, depth + 1) for inner in value)
    return True


_Pickler: Any = pickle._Pickler  # of which the stubs know next to nothing


class Pickler(_Pickler):
    """Writes what is unmade as it was read. (The name is the one `torch.save` looks for.)"""

    def save_named(self, named: Named | OnlyCalled) -> None:
        self.save(named.module)
        self.save(named.name)
        self.write(pickle.STACK_GLOBAL)
        self.memoize(named)

    def save_unmade(self, unmade: Unmade) -> None:
        save, write = self.save, self.write
        save(unmade.source)
        save(unmade.args)
        if unmade.how == pickle.NEWOBJ_EX:
            save(unmade.options)
        write(unmade.how)
        self.memoize(unmade)
        for operation, operand in unmade.steps:
            if operation == pickle.BUILD:
                save(operand)
            else:
                write(pickle.MARK)
                for item in operand:
                    save(item)
            write(operation)

    dispatch: ClassVar[dict[Any, Any]] = {
        **_Pickler.dispatch,
        Named: save_named,
        OnlyCalled: save_named,
        Unmade: save_unmade,
    }


def save_torch(value: Any) -> bytes:
    """As `torch.save` would write it, whatever in it is unmade."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer, pickle_protocol=PROTOCOL)
    except NotPlainError:
        buffer = io.BytesIO()
        torch.save(value, buffer, pickle_module=sys.modules[__name__], pickle_protocol=PROTOCOL)
    return buffer.getvalue()


def uses_of(raw: bytes, sections: Sequence[int]) -> Uses:
    """What a pickled state names that is not known. `sections`: see `load_pickles`."""
    inert = Inert()
    load_pickles(raw, sections, inert)
    return inert.uses
