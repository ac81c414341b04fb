"""The wire's version: builds that say different things to each other refuse each other by name,
and do not find out in the middle of a recovery."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import xxhash

from keepstep.core.wire.connection import VERSION
from keepstep.core.wire.messages import KINDS
from keepstep.model.bounds import Range

# Of what keepers say to each other in this version. Another digest needs another version.
SAID = {9: "23b357e93ae81910"}


def shape(hint: Any) -> str:
    """What of a type is on the wire: for a class its fields, with their own shapes."""
    return " ".join(_shape(hint, ()))


def _shape(hint: Any, within: tuple[Any, ...]) -> Iterator[str]:
    if get_origin(hint) is Annotated:
        yield repr(get_args(hint)[1:])
        hint = get_args(hint)[0]
    inner = get_args(hint)
    if inner:
        yield str(getattr(get_origin(hint), "__name__", get_origin(hint)))
        for each in inner:
            yield from _shape(each, within) if not isinstance(each, str) else [each]
    elif isinstance(hint, type) and issubclass(hint, Enum):
        yield f"{[one.value for one in hint]}"
    elif isinstance(hint, type) and (is_dataclass(hint) or hasattr(hint, "_fields")):
        yield str(getattr(hint, "KIND", ""))
        hints = get_type_hints(hint, include_extras=True)
        for name, required in _fields(hint) if hint not in within else ():
            yield f"{name}{'' if required else '?'}:"
            yield from _shape(hints[name], (*within, hint))
    else:
        yield getattr(hint, "__name__", repr(hint))


def _fields(make: Any) -> Iterator[tuple[str, bool]]:
    if not is_dataclass(make):
        yield from ((name, True) for name in make._fields)
        return
    for one in fields(make):
        if one.init:
            yield one.name, one.default is MISSING and one.default_factory is MISSING


def test_whatever_keepers_say_otherwise_has_another_version() -> None:
    shapes = "\n".join(shape(KINDS[kind]) for kind in sorted(KINDS))
    said = xxhash.xxh3_64_hexdigest(shapes.encode())
    assert {VERSION: said} == SAID, (
        "what keepers say to each other is not what this version says: give VERSION in "
        f"core/wire/connection.py the next number, and this one's digest, {said}, its line here"
    )


class Row(NamedTuple):
    number: int


class LongerRow(NamedTuple):
    number: int
    other: int


@dataclass(frozen=True)
class Said:
    row: tuple[Row, ...]


@dataclass(frozen=True)
class SaidLonger:
    row: tuple[LongerRow, ...]


@dataclass(frozen=True)
class SaidOfMore:
    row: tuple[Annotated[Row, Range(0, 7)], ...]


@dataclass(frozen=True)
class SaidPerhaps:
    row: tuple[Row, ...] = ()


def test_a_field_its_bounds_and_whether_it_is_needed_are_seen() -> None:
    shapes = [shape(each) for each in (Said, SaidLonger, SaidOfMore, SaidPerhaps)]
    assert len(set(shapes)) == len(shapes), shapes
    assert shape(Said) == shape(Said)
