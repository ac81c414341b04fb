"""Told sights come back as they were, and nothing that is none comes back as one."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.numbers.told_sight import NAME_CHARACTERS, NAMES, from_text, to_text
from keepstep.core.wire.codec import Codec
from keepstep.errors import DamageError
from keepstep.model.bounds import MAX_PACKET_BYTES
from keepstep.model.messages.keeper_rank import HaltWord
from keepstep.model.numbers import SKETCH_SUMS, Device, Origin, RangeCount, Sight, Sign
from keepstep.model.snapshot import Stamp

NAME = st.text(max_size=NAME_CHARACTERS)
FEW = st.lists(NAME, max_size=NAMES).map(tuple)
COUNT = st.integers(0, 1 << 40)
SIGHTS = st.builds(
    Sight,
    rank=COUNT,
    role=COUNT,
    signs=st.lists(st.sampled_from(Sign), unique=True).map(tuple),
    first_step=st.integers(-1, 1 << 40),
    looked=st.booleans(),
    gave=st.none() | st.floats(allow_nan=False),
    gave_bad_at=st.none() | COUNT,
    bad_batch=FEW,
    bad_weights=FEW,
    bad_moments=FEW,
    bad_gradients=FEW,
    bad_update=FEW,
    origin=st.none() | st.builds(Origin, NAME, NAME, NAME),
    narrow=st.none() | st.builds(RangeCount, NAME, NAME, COUNT, COUNT, COUNT),
    digest=st.text("0123456789abcdef", max_size=64),
    sketch=st.lists(st.floats(allow_nan=False), max_size=SKETCH_SUMS).map(tuple),
    device=st.none() | st.builds(Device, NAME, COUNT),
    holds=st.lists(st.builds(Stamp, st.integers(-1, 1 << 40), COUNT), max_size=8).map(tuple),
    batches=COUNT,
    skips=COUNT,
    means=st.booleans(),
    differs_since=st.none() | st.integers(-1, 10**9),
)


@given(SIGHTS)
def test_what_is_told_comes_back_equal(seen: Sight) -> None:
    assert from_text(to_text(seen)) == seen


def test_nan_comes_back_too() -> None:
    gave = from_text(to_text(Sight(0, 0, gave=math.nan))).gave
    assert gave is not None and math.isnan(gave)


def test_whatever_a_program_calls_its_tensors_a_word_fits_into_a_packet() -> None:
    names = ("\N{GRINNING FACE}" * 4000,) * 40
    seen = Sight(0, 0, tuple(Sign), bad_batch=names, bad_weights=names, bad_moments=names)
    seen = from_text(to_text(seen))
    assert len(seen.bad_batch) == NAMES and len(seen.bad_weights[0]) == NAME_CHARACTERS
    word = HaltWord(0, 1, 0, 0, 0, "stands", to_text(seen))
    assert len(Codec([HaltWord]).encode(word)) < MAX_PACKET_BYTES


@given(SIGHTS, st.data())
def test_another_text_is_refused_and_does_nothing_else(seen: Sight, data: st.DataObject) -> None:
    text = to_text(seen)
    plain = json.loads(text)
    change = data.draw(st.sampled_from(["cut", "field", "less", "more"]))
    if change == "cut":
        text = text[: data.draw(st.integers(0, len(text) - 1))]
    else:
        at = data.draw(st.integers(0, len(plain) - 1))
        odd = data.draw(st.sampled_from([{}, [[]], -7, "x", 1.5, True]))
        plain = {
            "field": [*plain[:at], odd, *plain[at + 1 :]],
            "less": plain[:-1],
            "more": [*plain, 0],
        }[change]
        text = json.dumps(plain)
    try:
        from_text(text)
    except DamageError:
        return
    assert change == "field"  # it is another sight, and may be one


@pytest.mark.parametrize("text", ["", "null", "[]", "7", '"a"', "[" * 100_000])
def test_what_is_no_sight_is_refused(text: str) -> None:
    with pytest.raises(DamageError):
        from_text(text)
