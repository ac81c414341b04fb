"""Decoding: what lies in files, memory and where nodes meet, checked field by field as it is read.

Comes in: bytes that somebody else may have written. Goes out: typed values, or ValueError;
`decoding` makes a DamageError of that and of whatever else odd bytes may bring about, so that none
of them end the process that reads them. Messages have a codec of their own (`core/wire/codec.py`).
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from keepstep.errors import DamageError
from keepstep.model.bounds import U63

T = TypeVar("T")

NOT_FINITE = ("nan", "inf", "-inf")  # JSON has none of them, and a loss may be one
# What a terminal acts on and does not show: controls but tab and line feed, changes of direction;
# and halves of characters, which cannot be printed.
_UNSEEN = dict.fromkeys(
    [
        *(*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0), *range(0xD800, 0xE000)),
        *(0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)),
    ],
    "?",
)


@contextmanager
def decoding(where: str) -> Iterator[None]:
    """Raises DamageError for what cannot be what was written there."""
    try:
        yield
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise DamageError(f"{where}: not as it was written: {error}") from error


def on_a_screen(text: str) -> str:
    """The same, without what would change the screen it is shown on: a store, a log or another
    machine may have put that there."""
    return text.translate(_UNSEEN)


def from_json(text: str | bytes) -> Any:
    """Raises ValueError, whatever the text."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def an_object(plain: Any) -> dict[str, Any]:
    if not isinstance(plain, dict):
        raise ValueError(f"expected an object, found {plain!r:.40}")
    return plain


def a_list(plain: Any) -> list[Any]:
    if not isinstance(plain, list):
        raise ValueError(f"expected a list, found {plain!r:.40}")
    return plain


def a_text(plain: Any) -> str:
    if not isinstance(plain, str):
        raise ValueError(f"expected a text, found {plain!r:.40}")
    return plain


def a_name(plain: Any) -> str:
    """A text that can be shown as it is."""
    name = a_text(plain)
    if on_a_screen(name) != name or "\n" in name:
        raise ValueError(f"expected a name, found {name!r:.80}")
    return name


def a_count(plain: Any, least: int = 0) -> int:
    if type(plain) is not int or not least <= plain <= U63:  # a bool is an int to isinstance
        raise ValueError(f"expected a whole number from {least} on, found {plain!r:.40}")
    return plain


def a_whole_number(plain: Any) -> int:
    return a_count(plain, least=-U63)


def counts(plain: Any) -> tuple[int, ...]:
    return tuple(map(a_count, a_list(plain)))


def a_number(plain: Any) -> float:
    """With what JSON has no word for: see `number_to_json`."""
    if plain in NOT_FINITE or (isinstance(plain, (int, float)) and not isinstance(plain, bool)):
        return float(plain)
    raise ValueError(f"expected a number, found {plain!r:.40}")


def number_to_json(value: float) -> float | str:
    return float(value) if math.isfinite(value) else str(float(value))


def a_file_name(plain: Any) -> str:
    """Of a file in the checkpoint's own directory, and in no other."""
    name = a_name(plain)
    if not name or "/" in name or "\\" in name or name in (".", "..") or "\0" in name:
        raise ValueError(f"expected a file's name, found {name!r:.80}")
    return name


def a_record(kind: type[T], plain: Any) -> T:
    """A flat dataclass from an object with a name for each of its fields. A field's type is one of
    int, float, str, bool, an enum of whole numbers, a Literal of texts, or one of them or None.
    Raises ValueError."""
    types_of = _types_of(cast(Any, kind))
    values = an_object(plain)
    if not values.keys() <= types_of.keys():
        odd = sorted(values.keys() - types_of.keys())
        raise ValueError(f"expected the fields of {kind.__name__}, found also {odd[0]!r:.40}")
    try:
        return kind(**{name: _of_type(value, types_of[name]) for name, value in values.items()})
    except TypeError as error:  # one is missing
        raise ValueError(str(error)) from error


@cache
def _types_of(kind: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _of_type(value: Any, hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        [hint] = [one for one in get_args(hint) if one is not type(None)]
    if get_origin(hint) is Literal:
        if value in get_args(hint):
            return value
        raise ValueError(f"expected one of {get_args(hint)}, found {value!r:.40}")
    if hint is float and type(value) is int:
        if abs(value) > U63:
            raise ValueError(f"expected a number that counts something, found {value!r:.40}")
        return float(value)
    if issubclass(hint, int) and hint not in (int, bool) and type(value) is int:
        return hint(value)  # an enum: ValueError when there is none of that number
    if type(value) is not hint or (hint is int and abs(value) > U63):
        raise ValueError(f"expected {hint.__name__}, found {value!r:.40}")
    return value
