"""No wrong bytes: what a rank loads, and what a holder says it has, is what the oracle says.

A parity is what the product's own code makes of the oracle's states: that it decodes to them is
seen where what was decoded is loaded.

Not verified: copies and parities that rest, between their acknowledgement and their use; bytes in a
checkpoint that nobody loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from keepstep.edge.shm.slot import Slot
from keepstep.edge.shm.slot_header import parse_page
from keepstep.model.kept import kept_of
from keepstep.model.messages.peers import CopyAcked, MeshMessage
from keepstep.model.snapshot import Stamp
from keepstep.model.wire import Part, Span
from keepstep.runtime.replication.encode import (
    Encoding,
    ParityContents,
    contents_from,
    ranges_for,
)
from keepstep.sim.protocol.checkers.checker import Checker
from keepstep.sim.protocol.checkers.inspection import Inspection
from keepstep.sim.protocol.job.live_state import payload_of
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
        inspection = Inspection(self.job, machine)
        copies = inspection.copies(rank, stamp)
        if copies:
            oracle = self.job.around.oracle
            expected, nbytes = oracle.state(rank, stamp) or b"", oracle.nbytes(rank)
            if any(
                data[: max(0, nbytes - at)] != expected[at : at + len(data)]
                for kept in copies
                for at, data in kept
            ):
                self.violated(
                    f"machine {machine.number} acknowledges {stamp} of rank {rank}, and "
                    "holds other bytes"
                )
            return
        block_bytes = self.job.plan.block_bytes
        parities = [found for found in inspection.proven("parity") if found[1].stamp == stamp]
        for mine, _, payload, manifest in parities:
            if not self._is_parity(mine, stamp, payload, contents_from(manifest, block_bytes)):
                self.violated(
                    f"machine {machine.number} acknowledges {stamp} of rank {rank}, and the parity "
                    f"of rank {mine} is another one"
                )
        # What is said in one turn goes out together: a newer one may have taken its place since.
        begun = inspection.newest_begun(rank)
        is_replaced = begun is not None and begun > stamp
        has_damage = self.atlas.has_damage(machine.number, stamp)
        if not parities and not has_damage and not is_replaced:
            self.violated(
                f"machine {machine.number} acknowledges {stamp} of rank {rank}, and holds "
                "nothing of it that proves"
            )

    def _is_parity(self, mine: int, stamp: Stamp, payload: bytes, contents: ParityContents) -> bool:
        """Whether it is made of what the others of its stripe group have at that stamp."""
        blank = cast(Slot, _Blank(memoryview(bytearray(contents.nbytes))))
        encoding = Encoding(blank, contents, mine, stamp, lambda: None)
        for rank, (_, sizes) in contents.metas.items():
            state = self.job.around.oracle.state(rank, stamp)
            whole = b"" if state is None else payload_of(state)
            at, nbytes = contents.where(rank, Part.HEADER)
            header = parse_page(payload[at : at + nbytes], Path(f"parity of rank {mine}"))
            if len(whole) != header.payload_bytes:
                return False
            kept = kept_of(len(whole), header.block_bytes, header.lacking)
            places = kept.stretches(0, kept.nbytes)
            data = b"".join([whole[begin : begin + count] for begin, count in places])
            for range_ in ranges_for(contents.stripes, sizes, rank, mine):
                if range_.part is Part.PAYLOAD:
                    _add(encoding, Span(rank, stamp, *range_), data)
        nbytes = contents.stripes.parity_bytes
        return payload[:nbytes] == bytes(blank.payload[:nbytes])


@dataclass(frozen=True, slots=True)
class _Blank:
    """As much of a slot as an encoding needs."""

    payload: memoryview


def _add(encoding: Encoding, span: Span, data: bytes) -> None:
    place = encoding.place(0, span)
    if place is not None:
        place[:] = data[span.offset : span.offset + span.length]
        encoding.arrived(0, span, 0)
