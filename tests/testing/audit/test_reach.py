"""Reach: what a program can get at is found, and a change of it is seen."""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from keepstep.testing.audit.reach import reach


class Slotted:
    __slots__ = ("value",)


def numbers() -> Any:
    for value in (1, 2, 3):  # noqa: UP028
        yield value


def counter() -> Callable[[], None]:
    count = 0

    def add() -> None:
        nonlocal count
        count += 1

    return add


def keeping(cache: dict[str, int]) -> Callable[[], None]:
    def keep(into: dict[str, int] = cache) -> None:
        into["n"] = into.get("n", 0) + 1

    return keep


def slotted() -> Slotted:
    made = Slotted()
    made.value = 1
    return made


def change_slot(made: Slotted) -> None:
    made.value += 1


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "tensor": (lambda: torch.zeros(3), lambda t: t.add_(1)),
    "part of a tensor": (lambda: torch.zeros(4, 4).t()[1:], lambda t: t[0].add_(1)),
    "bfloat16": (lambda: torch.zeros(3).bfloat16(), lambda t: t.add_(1)),
    "list": (lambda: [[1]], lambda v: v[0].append(2)),
    "deque": (lambda: deque([1]), lambda v: v.append(2)),
    "set": (lambda: {1}, lambda v: v.add(2)),
    "dict in a dict": (lambda: {"a": {"b": 1}}, lambda v: v["a"].update(b=2)),
    "buffer": (lambda: torch.nn.BatchNorm1d(2), lambda m: m.running_mean.add_(1)),
    "slot": (slotted, change_slot),
    "closure": (counter, lambda f: f()),
    "default": (lambda: keeping({}), lambda f: f()),
    "bound method": (lambda: torch.nn.Linear(1, 1).forward, lambda m: m.__self__.bias.data.add_(1)),
    "partial": (lambda: functools.partial(print, [1]), lambda p: p.args[0].append(2)),
    "running generator": (numbers, next),
    "iterator of a list": (lambda: iter([1, 1]), next),
    "count": (itertools.count, next),
    "torch generator": (torch.Generator, lambda g: torch.rand(1, generator=g)),
    "python generator": (lambda: random.Random(1), lambda g: g.random()),
    "numpy generator": (lambda: numpy.random.default_rng(1), lambda g: g.random()),
    "numpy's older one": (lambda: numpy.random.RandomState(1), lambda g: g.random()),
    "array": (lambda: numpy.zeros(3), lambda a: a.fill(1)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_seen(name: str) -> None:
    make, change = CASES[name]
    held = make()

    def look() -> dict[str, Any]:
        found = reach(sys._getframe(1), ())
        where = f"{sys._getframe(1).f_code.co_name}(): held"
        return {p: s for p, s in found.items() if p.startswith(where)}

    before = look()
    assert before and look() == before, "a look changes nothing"
    change(held)
    assert look() != before


def test_an_object_under_two_names_is_looked_at_once() -> None:
    one = torch.zeros(1)
    other = [one]
    found = reach(sys._getframe(0), ())
    where = "test_an_object_under_two_names_is_looked_at_once(): "
    assert [p for p in found if p.startswith(where)] == [f"{where}one"]
    assert other[0] is one


def test_what_holds_itself_ends() -> None:
    held: list[Any] = [1]
    held.append(held)
    assert "test_what_holds_itself_ends(): held[0]" in reach(sys._getframe(0), ())
