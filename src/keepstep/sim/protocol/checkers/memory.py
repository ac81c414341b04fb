"""Memory within budget: a machine never takes more than the plan of its slots and what it holds for
others says, and leaves nothing behind.

Not verified: what a keeper leaves that is killed while it removes the directory (its name says so),
or when agent and ranks have gone: `keepstep clean` finds it; memory of processes; files outside the
job directory (there are none here).
"""

from __future__ import annotations

from keepstep.core.redundancy.memory_budget import held_slots
from keepstep.edge.shm.slot import slot_bytes
from keepstep.model.topology import Copies, Parity, ReedSolomon, parse_policy
from keepstep.model.units import KIB, PAGE_BYTES
from keepstep.sim.protocol.trainer import MANIFEST
from keepstep.sim.protocol.job.observer import Checker

# what `core/redundancy/memory_budget.py` chooses at most, with a store and many nodes
MOST_SLOTS = 5


class MemoryWithinBudget(Checker):
    name = "memory"

    def struck(self, what: str) -> None:
        self._look()

    def over(self) -> None:
        self._look()
        for site in self.job.living_sites():
            if site.keeper is not None and site.keeper.process.why_ended.startswith("killed"):
                continue  # when nobody was left who could have started another one
            left = [path for path, _ in site.machine.files.every_file() if ".ending-" not in path]
            if left:
                self.violated(f"machine {site.machine.number} still has {left[:4]}")

    def _look(self) -> None:
        plan = self.job.plan
        # Payloads differ by a few bytes; a parity also holds its members' headers, tables and
        # manifests.
        each = slot_bytes(
            max(self.job.oracle.nbytes(r) for r in range(self.job.world_size)) + KIB,
            len(MANIFEST) + 4 * KIB,
        )
        policy = parse_policy(plan.policy)
        held = (
            2 * (plan.nodes - 1)
            if not isinstance(policy, (Copies, Parity, ReedSolomon))
            else held_slots(policy)
        )
        beside = 2 * (plan.nodes * 2 * PAGE_BYTES + plan.nbytes + PAGE_BYTES) * (plan.nodes > 1)
        own = plan.slots or MOST_SLOTS
        # While a snapshot is fetched or mended, and when the placement changes, there is one more
        # of a kind for a moment.
        most = (
            plan.ranks_per_node * ((own + 2 + 2 * held + 2) * each + beside + PAGE_BYTES)
            + 3 * PAGE_BYTES
        )
        for site in self.job.living_sites():
            if site.machine.files.most_bytes > most:
                self.violated(
                    f"machine {site.machine.number} has taken "
                    f"{site.machine.files.most_bytes} bytes, {most:.0f} are planned"
                )
