"""Slot maker: memory for one rank's slots, within the budget of its machine.

Comes in: how large a slot has to be, or where one is. Goes out: the plan, and slots that are ready
for copies from a device, those made here pre-faulted.
How many there are, and when, is decided in `core/redundancy/memory_budget.py` and
`core/resume/slot_growth.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from weakref import WeakSet

from keepstep.core.redundancy import memory_budget
from keepstep.edge.shm.slot import Slot, slot_bytes, slot_path, slot_paths
from keepstep.edge.shm.slot_store import SHELVES
from keepstep.errors import ConfigError
from keepstep.model.events import WARNING
from keepstep.model.topology import Auto, NoRedundancy, parse_policy
from keepstep.ports import Acts
from keepstep.runtime.rank.world import RankIdentity, RankOptions, RankWorld


class SlotMaker:
    """One rank's."""

    def __init__(self, world: RankWorld, options: RankOptions, who: RankIdentity) -> None:
        self._world, self._options, self._who = world, options, who
        self._has_told = False  # that a device refuses
        self._refused: WeakSet[Slot] = WeakSet()
        self._restoring_bytes = 0

    def first_plan(self, payload: int, manifest: int, there: int) -> memory_budget.SlotPlan:
        """On the trainer's thread, before training: see `plan`."""
        self._restoring_bytes = self._world.live.restoring_bytes()
        return self.plan(payload, manifest, there)

    def plan(self, payload: int, manifest: int, there: int) -> memory_budget.SlotPlan:
        """For slots of that many bytes, of which so many are there. Raises MemoryBudgetError, and
        ConfigError where nobody else would have the snapshot while the only slot is
        overwritten."""
        who, options = self._who, self._options
        if options.slots == 1 and not who.has_many_nodes:
            raise ConfigError(
                "slots: expected 2 or more in a job of one node, where nobody else has the "
                "snapshot while the only slot is overwritten, found 1"
            )
        memory = self._world.memory
        paths = [slot_path(options.job_dir, who.rank, index) for index in range(there)]
        own = sum(memory.size(path) for path in paths) * who.local_world_size
        policy = parse_policy(options.redundancy)
        plan = memory_budget.plan(
            slot_bytes(payload, manifest, memory.block_bytes),
            who.local_world_size,
            memory.free_bytes(options.arena_dir),
            self._world.available_bytes(),
            options.slots,
            options.has_store,
            str(options.arena_dir),
            held=memory_budget.held_slots(policy) if who.has_many_nodes else 0.0,
            many_nodes=who.has_many_nodes,
            there_bytes=own + self._held_bytes(),
            block_bytes=memory.block_bytes,
            restoring_bytes=self._restoring_bytes,
        )
        if who.has_many_nodes or isinstance(policy, (Auto, NoRedundancy)):
            return plan
        alone = f"; the job has one node, so redundancy {options.redundancy} copies nothing"
        return replace(plan, why=plan.why + alone)

    def _held_bytes(self) -> int:
        """What this node's keeper holds for others already: it is in the plan, and no longer in
        what is free."""
        memory, total = self._world.memory, 0
        for part in SHELVES.values():
            for rank in memory.names(self._options.job_dir / part):
                directory = self._options.job_dir / part / rank
                total += sum(memory.size(directory / name) for name in memory.names(directory))
        return total

    def make(self, index: int, payload: int, manifest: int) -> Slot:
        """In place of the one of that number, if there is one. Raises MemoryBudgetError."""
        path = slot_path(self._options.job_dir, self._who.rank, index)
        fresh = Slot.create(self._world.memory, path, payload, manifest)
        return self._pinned(fresh)

    def open(self, path: Path) -> Slot:
        """One that is there. Raises DamageError, OSError."""
        return self._pinned(Slot(self._world.memory, path))

    def again(self, slots: Sequence[Slot], open_slot: Callable[[Path], Slot]) -> list[Slot]:
        """All of the rank's slots, of which these were there. A map of what is still the same file
        stays: a new one, and a device's lock of it, cost a touch of each page."""
        paths = slot_paths(self._world.memory, self._options.job_dir, self._who.rank)
        kept = {slot.path: slot for slot in slots if slot.path in paths and slot.is_there()}
        for slot in slots:
            if slot.path in kept:
                slot.unlock()
                self._pinned(slot)  # it may lack more than when it was opened
            else:
                slot.close()
        return [kept.get(path) or open_slot(path) for path in paths]

    def pin_kept(self, slot: Slot) -> None:
        """Some of its memory may have been given up, and nothing is under way to it."""
        if slot not in self._refused and slot.lacking():
            self._pinned(slot)

    def _pinned(self, slot: Slot) -> Slot:
        why = self._world.live.pin(slot)
        if why is not None:
            self._refused.add(slot)
        if why is not None and not self._has_told:
            self._has_told = True
            rank = self._who.rank
            self._world.journal.record("slot-unlocked", f"rank {rank}: {why}", WARNING, rank=rank)
        return slot

    def one_more(self, index: int, payload: int, manifest: int) -> Acts[Slot | None]:
        """Of that number; None where the budget has no room for it. Raises MemoryBudgetError."""
        yield
        if self.plan(payload, manifest, index).most <= index:
            return None
        return self.make(index, payload, manifest)
