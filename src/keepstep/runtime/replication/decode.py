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
from keepstep.model.kept import KeptBlocks
from keepstep.model.wire import BlockRange, Part
from keepstep.runtime.replication.receive import IncomingSnapshot


class PayloadDecoder:
    """Into `incoming`, from the first byte that it keeps to its last: the targets of the steps lie
    one behind the other, without what the snapshot lacks (`KeptBlocks`)."""

    def __init__(self, stripes: Stripes, incoming: IncomingSnapshot, kept: KeptBlocks) -> None:
        self._stripes = stripes
        self._incoming = incoming
        self._payload = incoming.payload
        self._kept = kept
        self._at = 0  # so much is there
        self._running = running_checksum()  # of the block that is begun

    def rebuild(self, step: Combine, sources: Sequence[bytearray]) -> None:
        """The step's one target, from the bytes of its sources in their order."""
        # numpy, which a keeper without codes does not need
        from keepstep.coding.reed_solomon import rebuild

        [target] = step.targets
        rows = (coefficients(self._stripes, step),)
        places = self._places(step)
        if len(places) == 1:
            [(begin, nbytes)] = places
            into = self._payload[begin : begin + nbytes]
            rebuild(rows, sources, [into])
            self._hash(into)
        else:  # what lies apart in the payload is computed beside it
            found = bytearray(target.nbytes)
            rebuild(rows, sources, [found])
            self._put(places, memoryview(found))

    def take(self, step: Combine, added_up: bytearray) -> None:
        """The step's one target, which another node has added up."""
        self._put(self._places(step), memoryview(added_up))

    def _places(self, step: Combine) -> list[tuple[int, int]]:
        [target] = step.targets
        assert target.start == self._at, f"expected {self._at}, found {target}"
        return list(self._kept.stretches(target.start, target.nbytes))

    def _put(self, places: Sequence[tuple[int, int]], data: memoryview) -> None:
        at = 0
        for begin, nbytes in places:
            self._payload[begin : begin + nbytes] = data[at : at + nbytes]
            at += nbytes
        self._hash(data)

    def _hash(self, data: memoryview) -> None:
        size = self._kept.block_bytes
        while data:
            index, begun_bytes = divmod(self._at, size)
            piece = data[: size - begun_bytes]
            self._running.update(piece)
            self._at += len(piece)
            if begun_bytes + len(piece) == size or self._at == self._kept.nbytes:
                block = self._kept.blocks[index]
                range_ = BlockRange(Part.PAYLOAD, block * size, self._at - index * size)
                self._incoming.computed(range_, self._running.intdigest())
                self._running = running_checksum()
            data = data[len(piece) :]


def coefficients(stripes: Stripes, step: Combine) -> bytes:
    """How often each source counts in the step's one target."""
    # it brings numpy, as in `rebuild`
    from keepstep.coding.reed_solomon import solve

    [target] = step.targets
    have = tuple(piece.position for piece in step.sources)
    [row] = solve(stripes.k, stripes.tolerates, have, (target.position,))
    return row
