"""Frozen: parameters that no optimizer moves, as LoRA's base, are not copied again while they stay
as they were.

A slot is written again and again, and what does not change lies in it already. Nobody knows of such
a parameter that it stands still, so it is not copied behind the trainer's back as an optimizer's
are. It is compared instead: where the live bytes are those that the slot has held since it was
copied at a boundary, they are the boundary's. Where they are not, they were changed since, and
nobody can tell whether before or after it: the snapshot is torn, and that parameter is copied at
the boundary from then on. On a device digests are compared, and what the slot had is known by its
marks (`frozen_digests.py`).

Not seen is what two writes do that no counter tells of, one before the boundary, and one behind it
that takes the first back before anybody has looked.

Comes in: a slot, the plan of a state, version counters at the boundary. Goes out: whether the slot
holds them, and in the end which of them moved. Invariant: a slot counts as holding them only where
this process has copied all of them into it, whole, by the same plan and with the same counters, and
all has landed.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from keepstep.edge.shm.memory import equal
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch.frozen_digests import FrozenMarks
from keepstep.edge.torch.plan import CopyOrder
from keepstep.model.units import KIB

FEWEST_BYTES = 64 * KIB  # of a tensor: a smaller one is copied as quickly as it is looked at


@dataclass(eq=False)
class HeldFrozen:
    """What one slot has. `marks`: of what is on devices, once it has landed; on any thread."""

    plan: CopyOrder
    versions: list[int]
    marks: FrozenMarks | None = None


class FrozenInSlots:
    """Of one process."""

    def __init__(self) -> None:
        self._held: WeakKeyDictionary[Slot, HeldFrozen] = WeakKeyDictionary()

    def are_in(self, slot: Slot, plan: CopyOrder) -> HeldFrozen | None:
        """What is there, if all of them are, for all that counters and addresses tell."""
        held = self._held.get(slot)
        if held is None or held.plan is not plan or held.versions != plan.frozen_versions():
            return None
        return None if held.marks is None and _are_on_devices(plan) else held

    def copied(self, slot: Slot, plan: CopyOrder) -> HeldFrozen:
        """On the trainer's thread, at the boundary: all of them have just been copied into it, or
        are ordered to be."""
        self._held[slot] = held = HeldFrozen(plan, plan.frozen_versions())
        return held

    def forget(self, slot: Slot) -> None:
        """Some of it is to lie with other ranks, or is not finite."""
        self._held.pop(slot, None)


def _are_on_devices(plan: CopyOrder) -> bool:
    """Whether some of them are."""
    return any(plan.frozen.through_torch.values())


def differing(slot: Slot, plan: CopyOrder) -> list[str]:
    """The names of those whose live bytes are not the slot's. From any thread; the tensors' memory
    is the plan's own reference, whatever the program does with its own."""
    begin = slot.payload_address
    return [
        item.spec.name
        for item, segment in plan.frozen.pairs
        if item.address is not None
        and not equal(item.address, begin + segment.offset, segment.spec.nbytes)
    ]
