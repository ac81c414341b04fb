"""Own: a saved state is made of what the live one is made of, and of nothing else."""

from __future__ import annotations

import functools
import logging
import os
import pickle
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from keepstep.edge.torch.pickles.checked import load_pickles
from keepstep.edge.torch.pickles.inert import uses_of
from keepstep.edge.torch.pickles.own import Own
from keepstep.errors import UntrustedError
from tests.edge.torch.pickles import own_types
from tests.edge.torch.pickles.hostile import RUNNING, Calls, Text
from tests.edge.torch.pickles.own_types import (
    Bits,
    Colour,
    Frozen,
    Hooked,
    Making,
    Marked,
    Plain,
    Point,
    Record,
    Reducing,
    Restoring,
    Table,
    Vector,
)

SECTIONS = (1,)


def read(raw: bytes, live: Any, objects: Sequence[Any] = (), trusted: Sequence[str] = ()) -> Any:
    """A saved pickle, as a program reads it whose state is `live`."""
    own = Own(lambda: uses_of(pickle.dumps(live, 5), SECTIONS), objects, trusted)
    (found,) = load_pickles(raw, SECTIONS, own)
    return found


OWN = [
    *(Colour.RED, Bits.A | Bits.B, Point(1, 2.5), Record(0.5, ["a"]), Frozen(Colour.BLUE)),
    *(Plain([1]), Plain.Inner(), Table(a=1), Restoring(), Reducing(7), Plain, own_types.rebuilt),
    *(Plain(3).method, functools.partial(own_types.rebuilt, 4), defaultdict(Record)),
    *(logging.getLogger("a.b"), re.compile("a+", re.IGNORECASE), {Colour.RED: {Point(1, 2): 3}}),
]


@pytest.mark.parametrize("value", OWN, ids=lambda value: type(value).__name__)
def test_what_the_live_state_has_comes_back(value: Any) -> None:
    raw = pickle.dumps(value, 5)
    expected = pickle.loads(raw)
    assert pickle.dumps(read(raw, value), 5) == pickle.dumps(expected, 5)


@pytest.mark.parametrize(
    "value",
    [Colour.BLUE, Bits.B, Point(1, 2.5), Record(0.5), Frozen(Colour.RED), Plain(1), Table(a=1)],
    ids=lambda value: type(value).__name__,
)
def test_what_a_list_fills_with_later_comes_back_where_it_runs_no_code(value: Any) -> None:
    raw = pickle.dumps([value], 5)
    found = read(raw, [], objects=[Plain(0)])
    assert pickle.dumps(found, 5) == pickle.dumps([value], 5)
    assert pickle.dumps(read(raw, []), 5) == pickle.dumps([value], 5)  # it is not installed


def test_of_what_is_installed_only_packages_that_the_live_state_has_are_taken() -> None:
    raw = pickle.dumps([pytest.ExitCode.OK], 5)
    with pytest.raises(UntrustedError, match="ExitCode"):
        read(raw, [])
    assert read(raw, [], objects=[pytest.ExitCode.OK]) == [pytest.ExitCode.OK]


def test_a_class_of_the_program_may_fill_its_objects_itself() -> None:
    found = read(pickle.dumps(Restoring(), 5), [])
    assert type(found) is Restoring and found.calls == 1


def test_what_is_called_is_refused_unless_a_person_trusts_it() -> None:
    value, name = Reducing(1), "rebuilt"
    raw = pickle.dumps(value, 5)
    module = own_types.__name__
    for trusted in ([], [f"{module}.rebuil", f"{module}.re", "test"]):
        with pytest.raises(UntrustedError):
            read(raw, [], objects=[Plain(0)], trusted=trusted)
    for word in (f"{module}.{name}", module, "tests"):
        assert type(read(raw, [], trusted=[word])) is type(value)


