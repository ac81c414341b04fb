"""Known: the plain types of Python, numpy and torch, and how each is made from what a pickle says.

Each way is a function that looks at its arguments first: none of them runs code that the arguments
name, reads a file, or takes memory that the pickle does not fill. What may only be named (a class
as a value, a dtype) has no such function.
"""

from __future__ import annotations

import argparse
import array
import codecs
import collections
import datetime
import decimal
import fractions
import itertools
import logging
import pathlib
import random
import re
import sys
import time
import types
import uuid
import zoneinfo
from collections.abc import Callable
from functools import cache
from operator import index
from typing import Any

import torch

from keepstep.edge.torch.parts import PlaceOfPart
from keepstep.edge.torch.pickles.checked import (
    ITERATORS,
    OF_TYPE,
    OnlyCalled,
    check_keys,
)
from keepstep.edge.torch.pickles.known_numpy import numpys_builds, numpys_names
from keepstep.edge.torch.pickles.known_torch import (
    FUNCTIONS,
    PLACEMENTS,
    RESULTS,
    TORCHS_VALUES,
    build_placement,
    placements,
    unfilled_placement,
)
from keepstep.errors import UntrustedError

Name = tuple[str, str]
Call = Callable[..., Any]
Build = Callable[[Any, Any], None]

_FRACTION = re.compile(r"-?\d+(/\d+)?")


