"""Phrases: lines of a fixed form, and what each means.

Comes in: a line of a story. Goes out: what the phrase that it matches makes of it, or a
`StoryError` that says which phrases there are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Generic, TypeVar

from keepstep.errors import ConfigError
from keepstep.model.units import KIB, MIB, MS_NS, S_NS

T = TypeVar("T")

_SCALES = {"ns": 1, "us": 1000, "ms": MS_NS, "s": S_NS, "B": 1, "KiB": KIB, "MiB": MIB, "": 1}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?) ?(ns|us|ms|s|B|KiB|MiB|)")
TIME = r"\d+(?:\.\d+)? ?(?:ns|us|ms|s)"
PLACE = r"(?:machine|node) \d+"
MIN_CLOSE = 0.4


class StoryError(ConfigError):
    """A line of a story that says nothing."""

    def __init__(self, line: int, expected: str, found: str) -> None:
        super().__init__(f"line {line}: expected {expected}, found {found!r}")


class Phrases(Generic[T]):
    """`what`: which part of a story they are."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.examples: list[str] = []
        self._phrases: list[tuple[re.Pattern[str], Callable[..., T]]] = []

    def phrase(self, example: str, pattern: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
        """Of who is decorated, and is called with the pattern's named groups."""

        def add(make: Callable[..., T]) -> Callable[..., T]:
            compiled = re.compile(pattern)
            assert compiled.fullmatch(example), f"{example} does not match its own pattern"
            self.examples.append(example)
            self._phrases.append((compiled, make))
            return make

        return add

    def find(self, text: str) -> T | None:
        """None when no phrase matches."""
        for pattern, make in self._phrases:
            found = pattern.fullmatch(text)
            if found is not None:
                return make(**found.groupdict())
        return None

    def read(self, number: int, text: str) -> T:
        """number: of the line. Raises StoryError."""
        found = self.find(text)
        if found is None:
            raise unknown(number, self.what, self.examples, text)
        return found


def unknown(number: int, what: str, examples: Sequence[str], text: str) -> StoryError:
    """No phrase says this: with the examples that are most like it."""
    close = get_close_matches(text, examples, 3, MIN_CLOSE) or examples
    return StoryError(number, f"{what}, such as {'; '.join(close)}", text)


def quantity(text: str) -> float:
    """Of `4.2s` the nanoseconds, of `10KiB` the bytes, of `7` that. Raises ValueError."""
    found = _QUANTITY.fullmatch(text.strip())
    if found is None:
        raise ValueError(text)
    return float(found[1]) * _SCALES[found[2]]


def ns(text: str) -> int:
    """Of a time."""
    return round(quantity(text))


def fields(text: str | None) -> dict[str, str]:
    """Of `step=7 source=memory`."""
    return dict(pair.split("=", 1) for pair in (text or "").split())
