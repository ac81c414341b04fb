"""Step: a number everywhere, with a body that can be given up."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.runtime.rank.step import Step


class Loop:
    def __init__(self, is_lost: bool) -> None:
        self._is_lost = is_lost
        self.entered: list[int] = []
        self.left = 0

    def leave(self) -> bool:
        self.left += 1
        return self._is_lost

    def step(self, number: int) -> Step:
        return Step.of(number, self.entered.append, self.leave)


@given(st.integers(0, 1 << 60))
def test_it_is_a_number_wherever_it_is_kept(number: int) -> None:
    step = Loop(False).step(number)
    assert step == number and step + 1 == number + 1
    kept = pickle.loads(pickle.dumps({"step": step}))["step"]
    assert kept == number and type(kept) is int


def test_a_body_that_ends_well() -> None:
    loop = Loop(is_lost=False)
    with (step := loop.step(4)):
        assert step.entered and not step.ended
    assert step.ended and loop.entered == [4] and loop.left == 1


@pytest.mark.parametrize("is_lost", [True, False])
def test_an_error_is_the_lost_peers_only_when_one_is_lost(is_lost: bool) -> None:
    loop = Loop(is_lost)
    step = loop.step(4)
    try:
        with step:
            raise ValueError("shape")
    except ValueError:
        assert not is_lost
    else:
        assert is_lost
    assert not step.ended and loop.left == 1


def test_an_interrupt_is_never_swallowed() -> None:
    with pytest.raises(KeyboardInterrupt), Loop(is_lost=True).step(4):
        raise KeyboardInterrupt


def test_a_step_whose_body_was_not_entered_says_so() -> None:
    step = Loop(False).step(4)
    assert not step.entered and not step.ended
