"""Values: what is saved goes into the objects that the program holds, and into what they hold."""

from __future__ import annotations

import copy
import logging
import pickle
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keepstep.edge.torch.values import Refill


class Table(dict[str, Any]):
    """A dict with something beside its items."""


class Row(list[Any]):
    """The same of a list."""


class Bag(set[Any]):
    """The same of a set."""


class Recent(deque[Any]):
    """The same of a deque."""


class Marked(torch.Tensor):
    """The same of a tensor."""


class Node:
    def __init__(self, parent: Node | None = None) -> None:
        self.parent = parent
        self.children: list[Node] = []
        self.count = 0
        self.calls: list[Callable[[], None]] = [self.up, partial(self.up)]

    def up(self) -> None:
        self.count += 1


class Guarded:
    """With a state of its own telling, which is a copy."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.lock = object()

    def __getstate__(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.losses = state["losses"]
        self.lock = object()


class Registered(Enum):
    ONE = 1


def saved(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def filled(live: Any, later: Any) -> tuple[Any, list[str]]:
    refill = Refill({})
    return refill.top("log", live, saved(later)), refill.replaced


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (Table, {"a": 1}),
        (OrderedDict, {"a": 1}),
        (Row, [1]),
        (Bag, [1]),
        (Recent, [1]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_container_of_the_programs_own_has_its_attributes_back(
    kind: Callable[..., Any], content: Any
) -> None:
    live, later = kind(), kind(content)
    live.name, live.stale, later.name, later.seen = "x", 1, "y", [2]
    found, told = filled(live, later)
    assert found is live and found == later and vars(live) == {"name": "y", "seen": [2]}
    assert not told


def test_a_dict_that_is_its_own_attributes_stays_so() -> None:
    live: Any = Table(a=1)
    live.__dict__ = live
    later: Any = Table(a=2, b=3)
    later.__dict__ = later
    found, _ = filled(live, later)
    assert found is live and found.b == 3 and found["a"] == 2


def test_a_default_is_made_as_it_was_when_it_was_saved() -> None:
    live: Any = {"hist": defaultdict(int)}
    inner = live["hist"]
    filled(live, {"hist": defaultdict(list, {"a": [1]})})
    assert live["hist"] is inner and inner["b"] == [] and inner["a"] == [1]


@pytest.mark.parametrize("kind", [Counter, OrderedDict])
def test_pythons_own_dicts(kind: Callable[..., Any]) -> None:
    live, later = kind(a=1, b=2), kind(b=-3, a=0)
    found, _ = filled(live, later)
    assert found is live and list(found.items()) == [("b", -3), ("a", 0)]


def test_a_bound_method_is_bound_to_the_object_that_is_restored() -> None:
    live, later = Node(), Node()
    later.up()
    found, told = filled(live, later)
    assert found is live and not told
    for call in live.calls:
        call()
    assert live.count == 3


def test_rings_that_came_later_are_restored() -> None:
    root = Node()
    root.children.append(Node(root))
    found, _ = filled({"best": None}, {"best": root})
    assert found["best"].children[0].parent is found["best"]
    found["best"].children[0].parent.calls[0]()
    assert found["best"].count == 1


def test_a_logger_is_the_one_there_is_and_is_left_alone() -> None:
    logger = logging.getLogger("tests.values")
    logger.handlers.append(handler := logging.NullHandler())
    before = dict(vars(logger))
    found, _ = filled({"log": None, "kind": None}, {"log": logger, "kind": Registered.ONE})
    assert found == {"log": logger, "kind": Registered.ONE} and vars(logger) == before
    logger.handlers.remove(handler)


def test_what_tells_its_own_state_keeps_the_objects_in_it() -> None:
    live, later = Guarded(), Guarded()
    held, lock = live.losses, live.lock
    later.losses.append(0.5)
    found, told = filled(live, later)
    assert found is live and live.losses is held and held == [0.5] and live.lock is not lock
    assert not told


def test_a_namespace_is_filled_in_place() -> None:
    live = SimpleNamespace(n=0, inner=[1])
    inner = live.inner
    found, told = filled(live, SimpleNamespace(n=2, inner=[1, 2], new=3))
    assert found is live and not told
    assert vars(live) == {"n": 2, "inner": [1, 2], "new": 3} and live.inner is inner


def test_a_tensor_of_the_programs_own_has_its_attributes_back() -> None:
    live: Any = torch.zeros(2).as_subclass(Marked)
    later: Any = torch.ones(2).as_subclass(Marked)
    live.tag, later.tag = "old", "new"
    found, _ = filled([live], [later])
    assert found[0] is live and live.tag == "new"
    assert live.as_subclass(torch.Tensor).tolist() == [1, 1]


class Reducing:
    def __init__(self, count: int) -> None:
        self.count = count

    def __reduce__(self) -> Any:
        return Reducing, (self.count,)


@pytest.mark.parametrize(
    ("live", "later", "is_told"),
    [
        (Reducing(1), Reducing(2), True),
        (iter([1]), iter([2]), True),
        (1, 2, False),
        ("a", "b", False),
        ((1,), (2,), False),
        (Registered.ONE, Registered.ONE, False),
        (None, [1], False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_filled_is_told_where_the_program_would_not_see_it(
    live: Any, later: Any, is_told: bool
) -> None:
    _, told = filled(live, later)
    assert bool(told) == is_told


def test_a_set_holds_the_very_objects_that_others_hold() -> None:
    node = Node()
    live = {"all": [node], "open": {node}}
    later = copy.deepcopy(live)
    found, _ = filled(live, later)
    assert found["open"] == {node} and found["all"][0] is node


class OwnNumber(complex):
    pass


class Fixed:
    """Is what it was made of."""

    def __new__(cls, value: int) -> Fixed:
        made = object.__new__(cls)
        object.__setattr__(made, "value", value)
        return made

    def __getnewargs__(self) -> tuple[int]:
        return (self.value,)  # type: ignore[attr-defined,no-any-return]

    def __setattr__(self, *_: Any) -> None:
        raise AttributeError("fixed")

    def __repr__(self) -> str:
        return f"Fixed({self.value})"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("live", "saved"),
    [
        (1j, 2j),
        (OwnNumber(1j), OwnNumber(2j)),
        (re.compile("a"), re.compile("b")),
        (int | str, int | float),
        (torch.strided, torch.sparse_coo),
        (torch.float32, torch.float16),
        (torch.finfo(torch.float32), torch.finfo(torch.float16)),
        (Fixed(1), Fixed(2)),
        (range(1), range(2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_made_anew_or_not_at_all_is_the_saved_one(live: Any, saved: Any) -> None:
    assert repr(Refill({}).top("it", live, saved)) == repr(saved)
    assert repr(Refill({}).top("it", {"in": [live]}, {"in": [saved]})) == repr({"in": [saved]})
