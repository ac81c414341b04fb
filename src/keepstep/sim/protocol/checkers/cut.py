"""A cut always exists: whatever was lost, all ranks could go back to what was committed, if the
placement promises that.

And no rank overwrites its part of the newest that was committed, whoever has a copy; on one node,
where nobody commits, of the newest that all ranks hold. A rank with one slot overwrites nothing
that all ranks have, or can be given, before all of its holders have it.

Looked for in the bytes that lie on the machines, after everything that the nemesis does, whenever
something is committed, and in between.

Not verified: that it is found by those who look for it (`lost.py` does that); instants between two
looks.
"""

from __future__ import annotations

from keepstep.model.messages.peers import HorizonWord, MeshMessage
from keepstep.model.restore_sources import HeldSnapshot
from keepstep.model.snapshot import Stamp
from keepstep.model.units import S_NS
from keepstep.sim.protocol.checkers.atlas import Generation
from keepstep.sim.protocol.checkers.checker import Checker
from keepstep.sim.protocol.checkers.commit import unproven_part
from keepstep.sim.protocol.checkers.inspection import Inspection, restorable
from keepstep.sim.protocol.job.program import Program
from keepstep.sim.protocol.wire.links import SimLinks

EVERY_NS = 2 * S_NS


class ACutExists(Checker):
    NAME = "a cut exists"
    _looked_ns = 0
    _committed: Stamp | None = None
    _inherited: Stamp | None = None  # what a leader knew was committed before its mesh

    def struck(self, what: str) -> None:
        self._look(f"after {what}")

    def said(self, links: SimLinks, node: int, message: MeshMessage) -> None:
        if not isinstance(message, HorizonWord):
            return
        self._inherited = message.inherited
        if message.committed is not None:
            stamp = message.committed
            if self._committed is None or stamp > self._committed:
                self._committed = stamp
                self._look("when it was committed")

    def stepped(self, program: Program, step: int) -> None:
        if self.job.world.now_ns - self._looked_ns > EVERY_NS:
            self._look("while all train")

    def overwrites(self, program: Program, stamp: Stamp) -> None:
        known = self.atlas.committed
        if self.atlas.has_damage(program.process.machine.number, stamp):
            return  # it was given up
        is_owed = known is not None and known.stamp == stamp and not self.atlas.is_over
        if self.job.plan.slots == 1:
            if not self._rests_elsewhere(program, stamp):
                self.violated(
                    f"rank {program.who.rank} overwrites {stamp} of epoch {stamp.epoch} in its "
                    "only slot, and not all of its holders have it"
                )
        elif is_owed and not self._knows_a_newer(program, stamp):
            self.violated(
                f"rank {program.who.rank} overwrites {stamp} of epoch {stamp.epoch}, the newest "
                "that was committed"
            )

        if self.job.plan.nodes == 1 and not self.atlas.damages and not self.atlas.is_over:
            held = restorable(self.job, self.job.world_size)
            looked = Inspection(self.job, program.process.machine)
            is_newest = stamp == max(held, default=None)
            if is_newest and not looked.is_nobodys(stamp, self.job.world_size):
                self.violated(
                    f"rank {program.who.rank} overwrites {stamp} of epoch {stamp.epoch}, the "
                    "newest that all ranks hold"
                )

    def _knows_a_newer(self, program: Program, stamp: Stamp) -> bool:
        return self._has_page_of_newer(program, stamp) or self._has_inherited_newer(stamp)

    def _has_inherited_newer(self, stamp: Stamp) -> bool:
        """A leader was killed before it said that to others, and the next one has read it of a
        page: all ranks must have it, or could be given it."""
        newer = self._inherited
        return newer is not None and newer > stamp and self._is_common(newer)

    def _has_page_of_newer(self, program: Program, stamp: Stamp) -> bool:
        """A leader's own node reads of a commit before any word of it is said, and the leader may
        be killed in between. What is read there must be as true as a word."""
        inspection = Inspection(self.job, program.process.machine)
        newer = inspection.committed()
        if newer is None or newer <= stamp:
            return False
        generation = self._would_be(program, newer)
        return generation is not None and unproven_part(self.job, generation) is None

    def _rests_elsewhere(self, program: Program, stamp: Stamp) -> bool:
        """In the only slot of a rank: what is committed all of its holders have proven, those that
        live. What will never be common nobody needs."""
        if self.atlas.is_over or not self._is_common(stamp):
            return True
        generation = self._would_be(program, stamp)
        if generation is None:
            return False
        assignment = generation.assignments[program.who.rank]
        machines = [
            self.job.nodes[generation.machines[each]].machine for each in assignment.holders
        ]
        wanted = HeldSnapshot(program.who.rank, stamp)
        return bool(machines) and all(
            wanted in Inspection(self.job, machine).inventory().snapshots
            for machine in machines
            if machine.alive and not self.atlas.has_damage(machine.number, stamp)
        )

    def _would_be(self, program: Program, stamp: Stamp) -> Generation | None:
        """That generation, as it would be committed in the epoch that the program trains."""
        rank = program.rank
        return None if rank is None else self.atlas.would_be(stamp, rank.epoch)

    def _is_common(self, stamp: Stamp) -> bool:
        """Whether every rank has it, or could be given it."""
        return stamp in restorable(self.job, self.atlas.world_size)

    def _look(self, when: str) -> None:
        self._looked_ns = self.job.world.now_ns
        owed = self.atlas.owed()
        if owed is None:
            return
        found = restorable(self.job, self.atlas.committed_ranks)
        if not any(stamp >= owed for stamp in found):
            there = ", ".join(str(s) for s in sorted(found)) or "nothing"
            self.violated(
                f"{owed} of epoch {owed.epoch} was committed and its placement survives; "
                f"{when} all could go back to {there}"
            )
