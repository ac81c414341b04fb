"""Budget: how many slots, and whether they fit.

Comes in: bytes of a slot, ranks on this machine, free bytes. Goes out: a count with its reason, or
an error with the numbers and the fix.

Two slots keep one snapshot whole while the next is written. A third keeps capture going while
slower ranks still seal (facts: with commits that lag by L steps, L + 2 slots are needed); it is
taken when cheap. With many nodes so is a fourth: while one generation is on its way to other nodes,
another stays whole and the next is written. One more rests pinned under the persister's reading
when there is a store. What is held for other nodes (two generations of copies or parity) is counted
too, before the first of it arrives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from keepstep.errors import MemoryBudgetError
from keepstep.model.topology import Copies, Parity, Policy, ReedSolomon
from keepstep.model.units import MIB, counted, human_bytes

# a third slot is cheap when all slots take less than this part of the free memory
CHEAP_RATIO = 0.10
HEADROOM_RATIO = 0.05  # left free whatever happens


@dataclass(frozen=True, slots=True)
class SlotPlan:
    slots: int
    total_bytes: int
    why: str


def held_slots(policy: Policy) -> float:
    """What a node holds for others, in slots a rank of its own: two generations. `auto` looks at
    what is free later: 0."""
    match policy:
        case Copies(m):
            return 2.0 * (m - 1)
        case Parity(n):
            return 2.0 / (n - 1)
        case ReedSolomon(k, m):
            return 2.0 * m / k
    return 0.0


def plan(
    slot_bytes: int,
    local_ranks: int,
    free_bytes: int,
    available_bytes: int,
    wanted: int,
    has_store: bool,
    arena_dir: str,
    held: float = 0.0,
    many_nodes: bool = False,
    there_bytes: int = 0,
) -> SlotPlan:
    """`free_bytes`: free in the arena's filesystem; `available_bytes`: memory the kernel can give;
    `wanted`: 0 chooses; `held`: what is held for other nodes, in slots a rank; `many_nodes`:
    whether snapshots go to other nodes; `there_bytes`: what this job has there already, which is in
    the plan and not in what is free.

    Raises MemoryBudgetError.
    """
    free_ratio = 1 - HEADROOM_RATIO  # what is there fits, however little is free
    usable = int(
        min(free_bytes, available_bytes) * free_ratio
        + there_bytes
        - held * local_ranks * slot_bytes
    )
    least = 2 + has_store
    more = least + (2 if many_nodes else 1)
    count = wanted or (more if more * local_ranks * slot_bytes <= usable * CHEAP_RATIO else least)
    if not wanted and count * local_ranks * slot_bytes > usable:
        # without the persister's own slot a capture is skipped now and then while it reads
        count = 2
    total = count * local_ranks * slot_bytes
    held_bytes = math.ceil(held * local_ranks * slot_bytes)
    enough_mib = math.ceil((total + held_bytes) / free_ratio / MIB) + 64
    sentence = (
        f"{count} slots x {counted(local_ranks, 'rank')} x {human_bytes(slot_bytes)} = "
        f"{human_bytes(total)}"
    )
    if held_bytes:
        sentence += f", and {human_bytes(held_bytes)} held for other nodes,"
    if total > usable:
        tight = (
            f"{arena_dir} has {human_bytes(free_bytes)} free"
            if free_bytes <= available_bytes
            else "memory is short"
        )
        raise MemoryBudgetError(
            f"the slots do not fit: {sentence} needed, but {tight} (free in {arena_dir}: "
            f"{human_bytes(free_bytes)}, memory available: "
            f"{human_bytes(available_bytes)}, {HEADROOM_RATIO:.0%} kept free; of this job there: "
            f"{human_bytes(there_bytes)}). "
            f"Enlarge it (docker run --shm-size={enough_mib}m, "
            f"Kubernetes: an emptyDir of medium Memory at {arena_dir}, else mount -o "
            f"remount,size=... {arena_dir}), "
            "set arena_dir to another tmpfs, or protect fewer bytes"
        )
    room = human_bytes(free_bytes + there_bytes)
    return SlotPlan(count, total, f"{sentence} of {room} free in {arena_dir}")
