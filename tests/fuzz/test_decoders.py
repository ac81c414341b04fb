"""Some hundred inputs for each decoder; `make soak` gives each a hundred thousand."""

from __future__ import annotations

import pytest

from keepstep.errors import DamageError
from tests.fuzz.decoders import Decoder, all_decoders
from tests.fuzz.fuzz import fuzz

DECODERS = all_decoders()
INPUTS = 300


@pytest.mark.parametrize("name", DECODERS)
def test_what_is_right_is_read(name: str) -> None:
    decoder = DECODERS[name]
    for seed in decoder.seeds:
        decoder.same(decoder.read(seed), seed)


@pytest.mark.parametrize("name", DECODERS)
def test_whatever_comes_is_read_or_refused(name: str) -> None:
    fuzz(DECODERS[name], f"0/{name}", INPUTS)


def test_an_error_that_nobody_expects_is_found() -> None:
    careless = Decoder([b'{"a": 1}'], lambda said: __import__("json").loads(said)["a"])
    with pytest.raises(AssertionError, match="input"):
        fuzz(careless, "careless", 100)


def test_what_is_taken_and_was_not_written_is_found() -> None:
    def same(found: bytes, said: bytes) -> None:
        assert said == b"right"

    with pytest.raises(AssertionError):
        fuzz(Decoder([b"right"], bytes, (DamageError,), same), "credulous", 100)
