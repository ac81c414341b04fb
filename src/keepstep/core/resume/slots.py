"""Slots: where the next snapshot goes, or why it does not.

Comes in: the rank's own slots, the horizon (newest stamp all ranks hold) and which stamps are
hopeless. Goes out: a slot to overwrite, or a reason to skip. Never overwrites the horizon, nor
anything newer that may still become one; never runs two captures; never waits.

A rank with one slot has nowhere else to go: it overwrites the horizon itself, once that is
committed and rests whole on other nodes (`released`). Until the next one is committed the newest
step that everybody can go back to is there alone (docs/protocol.md, "One slot").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from keepstep.model.snapshot import SlotState, SlotView, Stamp

# why a slot is free
OLDER = "{stamp} is older than the horizon, {horizon}"
HOPELESS = "{stamp} will never be held by every rank"
ELSEWHERE = "{stamp} is committed and rests on other nodes"


class Take(NamedTuple):
    slot: int
    why: str


@dataclass(frozen=True, slots=True)
class Skip:
    """`is_full`: every rank holds a step, and with one slot more this one would be captured."""

    why: str
    is_full: bool = False


def choose(
    slots: Sequence[SlotView],
    horizon: Stamp | None,
    is_hopeless: Callable[[Stamp], bool],
    released: Stamp | None = None,
) -> Take | Skip:
    """Decide about the next snapshot. `released`: of a rank with one slot, the newest stamp
    that it need not keep itself."""
    writing = [view for view in slots if view.state is SlotState.WRITING]
    if writing:
        return Skip(f"the snapshot of {writing[0].stamp} is not sealed yet")
    free: list[tuple[int, int, str]] = []  # (order, slot, reason)
    for index, view in enumerate(slots):
        if view.pinned:
            continue
        if view.state is SlotState.EMPTY:
            free.append((-2, index, "it is empty"))
        elif horizon is not None and view.stamp < horizon:
            free.append((view.stamp.step, index, OLDER))
        elif released is not None and view.stamp <= released:
            free.append((view.stamp.step, index, ELSEWHERE))
        elif view.stamp != horizon and is_hopeless(view.stamp):
            free.append((view.stamp.step, index, HOPELESS))
    if free:
        _, index, why = min(free)
        found = why.format(stamp=slots[index].stamp, horizon=horizon)
        return Take(index, f"slot {index}: {found}")
    pinned = sum(v.pinned for v in slots)
    if len(slots) == 1:
        stays = "is being read" if pinned else "is not committed yet, with copies on other nodes"
        return Skip(f"{slots[0].stamp} in the only slot {stays}")
    if horizon is None:
        return Skip(
            f"no step is held by every rank yet, and all {len(slots)} slots may still become "
            f"one ({pinned} pinned)"
        )
    return Skip(
        f"{horizon} is the newest step every rank holds, and the other {len(slots) - 1} "
        f"slots wait for peers or a reader ({pinned} pinned)",
        is_full=True,
    )
