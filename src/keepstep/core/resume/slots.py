"""Slots: where the next snapshot goes, or why it does not.

Comes in: the rank's own slots, the horizon (newest stamp all ranks hold) and which stamps are
hopeless. Goes out: a slot to overwrite, or a reason to skip. Never overwrites the horizon, nor
anything newer that may still become one; never runs two captures; never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from keepstep.model.snapshot import SlotState, SlotView, Stamp


class Take(NamedTuple):
    slot: int
    why: str


@dataclass(frozen=True, slots=True)
class Skip:
    why: str


def choose(
    step: int,
    slots: Sequence[SlotView],
    horizon: Stamp | None,
    is_hopeless: Callable[[Stamp], bool],
) -> Take | Skip:
    """Decide about the snapshot of `step`."""
    writing = next((v for v in slots if v.state is SlotState.WRITING), None)
    if writing is not None:
        return Skip(f"the snapshot of {writing.stamp} is not sealed yet")
    free: list[tuple[int, int]] = []  # (order, slot)
    for index, view in enumerate(slots):
        if view.pinned:
            continue
        if view.state is SlotState.EMPTY:
            free.append((-2, index))
        elif horizon is not None and view.stamp < horizon:
            free.append((view.stamp.step, index))
        elif view.stamp != horizon and is_hopeless(view.stamp):
            free.append((view.stamp.step, index))
    if free:
        _, index = min(free)
        return Take(index, f"slot {index}: {_why_free(slots[index], horizon)}")
    pinned = sum(v.pinned for v in slots)
    if horizon is None:
        return Skip(
            f"no step is held by every rank yet, and all {len(slots)} slots may still become "
            f"one ({pinned} pinned)"
        )
    return Skip(
        f"{horizon} is the newest step every rank holds, and the other {len(slots) - 1} "
        f"slots wait for peers or a reader ({pinned} pinned)"
    )


def _why_free(view: SlotView, horizon: Stamp | None) -> str:
    if view.state is SlotState.EMPTY:
        return "it is empty"
    if horizon is not None and view.stamp < horizon:
        return f"{view.stamp} is older than the horizon, {horizon}"
    return f"{view.stamp} will never be held by every rank"
