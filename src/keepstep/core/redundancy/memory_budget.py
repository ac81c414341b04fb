"""Budget: how many slots to begin with, how many there may be, and whether they fit.

Comes in: bytes of a slot, ranks on this machine, free bytes. Goes out: two counts with their
reason, or an error with the numbers and the fix.

Two slots keep one snapshot whole while the next is written, and where a capture, its copies and its
commit fit into a step no more are needed. Commits that lag by L steps need L + 2: a third slot
keeps capture going while slower ranks still seal, with many nodes a fourth while one generation is
on its way to other nodes, and one more rests pinned under the persister's reading when there is a
store. Those are made when captures have found none free (`core/resume/slot_growth.py`), or at once
where all of them are small. What is held for other nodes (two generations of copies or parity) is
counted too, before the first of it arrives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from keepstep.errors import MemoryBudgetError
from keepstep.model.topology import Copies, Parity, Policy, ReedSolomon
from keepstep.model.units import MIB, counted, human_bytes

LEAST_SLOTS = 2
SMALL_BLOCKS = 16  # all slots of a node together: making them takes no time, nor room
# slots for slower ranks are cheap when all slots take less than this part of the free memory
CHEAP_RATIO = 0.10
HEADROOM_RATIO = 0.05  # left free whatever happens


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """`slots`: to begin with, which take `total_bytes`; `most`: there may be so many."""

    slots: int
    most: int
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
    block_bytes: int = 4 * MIB,
    restoring_bytes: int = 0,
) -> SlotPlan:
    """`free_bytes`: free in the arena's filesystem; `available_bytes`: memory the kernel can give;
    `wanted`: 0 chooses; `held`: what is held for other nodes, in slots a rank; `many_nodes`:
    whether snapshots go to other nodes; `there_bytes`: what this job has there already, which is in
    the plan and not in what is free; `block_bytes`: `Memory.block_bytes`; `restoring_bytes`: what a
    rank needs besides its slots while it restores.

    Raises MemoryBudgetError.
    """
    free_ratio = 1 - HEADROOM_RATIO  # what is there fits, however little is free
    for_slots = max(0, available_bytes - local_ranks * restoring_bytes)
    usable = int(
        min(free_bytes, for_slots) * free_ratio + there_bytes - held * local_ranks * slot_bytes
    )
    all_bytes = local_ranks * slot_bytes  # one slot of every rank
    most = wanted or LEAST_SLOTS + has_store + (2 if many_nodes else 1)
    if not wanted and most * all_bytes > usable * CHEAP_RATIO:
        most = LEAST_SLOTS + has_store
    if not wanted and most * all_bytes > usable:
        # without the persister's own slot a capture is skipped now and then while it reads
        most = LEAST_SLOTS
    is_small = most * all_bytes <= SMALL_BLOCKS * block_bytes
    count = most if wanted or is_small else LEAST_SLOTS
    total = count * all_bytes
    held_bytes = math.ceil(held * local_ranks * slot_bytes)
    enough_mib = math.ceil((total + held_bytes) / free_ratio / MIB) + 64
    sentence = (
        f"{count} slots x {counted(local_ranks, 'rank')} x {human_bytes(slot_bytes)} = "
        f"{human_bytes(total)}"
    )
    if held_bytes:
        sentence += f", and {human_bytes(held_bytes)} held for other nodes,"
    if local_ranks * restoring_bytes >= MIB:
        sentence += f", and {human_bytes(local_ranks * restoring_bytes)} while all restore,"
    if total > usable:
        tight = (
            f"{arena_dir} has {human_bytes(free_bytes)} free"
            if free_bytes <= for_slots
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
    more = f", up to {most} when captures find none free" if most > count else ""
    return SlotPlan(count, most, total, f"{sentence} of {room} free in {arena_dir}{more}")
