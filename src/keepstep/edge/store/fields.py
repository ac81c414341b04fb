"""Fields: what a checkpoint's own files say, checked one by one as it is read.

Comes in: what JSON gives. Goes out: typed values, or ValueError; `decoding` makes a DamageError of
that and of whatever else an odd file may bring about, so that no file ends the process that reads
it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from keepstep.errors import DamageError
from keepstep.model.bounds import U63

NOT_FINITE = ("nan", "inf", "-inf")  # JSON has none of them, and a loss may be one


@contextmanager
def decoding(where: str) -> Iterator[None]:
    """Raises DamageError for what cannot be what was written there."""
    try:
        yield
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise DamageError(f"{where}: not as it was written: {error}") from error


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


def a_count(plain: Any, least: int = 0) -> int:
    if type(plain) is not int or not least <= plain <= U63:  # a bool is an int to isinstance
        raise ValueError(f"expected a whole number from {least} on, found {plain!r:.40}")
    return plain


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
    name = a_text(plain)
    if not name or "/" in name or "\\" in name or name in (".", "..") or "\0" in name:
        raise ValueError(f"expected a file's name, found {name!r:.80}")
    return name
