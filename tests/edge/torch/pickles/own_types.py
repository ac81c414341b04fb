"""Classes as programs have them, in a package of their own."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, IntFlag
from typing import Any, NamedTuple

import numpy
import torch


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Bits(IntFlag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: int
    y: float


@dataclass
class Record:
    loss: float
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen:
    colour: Colour
    inner: Any = None


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value

    class Inner:
        __slots__ = ("__hidden", "shown")

        def __init__(self) -> None:
            self.shown, self.__hidden = 1, 2

        def all(self) -> Any:
            return self.shown, self.__hidden

    def method(self) -> Any:
        return self.value


class Table(dict[str, Any]):
    """Nothing of its own."""


class Restoring:
    """Runs code of its own as it is restored."""

    def __init__(self) -> None:
        self.calls = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, calls=state["calls"] + 1)


class Reducing:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return rebuilt, (self.value,)


def rebuilt(value: Any) -> Reducing:
    return Reducing(value)


class Making:
    """Whose call would be dangerous."""

    def __new__(cls, path: str) -> Making:
        os.mkdir(path)
        return super().__new__(cls)


class Marked(torch.Tensor):
    """A tensor of a class of its own."""


class Hooked(torch.Tensor):
    """A tensor whose class has a say in what is done with it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class ByClassMethod:
    """Made again by a method of its class."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    @classmethod
    def load(cls, words: list[str]) -> ByClassMethod:
        return cls(words)

    def __reduce__(self) -> Any:
        return ByClassMethod.load, (self.words,)


class Recent(deque[Any]):
    """With no code of its own."""


class Vector(numpy.ndarray[Any, Any]):
    """An array of a class of its own."""


class Masked(numpy.ma.MaskedArray):  # type: ignore[type-arg]
    """A masked one."""