def test_no_class_is_called_that_the_live_state_only_names(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    raw = pickle.dumps(Calls(Making, str(mark)))
    with pytest.raises(UntrustedError):
        read(raw, Making)
    new = Text().name(own_types.__name__, "Making").value((str(mark),)).do(pickle.NEWOBJ).end()
    for live in (Making, Plain(0)):
        with pytest.raises(UntrustedError):
            read(new, live, objects=[Plain(0)])
    assert not mark.exists()


def test_no_class_or_member_is_written_into() -> None:
    for name in ("Plain", "Record", "Table", "rebuilt"):
        text = Text().name(own_types.__name__, name).value((None, {"method": 1}))
        with pytest.raises(UntrustedError):
            read(text.do(pickle.BUILD).end(), OWN, objects=[Plain(0)])
    member = Text().name(own_types.__name__, "Colour").value(("red",)).do(pickle.REDUCE)
    with pytest.raises(UntrustedError):
        read(member.value({"_value_": "blue"}).do(pickle.BUILD).end(), OWN)
    assert Colour.RED.value == "red"


def test_no_object_becomes_one_of_another_class() -> None:
    text = Text().name(own_types.__name__, "Plain").value(()).do(pickle.NEWOBJ)
    text.do(pickle.NONE, pickle.EMPTY_DICT).value("__class__").name(own_types.__name__, "Record")
    with pytest.raises(UntrustedError):
        read(text.do(pickle.SETITEM, pickle.TUPLE2, pickle.BUILD).end(), OWN)


@pytest.mark.parametrize("name", ["__init__", "__globals__", "__class__", "value", "absent"])
def test_of_an_object_only_a_method_is_asked_for(name: str) -> None:
    text = Text().name("builtins", "getattr").value(Plain(1)).value(name)
    with pytest.raises(UntrustedError):
        read(text.do(pickle.TUPLE2, pickle.REDUCE).end(), OWN)


@pytest.mark.parametrize("name", RUNNING)
def test_what_would_run_is_refused_whatever_the_live_state_has(name: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for live in (OWN, []):
        with pytest.raises(UntrustedError):
            read(RUNNING[name](mark), live, objects=[Plain(0), torch.nn.Linear(1, 1)])
    assert not mark.exists()


def test_a_function_of_pythons_is_not_called_though_the_live_state_calls_it(
    tmp_path: Path,
) -> None:
    live = Calls(os.path.join, "a", "b")
    with pytest.raises(UntrustedError):
        read(pickle.dumps(live), live)


def test_no_module_is_imported_because_it_is_named() -> None:
    import sys

    before = set(sys.modules)
    for module in ("this", "antigravity", "tests.nowhere"):
        with pytest.raises(UntrustedError):
            read(Text().name(module, "x").end(), OWN, objects=[Plain(0)])
    assert "this" not in set(sys.modules) - before


def test_a_tensor_of_a_class_of_its_own_comes_back() -> None:
    tensor = torch.arange(3.0).as_subclass(Marked)
    found = read(pickle.dumps(tensor), tensor)
    assert type(found) is Marked
    assert torch.equal(found.as_subclass(torch.Tensor), torch.arange(3.0))
    assert type(read(pickle.dumps(tensor), [])) is Marked  # it runs nothing
    hooked = torch.arange(3.0).as_subclass(Hooked)
    assert type(read(pickle.dumps(hooked), hooked)) is Hooked
    with pytest.raises(UntrustedError, match="Hooked"):
        read(pickle.dumps(hooked), [])


@pytest.mark.parametrize("args", [((1 << 50,), b"b"), ((0,), "O"), ((0, 1 << 50), b"b"), ()])
def test_an_array_of_a_class_of_its_own_is_made_empty(args: tuple[Any, ...]) -> None:
    live = numpy.zeros(2).view(Vector)
    raw = pickle.dumps(Calls(live.__reduce__()[0], Vector, *args))
    with pytest.raises(UntrustedError):
        read(raw, live)
    new = Text().name(own_types.__name__, "Vector").value((1 << 50,)).do(pickle.NEWOBJ).end()
    with pytest.raises(UntrustedError, match="without memory"):
        read(new, live)
    lying = pickle.dumps(live).replace(b"K\x02\x85", b"K\x09\x85")
    with pytest.raises(UntrustedError, match="other content"):
        read(lying, live)


@pytest.mark.parametrize(
    "function", [torch.storage._load_from_bytes, getattr, numpy.ones(1).__reduce__()[0]]
)
def test_a_function_that_is_only_called_is_handed_to_nobody(function: Any) -> None:
    """Else the program would call it some day, with what the bytes say."""
    live = [defaultdict(functools.partial(dict, a=1))]
    hostile = [defaultdict(functools.partial(function, b"evil"))]
    with pytest.raises(UntrustedError, match="hands"):
        read(pickle.dumps(hostile), live)
    with pytest.raises(UntrustedError, match="hands"):
        read(pickle.dumps([defaultdict(function)]), live)
    [alone] = read(pickle.dumps([function]), live)
    with pytest.raises(UntrustedError, match="only called as a state is read"):
        alone(b"evil")
