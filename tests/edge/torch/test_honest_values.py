"""Honest values: what programs keep in their state comes back as it was, out of memory and out of
the store. Each of these was once refused, or came back as something else."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import re
import time
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import numpy
import pytest
import torch

from keepstep.edge.torch.dcp.tree import TREE, RankState, flat, grown
from keepstep.edge.torch.pickles.checked import load_pickles, load_torch
from keepstep.edge.torch.pickles.inert import Inert, uses_of
from keepstep.edge.torch.pickles.own import Own
from tests.edge.torch.pickles import own_types
from tests.edge.torch.pickles.own_types import ByClassMethod, Marked, Masked, Recent, Vector

ONE = (1,)


def through_memory(value: Any, live: Any) -> Any:
    own = Own(lambda: uses_of(pickle.dumps(live, 5), ONE))
    (found,) = load_pickles(pickle.dumps(value, 5), ONE, own)
    return found


def through_store(value: Any, live: Any) -> Any:
    """As the writer of checkpoints reads and writes it, and then as a program reads it."""
    (passed_on,) = load_pickles(pickle.dumps({"log": value}, 5), ONE, Inert())
    written = flat(RankState(0, passed_on))
    own = Own(lambda: uses_of(pickle.dumps(live, 5), ONE))
    values = {
        name: load_torch(kept.data, own) if isinstance(kept.data, bytes) else kept.data
        for name, kept in written.items()
    }
    return grown(values.pop(TREE), values, {})["log"]


def advanced(iterator: Any) -> Any:
    next(iterator)
    return iterator


VALUES: dict[str, Callable[[], Any]] = {
    "time zone": lambda: datetime(2026, 1, 1, tzinfo=ZoneInfo("Europe/Berlin")),
    "second hour of a night": lambda: datetime(2026, 10, 25, 2, 30, fold=1),
    "class method": lambda: ByClassMethod(["a"]),
    "factory": lambda: defaultdict(own_types.rebuilt, {"a": 1}),
    "partial factory": lambda: defaultdict(functools.partial(own_types.rebuilt, 4), {"a": 1}),
    "defaultdict": lambda: defaultdict(list, {"a": [1]}),
    "counter": lambda: Counter("aab"),
    "ordered": lambda: OrderedDict(b=1, a=2),
    "own deque": lambda: Recent([1, 2], 4),
    "deque of tensors": lambda: deque([torch.ones(1)], 3),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "coo": lambda: torch.eye(3).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]),
    "results": lambda: torch.tensor([[1.0, 3.0]]).max(1),
    "jagged": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.zeros(3)], layout=torch.jagged
    ),
    "own tensor": lambda: torch.ones(2, 2).as_subclass(Marked),
    "own conjugate": lambda: torch.tensor([1 + 2j]).as_subclass(Marked).conj(),
    "cycle": lambda: advanced(itertools.cycle([1, 2, 3])),
    "count": lambda: advanced(itertools.count(5, 2)),
    "chain": lambda: advanced(itertools.chain([1, 2], [3])),
    "slice": lambda: advanced(itertools.islice([1, 2, 3], 1, 3)),
    "iterator": lambda: advanced(iter([1, 2, 3])),
    "numbered": lambda: advanced(enumerate(["a", "b", "c"])),
    "zipped": lambda: zip([1, 2], "ab", strict=False),
    "backwards": lambda: advanced(reversed([1, 2, 3])),
    "records": lambda: numpy.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "record": lambda: numpy.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])[0],
    "masked": lambda: numpy.ma.masked_array([1.0, 2.0], mask=[True, False], fill_value=7.0),
    "matrix": lambda: numpy.matrix([[1, 2], [3, 4]]),
    "own array": lambda: numpy.arange(3.0).view(Vector),
    "own masked array": lambda: numpy.ma.masked_array([1.0, 2.0], mask=[True, False]).view(Masked),
    "titled": lambda: numpy.zeros(2, numpy.dtype([(("title", "a"), "i4")])),
    "with metadata": lambda: numpy.zeros(2, numpy.dtype("i4", metadata={"unit": "m"})),
    "moment": lambda: time.localtime(0),
    "none's class": lambda: [type(None), ..., NotImplemented, object],
    "format": lambda: [torch.channels_last, torch.strided, torch.float8_e4m3fn],
    "error": lambda: ValueError("no", 3),
    "regular flags": lambda: re.IGNORECASE | re.MULTILINE,
    "dotted key": lambda: {"val": {"loss": 1.0}, "val.loss": 2.0},
    "keys that print alike": lambda: {1: "a", "1": "b"},
}


def told(value: Any) -> Any:
    """All there is to say of a value, to be compared."""
    if isinstance(value, torch.Tensor):
        dense = value.values() if value.is_nested and value.layout is torch.jagged else value
        parts = dense.unbind() if dense.is_nested else [dense]
        plain = [part.to_dense() if part.layout is not torch.strided else part for part in parts]
        return type(value), value.layout, [p.resolve_conj().tolist() for p in plain]
    if isinstance(value, numpy.ndarray):
        inner = value.dtype
        return type(value), inner, inner.metadata, inner.fields, numpy.asarray(value).tolist()
    if isinstance(value, deque):
        return type(value), value.maxlen, [told(item) for item in value]
    if hasattr(value, "__next__"):
        return type(value), list(itertools.islice(value, 5))
    if isinstance(value, ByClassMethod):
        return type(value), value.words
    if isinstance(value, defaultdict):
        return type(value), repr(value.default_factory)[:40], dict(value)
    if isinstance(value, BaseException):
        return type(value), value.args
    if isinstance(value, datetime):
        return value, value.fold, value.tzinfo
    return type(value), value


@pytest.mark.parametrize("road", [through_memory, through_store])
@pytest.mark.parametrize("name", VALUES)
def test_it_comes_back_as_it_was(name: str, road: Callable[[Any, Any], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch and Python: beta, deprecated
        found = road(VALUES[name](), VALUES[name]())
        assert told(found) == told(VALUES[name]())
        if "masked" in name:
            assert found.mask.tolist() == [True, False]
            assert found.fill_value == VALUES[name]().fill_value


def test_one_list_under_two_names_stays_one_out_of_the_store() -> None:
    shared = [1, 2]
    found = through_store({"a": shared, "b": {"c": shared}}, {})
    assert found["a"] is found["b"]["c"]


def test_a_ring_of_containers_comes_back_out_of_the_store() -> None:
    ring: dict[str, Any] = {"weights": torch.ones(2)}
    ring["self"] = [ring]
    found = through_store(ring, {})
    assert found["self"][0] is found and found["weights"].tolist() == [1, 1]


def test_a_chain_of_objects_may_be_as_deep_as_python_pickles() -> None:
    chain: Any = None
    for _ in range(200):
        chain = {"next": chain}
    assert through_store(copy.deepcopy(chain), {}) == chain


@pytest.mark.parametrize(
    "name", ["own deque", "own tensor", "own conjugate", "error", "time zone", "nested", "results"]
)
@pytest.mark.parametrize("road", [through_memory, through_store])
def test_it_may_come_later(name: str, road: Callable[[Any, Any], Any]) -> None:
    assert told(road(VALUES[name](), {})) == told(VALUES[name]())
