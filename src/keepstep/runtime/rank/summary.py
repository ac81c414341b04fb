"""Summary: what a training's end tells, in one sentence.

Comes in: what was counted, and what becomes of the memory. Goes out: words.
"""

from __future__ import annotations

from keepstep.model.units import counted, human_ns


def summary_of(
    counts: tuple[int, int, int],
    stall_ns: int,
    checkpoints: str,
    kept_s: float | None,
    stores_later: bool,
) -> str:
    """`counts`: steps captured, skipped and torn. `stall_ns`: of a step. `checkpoints`: in words.
    `kept_s`: so long memory is kept, because the training has not ended well; None: it is not.
    `stores_later`: the newest step goes to the store then."""
    captured, skipped, torn = counts
    why = (
        f"{counted(captured, 'step')} captured, {skipped} skipped, {torn} torn; the trainer "
        f"waited {human_ns(stall_ns)} a step; {checkpoints}"
    )
    if kept_s is not None:
        why += f"; memory is kept for {kept_s:.0f} s: the same command goes on from it"
        if stores_later:
            why += ", and the newest step goes to the store when that time is over"
    return why
