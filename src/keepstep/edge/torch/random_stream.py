"""Random stream: random numbers that are nobody else's.

What loads data draws from torch's, numpy's and Python's global generators: the order of a shuffle,
the seed of the workers, an augmentation. While a stream is entered those generators are its own; on
leaving they are again what they were, so loading, or loading again after a restart, shifts nobody's
numbers. CUDA's generators are left alone.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
import xxhash

NUMPY_SEEDS = 1 << 32


def mixed(*numbers: int | str) -> int:
    """A seed of 63 bits that follows from all of them."""
    return xxhash.xxh3_64_intdigest(repr(numbers).encode()) >> 1


def sow(seed: int) -> None:
    """Seed the generators that `RandomStream` exchanges."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % NUMPY_SEEDS)


class RandomStream:
    """The numbers that follow from one seed. Enter it to draw; it goes on where it was left."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._own: tuple[Any, Any] | None = None  # None: from the seed
        self._others: tuple[Any, Any] = (None, None)
        self._numpy: _NumpyStream | None = None

    def restart(self, seed: int) -> None:
        """As a new one of that seed."""
        self._seed = seed
        self._own = None

    def __enter__(self) -> None:
        self._others = _states()
        if self._numpy is None and "numpy" in sys.modules:
            self._numpy = _NumpyStream()
        if self._numpy is not None:
            self._numpy.exchange()
        if self._own is None:
            sow(self._seed)
        else:
            _set_states(self._own)

    def __exit__(self, *_: object) -> None:
        self._own = _states()
        _set_states(self._others)
        if self._numpy is not None:
            self._numpy.exchange()


def _states() -> tuple[Any, Any]:
    return torch.default_generator.get_state(), random.getstate()


def _set_states(states: tuple[Any, Any]) -> None:
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])


class _NumpyStream:
    """numpy's generator is exchanged as a whole: its state takes a hundred times as long."""

    def __init__(self) -> None:
        self._random: Any = sys.modules["numpy"].random
        self._waiting: Any = self._random.MT19937(0)

    def exchange(self) -> None:
        current = self._random.get_bit_generator()
        self._random.set_bit_generator(self._waiting)
        self._waiting = current
