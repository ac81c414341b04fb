"""Scrubber: everything that rests on this node is verified again from time to time, and what fails
is mended, or given up.

Comes in: the clock, what the workers found. Goes out: damaged slots of ranks mended from other
nodes' memory, or reported to their ranks; damaged copies and parities given up, so that they are
sent again. When all is well, holders are asked to compare their copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from keepstep.edge.shm.slot import Slot, ranks_in, slot_paths
from keepstep.errors import DamageError
from keepstep.model.messages.keeper_rank import SlotDamaged, ToRank
from keepstep.model.snapshot import RankStatus, SlotState
from keepstep.model.units import S_NS
from keepstep.ports import Memory
from keepstep.runtime.keeper_world import KeeperWorld
from keepstep.runtime.replication.mesh_state import MeshState


class ScrubHost(Protocol):
    """What the keeper does for it."""

    @property
    def mesh_state(self) -> MeshState | None:
        """Of the present mesh; None in a job of one node."""

    def status(self, rank: int) -> RankStatus | None:
        """What the rank's page says."""

    def tell(self, rank: int, message: ToRank) -> None:
        """Send it to that rank, if it is connected."""


@dataclass(frozen=True, slots=True)
class DamagedSlot:
    """A slot that does not prove. `rank` is None for what is held for other nodes."""

    path: Path
    rank: int | None
    index: int
    why: str


class Scrubber:
    """One keeper's."""

    def __init__(self, job_dir: Path, every_s: float, world: KeeperWorld, host: ScrubHost) -> None:
        """`every_s`: 0 is never."""
        self._job_dir, self._every_ns = job_dir, round(every_s * S_NS)
        self._world, self._host = world, host
        self._is_on = False
        self._is_wanted = False
        self._began_ns = world.clock.monotonic_ns()

    def tick(self) -> None:
        """Begin when it is time, unless the last one is not done."""
        now_ns = self._world.clock.monotonic_ns()
        is_due = self._every_ns and now_ns - self._began_ns >= self._every_ns
        if not self._is_on and (is_due or self._is_wanted):
            self._is_on = True
            self._is_wanted = False
            self._began_ns = now_ns
            self._world.workers.submit(
                lambda: scrub(self._world.memory, self._job_dir), self._found
            )

    def soon(self) -> None:
        """Something that lies here does not prove: look for it, also where nobody scrubs."""
        self._is_wanted = True

    def _found(self, damaged: list[DamagedSlot]) -> None:
        self._is_on = False
        state = self._host.mesh_state
        for slot in damaged:
            if slot.rank is not None:
                self._mend(slot, slot.rank)
            elif state is not None:
                state.damaged_at_rest(slot.path, slot.why)
        if not damaged and state is not None:
            state.compare()

    def _mend(self, slot: DamagedSlot, rank: int) -> None:
        index, journal = slot.index, self._world.journal
        journal.record("damaged", f"scrub: {slot.why}", rank=rank, slot=index)
        state, status = self._host.mesh_state, self._host.status(rank)
        if state is not None and rank not in state.own_ranks:
            self._give_up(slot, rank)
            return

        def mended(failed: str | None) -> None:
            if failed is None:
                told = f"slot {index} of rank {rank} is whole again, from other nodes' memory"
                journal.record("mended", told, rank=rank, slot=index)
            else:
                told = f"slot {index} of rank {rank} cannot be mended: {failed}"
                journal.record("not-mended", told, rank=rank, slot=index)
                self._host.tell(rank, SlotDamaged(index, slot.why))

        # What the slot held is asked of the rank's page: its header may be what is damaged.
        view = None if status is None or index >= len(status.slots) else status.slots[index]
        if state is None or view is None or view.state is not SlotState.SEALED:
            mended("nobody can say what it was")
        else:
            state.recovery.mend(rank, index, view.stamp, mended)

    def _give_up(self, slot: DamagedSlot, rank: int) -> None:
        """It would be offered to the node where the rank lives now, again and again."""

        def done(is_given_up: bool) -> None:
            if is_given_up:
                told = f"slot {slot.index} of rank {rank} is given up: the rank lives elsewhere now"
                self._world.journal.record("not-mended", told, rank=rank, slot=slot.index)

        self._world.workers.submit(lambda: void_damaged(self._world.memory, slot.path), done)


def void_damaged(memory: Memory, path: Path) -> bool:
    """Forget what that slot holds, unless it proves now or somebody reads or writes it; whether it
    was forgotten."""
    try:
        slot = Slot(memory, path)
    except (DamageError, OSError):
        return False  # nobody can read it
    try:
        if slot.lock(exclusive=True):
            slot.verify_bytes()
    except LookupError:
        pass  # it holds nothing any more
    except DamageError:
        slot.void()
        return True
    finally:
        slot.unlock()
        slot.close()
    return False


def scrub(memory: Memory, job_dir: Path) -> list[DamagedSlot]:
    """Re-verify every sealed slot: the ranks' own, copies and parities. Those that do not prove."""
    damaged = []
    for root in (job_dir, job_dir / "held", job_dir / "parity"):
        for rank in ranks_in(memory, root):
            for path in slot_paths(memory, root, rank):
                flaw = _flaw_of(memory, path)
                if flaw is not None:
                    index = int(path.name.split("-")[1])
                    owner = rank if root == job_dir else None
                    damaged.append(DamagedSlot(path, owner, index, flaw))
    return damaged


def _flaw_of(memory: Memory, path: Path) -> str | None:
    """Why the slot does not prove; None when it does, holds nothing, or is not there any more."""
    try:
        slot = Slot(memory, path)
        try:
            slot.verify_bytes()
        finally:
            slot.close()
    except DamageError as error:
        return str(error)
    except (LookupError, OSError):
        return None
    return None
