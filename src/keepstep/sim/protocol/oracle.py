"""Oracle: what every rank's state is after every step, computed beside the training it is compared
with.

A step mixes the states of all ranks, as an all-reduce does, and gives each rank a new one made of
the mixture: so a state that holds one wrong byte, or was computed from ranks that stood at
different steps, differs from then on everywhere. A state begins with the mixture it was made of: so
a checkpoint can be loaded by another number of ranks, and from there on the oracle goes with them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

MIXED_BYTES = 16


def mix(states: Iterable[bytes]) -> bytes:
    """What the ranks learn from each other in a step."""
    digest = hashlib.blake2b(digest_size=MIXED_BYTES)
    for state in states:
        digest.update(state)
    return digest.digest()


def advance(mixed: bytes, rank: int, step: int, nbytes: int) -> bytes:
    """The rank's state after `step`, from the mixture of all states before it: `nbytes`, at least
    those of the mixture."""
    seed = hashlib.blake2b(
        mixed + rank.to_bytes(4, "little") + step.to_bytes(8, "little"), digest_size=32
    ).digest()
    return (mixed + seed * (nbytes // len(seed) + 1))[:nbytes]


class Oracle:
    """An undisturbed run. States are `nbytes` long, each rank's a little longer than the one
    before."""

    def __init__(self, seed: int, world_size: int, nbytes: int) -> None:
        assert nbytes >= MIXED_BYTES
        self._nbytes = nbytes
        self.world_size = world_size
        first = hashlib.blake2b(str(seed).encode(), digest_size=MIXED_BYTES).digest()
        self._mixed = [first]  # by the step that it goes into

    def nbytes(self, rank: int) -> int:
        return self._nbytes + 7 * (rank % 5)

    def first(self) -> bytes:
        """What goes into step 0."""
        return self._mixed[0]

    def state(self, rank: int, step: int) -> bytes:
        while len(self._mixed) <= step:
            last = len(self._mixed) - 1
            self._mixed.append(mix(self._after(rank, last) for rank in range(self.world_size)))
        return self._after(rank, step)

    def _after(self, rank: int, step: int) -> bytes:
        return advance(self._mixed[step], rank, step, self.nbytes(rank))

    def resized(self, step: int, world_size: int) -> None:
        """From after `step` on so many ranks train."""
        if world_size != self.world_size:
            self.state(0, step)
            del self._mixed[step + 1 :]
            self.world_size = world_size