class Known:
    """A vocabulary of nothing else. `names` are added to the table: what stands for a name may be
    called where it is in `calls`."""

    def __init__(self, calls: dict[Name, Call] | None = None) -> None:
        self._extra = calls or {}
        self._calls = {**calls_by_id(), **{id(call): call for call in self._extra.values()}}

    def find(self, module: str, name: str) -> Any:
        """See `Vocabulary`."""
        key = (module.replace("numpy.core.", "numpy._core.", 1), name)
        if key in self._extra:
            return self._extra[key]
        table = names()
        if key in table:
            return table[key]
        if module.partition(".")[0] == "numpy" and key in numpys_names():
            return numpys_names()[key][0]
        if module == PLACEMENTS and name in placements():
            return placements()[name]
        # A memory format calls itself torch.NAME, wherever Python finds such a thing first.
        own = name.removeprefix("torch.") if module.partition(".")[0] == "torch" else ""
        if isinstance(getattr(torch, own, None), TORCHS_VALUES):
            return getattr(torch, own)
        return self.find_other(module, name)

    def find_other(self, module: str, name: str) -> Any:
        """What stands for a name that is in no table."""
        raise unknown(module, name)

    def call(self, function: Any, args: tuple[Any, ...]) -> Any:
        """See `Vocabulary`."""
        if function == ATTRIBUTE:
            return self.attribute(*args)
        if function == OF_TYPE:
            return self._from_type(*args)
        known = self._calls.get(id(function))
        if known is None and "numpy" in sys.modules:
            known = _numpys_calls().get(id(function))
        return self.call_other(function, args) if known is None else known(*args)

    def call_other(self, function: Any, args: tuple[Any, ...]) -> Any:
        """A call of what is in no table."""
        raise only_named("calls", function)

    def attribute(self, owner: Any, name: str) -> Any:
        """A class within a class, as old protocols name it."""
        if not isinstance(owner, type) or not isinstance(name, str):
            raise UntrustedError(f"the saved state asks a {type(owner).__name__} for {name!r}")
        return self.find(owner.__module__, f"{owner.__qualname__}.{name}")

    def _from_type(self, function: Any, kind: Any, args: Any, state: Any) -> Any:
        """A tensor of a class of its own, or with attributes."""
        made = self.call(function, args)
        if not isinstance(made, torch.Tensor) or not issubclass(kind, torch.Tensor):
            raise UntrustedError("the saved state makes a tensor of what is none")
        if type(made) is not kind:
            made = made.as_subclass(kind)
        if state:
            self.build(made, state)
        return made

    def make(self, kind: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """See `Vocabulary`."""
        if _is_placement(kind) and not args and not options:
            return unfilled_placement(kind)
        if kind in _MADE and not options:
            return kind.__new__(kind, *args)
        raise only_named("makes a", kind)

    def build(self, made: Any, state: Any) -> None:
        """See `Vocabulary`."""
        kind = type(made)
        known = _builds().get(kind)
        if known is None and "numpy" in sys.modules:
            known = numpys_builds().get(kind)
        if known is None and _is_placement(kind):
            known = build_placement
        if known is None:
            raise UntrustedError(f"the saved state changes a {kind.__name__}, which has no state")
        known(made, state)

    def holds(self, made: Any) -> bool:
        """See `Vocabulary`."""
        return type(made) in (collections.OrderedDict, collections.defaultdict, collections.Counter)


def is_ours(name: Name) -> bool:
    """What keepstep itself writes into a tree."""
    return name[0].partition(".")[0] == "keepstep"


def unknown(module: str, name: str) -> UntrustedError:
    """A name that nobody knows."""
    return UntrustedError(
        f"the saved state names {module}.{name}, and neither keepstep nor the state of this "
        "program has such a thing. Nothing of it is loaded, everything is kept. Where it is the "
        f"program's own, say so: KEEPSTEP_TRUSTED_TYPES={module}.{name}; where it was renamed, "
        "let the old name stand for it"
    )


def only_named(does: str, found: Any) -> UntrustedError:
    """Of a known name more is asked than it stands for."""
    name = ".".join(filter(None, (getattr(found, "__module__", None), _name_of(found))))
    return UntrustedError(
        f"the saved state {does} {name}, which the state of this program does not. Nothing of it "
        f"is loaded, everything is kept. If it may: KEEPSTEP_TRUSTED_TYPES={name}"
    )


def set_attributes(made: Any, state: Any) -> None:
    """As an object without `__setstate__` takes its state: attributes and slots."""
    attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    for name, value in (attributes or {}).items():
        if not isinstance(name, str):
            raise UntrustedError(f"the saved state has an attribute called {name!r}")
        vars(made)[name] = value
    for name, value in (slots or {}).items():
        if not isinstance(getattr(type(made), name, None), types.MemberDescriptorType):
            raise UntrustedError(f"{type(made).__name__} has no slot {name!r}")
        object.__setattr__(made, name, value)


def _name_of(named: Any) -> str:
    return str(getattr(named, "__qualname__", None) or f"a {type(named).__name__}")


# -- Python's


def _outside(*args: Any) -> Any:
    raise AssertionError("called outside a vocabulary")


def _plain(kind: type, *froms: type) -> Call:
    """A plain value of a plain value: what a subclass of the program's becomes when it is saved."""

    def make(value: Any) -> Any:
        if type(value) not in (kind, *froms):
            raise UntrustedError(f"expected {kind.__name__}, found a {type(value).__name__}")
        return kind(value)

    return make


def _type(value: Any) -> type:
    """How the classes of None and the like are pickled."""
    if value is not None and value is not Ellipsis and value is not NotImplemented:
        raise UntrustedError(f"expected None, found a {type(value).__name__}")
    return type(value)


def _time(seconds: Any, more: Any = None) -> time.struct_time:
    if type(seconds) is not tuple or type(more) not in (dict, type(None)):
        raise UntrustedError("expected the numbers of a time")
    return time.struct_time(seconds, more or {})


def _list(numbers: range) -> list[int]:
    if type(numbers) is not range:
        raise UntrustedError(f"expected successive numbers, found a {type(numbers).__name__}")
    return list(numbers)


def _set(items: list[Any]) -> set[Any]:
    check_keys(_a_list(items))
    return set(items)


def _frozenset(items: list[Any]) -> frozenset[Any]:
    check_keys(_a_list(items))
    return frozenset(items)


def _a_list(items: Any) -> list[Any]:
    if type(items) is not list:
        raise UntrustedError(f"expected a list, found a {type(items).__name__}")
    return items


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """How protocol 2 writes bytes."""
    if encoding != "latin1":
        raise UntrustedError(f"expected latin1, found {encoding!r}")
    return codecs.latin_1_encode(text)[0]


def _bytes() -> bytes:
    return b""


def _bytearray(content: bytes = b"", encoding: str = "") -> bytearray:
    raw = _encode(content, encoding) if isinstance(content, str) else content
    if not isinstance(raw, bytes):
        raise UntrustedError(f"expected bytes, found a {type(raw).__name__}")
    return bytearray(raw)


def _defaultdict(factory: Any = None) -> collections.defaultdict[Any, Any]:
    """The factory is not called as this is read."""
    if factory is not None and not callable(factory):
        raise UntrustedError(f"expected what makes a default, found {factory!r}")
    return collections.defaultdict(factory)


def _counter(counts: Any = None) -> collections.Counter[Any]:
    if type(counts) not in (dict, type(None)):
        raise UntrustedError(f"expected counts, found a {type(counts).__name__}")
    return collections.Counter(counts)


def _ordered(pairs: Any = ()) -> collections.OrderedDict[Any, Any]:
    check_keys(key for key, _ in pairs)
    return collections.OrderedDict(pairs)


def _deque(items: Any = (), most: Any = None) -> collections.deque[Any]:
    if type(items) not in (list, tuple):
        raise UntrustedError(f"expected a list, found a {type(items).__name__}")
    return collections.deque(items, None if most is None else index(most))


def _random() -> random.Random:
    return random.Random()


def _decimal(text: str) -> decimal.Decimal:
    return decimal.Decimal(_a_text(text))


def _fraction(first: Any, second: Any = None) -> fractions.Fraction:
    """Of two numbers, or of a text without an exponent, which could be a number without end."""
    if second is not None:
        return fractions.Fraction(index(first), index(second))
    if not _FRACTION.fullmatch(_a_text(first)):
        raise UntrustedError(f"expected a fraction, found {first!r}")
    return fractions.Fraction(first)


def _a_text(text: Any) -> str:
    if type(text) is not str:
        raise UntrustedError(f"expected a text, found a {type(text).__name__}")
    return text


def _path(kind: type[pathlib.PurePath]) -> Call:
    def make(*parts: str) -> pathlib.PurePath:
        return kind(*map(_a_text, parts))

    return make


def _array(kind: Any, code: str, machine_format: Any, content: Any = None) -> Any:
    if kind is not array.array or not isinstance(content, bytes):
        raise UntrustedError("expected an array and its bytes")
    return array._array_reconstructor(kind, code, machine_format, content)  # type: ignore[attr-defined]


def _array_of_list(code: str, numbers: Any) -> Any:
    return array.array(_a_text(code), numbers if type(numbers) is str else _a_list(numbers))


def _logger(name: str = "root") -> logging.Logger:
    return logging.getLogger(_a_text(name))


def _time_zone(key: Any, is_shared: Any = True) -> zoneinfo.ZoneInfo:
    """Of this machine's own files; a key cannot lead out of them."""
    zone = zoneinfo.ZoneInfo if is_shared else zoneinfo.ZoneInfo.no_cache
    return zone(_a_text(key))


def _iterator(items: Any, *end: Any) -> Any:
    """Over what is there."""
    if end or type(items) not in _ITERATED:
        raise UntrustedError(f"expected items, found a {type(items).__name__}")
    return iter(items)


def _is_iterated(value: Any) -> bool:
    return type(value) in _ITERATED or type(value) in ITERATORS


def _over(kind: type) -> Call:
    """Of iterators, each of which is made already."""

    def make(*inner: Any) -> Any:
        for one in inner:
            if not _is_iterated(one) and type(one) is not int:
                raise UntrustedError(f"expected iterators, found a {type(one).__name__}")
        return kind(*inner)

    return make


def _repeat(item: Any, times: int | None = None) -> itertools.repeat[Any]:
    return itertools.repeat(item) if times is None else itertools.repeat(item, index(times))


def _count(first: Any = 0, step: Any = 1) -> itertools.count[Any]:
    if not {type(first), type(step)} <= {int, float, complex}:
        raise UntrustedError("expected numbers to count")
    return itertools.count(first, step)


def _islice(items: Any, *ends: Any) -> Any:
    if not _is_iterated(items) or not {*map(type, ends)} <= {int, type(None)}:
        raise UntrustedError("expected an iterator and where it ends")
    return itertools.islice(items, *ends)


def _build_iterator(made: Any, state: Any) -> None:
    """How far it is, and what a cycle has seen."""
    made.__setstate__(state)


def _pattern(pattern: str | bytes, flags: int) -> re.Pattern[Any]:
    if type(pattern) not in (str, bytes):
        raise UntrustedError(f"expected a pattern, found a {type(pattern).__name__}")
    return re.compile(pattern, index(flags))


def _build_uuid(made: uuid.UUID, state: Any) -> None:
    if not isinstance(state, dict) or set(state) - {"int", "is_safe"}:
        raise UntrustedError("expected the number of a UUID")
    object.__setattr__(made, "int", index(state["int"]))
    object.__setattr__(made, "is_safe", uuid.SafeUUID(state.get("is_safe", None)))


def _place(path: str) -> PlaceOfPart:
    return PlaceOfPart(_a_text(path))


def _build_place(made: PlaceOfPart, state: Any) -> None:
    (path,) = state
    object.__setattr__(made, "path", _a_text(path))


def _build_random(made: random.Random, state: Any) -> None:
    if type(state) is not tuple or type(state[1]) is not tuple:
        raise UntrustedError("expected the numbers of a random state")
    made.setstate(state)


_ITERATED = (list, tuple, dict, set, frozenset, str, bytes, range)

_CALLED: dict[Name, tuple[Any, Call]] = {
    ("builtins", "enumerate"): (enumerate, _over(enumerate)),
    ("builtins", "zip"): (zip, _over(zip)),
    ("builtins", "reversed"): (reversed, _over(reversed)),
    ("itertools", "count"): (itertools.count, _count),
    ("itertools", "cycle"): (itertools.cycle, _over(itertools.cycle)),
    ("itertools", "repeat"): (itertools.repeat, _repeat),
    ("itertools", "chain"): (itertools.chain, _over(itertools.chain)),
    ("itertools", "islice"): (itertools.islice, _islice),
    ("builtins", "int"): (int, _plain(int, bool)),
    ("builtins", "float"): (float, _plain(float)),
    ("builtins", "bool"): (bool, _plain(bool, int)),
    ("builtins", "str"): (str, _plain(str)),
    ("builtins", "tuple"): (tuple, _plain(tuple, list)),
    ("builtins", "list"): (list, _list),
    ("builtins", "set"): (set, _set),
    ("builtins", "frozenset"): (frozenset, _frozenset),
    ("builtins", "range"): (range, range),
    ("builtins", "type"): (type, _type),
    ("time", "struct_time"): (time.struct_time, _time),
    ("builtins", "slice"): (slice, slice),
    ("builtins", "complex"): (complex, complex),
    ("builtins", "bytes"): (bytes, _bytes),
    ("builtins", "bytearray"): (bytearray, _bytearray),
    ("collections", "OrderedDict"): (collections.OrderedDict, _ordered),
    ("collections", "defaultdict"): (collections.defaultdict, _defaultdict),
    ("collections", "Counter"): (collections.Counter, _counter),
    ("collections", "deque"): (collections.deque, _deque),
    ("datetime", "date"): (datetime.date, datetime.date),
    ("datetime", "time"): (datetime.time, datetime.time),
    ("datetime", "datetime"): (datetime.datetime, datetime.datetime),
    ("datetime", "timedelta"): (datetime.timedelta, datetime.timedelta),
    ("datetime", "timezone"): (datetime.timezone, datetime.timezone),
    ("decimal", "Decimal"): (decimal.Decimal, _decimal),
    ("fractions", "Fraction"): (fractions.Fraction, _fraction),
    ("array", "array"): (array.array, _array_of_list),
    ("random", "Random"): (random.Random, _random),
    ("types", "SimpleNamespace"): (types.SimpleNamespace, types.SimpleNamespace),
    (PlaceOfPart.__module__, PlaceOfPart.__name__): (PlaceOfPart, _place),
    ("torch", "Size"): (torch.Size, torch.Size),
    ("torch", "device"): (torch.device, torch.device),
    **RESULTS,
}

for _kind in (pathlib.PurePosixPath, pathlib.PosixPath):
    _CALLED["pathlib", _kind.__name__] = (_kind, _path(_kind))
    _CALLED[_kind.__module__, _kind.__name__] = (_kind, _path(_kind))

_FUNCTIONS: dict[Name, Call] = {
    ("builtins", "getattr"): _outside,
    ("builtins", "iter"): _iterator,
    ("_codecs", "encode"): _encode,
    ("logging", "getLogger"): _logger,
    ("re", "_compile"): _pattern,
    ("array", "_array_reconstructor"): _array,
    ("zoneinfo", "ZoneInfo._unpickle"): _time_zone,
    ("torch._tensor", "_rebuild_from_type_v2"): _outside,
    **FUNCTIONS,
}
ATTRIBUTE = OnlyCalled("builtins", "getattr")

_NAMED: tuple[type, ...] = (dict, torch.Tensor, zoneinfo.ZoneInfo)
_MADE = (object, PlaceOfPart, uuid.UUID, argparse.Namespace, collections.ChainMap)


# -- all of them


@cache
def names() -> dict[Name, Any]:
    """What stands for each name of the table."""
    table: dict[Name, Any] = {key: kind for key, (kind, _) in _CALLED.items()}
    table |= {key: OnlyCalled(*key) for key in _FUNCTIONS}
    table |= {(kind.__module__, kind.__qualname__): kind for kind in (*_NAMED, *_MADE)}
    table["torch.nn.parameter", "Parameter"] = torch.nn.Parameter
    table["builtins", "Ellipsis"], table["builtins", "NotImplemented"] = ..., NotImplemented
    return table


@cache
def calls_by_id() -> dict[int, Call]:
    """What a call of each does, by the id of what stands for its name."""
    calls = {id(kind): call for kind, call in _CALLED.values()}
    return calls | {id(names()[key]): call for key, call in _FUNCTIONS.items()}


@cache
def _numpys_calls() -> dict[int, Call]:
    """The same of numpy's. Only who finds something of numpy's in a pickle imports it."""
    return {id(kind): call for kind, call in numpys_names().values() if call is not None}


def _is_placement(kind: Any) -> bool:
    return PLACEMENTS in sys.modules and kind in placements().values()


@cache
def _builds() -> dict[type, Build]:
    by_attributes = (
        *(argparse.Namespace, collections.ChainMap, collections.OrderedDict),
        *(types.SimpleNamespace, torch.Tensor, torch.nn.Parameter),
    )
    builds: dict[type, Build] = dict.fromkeys(by_attributes, set_attributes)
    builds |= dict.fromkeys(ITERATORS, _build_iterator)
    builds[uuid.UUID] = _build_uuid
    builds[PlaceOfPart] = _build_place
    builds[random.Random] = _build_random
    return builds
