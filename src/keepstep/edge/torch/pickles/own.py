"""Own: what a live program's state is made of, which saved bytes may make again.

Comes in: the pickle of the live state, and names that a person trusts. Goes out: a vocabulary that
adds to the known types
* what the live state names, as it uses it: what is only named there is only named, what is called
  there may be called. A function of Python's own library is never called, unless it is known;
* the other classes of the program, of its script and of modules that are not installed: their
  objects are made without a call of the class, and filled as the class fills them (`__setstate__`).
  A list that is empty at first fills with such;
* other classes of the packages that those and the protected objects are from, as far as making and
  filling an object runs no code of the class (but how it compares);
* what a person has named.
What saved bytes say may be anything: a program's `__setstate__` looks itself at what it is given.

Nothing is ever imported because bytes name it.
"""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, EnumMeta
from functools import reduce
from importlib import import_module
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from keepstep.edge.torch.pickles.inert import Uses
from keepstep.edge.torch.pickles.known import Call, Known, Name, is_ours, set_attributes
from keepstep.edge.torch.pickles.known_numpy import build_of, empty_array, makes_empty_array
from keepstep.errors import UntrustedError

SCRIPT = "__main__"
# Not the program's own: what is from there is known, or is in the live state itself.
LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "numpy", "keepstep")) - {SCRIPT}

_INSTALLED = frozenset(("site-packages", "dist-packages"))  # in a path

# Methods that run while an object is made, and while it is filled. A class that has one of its own
# making runs code.
_MAKING = ("__new__", "__del__", "__getattribute__", "_missing_")
_FILLING = (
    *("__setstate__", "__setattr__", "__setitem__"),
    *("append", "extend", "add", "update"),
)
_TORCHS_HOOKS = ("__torch_function__", "__torch_dispatch__")
_VALUES = (dict, list, tuple, set, frozenset, str, bytes, int, float, bool, type(None))
_BUILTIN = ("builtins", "collections", "typing", "enum", "abc")


