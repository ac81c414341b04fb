"""No wrong bytes: what a rank loads, and what a holder says it has, is what the oracle says.

Not verified: a parity's own bytes (what is decoded from it is loaded, and compared then); copies
that rest, between their acknowledgement and their use; bytes in a checkpoint that nobody loads.
"""

from __future__ import annotations

from keepstep.model.messages.peers import CopyAcked, MeshMessage
from keepstep.model.snapshot import Stamp
from keepstep.sim.protocol.wire.links import SimLinks
from keepstep.sim.protocol.checkers.inspection import Onlooker
from keepstep.sim.protocol.trainer import Rank
from keepstep.sim.protocol.job.observer import Checker


class NoWrongBytes(Checker):
    name = "no wrong bytes"

    def loaded(self, rank: Rank, source: str, stamp: Stamp, state: bytes) -> None:
        expected = b"" if source == "fresh" else self.job.oracle.state(rank.rank, stamp.step)
        if state != expected:
            self.violated(
                f"rank {rank.rank} loaded {len(state)} bytes as {stamp} from {source}, and "
                "they are not that"
            )

    def said(self, links: SimLinks, node: int, message: MeshMessage) -> None:
        if not isinstance(message, CopyAcked):
            return
        rank, stamp = message.rank, message.stamp
        machine = links.process.machine
        onlooker = Onlooker(machine, self.job.settings.job_dir)
        copies = [
            payload
            for r, header, payload, _ in onlooker.proven("held")
            if (r, header.stamp) == (rank, stamp)
        ]
        if copies:
            if any(payload != self.job.oracle.state(rank, stamp.step) for payload in copies):
                self.violated(
                    f"machine {machine.number} acknowledges {stamp} of rank {rank}, and "
                    "holds other bytes"
                )
            return
        rows = [header.stamp for _, header, _, _ in onlooker.proven("parity")]
        if stamp not in rows and not self.job.flipped(machine.number):
            self.violated(
                f"machine {machine.number} acknowledges {stamp} of rank {rank}, and holds "
                "nothing of it that proves"
            )
