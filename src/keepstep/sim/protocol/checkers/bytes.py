"""No wrong bytes: what a rank loads, and what a holder says it has, is what the oracle says.

Not verified: a parity's own bytes (what is decoded from it is loaded, and compared then); copies
that rest, between their acknowledgement and their use; bytes in a checkpoint that nobody loads.
"""

from __future__ import annotations

from keepstep.model.messages.peers import CopyAcked, MeshMessage
from keepstep.model.snapshot import Stamp
from keepstep.sim.protocol.checkers.checker import Checker
from keepstep.sim.protocol.checkers.inspection import Inspection
from keepstep.sim.protocol.job.oracle import MIXED_BYTES
from keepstep.sim.protocol.job.program import Program
from keepstep.sim.protocol.wire.links import SimLinks


class NoWrongBytes(Checker):
    NAME = "no wrong bytes"

    def loaded(self, program: Program, source: str, stamp: Stamp) -> None:
        rank = program.who.rank
        if not self._is_right(source, stamp, rank, program.state):
            self.violated(
                f"rank {rank} loaded {len(program.state)} bytes as {stamp} from {source}, and they "
                "are not that"
            )

    def _is_right(self, source: str, stamp: Stamp, rank: int, state: bytes) -> bool:
        oracle = self.job.around.oracle
        match source:
            case "fresh":
                return not state
            case "memory":
                return state == oracle.state(rank, stamp)
            case _:
                return oracle.is_checkpoint(stamp.step, rank, state)

    def went(self, program: Program, source: str, stamp: Stamp, epoch: int) -> None:
        mixed = None if source == "fresh" else program.state[:MIXED_BYTES]
        try:
            self.job.around.oracle.begin(epoch, stamp.step, mixed, program.who.world_size)
        except ValueError as error:
            self.violated(f"rank {program.who.rank} goes on in epoch {epoch} from {stamp}: {error}")

    def said(self, links: SimLinks, node: int, message: MeshMessage) -> None:
        if not isinstance(message, CopyAcked):
            return
        rank, stamp = message.rank, message.stamp
        machine = links.process.machine
        inspection = Inspection(machine, self.job.around.settings.job_dir)
        copies = [
            payload
            for r, header, payload, _ in inspection.proven("held")
            if (r, header.stamp) == (rank, stamp)
        ]
        if copies:
            oracle = self.job.around.oracle
            expected = oracle.state(rank, stamp)
            if any(payload[: oracle.nbytes(rank)] != expected for payload in copies):
                self.violated(
                    f"machine {machine.number} acknowledges {stamp} of rank {rank}, and "
                    "holds other bytes"
                )
            return
        rows = [header.stamp for _, header, _, _ in inspection.proven("parity")]
        if stamp not in rows and not self.atlas.has_damage(machine.number):
            self.violated(
                f"machine {machine.number} acknowledges {stamp} of rank {rank}, and holds "
                "nothing of it that proves"
            )
