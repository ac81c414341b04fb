"""Updates: of state that one rank alone has, which part's update is done again in a step, and what
follows from what that comes to.

Nobody else has such state, so nobody can be asked. But it follows from what the snapshot before the
step holds, and the gradients: whoever makes the update again from these must come to the same bits.
If not, the device computed wrong, in the update or as it did it again, or memory changed between
the snapshot and the update.

Comes in: how many elements each tensor has, the step, how far apart the two updates were. Goes out:
the pieces that are due, so that all come in turn, each as often; and whether a difference accuses.

Invariant: which pieces are due follows from the step alone, so a step that is run again has the
same ones. Nothing accuses before the same was compared often enough on clean steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from keepstep.core.numbers.repeats import MARGIN, WIDEST
from keepstep.model.numbers import UpdateOutcome, UpdatePiece

BLOCK_ELEMENTS = 4096  # a piece begins at a multiple of it: kernels compute in vectors
CALIBRATION = 4  # updates that are compared before a difference accuses
CALIBRATIONS = 3  # tried so often


def due_pieces(elements: Sequence[int], most: int, turn: int) -> tuple[UpdatePiece, ...]:
    """Of tensors with so many elements each, at most about `most` elements, but at least one block:
    other ones with each turn, until all have come."""
    blocks = [-(-count // BLOCK_ELEMENTS) for count in elements]
    total = sum(blocks)
    if not total:
        return ()
    wanted = min(total, max(1, most // BLOCK_ELEMENTS))
    first = turn * wanted % total
    chosen = sorted((first + offset) % total for offset in range(wanted))
    pieces: list[UpdatePiece] = []
    tensor, before = 0, 0
    for number in chosen:
        while number >= before + blocks[tensor]:
            before += blocks[tensor]
            tensor += 1
        begin = (number - before) * BLOCK_ELEMENTS
        end = min(begin + BLOCK_ELEMENTS, elements[tensor])
        if pieces and pieces[-1].tensor == tensor and pieces[-1].end == begin:
            begin = pieces.pop().begin
        pieces.append(UpdatePiece(tensor, begin, end))
    return tuple(pieces)


def probability(most: int, elements: int, look_every_steps: int) -> float:
    """That one element which goes wrong in one step is among those whose update is done again."""
    return min(1.0, max(most, BLOCK_ELEMENTS) / elements) / look_every_steps if elements else 0.0


@dataclass
class UpdateJudge:
    """Of one training. `why`: what calibrating has come to; empty while it goes on."""

    within: float = 0.0
    why: str = ""
    is_off: bool = False
    _apart: list[float] = field(default_factory=list)
    _tried: int = 0
    _moves: bool = False

    @property
    def is_calibrated(self) -> bool:
        return bool(self.why)

    def due(self, elements: Sequence[int], most: int, turn: int) -> tuple[UpdatePiece, ...]:
        return () if self.is_off else due_pieces(elements, most, turn)

    def heard(self, apart: float, more: Sequence[float]) -> UpdateOutcome:
        """So far, as a part of its size, an update that was done again lay from that which was
        made. `more`: how far it was when it was done once more."""
        if self.is_off:
            return UpdateOutcome.OFF
        if self.is_calibrated:
            if apart <= self.within:
                return UpdateOutcome.FITS
            has_come = any(again <= self.within for again in more)
            return UpdateOutcome.ERRED if has_come else UpdateOutcome.DIFFERS
        self._apart.append(apart)
        if len(self._apart) == CALIBRATION:
            self._calibrate()
        return UpdateOutcome.LEARNS

    def stayed(self, is_same: bool) -> bool:
        """Whether what an update has made is there still at the end of the body, where torch's
        counters say that nothing has changed it. Goes out: whether that accuses. A program that
        writes past the counters does so from the beginning."""
        if not self.is_calibrated:
            self._moves = self._moves or not is_same
        return self.is_calibrated and not (is_same or self._moves or self.is_off)

    def give_up(self, why: str) -> None:
        """What differs does so each time, and counts."""
        self.is_off, self.why, self.within = True, why, 0.0

    def _calibrate(self) -> None:
        apart, self._apart = self._apart, []
        self._tried += 1
        times = f"{CALIBRATION} updates were done again"
        if not any(apart):
            self.why = f"{times}, and came to the same bits"
            return
        farthest = max(apart)
        found = f"{times}, and came to other bits, up to {farthest:.1e} of their size apart"
        is_noise = all(apart) and math.isfinite(farthest) and MARGIN * farthest <= WIDEST
        if is_noise:
            self.within = MARGIN * farthest
            self.why = f"{found}: more than {self.within:.1e} is told from now on"
        elif self._tried == CALIBRATIONS:
            self.give_up(
                f"{found}, as {CALIBRATIONS - 1} times before or not alike: whether one is wrong "
                "is unknown, and none is done again any more"
            )
