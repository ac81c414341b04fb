"""Inert: what is not known is passed on as it was written, and nothing of it is made."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.edge.torch.pickles.checked import load_pickles
from keepstep.edge.torch.pickles.inert import PROTOCOL, Inert, Unmade, save_torch, uses_of
from keepstep.errors import UntrustedError
from tests.edge.torch.pickles.hostile import LYING, RUNNING
from tests.edge.torch.pickles.own_types import Colour, Frozen, Plain, Point, Restoring
from tests.edge.torch.pickles.test_known import PLAIN
from tests.edge.torch.pickles.test_own import OWN


def passed_on(value: Any) -> Any:
    """What one who trusts it reads of what an inert reader has written."""
    (found,) = load_pickles(pickle.dumps(value, 5), (1,), Inert())
    return torch.load(io.BytesIO(save_torch(found)), weights_only=False)


def plain_form(value: Any) -> bytes:
    return pickle.dumps(value, 5)


@pytest.mark.parametrize("value", [*PLAIN, *OWN], ids=lambda value: type(value).__name__)
def test_it_is_passed_on_as_it_was(value: Any) -> None:
    assert plain_form(passed_on(value)) == plain_form(pickle.loads(pickle.dumps(value, 5)))


def test_objects_that_are_one_stay_one() -> None:
    ring = Plain(None)
    ring.value = [ring, ring]
    found = passed_on((ring, ring.value))
    assert found[0] is found[1][0]
    assert found[0].value is found[1]


def test_nothing_of_the_programs_own_is_made() -> None:
    value = [Restoring(), Frozen(Colour.RED), Point(1, 2.0)]
    (found,) = load_pickles(pickle.dumps(value, 5), (1,), Inert())
    assert all(isinstance(each, Unmade) for each in found)


@pytest.mark.parametrize("name", RUNNING)
def test_what_would_run_does_not_run_here(name: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    try:
        (found,) = load_pickles(RUNNING[name](mark), (1,), Inert())
        save_torch(found)
    except UntrustedError:
        pass
    assert not mark.exists()


@pytest.mark.parametrize("name", ["numbers without end", "a dtype that hides objects"])
def test_what_lies_is_refused_here_as_well(name: str) -> None:
    with pytest.raises(UntrustedError):
        load_pickles(LYING[name], (1,), Inert())


def test_plain_values_are_written_as_torch_writes_them() -> None:
    plain = {"a": [1, torch.ones(2)]}
    buffer = io.BytesIO()
    torch.save(plain, buffer, pickle_protocol=PROTOCOL)
    assert save_torch(plain) == buffer.getvalue()


def test_uses_tell_calls_from_names() -> None:
    uses = uses_of(pickle.dumps([Colour.RED, Plain(1), Point], 5), (1,))
    module = Plain.__module__
    assert uses.named == {(module, "Colour"), (module, "Plain"), (module, "Point")}
    assert uses.called == {(module, "Colour")}
    assert uses.made == {(module, "Plain")}
