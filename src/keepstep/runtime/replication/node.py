"""Node: the many-nodes half of a keeper: puts owner, holder, supplier, fetching and leader together
for one round after the other.

Comes in: the mesh of a round, what other keepers say, what this node's ranks have sealed. Goes out:
words to the others, the horizon page, and to the keeper (`Host`) words of the vote and snapshots
that were fetched. Decides nothing about resuming: that is the election's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from keepstep.config import Settings
from keepstep.core.redundancy.node_safety import spell_out
from keepstep.core.redundancy.protection import Assignment, assignments
from keepstep.core.resume.commit import first_word, newer
from keepstep.core.resume.cut import Holding, common, holding_of
from keepstep.core.wire.plausible import flaw_of_peer
from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.node_safety_file import write_standing
from keepstep.edge.shm.slot import Slot, rank_dir, ranks_in, slot_paths
from keepstep.errors import ConfigError, DamageError
from keepstep.model.horizon import Horizon
from keepstep.model.mesh import LEADER, Mesh
from keepstep.model.messages.peers import (
    AllEnded,
    CheckpointBody,
    CheckpointWord,
    CopyAccepted,
    CopyAcked,
    CopyDeclined,
    CopyOffer,
    CopyUnavailable,
    FetchRanges,
    HorizonWord,
    InventoryReport,
    MeshMessage,
    NodeReport,
    RankReport,
    RanksEnded,
    SafetyWord,
    VoteBody,
    VoteWord,
)
from keepstep.model.restore_sources import HeldSnapshot, Inventory
from keepstep.model.snapshot import RankStatus, SlotState, Stamp
from keepstep.model.topology import Auto, NoRedundancy, Scheme, parse_policy
from keepstep.model.units import S_NS
from keepstep.runtime.replication.encode import Sizes
from keepstep.runtime.replication.holder import Holder
from keepstep.runtime.replication.leader import Leader
from keepstep.runtime.replication.owner import Owner
from keepstep.runtime.replication.peer_inbox import (
    FromPeer,
    LinkOver,
    LinkUp,
    LinkWritable,
    LoopCall,
    PeerEvent,
    PeerInbox,
)
from keepstep.runtime.replication.recovery import Restoring
from keepstep.runtime.replication.serve import Supplier
from keepstep.runtime.world import World

TICK_NS = S_NS // 2
STANDS_NS = 5 * S_NS  # so long a word about the nodes stands when nothing but the step has changed


class Host(Protocol):
    """What the keeper does for its mesh half."""

    def status(self, rank: int) -> RankStatus | None:
        """What its page says; the same object for as long as that is so."""
        ...

    def vote_word(self, node: int, body: VoteBody) -> None: ...

    def checkpoint_word(self, node: int, body: CheckpointBody) -> None: ...

    def inventories_changed(self) -> None: ...

    def leader_is_back(self) -> None: ...

    def all_nodes_ended(self) -> None:
        """The ranks of all nodes ended well."""

    def link_is_gone(self, node: int, why: str) -> None:
        """What was asked of that node's keeper will not be answered."""
        ...

    def peer_is_dead(self, node: int, why: str) -> None:
        """Nobody answers there any more."""
        ...

    def scrub_soon(self) -> None: ...

    def refuse(self, sender: str, why: str) -> None:
        """Something came that nobody can mean."""


