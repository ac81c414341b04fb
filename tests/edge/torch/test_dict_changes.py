"""Dict changes: what is told of dicts is the same only if they hold the very same things."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.edge.torch import dict_changes
from keepstep.edge.torch.dict_changes import can_count, changes_of

KEYS = st.integers(0, 3)
ACTS = ("set", "delete", "pop_last", "update", "clear", "default", "merge", "again")


class Thing:
    """With attributes, as a module has them."""


def act(found: dict[Any, Any], name: str, key: int) -> None:
    if name == "set":
        found[key] = [key]
    elif name == "again":
        found[key] = found.get(key)
    elif name == "delete":
        found.pop(key, None)
    elif name == "pop_last" and found:
        found.popitem()
    elif name == "update":
        found.update({key: [key]})
    elif name == "clear":
        found.clear()
    elif name == "default":
        found.setdefault(key, [key])
    elif name == "merge":
        found |= {key: [key]}


@settings(derandomize=True, deadline=None)
@given(
    st.sampled_from([dict, lambda: defaultdict(list)]),
    st.lists(st.tuples(st.sampled_from(ACTS), KEYS), max_size=20),
)
def test_the_same_is_told_only_of_the_same(made: Any, acts: list[tuple[str, int]]) -> None:
    found = made()
    told, held = changes_of([found]), list(found.items())
    for name, key in acts:
        act(found, name, key)
        now, items = changes_of([found]), list(found.items())
        if now == told:
            assert [(k, id(v)) for k, v in items] == [(k, id(v)) for k, v in held]
        told, held = now, items


def test_attributes_are_counted_however_often_they_are_set() -> None:
    thing = Thing()
    own = vars(thing)
    for number in range(200):  # long enough for the interpreter to have a quick way of its own
        told = changes_of([own])
        thing.value = [number]  # type: ignore[attr-defined]
        assert changes_of([own]) != told
    told = changes_of([own])
    del thing.value  # type: ignore[attr-defined]
    assert changes_of([own]) != told


def test_what_can_be_put_into_another_order_unseen_is_not_counted() -> None:
    assert not can_count(OrderedDict(a=1))
    assert not can_count(type("Own", (dict,), {})())
    assert not can_count([1])


def test_nothing_is_told_where_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dict_changes, "_version", None)
    found = {1: 1}
    assert not can_count(found)
    assert changes_of([found]) != changes_of([found])
