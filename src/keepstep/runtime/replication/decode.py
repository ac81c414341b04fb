"""Decode: the payload of a lost member, rebuilt step by step from what its stripe group sends, each
step hashed while it is in the cache.

Comes in: a step of the plan (`core/redundancy/stripes.py`) and the bytes of its sources. Goes out:
the bytes in the payload, and the checksum of each block that is complete. At memory speed: for
workers, one step after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.coding.checksum import running_checksum
from keepstep.core.redundancy.stripes import Combine, Stripes
from keepstep.model.wire import BlockRange, Part
from keepstep.runtime.replication.receive import IncomingSnapshot


class PayloadDecoder:
    """Into `incoming`, from its first byte to its last: the targets of the steps lie one behind the
    other."""

    def __init__(self, stripes: Stripes, incoming: IncomingSnapshot) -> None:
        self._stripes = stripes
        self._incoming = incoming
        self._payload = incoming.payload
        self._block_bytes = incoming.slot.block_bytes
        self._at = 0  # so much is there
        self._running = running_checksum()  # of the block that is begun

    def rebuild(self, step: Combine, sources: Sequence[bytearray]) -> None:
        """The step's one target, from the bytes of its sources in their order."""
        # numpy, which a keeper without codes does not need
        from keepstep.coding.reed_solomon import rebuild, solve

        [target] = step.targets
        assert target.start == self._at, f"expected {self._at}, found {target}"
        have = tuple(piece.position for piece in step.sources)
        rows = solve(self._stripes.k, self._stripes.tolerates, have, (target.position,))
        into = self._payload[target.start : target.stop]
        rebuild(rows, sources, [into])
        self._hash(into)

    def _hash(self, data: memoryview) -> None:
        while data:
            block, begun_bytes = divmod(self._at, self._block_bytes)
            piece = data[: self._block_bytes - begun_bytes]
            self._running.update(piece)
            self._at += len(piece)
            if begun_bytes + len(piece) == self._block_bytes or self._at == len(self._payload):
                at = block * self._block_bytes
                range_ = BlockRange(Part.PAYLOAD, at, self._at - at)
                self._incoming.computed(range_, self._running.intdigest())
                self._running = running_checksum()
            data = data[len(piece) :]
