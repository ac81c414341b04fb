"""Known states: what is told is the state, whatever was drawn; and it is read once while nothing
was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.edge.torch import known_states
from keepstep.edge.torch.known_states import KnownState, numpy_state, python_state

SOME = random.Random(5).getstate()
SOME_OF_NUMPY = np.random.RandomState(5).get_state()

PYTHONS = {
    "nothing": lambda: None,
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "bits": lambda: random.getrandbits(70),
    "shuffle": lambda: random.shuffle([1, 2, 3]),
    "seed": lambda: random.seed(3),
    "put back": lambda: random.setstate(SOME),
}
NUMPYS = {
    "nothing": lambda: None,
    "random": np.random.random,
    "normal": np.random.standard_normal,
    "seed": lambda: np.random.seed(3),
    "put back": lambda: np.random.set_state(SOME_OF_NUMPY),
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    python, bits, numpy = random.getstate(), np.random.get_bit_generator(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_bit_generator(bits)
    np.random.set_state(numpy)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):  # of a generator that is not numpy's first
        return repr(one) == repr(other)
    return one[0] == other[0] and bytes(one[1]) == bytes(other[1]) and one[2:] == other[2:]


@given(st.lists(st.sampled_from(sorted(PYTHONS))))
def test_it_is_the_state_of_python(acts: list[str]) -> None:
    for act in acts:
        PYTHONS[act]()
        assert python_state() == random.getstate()


@given(st.lists(st.sampled_from(sorted(NUMPYS))))
def test_it_is_the_state_of_numpy(acts: list[str]) -> None:
    np.random.set_bit_generator(np.random.MT19937(1))
    for act in acts:
        NUMPYS[act]()
        assert same(numpy_state(), np.random.get_state())


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64])
@pytest.mark.filterwarnings("ignore:get_state and legacy")
def test_another_generator_in_its_place_is_seen(kind: Any) -> None:
    for seed in (1, 2, 1):
        np.random.set_bit_generator(kind(seed))
        assert same(numpy_state(), np.random.get_state())
        np.random.random()
        assert same(numpy_state(), np.random.get_state())


def test_a_number_that_waits_for_the_next_call_is_seen() -> None:
    np.random.seed(1)
    np.random.standard_normal()
    waits = numpy_state()
    np.random.standard_normal()
    assert (waits[3], numpy_state()[3]) == (1, 0)


def test_it_is_read_once_while_nothing_is_drawn() -> None:
    np.random.set_bit_generator(np.random.MT19937(1))
    assert python_state() is python_state()
    assert numpy_state() is numpy_state()


def test_where_a_draw_does_not_show_it_is_read_each_time() -> None:
    generator = random.Random(1)
    known = KnownState(lambda _: b"always the same", lambda: False)
    first = known.of(generator.getstate)
    generator.random()
    assert known.of(generator.getstate) == generator.getstate() != first


def test_bytes_that_show_nothing_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, tried in (
        ("_bytes_of_python", known_states._python_shows_all),
        ("_bytes_of_numpy", known_states._numpy_shows_all),
    ):
        assert tried()
        monkeypatch.setattr(known_states, name, lambda _: b"always the same")
        assert not tried()


def test_a_function_of_the_programs_own_is_asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter(range(9))
    monkeypatch.setattr(random, "getstate", lambda: next(told))
    assert [python_state(), python_state()] == [0, 1]


def test_what_another_thread_draws_while_it_is_read_is_not_missed() -> None:
    generator = random.Random(1)

    class ReadWhileDrawn:
        __self__ = generator

        def __call__(self) -> Any:
            generator.random()
            return generator.getstate()

    before = generator.getstate()
    known = KnownState(known_states._bytes_of_python, lambda: True)
    known.of(ReadWhileDrawn())
    generator.setstate(before)
    assert known.of(generator.getstate) == before
