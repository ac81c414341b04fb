"""Fuzz: one decoder under many inputs."""

from __future__ import annotations

from random import Random

from tests.fuzz.decoders import Decoder
from tests.fuzz.mutations import mutated


def fuzz(decoder: Decoder, seed: str, inputs: int) -> int:
    """How many of them were refused. Raises AssertionError, with the input, when one brings about
    what it must not."""
    random = Random(seed)
    refused = 0
    for number in range(inputs):
        said = decoder.seal(mutated(random, random.choice(decoder.seeds)))
        try:
            found = decoder.read(said)
        except decoder.refuses:
            refused += 1
            continue
        except Exception as error:
            raise AssertionError(
                f"input {number} of {seed}: {type(error).__name__}: {error!s:.200}: {said[:300]!r}"
            ) from error
        decoder.same(found, said)
    return refused