class Node:
    def __init__(
        self, world: World, settings: Settings, lines: PeerInbox, job_hash: bytes, host: Host
    ) -> None:
        self._world, self._memory, self._clock, self._journal = (
            world,
            world.memory,
            world.clock,
            world.journal,
        )
        self._settings, self._lines, self._job_hash, self._host = settings, lines, job_hash, host
        job_dir = settings.job_dir
        self._holder = Holder(world, lines, job_dir, job_hash, self._own_sizes)
        self._supplier = Supplier(world.memory, lines, job_dir, self._holder)
        self._owner = Owner(world, lines, job_dir, self._something_is_protected, host.scrub_soon)
        self._told: set[int] = set()  # of those, whose loss was told
        self._page = HorizonPage(world.memory, job_dir)
        self.restoring = Restoring(world, settings, lines, job_hash, self._supplier, self._owner)
        # nodes whose keeper is gone: since when, and why we think so
        self._missing: dict[int, tuple[int, str]] = {}
        self._leader: Leader | None = None
        self._policy: Scheme | None = None
        self._assignments: dict[int, Assignment] = {}
        self._epoch = -1  # that is being trained; -1 before a go
        self._tidied = False
        self._proving = self._proven = False
        self._early_offers: list[CopyOffer] = []  # before that
        self._last_report: tuple[Any, ...] = ()
        # by rank: the facts, and what is said of them
        self._rows: dict[int, tuple[RankStatus, tuple[Stamp, ...] | None, RankReport]] = {}
        self._known_safety: dict[str, Any] | None = None  # what was heard last
        self._safety: SafetyWord | None = None  # what was told last, and when
        self._stood_ns = 0
        self._has_news = False
        self._ticked_ns = 0
        self.horizon = Horizon(-1)
        self.mesh: Mesh | None = None
        self.refusal: str | None = None  # why this round cannot be: the policy is impossible

    # -- rounds

    def begin(self, mesh: Mesh) -> None:
        """A round begins, or this keeper is a new one and hears of the present one."""
        if self.mesh is not None and mesh.version < self.mesh.version:
            return
        if mesh == self.mesh:
            return
        self._journal.record(
            "mesh",
            f"round {mesh.version}: node {mesh.node} of {len(mesh.members)}, ranks "
            f"{list(mesh.ranks_of(mesh.node))}",
            round=mesh.version,
        )
        self.restoring.begin(mesh)
        self._missing.clear()
        self._told.clear()
        self._early_offers.clear()
        self._owner.begin(mesh.ranks_of(mesh.node))
        self._supplier.end()
        self._holder.begin(mesh)
        self.mesh, self._epoch, self._tidied = mesh, -1, False
        self._policy, self._assignments, self._last_report, self._safety = None, {}, (), None
        self._leader, self.refusal = None, None
        asked = parse_policy(self._settings.redundancy)
        with_nodes = set(range(len(mesh.members))) if mesh.leads else {LEADER}
        try:
            if not isinstance(asked, Auto):
                with_nodes |= {
                    h
                    for w in assignments(asked, mesh).values()
                    for h in (*w.holders, w.node)
                    if mesh.node in (*w.holders, w.node)
                }
            if mesh.leads:
                self._leader = Leader(self._lines, mesh, asked, self._journal)
        except ConfigError as error:
            self.refusal = f"redundancy: {error}"
        self._lines.join(mesh, with_nodes - {mesh.node})
        if self._proven:
            self._tell_inventory()
        elif not self._proving:
            self._proving = True
            self._world.workers.submit(
                lambda: [*self._holder.copies.prove(), *self._holder.parities.prove()], self._proved
            )

    def _proved(self, wrong: list[str]) -> None:
        for why in wrong:
            self._journal.record("damaged", f"{why}; it counts no more")
        self._proven = True
        self._tell_inventory()
        early, self._early_offers = self._early_offers, []
        for offer in early:
            self._holder.offered(offer)

    # -- what comes in

    def hear(self) -> None:
        """The lines have something."""
        for event in self._lines.take():
            self._hear(event)
        if self._has_news:
            self._has_news = False
            self.report()

    def _something_is_protected(self) -> None:
        """Reported once for all that is heard together: a look at the pages of all ranks costs more
        than a message."""
        self._has_news = True

    def _hear(self, event: PeerEvent) -> None:
        match event:
            case FromPeer():
                self._receive(event.node, event.message)
            case LoopCall():
                event.call()
            case LinkUp():
                self._link_is_open(event.node)
            case LinkWritable():
                self._owner.writable(event.node)
                self._supplier.writable(event.node)
            case LinkOver():
                self._link_is_dead(event.node, event.why, event.is_loss)

    def _receive(self, node: int, message: MeshMessage) -> None:
        assert self.mesh is not None
        if flaw := flaw_of_peer(node, message, self.mesh):
            self._host.refuse(f"node {node}", flaw)
            return
        match message:
            case HorizonWord():
                self._follow(message)
            case NodeReport():
                if self._leader is not None:
                    self._leader.reported(node, message)
            case InventoryReport():
                held = Inventory(frozenset(message.snapshots), frozenset(message.parities))
                self.restoring.told(node, held)
                self._host.inventories_changed()
            case RanksEnded():
                if self._leader is not None:
                    self._leader.ended(node)
            case AllEnded():
                self._host.all_nodes_ended()
            case VoteWord():
                self._host.vote_word(node, message.body)
            case CheckpointWord():
                self._host.checkpoint_word(node, message.body)
            case SafetyWord():
                self._know_safety(message)
            case CopyOffer():
                self._offered(message)
            case CopyAccepted(_, rank, stamp):
                self._owner.accepted(node, rank, stamp)
            case CopyAcked(_, rank, stamp):
                self._owner.acked(node, rank, stamp)
            case CopyDeclined():
                self._owner.declined(node, message.rank, message.why)
            case FetchRanges(_, rank, stamp, ranges):
                if not self._owner.wanted(node, rank, stamp, ranges):
                    self._supplier.asked(node, rank, stamp, ranges)
            case CopyUnavailable(_, rank, stamp, why):
                if not self.restoring.failed(node, rank, stamp, why):
                    self._owner.nacked(node, rank, stamp, why)

    def _know_safety(self, word: SafetyWord) -> None:
        assert self.mesh is not None
        self._known_safety = spell_out(word, self.mesh, self._known_safety)
        write_standing(self._memory, self._settings.job_dir, self._known_safety)

    def _offered(self, offer: CopyOffer) -> None:
        if offer.stripe_group:
            sizes = Sizes(offer.payload_bytes, offer.manifest_bytes)
            self._owner.announced(offer.rank, offer.stamp, sizes)
        if self._proven:
            self._holder.offered(offer)
        else:  # a slot that is being written now would be taken for one whose writer has died
            self._early_offers.append(offer)

    def _link_is_open(self, node: int) -> None:
        self._missing.pop(node, None)
        self._told.discard(node)
        self._owner.link_is_open(node)
        self.restoring.link_is_open(node)
        if self._leader is not None:
            self._leader.joined(node)
        if node == LEADER:
            self._last_report = ()
            self._tell_inventory()
            self._host.leader_is_back()
            self.report()

    def _link_is_dead(self, node: int, why: str, is_loss: bool) -> None:
        self._holder.link_is_dead(node)
        self.restoring.link_is_dead(node, why)
        self._host.link_is_gone(node, why)
        if is_loss and self._lines.needs(node):
            # Perhaps only its keeper died, and the next one is about to come: the node is lost when
            # nobody does.
            self._missing.setdefault(node, (self._clock.monotonic_ns(), why))
            self._lines.link_again(node)

    # -- the vote's needs

    def _version(self) -> int:
        return self._lines.mesh_version

    def say_to_leader(self, body: VoteBody) -> None:
        self._lines.send(LEADER, VoteWord(self._version(), body))

    def say_to_all(self, body: VoteBody) -> None:
        assert self.mesh is not None
        for member in self.mesh.members:
            self._lines.send(member.node, VoteWord(self._version(), body))

    def say_ended(self) -> None:
        """All ranks here ended well."""
        self._lines.send(LEADER, RanksEnded(self._version()))

    def say_persist(self, node: int, body: CheckpointBody) -> None:
        self._lines.send(node, CheckpointWord(self._version(), body))

    def _tell_inventory(self) -> None:
        if not self._proven or self.mesh is None:
            return
        parities = tuple(self._holder.coded())
        snapshots = {*self._holder.snapshots(), *self._left_behind()}
        said = InventoryReport(self._version(), tuple(sorted(snapshots)), parities)
        self._lines.send(LEADER, said)

    def _left_behind(self) -> list[HeldSnapshot]:
        """Snapshots of ranks that lived here and live elsewhere now. Those that live here prove
        their own, and tell in the vote."""
        found = []
        for rank in ranks_in(self._memory, self._settings.job_dir):
            if rank in self._own_ranks():
                continue
            for path in slot_paths(self._memory, self._settings.job_dir, rank):
                try:
                    slot = Slot(self._memory, path)
                    header = slot.header()
                    slot.close()
                except (DamageError, OSError):
                    continue
                if header.state is SlotState.SEALED and header.job_hash == self._job_hash:
                    found.append(HeldSnapshot(rank, header.stamp))
        return found

    def holdings(self) -> list[Holding]:
        """Of every rank of every node, as last reported; empty unless this node leads."""
        return self._leader.holdings() if self._leader is not None else []

    def forget_newer(self, stamp: Stamp | None) -> None:
        self._holder.forget_newer(stamp)

    def went(self, epoch: int, resumed: Stamp | None) -> None:
        """Everybody trains on, in this epoch."""
        held = common([holding_of(status).sealed for status in self._own_pages().values()])
        self._epoch, self.horizon = epoch, first_word(epoch, resumed, self._page.last(), held)
        self._page.write(self.horizon)
        self._supplier.end()
        self._lines.restored()
        self._holder.heard(self.horizon)
        if self._leader is not None:
            self._leader.went(epoch)
        self._last_report = ()
        self.report()

    def trains(self) -> None:
        """Ranks were training when this keeper came: their pages say in which epoch."""
        if self._epoch < 0:
            self._epoch = max((s.epoch for s in self._own_pages().values()), default=-1)
            # what the keeper before heard, and the ranks have acted upon
            self.horizon = self._page.read(self._epoch)
            self._holder.heard(self.horizon)
            self.report()

    def _own_ranks(self) -> range:
        return self.mesh.ranks_of(self.mesh.node) if self.mesh is not None else range(0)

    def _own_pages(self) -> dict[int, RankStatus]:
        """As far as they can be read."""
        return {
            rank: status
            for rank in self._own_ranks()
            if (status := self._host.status(rank)) is not None
        }

    # -- every step

    def rank_changed(self) -> None:
        """A rank here has sealed a snapshot, given one up, or skipped one."""
        self._owner.go_on()
        self.report()

    def report(self) -> None:
        """Tell the leader what this node's ranks hold and what is protected of it, if that
        changed."""
        if self._epoch < 0 or self.mesh is None:
            return
        pages = self._own_pages()
        if any(status.epoch != self._epoch for status in pages.values()):
            return
        ranks = tuple([self._told_of(rank, status) for rank, status in pages.items()])
        said = (self._epoch, ranks, self._owner.hindered)
        if said == self._last_report:
            return
        self._last_report = said
        nbytes = sum(s.payload_bytes for s in pages.values())
        free = self._memory.free_bytes(self._settings.arena_dir) + nbytes * max(
            (len(s.slots) for s in pages.values()), default=0
        )
        report = NodeReport(
            mesh_version=self.mesh.version,
            epoch=self._epoch,
            committed=self.horizon.committed,
            target=self.horizon.target,
            inherited=self.horizon.inherited,
            snapshot_bytes=nbytes,
            free_bytes=free,
            hindered=self._owner.hindered,
            ranks=ranks,
        )
        self._lines.send(LEADER, report)

    def _told_of(self, rank: int, status: RankStatus) -> RankReport:
        """What a report says of a rank. Made anew only from other facts: each of them is a value,
        and another object when it changes."""
        protected = (
            None if isinstance(self._policy, NoRedundancy) else self._owner.protected.get(rank, ())
        )
        known = self._rows.get(rank)
        if known is None or known[0] is not status or known[1] is not protected:
            own = holding_of(status)
            proven = own.sealed if protected is None else protected
            row = RankReport(
                rank=rank,
                sealed=tuple(sorted(own.sealed)),
                pending=own.pending,
                decided_step=own.decided_step,
                protected=tuple(sorted(proven)),
            )
            known = self._rows[rank] = status, protected, row
        return known[2]

    def _follow(self, word: HorizonWord) -> None:
        if word.epoch != self._epoch or self.mesh is None:
            return
        self._take_policy(word.policy, word.why)
        horizon = Horizon(
            word.epoch,
            word.committed,
            word.target,
            frozenset(word.alive),
            word.decided_step,
            word.inherited,
        )
        # another leader that has not heard all reports knows less
        self.horizon = horizon = newer(self.horizon, horizon)
        self._page.write(horizon)
        self._holder.heard(horizon)
        if horizon.target is not None:
            self._holder.try_rows(horizon.target)
        self._owner.protect(horizon.target, horizon.floor)
        if horizon.committed is not None and self._policy is not None and not self._tidied:
            self._tidy()

    def _take_policy(self, policy: str, why: str) -> None:
        if self.mesh is None:
            return
        try:
            scheme = parse_policy(policy)
            if isinstance(scheme, Auto) or scheme == self._policy:
                return
            found = assignments(scheme, self.mesh)
        except ConfigError as error:
            self._host.refuse(f"node {LEADER}", str(error))
            return
        self._policy, self._assignments = scheme, found
        near = {
            h
            for w in self._assignments.values()
            for h in (*w.holders, w.node)
            if self.mesh.node in (*w.holders, w.node)
        }
        self._lines.link_with(near - {self.mesh.node})
        self._owner.follow(self._assignments)
        self._journal.record("redundancy", f"{policy}: {why}", policy=policy)

    def _tidy(self) -> None:
        """A generation is committed under the present placement: what only an older one needed may
        go."""
        assert self.mesh is not None
        self._tidied = True
        here = self.mesh.node
        for rank in ranks_in(self._memory, self._settings.job_dir):
            if rank not in self._own_ranks():
                self._memory.remove(rank_dir(self._settings.job_dir, rank))
        self._holder.keep_only(
            {r for r, w in self._assignments.items() if here in w.holders and not w.stripe_group},
            {r for r, w in self._assignments.items() if w.node == here and w.stripe_group},
        )

    def _tell_safety(self) -> None:
        if self._leader is None or self.mesh is None:
            return
        nodes = (m.node for m in self.mesh.members)
        safety = self._leader.safety(
            {n for n in nodes if n == self.mesh.node or self._lines.is_open(n)}
        )
        if safety is None or safety == self._safety:
            return
        only_another_step = self._safety is not None and (
            replace(safety, step=self._safety.step) == self._safety
        )
        if only_another_step and self._clock.monotonic_ns() - self._stood_ns < STANDS_NS:
            return  # which everybody's horizon tells too
        self._safety, self._stood_ns = safety, self._clock.monotonic_ns()
        for member in self.mesh.members:
            self._lines.send(member.node, safety)

    # -- what scrubbing found

    def compare(self) -> None:
        """Everything here has proven: have the holders compare what they hold with it."""
        self._owner.compare()

    def damaged_at_rest(self, path: Path, why: str) -> None:
        self._holder.damaged_at_rest(path, why)

    def tick(self) -> None:
        now_ns = self._clock.monotonic_ns()
        if now_ns - self._ticked_ns > TICK_NS:
            self._ticked_ns = now_ns
            self._owner.tick()
            self.report()
            self._tell_safety()
        for node, (since_ns, why) in list(self._missing.items()):
            if now_ns - since_ns > self._lines.return_ns and node not in self._told:
                self._told.add(node)
                self._host.peer_is_dead(node, why)

    def _own_sizes(self, rank: int, stamp: Stamp) -> Sizes | None:
        for path in slot_paths(self._memory, self._settings.job_dir, rank):
            try:
                slot = Slot(self._memory, path)
                header = slot.header()
                slot.close()
            except (DamageError, OSError):
                continue
            if (header.state, header.stamp) == (SlotState.SEALED, stamp):
                return Sizes(header.payload_bytes, header.manifest_bytes)
        return None

    def close(self) -> None:
        self._lines.close()
        self._page.close()
