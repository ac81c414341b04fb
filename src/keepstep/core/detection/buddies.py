"""Buddies: who computes whose gradient a second time, and what follows from it.

Comes in: the step, the epoch, how many ranks train the same model, whether a checked rank's local
gradient was what its buddy found. Goes out: the pair of a step, and what is told of it.

Replicas cannot see what goes wrong before gradients are reduced: all of them get the same wrong
sum. So every so many steps one rank's gradient is computed a second time, by another rank that has
the same parameters, and compared bit for bit. Every rank has its turn, and its buddy is another one
each time, in each life of the job too: whoever is found wrong by two is wrong.

Invariant: all ranks draw the same pair without a word, nobody checks itself, and nothing is judged
before the two have agreed once: what cannot be repeated bit for bit here is told, not accused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from keepstep.core.detection.replicas import tensors_in_words


class Pair(NamedTuple):
    """Places in the group of ranks: whose gradient is computed, and who does that."""

    checked: int
    buddy: int


def pair_of(step: int, epoch: int, size: int, every_steps: int) -> Pair | None:
    """Of that step; None where nobody is checked in it."""
    if size < 2 or every_steps < 1 or step % every_steps:
        return None
    turn = step // every_steps
    checked = turn % size
    # a buddy further with each round, and with each life: the same step is checked by another one
    further = (turn // size + epoch) % (size - 1)
    return Pair(checked, (checked + 1 + further) % size)


def probability(every_steps: int, size: int, wrong_steps: int) -> float:
    """That a rank which computes wrong in so many steps in a row, each of them to be seen, is
    checked in one of them."""
    span = every_steps * size
    return min(1.0, wrong_steps / span)


@dataclass
class Repeatability:
    """Whether a gradient that is computed twice is the same here, as all ranks have heard."""

    has_agreed: bool = False
    is_off: bool = False

    def heard(self, agrees: bool) -> bool:
        """The outcome of one check. True when it accuses: the two have agreed before, and do not
        now."""
        if agrees:
            self.has_agreed = True
            return False
        self.is_off = self.is_off or not self.has_agreed
        return not self.is_off


def sentence(step: int, checked: int, buddy: int, names: Sequence[str], total: int) -> str:
    """What was found. `names`: the parameters whose gradients differ, of so many."""
    return (
        f"silent corruption: the local gradient of rank {checked} in step {step} is not what rank "
        f"{buddy} finds from the same parameters and batch, in {tensors_in_words(names, total)}; "
        "one of the two computes wrong"
    )
