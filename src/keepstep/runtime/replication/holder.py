"""Holder: this node as a keeper of other nodes' snapshots: copies, and parities of rows.

Comes in: offers of owners and the blocks they send. Goes out: accept, decline (no memory: said once
is enough), ack when the part is whole and proven here, nack when it is not or is no more. Which
slot is overwritten is decided by the same rule as a rank's own (core/resume/slots.py), with the
newest horizon heard of, so that the newest committed generation stays whole whatever arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from keepstep.core.resume.slots import Skip, choose
from keepstep.edge.shm.slot import Slot
from keepstep.edge.shm.slot_store import Shelf
from keepstep.errors import DamageError, MemoryBudgetError
from keepstep.model.horizon import Horizon
from keepstep.model.mesh import Mesh
from keepstep.model.messages.peers import (
    CopyAccepted,
    CopyAcked,
    CopyDeclined,
    CopyOffer,
    CopyUnavailable,
    FetchRanges,
    SnapshotMessage,
)
from keepstep.model.restore_sources import HeldParity, HeldSnapshot
from keepstep.model.snapshot import SlotState, Stamp
from keepstep.model.units import human_bytes
from keepstep.model.wire import BlockRange
from keepstep.runtime.replication.dedup import Twins, in_runs
from keepstep.runtime.replication.encode import (
    Contents,
    Encoding,
    Sizes,
    blank,
    contents_from,
    contents_of,
)
from keepstep.runtime.replication.peer_inbox import PeerInbox
from keepstep.runtime.replication.receive import Whole
from keepstep.runtime.world import World

ASKED_AT_ONCE = 2000  # ranges in one message
OwnSizes = Callable[[int, Stamp], Sizes | None]


class Holder:
    """All that this node holds for others. Everything but blocks happens in the keeper's loop."""

    def __init__(
        self, world: World, lines: PeerInbox, job_dir: Path, job_hash: bytes, own_sizes: OwnSizes
    ) -> None:
        """`own_sizes(rank, stamp)`: of a snapshot of this node's own ranks, None when it is not
        sealed here."""
        self._world, self._journal, self._own_sizes = world, world.journal, own_sizes
        self._lines, self._job_dir, self._job_hash = lines, job_dir, job_hash
        self.copies, self.parities = (
            Shelf(world.memory, job_dir / "held"),
            Shelf(world.memory, job_dir / "parity"),
        )
        self._twins = Twins(world.memory, job_dir)
        self._receiving: dict[int, Whole] = {}  # by rank: an owner sends one snapshot at a time
        # of those, which are being filled from what this node has itself
        self._comparing: dict[int, Stamp] = {}
        self._encoding: dict[int, Encoding] = {}  # by this node's member of the row
        self._offers: dict[tuple[int, Stamp], CopyOffer] = {}  # of rows that are not complete yet
        self._contents: dict[tuple[int, Stamp], Contents] = {}
        self._horizon = Horizon(-1)
        # for whom a slot is being made; None: for nobody any more
        self._preparing: dict[tuple[Shelf, int], CopyOffer | None] = {}

    # -- rounds

    def begin(self, mesh: Mesh) -> None:
        """Another round: whatever was on its way counts no more."""
        self._mesh = mesh
        for rank in list(self._receiving):
            self._stop_receiving(rank)
        for rank in list(self._encoding):
            self._stop_encoding(rank)
        self._offers.clear()
        self._preparing = dict.fromkeys(self._preparing)
        self._horizon = Horizon(-1)

    def keep_only(self, copies: set[int], parities: set[int]) -> None:
        """Of these ranks; what was on its way of others counts no more."""
        for rank in [r for r in self._receiving if r not in copies]:
            self._stop_receiving(rank)
        for rank in [r for r in self._encoding if r not in parities]:
            self._stop_encoding(rank)
        kept = {*((self.copies, r) for r in copies), *((self.parities, r) for r in parities)}
        self._preparing = {
            key: offer if key in kept else None for key, offer in self._preparing.items()
        }
        self.copies.keep_only(copies)
        self.parities.keep_only(parities)

    def forget_newer(self, stamp: Stamp | None) -> None:
        """All ranks go back to `stamp` (None: to something that is not in memory)."""
        self.copies.void_newer(stamp)
        self.parities.void_newer(stamp)

    def heard(self, horizon: Horizon) -> None:
        self._horizon = horizon

    def snapshots(self) -> list[HeldSnapshot]:
        return [HeldSnapshot(rank, stamp) for rank, stamp in self.copies.sealed()]

    def coded(self) -> list[HeldParity]:
        found = []
        sealed = self.parities.sealed()
        self._contents = {key: known for key, known in self._contents.items() if key in sealed}
        for (rank, stamp), slot in sealed.items():
            contents = self.contents(rank, stamp, slot)
            found.append(
                HeldParity(rank, stamp, contents.stripes.members, contents.stripes.tolerates)
            )
        return found

    def contents(self, rank: int, stamp: Stamp, slot: Slot) -> Contents:
        known = self._contents.get((rank, stamp))
        if known is None:
            known = self._contents[(rank, stamp)] = contents_from(slot.manifest_text(slot.header()))
        return known

    # -- offers

    def offered(self, offer: CopyOffer) -> None:
        """An owner wants a snapshot of its rank kept here."""
        if offer.stripe_group:
            self._row_offered(offer)
            return
        slot = self.copies.find(offer.rank, offer.stamp)
        if slot is not None and slot.header().table_checksum == offer.table_checksum:
            self._ack(offer)
            return
        # two computations of one stamp cannot be: one of the two is damaged, and the owner has just
        # proven its own
        if slot is not None:
            slot.void()
        if self._comparing.get(offer.rank) == offer.stamp:
            return  # its table is here, and what is missing will be asked for
        self._stop_receiving(offer.rank)
        self._make_room(
            offer,
            self.copies,
            offer.rank,
            offer.capacity_bytes,
            offer.manifest_capacity_bytes,
            lambda s: self._receive(offer, s),
        )

    def _make_room(
        self,
        offer: CopyOffer,
        shelf: Shelf,
        rank: int,
        capacity: int,
        manifest_capacity: int,
        then: Callable[[Slot], None],
        blank_bytes: int = 0,
    ) -> None:
        """A slot that may be overwritten, for a parity with zeros to begin with. Touching memory is
        not the loop's work: it takes long."""
        if (shelf, rank) in self._preparing:
            return  # the owner asks again
        index = self._choose(shelf, rank, offer)
        if index is None:
            return
        fitting = None if blank_bytes else shelf.fitting(rank, index, capacity, manifest_capacity)
        if fitting is not None:
            then(fitting)
            return
        self._preparing[(shelf, rank)] = offer

        def make() -> Slot | MemoryBudgetError:
            try:
                slot = shelf.take(rank, index, capacity, manifest_capacity)
            except MemoryBudgetError as error:
                return error
            if blank_bytes:
                blank(slot, blank_bytes)
            return slot

        def made(found: Slot | MemoryBudgetError) -> None:
            if self._preparing.pop((shelf, rank)) is None:
                return  # another round has begun, or another policy
            if isinstance(found, MemoryBudgetError):
                owner = self._mesh.node_of[offer.rank]
                self._journal.record(
                    "declined",
                    f"node {owner} asks for {human_bytes(capacity)} here: {found}",
                    rank=offer.rank,
                )
                version = self._mesh.version
                self._to_owner(CopyDeclined(version, offer.rank, offer.stamp, str(found)))
            else:
                then(found)

        self._world.workers.submit(make, made)

    def _choose(self, shelf: Shelf, rank: int, offer: CopyOffer) -> int | None:
        known = self._horizon
        floor = max((s for s in (offer.floor, known.floor) if s is not None), default=None)
        # What was half written is given up by now: an owner sends one snapshot at a time.
        views = [
            v._replace(state=SlotState.EMPTY) if v.state is SlotState.WRITING else v
            for v in shelf.views(rank)
        ]
        decision = choose(offer.stamp.step, views, floor, known.is_hopeless)
        if isinstance(decision, Skip):
            self._refuse(offer, f"no slot is free here: {decision.why}")
            return None
        return decision.slot

    def _to_owner(self, message: SnapshotMessage) -> None:
        self._lines.send(self._mesh.node_of[message.rank], message)

    def _accept(self, offer: CopyOffer) -> None:
        self._to_owner(CopyAccepted(self._mesh.version, offer.rank, offer.stamp))

    def _ack(self, offer: CopyOffer) -> None:
        self._to_owner(CopyAcked(self._mesh.version, offer.rank, offer.stamp))

    def _refuse(self, offer: CopyOffer, why: str) -> None:
        self._to_owner(CopyUnavailable(self._mesh.version, offer.rank, offer.stamp, why))

    # -- copies

    def _receive(self, offer: CopyOffer, slot: Slot) -> None:
        slot.begin(self._job_hash, offer.rank, self._mesh.world_size, 0, offer.stamp)
        whole = Whole(
            *(slot, offer.rank, offer.stamp, offer.payload_bytes, offer.manifest_bytes),
            lambda: self._lines.call_in_loop(lambda: self._arrived(offer, whole)),
            lambda: self._lines.call_in_loop(lambda: self._compare(offer, whole)),
        )
        self._receiving[offer.rank] = whole
        self._lines.expect(offer.rank, offer.stamp, whole)
        self._accept(offer)

    def _compare(self, offer: CopyOffer, whole: Whole) -> None:
        """The table is here: what this node's own ranks have too is taken from there, the rest is
        asked for."""
        if self._receiving.get(offer.rank) is not whole:
            return
        self._comparing[offer.rank] = offer.stamp
        whole.work(True)
        table, ranks = whole.table(), self._mesh.ranks_of(self._mesh.node)

        def ask(missing: list[BlockRange]) -> None:
            whole.work(False)
            if self._receiving.get(offer.rank) is whole:
                del self._comparing[offer.rank]
                for ranges in in_runs(missing, ASKED_AT_ONCE):
                    version = self._mesh.version
                    self._to_owner(FetchRanges(version, offer.rank, offer.stamp, tuple(ranges)))

        self._world.workers.submit(
            lambda: self._twins.take_over(whole, table, ranks, offer.stamp), ask
        )

    def _arrived(self, offer: CopyOffer, whole: Whole) -> None:
        if self._receiving.get(offer.rank) is not whole:
            return
        del self._receiving[offer.rank]
        self._lines.expect_no_more(whole)
        try:
            whole.seal(self._job_hash)
        except DamageError as error:
            whole.slot.void()
            self._journal.record(
                "copy-refused",
                f"the copy of rank {offer.rank} at {offer.stamp} is not kept: {error}",
                rank=offer.rank,
            )
            self._refuse(offer, str(error))
            return
        self._ack(offer)

    def _stop_receiving(self, rank: int) -> None:
        whole = self._receiving.pop(rank, None)
        self._comparing.pop(rank, None)
        if whole is None:
            return
        self._lines.expect_no_more(whole)
        if whole.in_use:
            self.copies.retire(whole.slot)
        else:
            whole.slot.void()

    def link_is_dead(self, node: int) -> None:
        for whole in self._receiving.values():
            whole.gone(node)

    def damaged_at_rest(self, path: Path, why: str) -> None:
        """Scrubbing found a copy or a parity that no longer proves: give it up, and have its owners
        send it again."""
        shelf = self.copies if path.is_relative_to(self.copies.root) else self.parities
        found = shelf.void_damaged(path)
        if found is None:
            return  # overwritten meanwhile
        rank, stamp = found
        self._journal.record("damaged", f"scrub: {why}; it is asked for again", rank=rank)
        contents = self._contents.pop((rank, stamp), None)
        owners = (
            [rank]
            if shelf is self.copies
            else [r for r in (contents.stripes.members if contents else ()) if r != rank]
        )
        for owner in owners:
            version, said = self._mesh.version, f"damaged at rest: {why}"
            self._to_owner(CopyUnavailable(version, owner, stamp, said))

    # -- parities

    def _row_offered(self, offer: CopyOffer) -> None:
        mine = next(r for r in offer.stripe_group if self._mesh.node_of[r] == self._mesh.node)
        slot = self.parities.find(mine, offer.stamp)
        if slot is not None:
            contents = self.contents(mine, offer.stamp, slot)
            if (
                contents.stripes.members == offer.stripe_group
                and contents.metas[offer.rank][1].payload_bytes == offer.payload_bytes
            ):
                self._ack(offer)
                return
            slot.void()
        self._offers = {
            key: known
            for key, known in self._offers.items()
            if known.stripe_group != offer.stripe_group or known.stamp == offer.stamp
        }
        self._offers[(offer.rank, offer.stamp)] = offer
        encoding = self._encoding.get(mine)
        if encoding is not None and encoding.stamp == offer.stamp:
            # the owner begins anew, and what it has sent cannot be taken out again
            self._stop_encoding(mine)
        self.try_rows(offer.stamp)

    def try_rows(self, stamp: Stamp) -> None:
        """Begin the parities whose other members have all offered."""
        rows = {offer.stripe_group for (_, s), offer in self._offers.items() if s == stamp}
        for row in sorted(rows):
            mine = next(r for r in row if self._mesh.node_of[r] == self._mesh.node)
            offers = {r: self._offers.get((r, stamp)) for r in row if r != mine}
            own = self._own_sizes(mine, stamp)
            if own is None or None in offers.values():
                continue
            known = {r: o for r, o in offers.items() if o is not None}
            sizes = {r: Sizes(o.payload_bytes, o.manifest_bytes) for r, o in known.items()} | {
                mine: own
            }
            self._begin_row(
                mine, contents_of(sizes, row, next(iter(known.values())).tolerates, mine), known
            )

    def _begin_row(self, mine: int, contents: Contents, offers: dict[int, CopyOffer]) -> None:
        first = next(iter(offers.values()))
        before = self._encoding.get(mine)
        if before is not None and before.stamp == first.stamp:
            return
        self._stop_encoding(mine)
        manifest_bytes = len(contents.to_text())

        def begin(slot: Slot) -> None:
            slot.begin(self._job_hash, mine, self._mesh.world_size, 0, first.stamp)
            encoding = Encoding(
                *(slot, contents, mine, first.stamp),
                lambda: self._lines.call_in_loop(
                    lambda: self._encoded(mine, encoding, list(offers.values()))
                ),
            )
            self._encoding[mine] = encoding
            for rank in encoding.ranks:
                self._lines.expect(rank, first.stamp, encoding)
            for offer in offers.values():
                self._accept(offer)

        capacity, parity_bytes = contents.nbytes, contents.stripes.parity_bytes
        self._make_room(
            first,
            self.parities,
            mine,
            capacity,
            manifest_bytes + manifest_bytes // 4,
            begin,
            parity_bytes,
        )

    def _encoded(self, mine: int, encoding: Encoding, offers: list[CopyOffer]) -> None:
        if self._encoding.get(mine) is not encoding:
            return
        del self._encoding[mine]
        self._lines.expect_no_more(encoding)
        try:
            encoding.seal(self._world.clock.wall_ns())
        except DamageError as error:  # a bit flipped in the slot's header while the pieces came
            encoding.slot.void()
            self._journal.record(
                "copy-refused",
                f"the parity of rank {mine} at {encoding.stamp} is not kept: {error}",
                rank=mine,
            )
            for offer in offers:
                self._refuse(offer, str(error))
            return
        self._contents[(mine, encoding.stamp)] = encoding.contents
        for offer in offers:
            self._offers.pop((offer.rank, offer.stamp), None)
            self._ack(offer)

    def _stop_encoding(self, mine: int) -> None:
        encoding = self._encoding.pop(mine, None)
        if encoding is not None:
            self._lines.expect_no_more(encoding)
            encoding.stop()
            encoding.slot.void()
