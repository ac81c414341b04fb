"""Repair sums: what several nodes have of a codeword, added up on its way to who rebuilds a lost
member of it.

Who adds up all pieces itself takes k bytes for each one that is rebuilt, over its one link. So it
asks one of those that have a piece, each in turn, for the sum of them all: that one takes the
others' pieces, adds its own, and sends as many bytes as are rebuilt. No link carries more than one
byte for each of them then, in either direction (partial-parallel repair: Mitra, Panta, Ra and
Bagchi, EuroSys 2016; here k is small, so one node adds up a piece where they build a tree).

Comes in: what is wanted here (`bring`), and what other nodes ask for. Goes out: sums, as blocks, or
why there is none: the asker takes the pieces themselves then. Everything but blocks and sums
happens in the keeper's loop.

Invariant: a sum proves nothing. What is rebuilt of it is proven by its own table.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from keepstep.errors import DamageError
from keepstep.model.messages.peers import Addend, AddUp, NoSum
from keepstep.model.snapshot import Stamp
from keepstep.model.wire import Part, Span
from keepstep.runtime.keeper_world import KeeperWorld
from keepstep.runtime.replication.mesh_links import MeshLinks
from keepstep.runtime.replication.serve import SnapshotServer

Then = Callable[[bytearray | str], None]  # hears the sum, or why there is none


@dataclass(eq=False)
class _WantedSum:
    """A sum that was asked of a node."""

    node: int
    memory: bytearray
    then: Then


@dataclass(eq=False)
class _OwedSum:
    """A sum that a node waits for. `pieces`: by their number among the addends, what is here."""

    asker: int
    wanted: AddUp
    pieces: dict[int, bytearray] = field(default_factory=dict)
    sum: bytearray | None = None  # once it is added up


class RepairSums:
    """Of one mesh."""

    def __init__(self, world: KeeperWorld, links: MeshLinks, server: SnapshotServer) -> None:
        self._workers, self._links, self._server = world.workers, links, server
        # The inbox outlives a mesh: what an earlier one asked for must not be taken for ours.
        self._numbers = count(world.clock.monotonic_ns())
        self._lock = threading.Lock()
        self._wanted: dict[int, _WantedSum] = {}  # by number
        self._owed: list[_OwedSum] = []

    def release(self) -> None:
        """Everybody has what it needs, or another mesh begins."""
        self._links.expect_sums(None)
        with self._lock:
            self._wanted.clear()
        self._owed.clear()

    # -- what is wanted here

    def bring(
        self, node: int, stamp: Stamp, nbytes: int, addends: Sequence[Addend], then: Then
    ) -> None:
        """Ask another node for this sum. `then` is called once, in the loop; never, once all is
        released."""
        number = next(self._numbers)
        with self._lock:
            self._wanted[number] = _WantedSum(node, bytearray(nbytes), then)
        self._links.expect_sums(self)
        asked = AddUp(self._links.version, number, stamp, nbytes, tuple(addends))
        if not self._links.send(node, asked):
            self._links.call_in_loop(partial(self._end, number, f"node {node} cannot be asked"))

    def place(self, node: int, span: Span) -> memoryview | None:
        """See `BlockTaker`."""
        with self._lock:
            wanted = self._wanted.get(span.offset)
        if wanted is None or (wanted.node, len(wanted.memory)) != (node, span.length):
            return None
        return memoryview(wanted.memory)

    def arrived(self, node: int, span: Span, checksum: int) -> None:
        """See `BlockTaker`."""
        self._links.call_in_loop(partial(self._end, span.offset, None))

    def unavailable(self, node: int, number: int, why: str) -> None:
        """That node does not add it up."""
        with self._lock:
            wanted = self._wanted.get(number)
        if wanted is not None and wanted.node == node:
            self._end(number, why)

    def _end(self, number: int, why: str | None) -> None:
        with self._lock:
            wanted = self._wanted.pop(number, None)
        if wanted is not None:
            wanted.then(wanted.memory if why is None else why)

    # -- what others ask for

    def asked(self, asker: int, wanted: AddUp) -> None:
        """That node wants these added up."""
        owed = _OwedSum(asker, wanted)
        self._owed.append(owed)
        for index, addend in enumerate(wanted.addends):
            if owed not in self._owed:
                return  # one was not to be had
            if addend.node == self._links.node:
                self._take_here(owed, index, addend)
            else:
                # Bare: how often it counts is known here.
                bare = addend._replace(coefficient=1)
                took = partial(self._took, owed, index)
                self.bring(addend.node, wanted.stamp, addend.range.length, (bare,), took)

    def _take_here(self, owed: _OwedSum, index: int, addend: Addend) -> None:
        try:
            piece = self._server.read_here(addend.rank, owed.wanted.stamp, addend.range)
        except (LookupError, DamageError) as error:
            self._took(owed, index, str(error))
        else:
            self._took(owed, index, piece)

    def _took(self, owed: _OwedSum, index: int, piece: bytearray | str) -> None:
        if owed not in self._owed:
            return
        if isinstance(piece, str):
            self._owed.remove(owed)
            self._refuse(owed, piece)
            return
        owed.pieces[index] = piece
        if len(owed.pieces) == len(owed.wanted.addends):
            self._workers.submit(partial(_sum_of, owed), partial(self._added_up, owed))

    def _added_up(self, owed: _OwedSum, found: bytearray) -> None:
        owed.pieces.clear()
        owed.sum = found
        self._send(owed)

    def _send(self, owed: _OwedSum) -> None:
        if owed not in self._owed or owed.sum is None:
            return
        number, stamp, nbytes = owed.wanted.number, owed.wanted.stamp, owed.wanted.nbytes
        span = Span(owed.wanted.addends[0].rank, stamp, Part.SUM, number, nbytes)
        done = partial(self._sent, owed)
        if self._links.send_block(owed.asker, span, memoryview(owed.sum), done, None):
            self._owed.remove(owed)

    def _sent(self, owed: _OwedSum, why: str | None) -> None:
        """On a link's thread. What is not wanted any more is no failure."""
        if why is not None and "damaged" in why:
            self._links.call_in_loop(partial(self._refuse, owed, why))

    def _refuse(self, owed: _OwedSum, why: str) -> None:
        self._links.send(owed.asker, NoSum(self._links.version, owed.wanted.number, why))

    def writable(self, node: int) -> None:
        """The link to that node takes blocks again."""
        for owed in [each for each in self._owed if each.asker == node]:
            self._send(owed)

    def link_is_dead(self, node: int, why: str) -> None:
        """Nothing comes from there any more, and nothing arrives."""
        self._owed = [owed for owed in self._owed if owed.asker != node]
        with self._lock:
            lost = [number for number, wanted in self._wanted.items() if wanted.node == node]
        for number in lost:
            self._end(number, why)


def _sum_of(owed: _OwedSum) -> bytearray:
    """For a worker: it takes as long as reading and writing memory does."""
    addends, pieces = owed.wanted.addends, owed.pieces
    if len(addends) == 1 and (addends[0].coefficient, len(pieces[0])) == (1, owed.wanted.nbytes):
        return pieces[0]
    # numpy, which a keeper without codes does not need
    from keepstep.coding.reed_solomon import rebuild

    found = bytearray(owed.wanted.nbytes)
    row = bytes(addend.coefficient for addend in addends)
    rebuild((row,), [pieces[index] for index in range(len(addends))], [found])
    return found