class Own(Known):
    """The vocabulary of one program.

    uses: finds what its live state names, and what for; asked once, when a name is not known.
    objects: what is protected.
    trusted: dotted names of classes, functions and modules.
    calls: see `Known`.
    """

    def __init__(
        self,
        uses: Callable[[], Uses],
        objects: Iterable[Any] = (),
        trusted: Iterable[str] = (),
        calls: Mapping[Name, Call] | None = None,
    ) -> None:
        super().__init__(dict(calls or {}))
        self._uses: Callable[[], Uses] | None = uses
        self._objects = tuple(objects)
        self._trusted = tuple(trusted)
        self._named: dict[Name, Any] = {}
        self._trusted_found: set[Name] = set()
        self._called: list[Any] = []
        self._kinds: set[type] = set()
        self._packages: set[str] = set()

    def _look(self) -> None:
        """What the live state is made of."""
        uses, self._uses = self._uses, None
        if uses is None:
            return
        found = uses()
        for key in found.named:
            if not is_ours(key):
                self._learn(key, key in found.called, key in found.made)
        kinds = {*self._kinds, *map(type, self._objects)}
        packages = {kind.__module__.partition(".")[0] for kind in kinds}
        self._packages = {SCRIPT, *packages} - LIBRARIES

    def _learn(self, key: Name, is_called: bool, is_made: bool) -> None:
        found = self._named[key] = _resolve(*key)
        is_class = isinstance(found, type)
        # A class of tensors or arrays is only named, by what makes its objects.
        if is_class and (is_called or is_made or issubclass(found, _arrays())):
            self._kinds.add(found)
        if is_called and (is_class or not _is_pythons(found)):
            self._called.append(found)

    def find_other(self, module: str, name: str) -> Any:
        self._look()
        key = module, name
        if self._is_trusted(module, name) and key not in self._trusted_found:
            found = self._named[key] = _resolve(*key)
            self._trusted_found.add(key)
            self._called.append(found)
            self._kinds.update({found} if isinstance(found, type) else ())
        elif key not in self._named:
            self._named[key] = self._of_own_module(module, name)
        return self._named[key]

    def refused(self, uses: Uses) -> set[Name]:
        """What of another state's uses this vocabulary would refuse."""
        self._look()
        return {n for n in uses.named if not is_ours(n) and not self._serves(n, uses)}

    def _serves(self, name: Name, uses: Uses) -> bool:
        try:
            found = self.find_other(*name)
        except UntrustedError:
            return False
        is_callable = name not in uses.called or any(found is known for known in self._called)
        return is_callable and (name not in uses.made or found in self._kinds)

    def _is_trusted(self, module: str, name: str) -> bool:
        return any(
            f"{module}.{name}" == word or f"{module}.".startswith(f"{word}.")
            for word in self._trusted
        )

    def _of_own_module(self, module: str, name: str) -> Any:
        package = module.partition(".")[0]
        is_local = package == SCRIPT or (package not in LIBRARIES and _is_local(package))
        loaded = sys.modules.get(module)
        kind = None if loaded is None else _attribute_of(loaded, name)
        is_there = isinstance(kind, type) and (kind.__module__, kind.__qualname__) == (module, name)
        if not isinstance(kind, type) or not is_there:
            return super().find_other(module, name)
        is_pythons = package in sys.stdlib_module_names and issubclass(kind, (Enum, Exception))
        is_tensors = issubclass(kind, torch.Tensor)
        if is_tensors:
            is_taken = _is_bare(kind)
        else:
            is_taken = _is_made_plainly(kind) if is_local else runs_no_code(kind)
        is_own = is_local or package in self._packages
        if not is_pythons and not (is_own and is_taken):
            return super().find_other(module, name)
        self._kinds.add(kind)
        if issubclass(kind, Enum):
            self._called.append(kind)
        return kind

    def call(self, function: Any, args: tuple[Any, ...]) -> Any:
        if makes_empty_array(function, args) and args[0] in self._kinds:
            return empty_array(function, args)
        return super().call(function, args)

    def call_other(self, function: Any, args: tuple[Any, ...]) -> Any:
        if any(function is known for known in self._called):
            return function(*args)
        is_own = isinstance(function, type) and function in self._kinds
        if is_own and _is_called_plainly(function) and _are_plain(args):
            return function(*args)
        return super().call_other(function, args)

    def attribute(self, owner: Any, name: str) -> Any:
        """Also a method of an object of the program's own."""
        if type(owner) not in self._kinds or not isinstance(name, str) or name.startswith("__"):
            return super().attribute(owner, name)
        method = getattr(type(owner), name, None)
        if not isinstance(method, FunctionType):
            raise UntrustedError(f"{type(owner).__name__} has no method {name!r}")
        return MethodType(method, owner)

    def make(self, kind: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if not isinstance(kind, type) or kind not in self._kinds:
            return super().make(kind, args, options)
        if issubclass(kind, _arrays()):
            raise UntrustedError(f"the saved state makes a {kind.__name__} without memory")
        return kind.__new__(kind, *args, **options)

    def build(self, made: Any, state: Any) -> None:
        kind = type(made)
        if kind not in self._kinds or isinstance(made, (type, Enum)):
            super().build(made, state)
        elif (build := build_of(kind)) is not None:
            build(made, state)
        elif hasattr(kind, "__setstate__") and not issubclass(kind, torch.Tensor):
            made.__setstate__(state)
        else:
            set_attributes(made, state)

    def holds(self, made: Any) -> bool:
        is_own = type(made) in self._kinds and not isinstance(made, (type, Enum, torch.Tensor))
        return is_own or super().holds(made)


def _is_bare(kind: type) -> bool:
    """Whether a class of tensors only has a name of its own."""
    own = kind.__mro__[: kind.__mro__.index(torch.Tensor)]
    return not any(
        name in vars(base) for base in own for name in (*_MAKING, *_FILLING, *_TORCHS_HOOKS)
    )


def _arrays() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    return (torch.Tensor,) if numpy is None else (torch.Tensor, numpy.ndarray)


def runs_no_code(kind: type) -> bool:
    """Whether an object of this class can be made and filled without any code of its own."""
    if type(kind) not in (type, ABCMeta, EnumMeta) or issubclass(kind, torch.Tensor):
        return False
    return all(_is_generated(kind, name) for name in (*_MAKING, *_FILLING))


def _is_made_plainly(kind: type) -> bool:
    """Whether an object of this class can be made, if not filled, without any code of its own."""
    return not issubclass(kind, torch.Tensor) and all(_is_generated(kind, n) for n in _MAKING)


def _is_called_plainly(kind: type) -> bool:
    """Whether an object of this class can be made by a call, and filled, without any code of its
    own."""
    owner = next(base for base in kind.__mro__ if "__init__" in vars(base))
    return owner.__module__ in _BUILTIN and runs_no_code(kind)


def _are_plain(args: tuple[Any, ...]) -> bool:
    """Whether they are values, and nothing that is asked for more and more of them."""
    return all(type(arg) in _VALUES for arg in args)


def _is_generated(kind: type, name: str) -> bool:
    """Whether a method is a built-in type's, or made by Python from the class's fields."""
    owner = next((base for base in kind.__mro__ if name in vars(base)), object)
    if owner.__module__ in _BUILTIN:
        return True
    method = vars(owner)[name]
    function = getattr(method, "__func__", method)
    made_by = getattr(function, "__globals__", {}).get("__name__", "")
    is_tuples = name == "__new__" and made_by == f"namedtuple_{owner.__name__}"
    is_enums = issubclass(kind, Enum) and made_by == "enum"
    parameters = getattr(owner, "__dataclass_params__", None)
    is_records = parameters is not None and (
        (name == "__setattr__" and parameters.frozen) or made_by == "dataclasses"
    )
    return is_tuples or is_enums or is_records


def _is_local(package: str) -> bool:
    """Whether the program has it loaded from a place where nothing is installed."""
    loaded = sys.modules.get(package)
    places = [*getattr(loaded, "__path__", ()), getattr(loaded, "__file__", None) or ""]
    return any(places) and not any(_INSTALLED & set(Path(place).parts) for place in places)


def _is_pythons(found: Any) -> bool:
    module = getattr(found, "__module__", None) or "builtins"
    return module.partition(".")[0] in sys.stdlib_module_names


def _resolve(module: str, name: str) -> Any:
    """What the program itself names. Raises UntrustedError when there is none."""
    try:
        return reduce(getattr, name.split("."), import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise UntrustedError(f"{module}.{name} is trusted, and is not there: {error}") from error


def _attribute_of(loaded: ModuleType, name: str) -> Any:
    """Only what is in classes, step by step: no attribute is asked for that computes."""
    found: Any = loaded
    for part in name.split("."):
        if not isinstance(found, (ModuleType, type)):
            return None
        found = vars(found).get(part)
    return found
