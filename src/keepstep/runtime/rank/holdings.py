"""Holdings: what a rank's own slots hold, as it asks where to resume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from keepstep.edge.shm.slot import Slot
from keepstep.errors import DamageError
from keepstep.model.shares import Share
from keepstep.model.snapshot import SlotHeader, Stamp
from keepstep.ports import Acts


@dataclass(frozen=True)
class Holdings:
    """Each payload is proven when it is loaded, and only then. `foreign_world`: some are of a job
    with so many ranks. `group`, `digests`, `shares`: as in `core/resume/cut.py`, `Holding`."""

    slot_of: dict[Stamp, int]
    foreign_world: int | None = None
    group: int = 0
    digests: tuple[tuple[Stamp, int], ...] = ()
    shares: tuple[tuple[Stamp, Share], ...] = ()

    @staticmethod
    def of(headers: Mapping[int, SlotHeader], foreign_world: int | None) -> Holdings:
        """What the headers of proven slots say, by their numbers. Digests of another group than the
        newest snapshot's can be compared with nobody's."""
        newest = max(headers.values(), key=lambda header: header.stamp, default=None)
        group = 0 if newest is None else newest.replica_group
        told = [(h.stamp, h.digest) for h in headers.values() if group == h.replica_group != 0]
        slot_of = {header.stamp: index for index, header in headers.items()}
        shares = [(h.stamp, h.share) for h in headers.values() if h.share is not None]
        return Holdings(slot_of, foreign_world, group, tuple(sorted(told)), tuple(sorted(shares)))


def is_damaged(slot: Slot) -> Acts[bool]:
    """Whether the slot says that it holds a snapshot, and that does not prove."""
    yield
    try:
        slot.verify()
    except DamageError:
        return True
    except LookupError:
        return False
    return False
