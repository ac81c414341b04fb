"""Memory within budget: a machine never takes more than the plan of its slots and what it holds for
others says, and leaves nothing behind.

Not verified: what a keeper leaves that is killed while it removes the directory (its name says so),
or when agent and ranks have gone: `keepstep clean` finds it; memory of processes; files outside the
job directory (there are none here).
"""

from __future__ import annotations

from keepstep.config import ENDING
from keepstep.core.redundancy.memory_budget import held_slots
from keepstep.edge.shm.collective_profile_page import NBYTES as PROFILE_BYTES
from keepstep.edge.shm.slot import slot_bytes, table_bytes
from keepstep.model.topology import Copies, Parity, ReedSolomon, parse_policy
from keepstep.model.units import KIB, PAGE_BYTES
from keepstep.runtime.rank.capture import OBJECTS_SLACK_BYTES
from keepstep.sim.protocol.checkers.checker import Checker
from keepstep.sim.protocol.job.live_state import MANIFEST_BYTES

# what `core/redundancy/memory_budget.py` chooses at most, with a store and many nodes
MOST_SLOTS = 5
TEXT_PAGES = 8  # what agent and keeper write down for others


class MemoryWithinBudget(Checker):
    NAME = "memory"

    def struck(self, what: str) -> None:
        self._look()

    def over(self) -> None:
        self._look()
        for node in self.job.living_nodes():
            if node.keeper is not None and node.keeper.process.why_ended.startswith("killed"):
                continue  # when nobody was left who could have started another one
            left = [path for path, _ in node.machine.files.every_file() if ENDING not in path]
            if left:
                self.violated(f"machine {node.machine.number} still has {left[:4]}")

    def _look(self) -> None:
        plan = self.job.plan
        # Payloads differ by a few bytes, and have room to grow; a parity also holds its members'
        # headers, tables and manifests.
        payload = self.job.around.oracle.most_bytes(self.job.world_size) + OBJECTS_SLACK_BYTES
        described = plan.world_size * (PAGE_BYTES + KIB + table_bytes(payload, plan.block_bytes))
        manifest = MANIFEST_BYTES + MANIFEST_BYTES // 2 + 8 * KIB
        each = slot_bytes(payload + described, manifest, plan.block_bytes)
        policy = parse_policy(plan.policy)
        held = (
            2 * (plan.nodes - 1)
            if not isinstance(policy, (Copies, Parity, ReedSolomon))
            else held_slots(policy)
        )
        beside = 2 * (plan.nodes * 2 * PAGE_BYTES + plan.nbytes + PAGE_BYTES) * (plan.nodes > 1)
        own = plan.slots or MOST_SLOTS
        # what ranks of other nodes keep for those here, while all resume; and who they are
        parts = (plan.world_size - plan.ranks_per_node) * each + PAGE_BYTES
        # While a snapshot is fetched or mended, and when the placement changes, there is one more
        # of a kind for a moment.
        most = (
            plan.ranks_per_node * ((own + 2 + 2 * held + 2) * each + beside + PAGE_BYTES)
            + TEXT_PAGES * PAGE_BYTES
            + (plan.shares_over == "job") * parts
            + plan.interleaves * plan.ranks_per_node * PROFILE_BYTES
        )
        for node in self.job.living_nodes():
            if node.machine.files.most_bytes > most:
                self.violated(
                    f"machine {node.machine.number} has taken "
                    f"{node.machine.files.most_bytes} bytes, {most:.0f} are planned"
                )
