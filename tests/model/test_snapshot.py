"""Stamps: ordered by step, told apart by epoch."""

from __future__ import annotations

from keepstep.model.snapshot import Stamp


def test_a_later_step_is_newer_whatever_the_epoch() -> None:
    assert Stamp(4, 9) < Stamp(5, 1) < Stamp(5, 2)


def test_the_same_step_of_another_epoch_is_another_state() -> None:
    assert Stamp(5, 1) != Stamp(5, 2)
    assert str(Stamp(5, 2)) == "step 5"
