"""Owner: protects the snapshots of this node's own ranks on other nodes.

Comes in: the generation everybody is to protect now, and the holders' words. Goes out: offers,
blocks straight from the sealed slots, and which snapshots are proven by all their holders. A slot
is pinned while it is sent, and what is sent from a row's member is verified first: a bit that
flipped at rest must not get into a parity.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.coding.checksum import BLOCK_BYTES
from keepstep.core.redundancy.protection import Assignment
from keepstep.edge.shm.slot import Slot
from keepstep.errors import DamageError
from keepstep.model.messages.peers import CopyOffer
from keepstep.model.restore_sources import GroupMember, RestoreSource
from keepstep.model.snapshot import SlotHeader, Stamp
from keepstep.model.units import S_NS
from keepstep.model.wire import BlockRange, Part, Span
from keepstep.ports import Memory
from keepstep.runtime.replication.encode import Sizes, ranges_for
from keepstep.runtime.replication.peer_inbox import PeerInbox
from keepstep.runtime.replication.receive import ranges_of
from keepstep.runtime.slot_locks import Pin, pin_one
from keepstep.runtime.world import World

ASK_AGAIN_NS = 2 * S_NS  # without any answer
KEPT_STAMPS = 4  # a rank's protected stamps that are remembered: two generations are held


@dataclass
class Sending:
    """One holder's part: what is still to be handed to its link, and when it last gave a sign."""

    node: int
    waiting: deque[BlockRange] = field(default_factory=deque)
    accepted: bool = False
    filled: bool = False
    acked: bool = False
    sign_ns: int = 0


@dataclass
class Protection:
    """One snapshot on its way to its holders, pinned."""

    assignment: Assignment
    stamp: Stamp
    pin: Pin
    header: SlotHeader
    table: tuple[int, ...]
    holders: dict[int, Sending]
    sizes: dict[int, Sizes]  # of the row, as far as announced
    proven: bool

    @property
    def slot(self) -> Slot:
        return self.pin.slot


