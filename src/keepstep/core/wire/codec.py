"""Codec: messages, which are frozen dataclasses, to bounded JSON and back, checked field by field.

    {"kind": the class's KIND, and its fields by name}

Comes in: a message, or bytes that somebody sent. Goes out: the other one. What a field may hold is
read off its type hint: `int` and `str` with a bound (`model/bounds.py`), `bool`, an enum of numbers
or of texts, `Literal`, `X | None`, `tuple[X, ...]` and `tuple[X, Y]`, `dict[str, X]`, a named tuple
(as a list), a dataclass (as an object), or a union of messages (as objects with a `kind`). Nothing
is converted that is not meant: a bool is no number, a number no text.

Never trusts: an unknown kind, a missing or surplus field, a value of another type or beyond its
bound raises `NotAMessage`, nothing else does, and nothing is unpickled.

Invariant: what `encode` accepts, `decode` gives back equal, but for sentences that were cut; what
`decode` accepts, `encode` does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum, IntEnum
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from keepstep.errors import KeepstepError
from keepstep.model.bounds import Length, Range
from keepstep.model.units import KIB
from keepstep.model.wire import Refusal

MAX_MESSAGE_BYTES = 256 * KIB
MAX_ITEMS = 10_000  # of a list without a bound of its own
KIND = "kind"

M = TypeVar("M")
_REFUSES = (ValueError, TypeError, AttributeError, RecursionError, KeepstepError)
Read = Callable[[Any], Any]  # of what JSON gives; raises ValueError
Write = Callable[[Any], Any]  # to what JSON takes; raises ValueError, AttributeError, TypeError


class NotAMessage(ValueError):
    """Bytes or fields that are no message of ours; `reason` is UNKNOWN_KIND, OVERSIZED or
    MALFORMED."""

    def __init__(self, reason: Refusal, why: str) -> None:
        super().__init__(why)
        self.reason = reason


class Codec(Generic[M]):
    """The messages of one conversation."""

    def __init__(self, kinds: Iterable[type[M]], max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        """kinds: dataclasses with a `KIND` of their own. max_bytes: of one encoded message."""
        self._max_bytes = max_bytes
        self._schemas: dict[str, _Schema] = {}
        for kind in kinds:
            name = str(kind.KIND)  # type: ignore[attr-defined]
            assert name not in self._schemas, f"two messages are called {name}"
            self._schemas[name] = _schema(kind)

    def encode(self, message: M) -> bytes:
        """Raises NotAMessage: what no peer would accept is not sent."""
        kind = getattr(message, "KIND", None)
        schema = self._schemas.get(str(kind))
        if schema is None or schema.make is not type(message):
            found = type(message).__name__
            raise NotAMessage(Refusal.UNKNOWN_KIND, f"{self._expected()}, found {found}")
        try:
            plain = schema.write(message)
            schema.read(plain)
            body = _to_text({KIND: kind, **plain})
        except _REFUSES as error:
            raise NotAMessage(Refusal.MALFORMED, f"{kind}: {error}") from error
        encoded = body.encode()
        if len(encoded) > self._max_bytes:
            why = f"{kind} of {len(encoded)} bytes, at most {self._max_bytes} allowed"
            raise NotAMessage(Refusal.OVERSIZED, why)
        return encoded

    def decode(self, body: bytes | memoryview) -> M:
        """Raises NotAMessage."""
        if len(body) > self._max_bytes:
            why = f"a message of {len(body)} bytes, at most {self._max_bytes} allowed"
            raise NotAMessage(Refusal.OVERSIZED, why)
        try:
            plain = _from_text(str(body, "utf-8"))
        except (ValueError, RecursionError) as error:
            raise NotAMessage(Refusal.MALFORMED, f"no JSON: {error}") from error
        if not isinstance(plain, dict):
            raise NotAMessage(Refusal.MALFORMED, f"expected an object, found {plain!r:.40}")
        kind = plain.pop(KIND, None)
        if not isinstance(kind, str):
            raise NotAMessage(Refusal.MALFORMED, f"expected the name of a kind, found {kind!r:.40}")
        schema = self._schemas.get(kind)
        if schema is None:
            raise NotAMessage(Refusal.UNKNOWN_KIND, f"{self._expected()}, found {kind!r:.40}")
        try:
            message: M = schema.read(plain)
        except (ValueError, KeepstepError) as error:
            raise NotAMessage(Refusal.MALFORMED, f"{kind}: {error}") from error
        return message

    def _expected(self) -> str:
        return f"expected one of {', '.join(sorted(self._schemas))}"


# -- schemas, made once from type hints


class _Schema:
    """One dataclass: how its fields are read from an object, and written to one."""

    def __init__(self, make: type[Any]) -> None:
        self.make = make
        hints = get_type_hints(make, include_extras=True)
        own = [field for field in fields(make) if field.init]
        self._reads: list[tuple[str, Read]] = [(f.name, _reader(hints[f.name])) for f in own]
        self._writes: list[tuple[str, Write]] = [(f.name, _writer(hints[f.name])) for f in own]
        self._required = frozenset(f.name for f in own if not _has_default(f))
        self._names = frozenset(f.name for f in own)

    def read(self, plain: Any) -> Any:
        if not isinstance(plain, dict):
            raise ValueError(f"expected an object, found {plain!r:.40}")
        if plain.keys() != self._names and not self._required <= plain.keys() <= self._names:
            found = sorted(map(str, plain))
            raise ValueError(f"expected the fields {sorted(self._names)}, found {found!r:.200}")
        values = {}
        for name, read in self._reads:
            if name in plain:
                try:
                    values[name] = read(plain[name])
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from error
        return self.make(**values)

    def write(self, message: Any) -> dict[str, Any]:
        return {name: write(getattr(message, name)) for name, write in self._writes}


def _has_default(field: Any) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


_schemas: dict[type[Any], _Schema] = {}


def _schema(make: type[Any]) -> _Schema:
    if make not in _schemas:
        _schemas[make] = _Schema(make)
    return _schemas[make]


def _reader(hint: Any, bound: Range | Length | None = None) -> Read:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _reader(args[0], next(a for a in args[1:] if isinstance(a, (Range, Length))))
    if hint is bool:
        return _read_bool
    if hint is int:
        assert isinstance(bound, Range), f"a number needs a bound, found {hint}"
        return _whole(bound)
    if hint is str:
        assert isinstance(bound, Length), f"a text needs a bound, found {hint}"
        return _text(bound)
    if origin is Literal:
        return _one_of(args)
    if origin is tuple:
        most = bound.most if isinstance(bound, Length) else MAX_ITEMS
        return _list(args, most)
    if origin is dict:
        assert args[0] is str, f"an object's keys are texts, found {hint}"
        return _object(_reader(args[1]), bound.most if isinstance(bound, Length) else MAX_ITEMS)
    if origin in (Union, UnionType):
        return _union(args)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _member_of(hint, int if issubclass(hint, IntEnum) else str)
    if isinstance(hint, type) and issubclass(hint, tuple):
        return _named_tuple(hint)
    assert is_dataclass(hint) and isinstance(hint, type), f"no rule for {hint}"
    return _schema(hint).read


def _whole(bound: Range) -> Read:
    least, most = bound.least, bound.most

    def read(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:  # a bool is an int to isinstance
            raise ValueError(f"expected a whole number, {least} to {most}, found {value!r:.40}")
        return value

    return read


def _text(bound: Length) -> Read:
    most = bound.most

    def read(value: Any) -> str:
        if not isinstance(value, str) or len(value) > most:
            raise ValueError(f"expected a text of at most {most} characters, found {value!r:.40}")
        return value

    return read


def _read_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, found {value!r:.40}")
    return value


def _one_of(words: tuple[Any, ...]) -> Read:
    def read(value: Any) -> Any:
        if not isinstance(value, str) or value not in words:
            raise ValueError(f"expected one of {', '.join(words)}, found {value!r:.40}")
        return value

    return read


def _member_of(enum: type[Enum], kind: type[int] | type[str]) -> Read:
    def read(value: Any) -> Enum:
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ValueError(f"expected one of {enum.__name__}, found {value!r:.40}")
        return enum(value)  # raises ValueError

    return read


def _list(hints: tuple[Any, ...], most: int) -> Read:
    if len(hints) == 2 and hints[1] is Ellipsis:
        one = _reader(hints[0])

        def read_many(value: Any) -> tuple[Any, ...]:
            if not isinstance(value, (list, tuple)) or len(value) > most:
                raise ValueError(f"expected a list of at most {most}, found {value!r:.40}")
            return tuple(map(one, value))

        return read_many
    each = [_reader(hint) for hint in hints]

    def read_each(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or len(value) != len(each):
            raise ValueError(f"expected a list of {len(each)}, found {value!r:.40}")
        return tuple([read(item) for read, item in zip(each, value, strict=True)])

    return read_each


def _named_tuple(make: type[Any]) -> Read:
    hints = get_type_hints(make, include_extras=True)
    bounds = [_reader(hints[name]) for name in make._fields]

    def read(value: Any) -> Any:
        if not isinstance(value, (list, tuple)) or len(value) != len(bounds):
            raise ValueError(f"expected a list of {len(bounds)}, found {value!r:.40}")
        return make(*[one(item) for one, item in zip(bounds, value, strict=True)])

    return read


def _object(one: Read, most: int) -> Read:
    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > most:
            raise ValueError(f"expected an object of at most {most} entries, found {value!r:.40}")
        return {str(key): one(item) for key, item in value.items()}

    return read


def _union(hints: tuple[Any, ...]) -> Read:
    if NoneType in hints:
        rest = tuple(hint for hint in hints if hint is not NoneType)
        inner = _reader(rest[0]) if len(rest) == 1 else _union(rest)
        return lambda value: None if value is None else inner(value)
    schemas = {str(hint.KIND): _schema(hint) for hint in hints}

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError(f"expected an object, found {value!r:.40}")
        kind = value.get(KIND)
        schema = schemas.get(kind) if isinstance(kind, str) else None
        if schema is None:
            raise ValueError(f"expected one of {', '.join(sorted(schemas))}, found {kind!r:.40}")
        return schema.read({name: item for name, item in value.items() if name != KIND})

    return read


def _writer(hint: Any) -> Write:
    """Whatever `_reader` of the same hint takes."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        bound = args[1]
        if isinstance(bound, Length) and bound.cuts:
            return _cutting(bound.most)
        return _writer(args[0])
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        one = _writer(args[0])
        return list if one is _as_it_is else lambda value: [one(item) for item in value]
    if origin is tuple:
        each = [_writer(arg) for arg in args]
        return lambda value: [write(item) for write, item in zip(each, value, strict=True)]
    if origin is dict:
        one = _writer(args[1])
        return lambda value: {key: one(item) for key, item in value.items()}
    if origin in (Union, UnionType):
        return _union_writer(args)
    if isinstance(hint, type) and issubclass(hint, tuple):
        hints = get_type_hints(hint, include_extras=True)
        each = [_writer(hints[name]) for name in hint._fields]  # type: ignore[attr-defined]
        return lambda value: [write(item) for write, item in zip(each, value, strict=True)]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return lambda value: value.value
    if is_dataclass(hint) and isinstance(hint, type):
        return _schema(hint).write
    return _as_it_is


def _cutting(most: int) -> Write:
    return lambda value: value[:most] if isinstance(value, str) else value


def _union_writer(hints: tuple[Any, ...]) -> Write:
    rest = tuple(hint for hint in hints if hint is not NoneType)
    if len(rest) == 1:
        inner = _writer(rest[0])
        return lambda value: None if value is None else inner(value)
    schemas: Mapping[type[Any], _Schema] = {hint: _schema(hint) for hint in rest}

    def write(value: Any) -> Any:
        if value is None and len(rest) < len(hints):
            return None
        schema = schemas.get(type(value))
        if schema is None:
            raise ValueError(f"expected one of {len(schemas)} messages, found {value!r:.40}")
        return {KIND: value.KIND, **schema.write(value)}

    return write


def _as_it_is(value: Any) -> Any:
    return value


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


# made once: json.dumps and json.loads make one for every call with options
_to_text = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_from_text = json.JSONDecoder(parse_constant=_no_constant).decode
