"""Newcomers: it is said at once, and once, that a new process would refuse what a state holds."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.edge.torch.pickles.checked import load_pickles
from keepstep.edge.torch.state import Protected
from keepstep.edge.torch.tree import SECTIONS
from keepstep.errors import UntrustedError
from tests.edge.torch.pickles import own_types
from tests.edge.torch.pickles.own_types import Colour, Plain, Point, Reducing, Restoring


def training(log: list[Any], *trusted: str) -> Protected:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    return Protected.of({"model": model, "optimizer": optimizer, "log": log}, True, trusted)


def is_read_by_a_new_process(raw: bytes) -> bool:
    calls = {
        ("keepstep.edge.torch.tree", "_fetch"): lambda index: torch.zeros(()),
        ("keepstep.edge.torch.tree", "_as_leaf"): lambda tensor, *_: tensor,
    }
    try:
        load_pickles(raw, SECTIONS, training([]).vocabulary(calls))
    except UntrustedError:
        return False
    return True


VALUES = [
    *(pytest.ExitCode.OK, Colour.RED, Point(1, 2.5), Plain(1), Restoring(), Reducing(7)),
    *(Path("a"), Counter("aab"), torch.float32, functools.partial(own_types.rebuilt, 4)),
    *(logging.getLogger("a"), pytest.Class, own_types.rebuilt, 1.5, "text"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_it_is_said_exactly_where_a_new_process_would_refuse(value: Any) -> None:
    protected = training([])
    assert not protected.gather().remark
    protected.values["log"].append(value)
    state = protected.gather()
    assert bool(state.remark) != is_read_by_a_new_process(state.objects), state.remark
    assert not protected.gather().remark, "said once"


def test_it_names_what_to_trust() -> None:
    protected = training([])
    protected.gather()
    protected.values["log"].append(pytest.ExitCode.OK)
    told = protected.gather().remark
    name = "pytest.ExitCode"
    assert f"KEEPSTEP_TRUSTED_TYPES={name}" in told
    trusting = training([], name)
    trusting.gather()
    trusting.values["log"].append(pytest.ExitCode.OK)
    assert not trusting.gather().remark


def test_what_is_there_from_the_beginning_is_not_said() -> None:
    protected = training([pytest.ExitCode.OK])
    assert not protected.gather().remark


def test_a_module_that_was_imported_later_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "comes_later.py").write_text("class Late:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    protected = training([])
    protected.gather()
    late = importlib.import_module("comes_later")
    monkeypatch.setitem(sys.modules, "comes_later", late)
    protected.values["log"].append(late.Late())
    assert "comes_later.Late" in protected.gather().remark