class Owner:
    """`on_protected`: another snapshot is proven by its holders; `on_damage`: what lies here does
    not prove."""

    def __init__(
        self,
        world: World,
        lines: PeerInbox,
        job_dir: Path,
        on_protected: Callable[[], None],
        on_damage: Callable[[], None],
    ) -> None:
        self._world, self._clock, self._journal = world, world.clock, world.journal
        self._lines, self._job_dir = lines, job_dir
        self._on_protected, self._on_damage = on_protected, on_damage
        self._assignments: Mapping[int, Assignment] = {}
        self._ranks: range = range(0)
        self._now: dict[int, Protection] = {}
        self._sizes: dict[tuple[int, Stamp], Sizes] = {}  # what members of our rows have announced
        self._target: Stamp | None = None
        self._floor: Stamp | None = None
        self._damaged: set[int] = set()  # ranks of whose target that has been told
        self.protected: dict[int, tuple[Stamp, ...]] = {}
        self.hindered = ""

    # -- rounds and targets

    def begin(self, ranks: range) -> None:
        """Another round."""
        self._release_all()
        self._ranks, self._assignments, self._sizes, self._target, self._floor = (
            ranks,
            {},
            {},
            None,
            None,
        )
        self.protected, self.hindered = {}, ""

    def follow(self, assignments: Mapping[int, Assignment]) -> None:
        """The policy that holds."""
        if dict(assignments) != dict(self._assignments):
            self._release_all()
            self._assignments, self.protected = dict(assignments), {}

    def protect(self, target: Stamp | None, floor: Stamp | None) -> None:
        """Bring `target` to all holders. What is older than `floor` they may overwrite."""
        if target != self._target:
            self._damaged.clear()
        self._target, self._floor = target, floor
        for rank in self._ranks:
            now = self._now.get(rank)
            if now is not None and now.stamp != target:
                self._release(rank)
        self.go_on()

    def go_on(self) -> None:
        """Begin with what could not be pinned before, because its rank was looking at it this
        moment."""
        target = self._target
        if target is not None:
            for rank in self._ranks:
                if (
                    rank in self._assignments
                    and rank not in self._now
                    and target not in self.protected.get(rank, ())
                ):
                    self._start(self._assignments[rank], target)

    def _start(self, assignment: Assignment, stamp: Stamp) -> None:
        if not assignment.holders:
            self._done(assignment.rank, stamp)
            return
        slot = pin_one(self._world.memory, self._job_dir, stamp, assignment.rank)
        if slot is None:
            # damaged or given up, as the leader will hear, or in its rank's hands this moment
            return
        try:
            header = slot.header()
            table = tuple(slot.table(header))
        except DamageError as error:
            slot.close()
            self._is_damaged(assignment.rank, f"{error}; it is not copied")
            return
        sizes = {
            r: self._sizes[(r, stamp)] for r in assignment.stripe_group if (r, stamp) in self._sizes
        }
        sizes[assignment.rank] = Sizes(header.payload_bytes, header.manifest_bytes)
        holders = {node: Sending(node) for node in assignment.holders}
        now = self._now[assignment.rank] = Protection(
            assignment,
            stamp,
            Pin(slot),
            header,
            table,
            holders,
            sizes,
            proven=not assignment.stripe_group,
        )
        for sending in holders.values():
            self._offer(now, sending)
        if assignment.stripe_group:
            self._world.workers.submit(
                lambda: _prove(self._world.memory, slot.path, header),
                lambda wrong: self._proved(now, wrong),
            )

    def _offer(self, now: Protection, sending: Sending) -> None:
        sending.sign_ns = self._clock.monotonic_ns()
        sending.waiting.clear()
        sending.accepted = sending.filled = False
        header, assignment = now.header, now.assignment
        offer = CopyOffer(
            mesh_version=self._lines.mesh_version,
            rank=assignment.rank,
            stamp=now.stamp,
            payload_bytes=header.payload_bytes,
            capacity_bytes=now.slot.capacity,
            manifest_bytes=header.manifest_bytes,
            manifest_capacity_bytes=now.slot.manifest_capacity,
            table_checksum=header.table_checksum,
            stripe_group=assignment.stripe_group,
            tolerates=assignment.tolerates,
            floor=self._floor,
        )
        self._lines.send(sending.node, offer)

    def _proved(self, now: Protection, wrong: str | None) -> None:
        if self._now.get(now.assignment.rank) is not now:
            return
        if wrong is not None:
            self._release(now.assignment.rank)
            self._is_damaged(now.assignment.rank, f"{wrong}; it is not encoded")
            return
        now.proven = True
        for sending in now.holders.values():
            self._fill(now, sending)

    # -- what others say

    def announced(self, rank: int, stamp: Stamp, sizes: Sizes) -> None:
        """A member of one of our rows has offered: now its size is known."""
        self._sizes[(rank, stamp)] = sizes
        self._sizes = {
            key: known
            for key, known in self._sizes.items()
            if self._floor is None or key[1] >= self._floor
        }
        for now in self._now.values():
            if rank in now.assignment.stripe_group and now.stamp == stamp:
                now.sizes[rank] = sizes
                for sending in now.holders.values():
                    self._fill(now, sending)

    def accepted(self, node: int, rank: int, stamp: Stamp) -> None:
        """The holder is ready (or ready anew: then everything is sent again)."""
        now, sending = self._find(node, rank, stamp)
        if now is not None and sending is not None:
            sending.accepted, sending.filled, sending.acked, sending.sign_ns = (
                True,
                False,
                False,
                self._clock.monotonic_ns(),
            )
            sending.waiting.clear()
            self._fill(now, sending)

    def _fill(self, now: Protection, sending: Sending) -> None:
        if not sending.accepted or sending.filled or not now.proven:
            return
        assignment, sizes = now.assignment, now.sizes
        if not assignment.stripe_group:
            # The payload follows when the holder has seen in the table which blocks of it are new
            # to it.
            whole = ranges_of(now.header.payload_bytes, now.header.manifest_bytes)
            sending.waiting.extend(r for r in whole if r.part is not Part.PAYLOAD)
        elif len(sizes) == len(assignment.stripe_group):
            stripes = assignment.stripes({r: s.payload_bytes for r, s in sizes.items()})
            keeper = next(r for r in assignment.stripe_group if self._node_of(r) == sending.node)
            sending.waiting.extend(
                ranges_for(stripes, sizes[assignment.rank], assignment.rank, keeper)
            )
        else:
            return
        sending.filled = True
        self._pump(now, sending)

    def wanted(self, node: int, rank: int, stamp: Stamp, ranges: tuple[BlockRange, ...]) -> bool:
        """A holder asks for what it lacks; False when nothing of that is on its way to it."""
        now, sending = self._find(node, rank, stamp)
        if now is None or sending is None or not sending.filled:
            return False
        sending.waiting.extend(
            r
            for r in ranges
            if r.part is Part.PAYLOAD and r.offset + r.length <= now.header.payload_bytes
        )
        self._pump(now, sending)
        return True

    def _node_of(self, rank: int) -> int:
        assert self._lines.mesh is not None
        return self._lines.mesh.node_of[rank]

    def _pump(self, now: Protection, sending: Sending) -> None:
        while sending.waiting:
            part, offset, length = sending.waiting[0]
            source = now.slot.part(part, now.header)[offset : offset + length]
            whole_block = (
                part is Part.PAYLOAD
                and offset % BLOCK_BYTES == 0
                and length == min(BLOCK_BYTES, now.header.payload_bytes - offset)
            )
            known = now.table[offset // BLOCK_BYTES] if whole_block else None
            span = Span(now.assignment.rank, now.stamp, part, offset, length)
            now.pin.take()
            if not self._lines.send_block(
                sending.node, span, source, self._on_done(now, sending), known
            ):
                now.pin.let_go()
                return  # `writable` will say when
            sending.waiting.popleft()

    def _on_done(self, now: Protection, sending: Sending) -> Callable[[str | None], None]:
        def on_links_thread(why: str | None) -> None:
            sending.sign_ns = self._clock.monotonic_ns()
            # and no more: waking the loop for each block costs more than the block's own work
            now.pin.let_go()
            if why is not None and "damaged" in why:
                self._lines.call_in_loop(lambda: self._source_is_damaged(now, why))

        return on_links_thread

    def _source_is_damaged(self, now: Protection, why: str) -> None:
        if self._now.get(now.assignment.rank) is now:
            self._journal.record(
                "copy-failed",
                f"{now.stamp} of rank {now.assignment.rank} does not arrive whole: {why}",
                rank=now.assignment.rank,
            )
            self._on_damage()

    def acked(self, node: int, rank: int, stamp: Stamp) -> None:
        now, sending = self._find(node, rank, stamp)
        if now is None or sending is None:
            return
        sending.acked = True
        if all(s.acked for s in now.holders.values()):
            self._release(rank)
            self._done(rank, stamp)

    def _done(self, rank: int, stamp: Stamp) -> None:
        self.protected[rank] = (*self.protected.get(rank, ()), stamp)[-KEPT_STAMPS:]
        self._on_protected()

    def _forget(self, rank: int, stamp: Stamp) -> None:
        self.protected[rank] = tuple(s for s in self.protected[rank] if s != stamp)

    def nacked(self, node: int, rank: int, stamp: Stamp, reason: str) -> None:
        """A holder has not got it whole, or has it no more."""
        self._journal.record(
            "copy-lost",
            f"node {node} does not hold {stamp} of rank {rank}: {reason}",
            rank=rank,
            node=node,
        )
        now, sending = self._find(node, rank, stamp)
        if now is not None and sending is not None:
            sending.acked = sending.accepted = False
            sending.sign_ns = self._clock.monotonic_ns()  # asked again by `tick`
        elif stamp in self.protected.get(rank, ()) and rank in self._assignments:
            self._forget(rank, stamp)
            if rank not in self._now:
                self._start(self._assignments[rank], stamp)

    def compare(self) -> None:
        """Offer the committed generation again: a holder whose copy is not what lies here takes it
        anew, the others just say so."""
        for rank, assignment in self._assignments.items():
            stamp = self._floor
            if (
                rank in self._ranks
                and assignment.holders
                and rank not in self._now
                and stamp in self.protected.get(rank, ())
            ):
                assert stamp is not None
                self._forget(rank, stamp)
                self._start(assignment, stamp)

    def source_of(self, rank: int, stamp: Stamp) -> RestoreSource | None:
        """Who can give that snapshot back, should it be damaged here; None when it is not
        protected."""
        assignment = self._assignments.get(rank)
        if (
            assignment is None
            or not assignment.holders
            or stamp not in self.protected.get(rank, ())
        ):
            return None
        if not assignment.stripe_group:
            return RestoreSource(rank, copies=assignment.holders)
        members = tuple(
            GroupMember(r, self._node_of(r)) for r in assignment.stripe_group if r != rank
        )
        return RestoreSource(rank, (), assignment.stripe_group, assignment.tolerates, members)

    def declined(self, node: int, rank: int, reason: str) -> None:
        if not self.hindered:
            self.hindered = f"node {node} cannot hold rank {rank}: {reason}"[:1000]
            self._on_protected()

    # -- links and time

    def link_is_open(self, node: int) -> None:
        for now in self._now.values():
            sending = now.holders.get(node)
            if sending is not None and not sending.acked:
                self._offer(now, sending)

    def writable(self, node: int) -> None:
        for now in self._now.values():
            if node in now.holders:
                self._pump(now, now.holders[node])

    def tick(self) -> None:
        """Ask again where nothing has moved: whatever got lost, a repeated offer finds out."""
        self.go_on()
        now_ns = self._clock.monotonic_ns()
        for now in [p for p in self._now.values() if not p.pin.is_shared]:
            if not self._still_proves(now):
                continue
            for node, sending in now.holders.items():
                idle = not sending.acked and now_ns - sending.sign_ns > ASK_AGAIN_NS
                if idle and self._lines.is_open(node):
                    self._offer(now, sending)

    def _still_proves(self, now: Protection) -> bool:
        """Whether the header is what it was when this began: holders refuse a damaged one, as often
        as it is sent."""
        try:
            now.slot.header()
        except DamageError as error:
            self._release(now.assignment.rank)
            self._is_damaged(now.assignment.rank, f"{error}; it is not copied")
            return False
        return True

    def _is_damaged(self, rank: int, why: str) -> None:
        if rank not in self._damaged:
            self._damaged.add(rank)
            self._journal.record("damaged", why, rank=rank)
            self._on_damage()

    # -- the pins

    def _find(self, node: int, rank: int, stamp: Stamp) -> tuple[Protection | None, Sending | None]:
        now = self._now.get(rank)
        if now is None or now.stamp != stamp:
            return None, None
        return now, now.holders.get(node)

    def _release(self, rank: int) -> None:
        now = self._now.pop(rank, None)
        if now is not None:
            now.pin.let_go()

    def _release_all(self) -> None:
        for rank in list(self._now):
            self._release(rank)

    def busy(self) -> list[int]:
        """Ranks whose target is not protected yet."""
        return sorted(self._now)


def _prove(memory: Memory, path: Path, header: SlotHeader) -> str | None:
    """What is wrong with the slot. Through a map of its own: the loop may close its one
    meanwhile."""
    try:
        slot = Slot(memory, path)
    except (DamageError, OSError) as error:
        return str(error)
    try:
        found, _ = slot.verify_bytes()
    except (DamageError, LookupError) as error:
        return str(error)
    finally:
        slot.close()
    # not the loss, which need not be a number
    is_same = (found.sequence, found.stamp) == (header.sequence, header.stamp)
    return None if is_same else f"{path}: expected {header.stamp}, found {found.stamp}"
