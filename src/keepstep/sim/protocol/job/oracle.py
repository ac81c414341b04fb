"""Oracle: what every rank's state is after every step, computed beside the training it is compared
with.

A step mixes the states of all ranks, as an all-reduce does, and gives each rank a new one made of
the mixture: so a state that holds one wrong byte, or was computed from ranks that stood at
different steps, differs from then on everywhere. A state begins with the mixture it was made of: so
a checkpoint can be loaded by another number of ranks, and from there on the oracle goes with them.
It ends with what does not learn: a third of it is the same after every step.

Where ranks are replicas, as many kinds of states there are as the plan says, and a rank may go
astray from some step on: from there it is of a kind of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from keepstep.model.snapshot import Stamp

MIXED_BYTES = 16
FROZEN = 3  # one of so many bytes
ASTRAY = 1000  # more than there are kinds


def mix(states: Iterable[bytes]) -> bytes:
    """What the ranks learn from each other in a step."""
    digest = hashlib.blake2b(digest_size=MIXED_BYTES)
    for state in states:
        digest.update(state)
    return digest.digest()


def advance(mixed: bytes, rank: int, step: int, nbytes: int) -> bytes:
    """The rank's state after `step`, from the mixture of all states before it: `nbytes`, at least
    those of the mixture."""
    frozen = _frozen(rank, nbytes - max(MIXED_BYTES, nbytes - nbytes // FROZEN))
    seed = hashlib.blake2b(
        mixed + rank.to_bytes(4, "little") + step.to_bytes(8, "little"), digest_size=32
    ).digest()
    return (mixed + seed * (nbytes // len(seed) + 1))[: nbytes - len(frozen)] + frozen


@lru_cache(maxsize=1 << 12)
def _frozen(rank: int, nbytes: int) -> bytes:
    """What the rank does not learn: no two blocks of it are the same."""
    return hashlib.shake_128(b"frozen" + rank.to_bytes(4, "little")).digest(nbytes)


@dataclass(frozen=True)
class Kinds:
    """Which ranks are alike. `count`: so many kinds; 0: each rank is one. `astray`: a rank, and the
    step from which on it is of a kind of its own."""

    count: int = 0
    astray: tuple[int, int] | None = None

    def of(self, rank: int, step: int) -> int:
        if not self.count:
            return rank
        if self.astray is not None and rank == self.astray[0] and step >= self.astray[1]:
            return rank % self.count + self.count * ASTRAY
        return rank % self.count


EACH_ITS_OWN = Kinds()


class Oracle:
    """Undisturbed runs. States are `nbytes` long, at least those of the mixture, and a little more
    for some ranks."""

    def __init__(
        self, seed: int, world_size: int, nbytes: int, kinds: Kinds = EACH_ITS_OWN
    ) -> None:
        assert nbytes >= MIXED_BYTES
        self._nbytes = nbytes
        self._kinds = kinds
        self.first = hashlib.blake2b(str(seed).encode(), digest_size=MIXED_BYTES).digest()
        self._runs = [_Run(world_size, 0, self.first, self.made_of)]
        self._run_of: dict[int, _Run] = {}  # by epoch
        # of the same training, begun elsewhere: its checkpoints may be loaded, too
        self.beside: Oracle | None = None

    def nbytes(self, rank: int) -> int:
        return self._nbytes + 7 * (self._kinds.of(rank, 0) % 5)

    def alike(self, rank: int, world_size: int) -> tuple[int, ...]:
        """The ranks of its kind, as the program says it; none where one of them goes astray, which
        is never undone: it does so again, whatever all go back to."""
        kinds = self._kinds
        if not kinds.count or kinds.astray is not None:
            return ()
        return tuple(r for r in range(world_size) if kinds.of(r, 0) == kinds.of(rank, 0))

    def made_of(self, mixed: bytes, rank: int, step: int) -> bytes:
        """The rank's state after `step`, from the mixture of all states before it."""
        return advance(mixed, self._kinds.of(rank, step), step, self.nbytes(rank))

    def most_bytes(self, world_size: int) -> int:
        """Of the longest state."""
        return max(self.nbytes(rank) for rank in range(min(5, world_size)))

    def begin(self, epoch: int, step: int, mixed: bytes | None, world_size: int) -> None:
        """So many ranks train in this epoch from after `step` on, whose states were made of
        `mixed`; from the beginning when that is None. Raises ValueError when no run has been
        there."""
        at = (0, self.first) if mixed is None else (step, mixed)
        theirs = [] if self.beside is None else self.beside._runs
        known = [run for run in (*self._runs, *theirs) if run.has(*at)]
        if not known:
            raise ValueError(f"no run had that state after step {step}")
        same = [run for run in known if run.world_size == world_size]
        if not same:
            same = [_Run(world_size, *at, self.made_of)]
            self._runs += same
        self._run_of[epoch] = same[0]

    def state(self, rank: int, stamp: Stamp) -> bytes | None:
        """None: nobody has trained in that epoch."""
        run = self._run_of.get(stamp.epoch)
        return None if run is None else run.state(rank, stamp.step)

    def is_checkpoint(self, step: int, rank: int, state: bytes) -> bool:
        """Whether that is what this rank makes of a checkpoint of this step."""
        mixed = state[:MIXED_BYTES]
        oracles = [self] if self.beside is None else [self, self.beside]
        return any(
            any(run.has(step, mixed) for run in oracle._runs)
            and state == oracle.made_of(mixed, rank, step)
            for oracle in oracles
        )


class _Run:
    """Of one number of ranks, from the step on that `mixed` goes into."""

    def __init__(
        self,
        world_size: int,
        first_step: int,
        mixed: bytes,
        made_of: Callable[[bytes, int, int], bytes],
    ) -> None:
        self.world_size = world_size
        self._first_step = first_step
        self._mixed = [mixed]
        self._made_of = made_of

    def has(self, step: int, mixed: bytes) -> bool:
        return step >= self._first_step and self._mixture(step) == mixed

    def state(self, rank: int, step: int) -> bytes:
        return self._made_of(self._mixture(step), rank, step)

    def _mixture(self, step: int) -> bytes:
        mixed = self._mixed
        while len(mixed) <= step - self._first_step:
            last = self._first_step + len(mixed) - 1
            ranks = range(self.world_size)
            mixed.append(mix(self._made_of(mixed[-1], r, last) for r in ranks))
        return mixed[step - self._first_step]
