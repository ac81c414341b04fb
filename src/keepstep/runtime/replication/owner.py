"""Owner: protects the snapshots of this node's own ranks on other nodes.

Comes in: the generation that everybody is to protect now, and the holders' answers. Goes out: which
snapshots are proven by all their holders. A slot is pinned while it is sent (`outgoing.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from keepstep.core.redundancy.protection import Assignment
from keepstep.edge.shm.slot import Slot
from keepstep.errors import DamageError
from keepstep.model.restore_sources import GroupMember, RestoreSource
from keepstep.model.snapshot import SlotHeader, Stamp
from keepstep.model.units import S_NS
from keepstep.model.wire import BlockRange
from keepstep.ports import Memory
from keepstep.runtime.keeper_world import KeeperWorld
from keepstep.runtime.replication.encode import SnapshotSizes
from keepstep.runtime.replication.mesh_links import MeshLinks
from keepstep.runtime.replication.outgoing import Delivery, OutgoingSnapshot
from keepstep.runtime.slot_locks import OwnSlots, Pin

ASK_AGAIN_NS = 2 * S_NS  # without any answer
KEPT_STAMPS = 4  # a rank's protected stamps that are remembered: two generations are held


class _Found(NamedTuple):
    """A snapshot on its way, and the part of it that goes to one node."""

    outgoing: OutgoingSnapshot
    delivery: Delivery


class Owner:
    """Of one mesh. `on_protected`: another snapshot is proven by its holders, or the policy cannot
    be followed; `on_damage`: what lies here does not prove."""

    def __init__(
        self,
        world: KeeperWorld,
        links: MeshLinks,
        slots: OwnSlots,
        on_protected: Callable[[], None],
        on_damage: Callable[[], None],
    ) -> None:
        self._world, self._clock, self._journal = world, world.clock, world.journal
        self._links, self._slots = links, slots
        self._on_protected, self._on_damage = on_protected, on_damage
        self._assignments: Mapping[int, Assignment] = {}
        self._ranks = links.mesh.ranks_of(links.node)
        self._outgoing: dict[int, OutgoingSnapshot] = {}
        self._given_up: list[OutgoingSnapshot] = []  # of which blocks are on their way
        self._proving: set[OutgoingSnapshot] = set()
        # of members of our stripe groups, as they were announced
        self._sizes: dict[tuple[int, Stamp], SnapshotSizes] = {}
        self._target: Stamp | None = None
        self._floor: Stamp | None = None
        # ranks in stripe groups of which some keeper knows no sizes, since it has come back
        self._untold: set[int] = set()
        self._damaged: set[int] = set()  # ranks whose damaged target has been told
        self.protected: dict[int, tuple[Stamp, ...]] = {}
        self.hindered = ""  # why the policy cannot be followed

    def end(self) -> None:
        """Another mesh begins."""
        self._release_all()
        self._slots.drop_gone()

    # -- targets

    def follow(self, assignments: Mapping[int, Assignment]) -> None:
        """The policy that holds."""
        if dict(assignments) != dict(self._assignments):
            self._release_all()
            self._assignments, self.protected = dict(assignments), {}
            self._untold.clear()
            self.hindered = ""

    def protect(self, target: Stamp | None, floor: Stamp | None) -> None:
        """Bring `target` to all holders. What is older than `floor` they may overwrite."""
        if target != self._target:
            self._damaged.clear()
            self._slots.drop_gone()
        self._target, self._floor = target, floor
        for rank in self._ranks:
            outgoing = self._outgoing.get(rank)
            if outgoing is not None and outgoing.stamp != target:
                self._release(rank)
        self.go_on()

    def forget_newer(self, stamp: Stamp | None, before_epoch: int | None = None) -> None:
        """All go back to `stamp`, and each node voids what it holds of what is abandoned
        (`Stamp.is_abandoned`): what was proven of that counts no more."""
        for rank, outgoing in [*self._outgoing.items()]:
            if outgoing.stamp.is_abandoned(stamp, before_epoch):
                self._release(rank)
        if self._target is not None and self._target.is_abandoned(stamp, before_epoch):
            self._target = None
        self.protected = {
            rank: tuple(s for s in stamps if not s.is_abandoned(stamp, before_epoch))
            for rank, stamps in self.protected.items()
        }

    def go_on(self) -> None:
        """Begin with what could not be pinned before, because its rank was looking at it this
        moment, or is still sent from before."""
        target = self._target
        if target is None:
            return
        for rank in self._ranks:
            is_needed = rank in self._untold or not self._is_protected(rank, target)
            if rank not in self._assignments or not is_needed:
                continue
            if not self._is_begun(rank, target) and not self._is_still_sent(rank, target):
                self._start(self._assignments[rank], target)
            if self._is_begun(rank, target):
                self._untold.discard(rank)

    def _is_begun(self, rank: int, stamp: Stamp) -> bool:
        outgoing = self._outgoing.get(rank)
        return outgoing is not None and outgoing.stamp == stamp

    def _is_still_sent(self, rank: int, stamp: Stamp) -> bool:
        """Whether blocks of it are on their way from before it was given up. A job that goes back
        to one stamp again and again, sooner than that has crossed, would send it as often; and its
        slot would be pinned until the last of it is there."""
        self._given_up = [outgoing for outgoing in self._given_up if outgoing.is_moving]
        return any((o.assignment.rank, o.stamp) == (rank, stamp) for o in self._given_up)

    def _start(self, assignment: Assignment, stamp: Stamp) -> None:
        rank = assignment.rank
        if not assignment.holders:
            self._done(rank, stamp)
            return
        slot = self._slots.pin(stamp, rank)
        if slot is None:
            # damaged or given up, as the leader will hear, or in its rank's hands this moment
            return
        try:
            header = slot.header()
            table = tuple(slot.table(header))
        except DamageError as error:
            self._slots.unpin(slot)
            self._is_damaged(rank, f"{error}; it is not copied")
            return
        outgoing = OutgoingSnapshot(
            self._links,
            self._clock,
            assignment,
            stamp,
            Pin(slot, self._slots.unpin),
            header,
            table,
            self._does_not_arrive,
        )
        for other in assignment.stripe_group:
            if other != rank and (other, stamp) in self._sizes:
                outgoing.knows_size(other, self._sizes[(other, stamp)])
        # What is only compared gives way to the target: its group may have gone on to that, and
        # would never ask for the older one.
        self._release(rank)
        self._outgoing[rank] = outgoing
        for delivery in outgoing.deliveries.values():
            outgoing.offer(delivery, self._floor)
        self._prove(outgoing)

    def _prove(self, outgoing: OutgoingSnapshot) -> None:
        """If that is needed, and not done or begun."""
        if outgoing in self._proving or not outgoing.is_proof_needed:
            return
        self._proving.add(outgoing)
        path, header = outgoing.path, outgoing.header
        self._world.workers.submit(
            lambda: _flaw_of(self._world.memory, path, header),
            lambda flaw: self._verified(outgoing, flaw),
        )

    def _verified(self, outgoing: OutgoingSnapshot, flaw: str | None) -> None:
        self._proving.discard(outgoing)
        rank = outgoing.assignment.rank
        if self._outgoing.get(rank) is not outgoing:
            return
        if flaw is not None:
            self._release(rank)
            self._is_damaged(rank, f"{flaw}; it is not encoded")
            return
        outgoing.proven()

    # -- what others say

    def announced(self, rank: int, stamp: Stamp, sizes: SnapshotSizes) -> None:
        """A member of one of our stripe groups has offered: now its size is known."""
        self._sizes[(rank, stamp)] = sizes
        self._sizes = {
            key: known
            for key, known in self._sizes.items()
            if self._floor is None or key[1] >= self._floor
        }
        for outgoing in self._outgoing.values():
            if rank in outgoing.assignment.stripe_group and outgoing.stamp == stamp:
                outgoing.announced(rank, sizes)
                self._prove(outgoing)

    def accepted(self, node: int, rank: int, stamp: Stamp) -> None:
        """The holder is ready: it has nothing of it, or what it had is not what lies here."""
        found = self._find(node, rank, stamp)
        if found is not None:
            found.outgoing.accepted(found.delivery)
        self._is_lacking(rank, stamp)

    def wanted(self, node: int, rank: int, stamp: Stamp, ranges: tuple[BlockRange, ...]) -> bool:
        """A holder asks for what it lacks; False when nothing of that is on its way to it."""
        found = self._find(node, rank, stamp)
        return found is not None and found.outgoing.wanted(found.delivery, ranges)

    def _does_not_arrive(self, outgoing: OutgoingSnapshot, why: str) -> None:
        rank = outgoing.assignment.rank
        if self._outgoing.get(rank) is outgoing:
            told = f"{outgoing.stamp} of rank {rank} did not arrive whole: {why}"
            self._journal.record("copy-failed", told, rank=rank)
            self._on_damage()

    def acked(self, node: int, rank: int, stamp: Stamp) -> None:
        """A holder has its part, and has proven it."""
        found = self._find(node, rank, stamp)
        if found is None:
            return
        found.delivery.acked = True
        if found.outgoing.is_acked:
            self._release(rank)
            self._done(rank, stamp)

    def _done(self, rank: int, stamp: Stamp) -> None:
        if not self._is_protected(rank, stamp):
            self.protected[rank] = (*self.protected.get(rank, ()), stamp)[-KEPT_STAMPS:]
            self._on_protected()

    def _is_protected(self, rank: int, stamp: Stamp) -> bool:
        return stamp in self.protected.get(rank, ())

    def _is_lacking(self, rank: int, stamp: Stamp) -> None:
        """A holder of it has not got it whole."""
        if self._is_protected(rank, stamp):
            self.protected[rank] = tuple(s for s in self.protected[rank] if s != stamp)
            if rank in self._assignments and rank not in self._outgoing:
                self._start(self._assignments[rank], stamp)

    def unavailable(self, node: int, rank: int, stamp: Stamp, why: str) -> None:
        """A holder has not got it whole, or has it no more."""
        told = f"node {node} does not hold {stamp} of rank {rank}: {why}"
        self._journal.record("copy-lost", told, rank=rank, node=node)
        found = self._find(node, rank, stamp)
        if found is not None:
            found.outgoing.refused(found.delivery)
        self._is_lacking(rank, stamp)

    def declined(self, node: int, rank: int, why: str) -> None:
        """A holder has no memory for it."""
        assignment = self._assignments.get(rank)
        if assignment is not None and node in assignment.holders and not self.hindered:
            self.hindered = f"node {node} cannot hold rank {rank}: {why}"
            self._on_protected()

    def compare(self) -> None:
        """Offer the committed generation again: a holder whose copy is not what lies here takes it
        anew, the others just say so. Until one does, what they have proven counts: should it be
        damaged here meanwhile, they can give it back."""
        floor = self._floor
        if floor is None:
            return
        for rank in self._ranks:
            assignment = self._assignments.get(rank)
            if assignment is None or not assignment.holders or rank in self._outgoing:
                continue
            if self._is_protected(rank, floor):
                self._start(assignment, floor)

    def source_of(self, rank: int, stamp: Stamp) -> RestoreSource | None:
        """Who can give that snapshot back, should it be damaged here; None when it is not
        protected."""
        assignment = self._assignments.get(rank)
        if assignment is None or not assignment.holders:
            return None
        if not self._is_protected(rank, stamp):
            return None
        group = assignment.stripe_group
        if not group:
            return RestoreSource(rank, copies=assignment.holders)
        node_of = self._links.mesh.node_of
        members = tuple(GroupMember(other, node_of[other]) for other in group if other != rank)
        return RestoreSource(rank, (), group, assignment.tolerates, members)

    # -- links and time

    def link_is_open(self, node: int) -> None:
        """Perhaps to another life of that node's keeper: offer again what it has not proven. Within
        a stripe group all, as soon as that can be: it has forgotten the sizes, without which its
        own rank sends nothing."""
        for outgoing in self._outgoing.values():
            delivery = outgoing.deliveries.get(node)
            knows = delivery is not None and delivery.acked and not outgoing.assignment.stripe_group
            if delivery is not None and not knows:
                outgoing.offer(delivery, self._floor)
        for rank in self._ranks:
            assignment = self._assignments.get(rank)
            if assignment is not None and assignment.stripe_group and node in assignment.holders:
                self._untold.add(rank)
        self.go_on()

    def writable(self, node: int) -> None:
        """The link to that node takes blocks again."""
        for outgoing in self._outgoing.values():
            if node in outgoing.deliveries:
                outgoing.pump(outgoing.deliveries[node])

    def tick(self) -> None:
        """Ask again where nothing has moved: whatever got lost, a repeated offer finds out."""
        self.go_on()
        now_ns = self._clock.monotonic_ns()
        for outgoing in [o for o in self._outgoing.values() if not o.is_moving]:
            if not self._still_proves(outgoing):
                continue
            for node, delivery in outgoing.deliveries.items():
                is_idle = not delivery.acked and now_ns - delivery.sign_ns > ASK_AGAIN_NS
                if is_idle and self._links.is_open(node):
                    outgoing.offer(delivery, self._floor)

    def _still_proves(self, outgoing: OutgoingSnapshot) -> bool:
        try:
            outgoing.verify_header()
        except DamageError as error:
            rank = outgoing.assignment.rank
            self._release(rank)
            self._is_damaged(rank, f"{error}; it is not copied")
            return False
        return True

    def _is_damaged(self, rank: int, why: str) -> None:
        if rank not in self._damaged:
            self._damaged.add(rank)
            self._journal.record("damaged", why, rank=rank)
            self._on_damage()

    # -- what is on its way

    def _find(self, node: int, rank: int, stamp: Stamp) -> _Found | None:
        outgoing = self._outgoing.get(rank)
        if outgoing is None or outgoing.stamp != stamp or node not in outgoing.deliveries:
            return None
        return _Found(outgoing, outgoing.deliveries[node])

    def _release(self, rank: int) -> None:
        outgoing = self._outgoing.pop(rank, None)
        if outgoing is not None:
            outgoing.end()
            if outgoing.is_moving:
                self._given_up.append(outgoing)

    def _release_all(self) -> None:
        for rank in list(self._outgoing):
            self._release(rank)


def _flaw_of(memory: Memory, path: Path, header: SlotHeader) -> str | None:
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
