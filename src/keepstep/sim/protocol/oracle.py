"""Oracle: what every rank's state is after every step, computed beside the training it is compared
with.

A step mixes the states of all ranks, as an all-reduce does, and gives each rank a new one made of
the mixture: so a state that holds one wrong byte, or was computed from ranks that stood at
different steps, differs from then on everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def mix(states: Iterable[bytes]) -> bytes:
    """What the ranks learn from each other in a step."""
    digest = hashlib.blake2b(digest_size=16)
    for state in states:
        digest.update(state)
    return digest.digest()


def advance(mixed: bytes, rank: int, step: int, nbytes: int) -> bytes:
    """The rank's state after `step`, from the mixture of all states before it."""
    seed = hashlib.blake2b(
        mixed + rank.to_bytes(4, "little") + step.to_bytes(8, "little"), digest_size=32
    ).digest()
    return (seed * (nbytes // 32 + 1))[:nbytes]


class Oracle:
    """An undisturbed run of `world_size` ranks. States are `nbytes` long, each rank's a little
    longer than the one before."""

    def __init__(self, seed: int, world_size: int, nbytes: int) -> None:
        self._world_size, self._nbytes = world_size, nbytes
        # by the step that they go into
        self._mixed = [hashlib.blake2b(str(seed).encode(), digest_size=16).digest()]

    def nbytes(self, rank: int) -> int:
        return self._nbytes + 7 * (rank % 5)

    def first(self) -> bytes:
        """What goes into step 0."""
        return self._mixed[0]

    def state(self, rank: int, step: int) -> bytes:
        while len(self._mixed) <= step:
            last = len(self._mixed) - 1
            self._mixed.append(
                mix(
                    advance(self._mixed[last], r, last, self.nbytes(r))
                    for r in range(self._world_size)
                )
            )
        return advance(self._mixed[step], rank, step, self.nbytes(rank))
