"""Mesh state: everything of a keeper's that belongs to one mesh, made when it begins and dropped
when the next one does.

Comes in: what other keepers say, what this node's ranks have sealed. Goes out: reports and
horizons, the horizon page, and to the keeper (`ReplicationHost`) words of the vote and snapshots
that were fetched. Decides nothing about resuming: that is the vote's.

Invariant: what is said here carries this mesh's version, and nothing of another mesh is heard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from keepstep.config import Settings
from keepstep.core.redundancy.protection import Assignment, assignments, partners
from keepstep.core.resume.commit import first_horizon, newer
from keepstep.core.resume.cut import Holding, common, holding_of
from keepstep.core.wire.plausible import flaw_of_peer
from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.slot import rank_dir, ranks_in
from keepstep.errors import ConfigError
from keepstep.model.horizon import Horizon
from keepstep.model.mesh import LEADER, Mesh
from keepstep.model.messages.peers import (
    AddUp,
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
    LinkReport,
    MeshMessage,
    NodeReport,
    NoSum,
    RanksEnded,
    SafetyWord,
    SeveralMessages,
    SharesWord,
    SnapshotUnproven,
    VoteBody,
    VoteToAll,
    VoteToLeader,
    VoteWord,
)
from keepstep.model.restore_sources import Inventory, RestoreSource, SharedSources
from keepstep.model.shares import Share
from keepstep.model.snapshot import RankStatus, Stamp
from keepstep.model.topology import Auto, NoRedundancy, Policy, Scheme, parse_policy
from keepstep.model.units import S_NS
from keepstep.runtime.keeper_world import KeeperWorld
from keepstep.runtime.replication.encode import sizes_of_offer
from keepstep.runtime.replication.held import HeldSnapshots
from keepstep.runtime.replication.holder import Holder
from keepstep.runtime.replication.inventory import inventory_of, own_sizes
from keepstep.runtime.replication.known_safety import KnownSafety
from keepstep.runtime.replication.leader import Leader
from keepstep.runtime.replication.link_watch import NodeLinks
from keepstep.runtime.replication.mesh_links import MeshLinks
from keepstep.runtime.replication.own_pages import OwnPages, reported
from keepstep.runtime.replication.owner import Owner
from keepstep.runtime.replication.recovery import SnapshotRecovery, Then
from keepstep.runtime.replication.repair_sums import RepairSums
from keepstep.runtime.replication.serve import SnapshotServer
from keepstep.runtime.replication.share_parts import ShareParts

# so long nothing new is said about which nodes may be lost when only the step has changed
SAFETY_NS = 5 * S_NS
# Which nodes may be lost is worked out anew no sooner than so many times as long as that took: with
# thousands of nodes the leader would do nothing else.
SAFETY_PAUSES = 50


class ReplicationHost(Protocol):
    """What the keeper does for its many-nodes half."""

    def status(self, rank: int) -> RankStatus | None:
        """What its page says; the same object for as long as that is so."""

    def receive_vote(self, node: int, body: VoteBody) -> None:
        """A word of the vote about where to resume."""

    def receive_checkpoint(self, node: int, body: CheckpointBody) -> None:
        """A word about writing a checkpoint."""

    def inventories_changed(self) -> None:
        """A node has told what it holds."""

    def leader_is_back(self) -> None:
        """The link to the leading keeper is open, perhaps to another life of it."""

    def all_nodes_ended(self) -> None:
        """The ranks of all nodes ended well."""

    def link_is_gone(self, node: int, why: str) -> None:
        """What was asked of that node's keeper will not be answered."""

    def peer_is_dead(self, mesh: Mesh, node: int, why: str) -> None:
        """Nobody answers there any more."""

    def scrub_soon(self) -> None:
        """Something that lies here does not prove."""

    def refuse(self, sender: str, why: str) -> None:
        """An implausible message came."""


class _Missing:
    """A node whose keeper is gone: since when, and why we think so."""

    def __init__(self, since_ns: int, why: str) -> None:
        self.since_ns, self.why = since_ns, why
        self.is_reported = False


class MeshState:
    """One keeper's, in one mesh. `open` before anything else."""

    def __init__(
        self,
        world: KeeperWorld,
        settings: Settings,
        links: MeshLinks,
        held: HeldSnapshots,
        page: HorizonPage,
        safety: KnownSafety,
        job_hash: bytes,
        host: ReplicationHost,
    ) -> None:
        self._memory, self._clock, self._journal = world.memory, world.clock, world.journal
        self._job_dir, self._arena_dir = settings.job_dir, settings.arena_dir
        self._links, self.mesh = links, links.mesh
        self._held, self._page, self._safety = held, page, safety
        self._job_hash, self._host = job_hash, host
        job_dir = settings.job_dir
        self._owner = Owner(world, links, held.own, self._something_is_protected, host.scrub_soon)
        sizes = partial(own_sizes, world.memory, job_dir)
        self._holder = Holder(world, links, held, job_hash, sizes)
        self._pages = OwnPages(self.own_ranks, host.status)
        self._server = SnapshotServer(links, held, host.scrub_soon)
        self._sums = RepairSums(world, links, self._server)
        self._has_one_slot, self._shares = settings.slots == 1, settings.share_replicas == "job"
        self.recovery = SnapshotRecovery(
            *(world, links, job_dir, job_hash),
            *(self._server, self._sums, self._owner, self._has_one_slot),
        )
        where = job_dir, self.mesh, self.recovery, held.has_copy, page
        self.parts = ShareParts(world, *where, self._shares and not self._has_one_slot)
        self._missing: dict[int, _Missing] = {}
        self._early_offers: list[CopyOffer] = []  # before what is held here has been proven
        self._policy: Scheme | None = None  # the one in force; None: not decided yet
        self._assignments: Mapping[int, Assignment] = {}
        self._epoch = -1  # that is being trained; -1 before anybody trains
        self.horizon = Horizon(-1)
        self._is_tidied = False
        self._has_news = False
        self._last_report: tuple[Any, ...] = ()
        self._last_safety: SafetyWord | None = None  # that was said
        self._last_safety_ns = 0
        self._next_safety_ns = 0  # no sooner is it worked out
        self._asked = parse_policy(settings.redundancy)
        self._leader: Leader | None = None
        self._node_links = NodeLinks(links, self._journal, int(settings.canary_every_s * S_NS))
        self.refusal = ""  # why nobody may train in this mesh: the policy is impossible
        self._near = self._nodes_to_begin_with(self._asked)

    def _nodes_to_begin_with(self, asked: Policy) -> set[int]:
        """Whom this node is linked with from the beginning, and its leader if it leads."""
        mesh = self.mesh
        near = set(range(len(mesh.members))) if mesh.leads else {LEADER}
        try:
            if not isinstance(asked, Auto):
                near |= partners(assignments(asked, mesh), mesh.node)
            if mesh.leads:
                self._leader = Leader(
                    *(self._links, asked, self._clock, self._journal, self._follow),
                    *(self._has_one_slot, self._shares),
                )
        except ConfigError as error:
            self.refusal = f"redundancy: {error}"
        return near - {mesh.node}

    def open(self) -> None:
        """Join the mesh, and say what is held here if that is proven already."""
        self._links.open(self._near)
        self.tell_inventory()

    def end(self) -> None:
        """The next mesh begins."""
        self.parts.end()
        self.recovery.end()
        self._owner.end()
        self._sums.release()
        self._server.release()
        self._holder.end()

    def held_is_proven(self) -> None:
        """What is held here for others has been verified."""
        self.tell_inventory()
        early, self._early_offers = self._early_offers, []
        for offer in early:
            self._holder.offered(offer)

    # -- what other keepers say

    def receive(self, node: int, message: MeshMessage) -> None:
        """A message of this mesh."""
        if flaw := flaw_of_peer(node, message, self.mesh):
            self._host.refuse(f"node {node}", flaw)
            return
        match message:
            case SeveralMessages():
                for one in message.messages:
                    self.receive(node, one)
            case CopyOffer():
                self._offered(message)
            case CopyAccepted(_, rank, stamp):
                self._owner.accepted(node, rank, stamp)
            case CopyAcked(_, rank, stamp):
                self._owner.acked(node, rank, stamp)
            case FetchRanges(_, rank, stamp, ranges, restores):
                if restores or not self._owner.wanted(node, rank, stamp, ranges):
                    self._server.asked(node, rank, stamp, ranges)
            case AddUp():
                self._sums.asked(node, message)
            case NoSum(_, number, why):
                self._sums.unavailable(node, number, why)
            case CopyUnavailable(_, rank, stamp, why):
                if not self.recovery.unavailable(node, rank, stamp, why):
                    self._owner.unavailable(node, rank, stamp, why)
            case SnapshotUnproven():
                self._host.scrub_soon()
            case CopyDeclined():
                self._owner.declined(node, message.rank, message.why)
            case HorizonWord():
                self._follow(message)
            case SharesWord(_, epoch, classes):
                self._page.write_classes(epoch, classes, self.own_ranks)
            case NodeReport():
                if self._leader is not None:
                    self._leader.receive_report(node, message)
            case LinkReport():
                self._node_links.receive(node, message, self._clock.monotonic_ns())
            case InventoryReport():
                snapshots, parities = frozenset(message.snapshots), frozenset(message.parities)
                held = Inventory(snapshots, parities, frozenset(message.shares))
                self.recovery.receive_inventory(node, held)
                self._host.inventories_changed()
            case RanksEnded():
                if self._leader is not None:
                    self._leader.ended(node)
            case AllEnded():
                self._host.all_nodes_ended()
            case VoteWord():
                self._host.receive_vote(node, message.body)
            case CheckpointWord():
                self._host.receive_checkpoint(node, message.body)
            case SafetyWord():
                self._safety.receive(message, self.mesh)

    def gathering(self) -> AbstractContextManager[None]:
        """What is said of snapshots until the end of it goes out together."""
        return self._links.gathering()

    def report_news(self) -> None:
        """What has changed here is reported once, behind all that has changed it; where this node
        leads, what others have reported is decided about. Only pages that are said to have changed
        are looked at: `tick` finds what nobody said."""
        if self._leader is not None:
            with self.gathering():  # what this node does at its own word comes behind that
                self._leader.decide()
        if self._has_news:
            self._report(self._pages.known())

    def _something_is_protected(self) -> None:
        self._has_news = True

    def _offered(self, offer: CopyOffer) -> None:
        if self.parts.is_bringing:
            return  # its blocks and theirs would be taken for each other; it is offered again
        if offer.stripe_group:
            sizes = sizes_of_offer(offer, self._memory.block_bytes)
            self._owner.announced(offer.rank, offer.stamp, sizes)
        if self._held.is_proven:
            self._holder.offered(offer)
        else:  # a slot that is being written now would be taken for one whose writer has died
            self._early_offers.append(offer)

    # -- links

    def link_is_open(self, node: int) -> None:
        """For the first time, or to another life of that node's keeper."""
        self._missing.pop(node, None)
        self._owner.link_is_open(node)
        self.recovery.link_is_open(node)
        if self._leader is not None:
            self._leader.link_is_open(node)
        if node == LEADER:
            self._last_report = ()
            self.tell_inventory()
            self._host.leader_is_back()
            self.report()

    def writable(self, node: int) -> None:
        """The link to that node takes blocks again."""
        self._owner.writable(node)
        self._server.writable(node)
        self._sums.writable(node)

    def link_is_dead(self, node: int, why: str, is_loss: bool) -> None:
        """It is over. No loss: that node's keeper said goodbye."""
        self._holder.link_is_dead(node)
        self._server.link_is_dead(node)
        self._sums.link_is_dead(node, why)
        self.recovery.link_is_dead(node, why)
        self._host.link_is_gone(node, why)
        if is_loss and self._links.needs(node):
            # Perhaps only its keeper died, and the next one is about to come: the node is lost when
            # nobody does.
            self._missing.setdefault(node, _Missing(self._clock.monotonic_ns(), why))
            self._links.link_again(node)

    # -- the vote and checkpoints

    @property
    def leads(self) -> bool:
        """Whether this node's keeper decides."""
        return self.mesh.leads

    def to_leader(self, body: VoteToLeader) -> None:
        """A word of the vote."""
        self._links.to_leader(VoteWord(self.mesh.version, body))

    def to_all(self, body: VoteToAll) -> None:
        """A word of the vote, to this node too."""
        self._links.to_all(VoteWord(self.mesh.version, body))

    def send_checkpoint(self, node: int, body: CheckpointBody) -> None:
        """A word about writing a checkpoint."""
        self._links.send(node, CheckpointWord(self.mesh.version, body))

    def ranks_ended(self) -> None:
        """All ranks here ended well."""
        self._links.to_leader(RanksEnded(self.mesh.version))

    def silent_nodes(self) -> frozenset[int]:
        """Nodes that have not told what they hold."""
        return self.recovery.silent_nodes()

    def restorable(self, proven: Mapping[int, frozenset[Stamp]]) -> Mapping[int, frozenset[Stamp]]:
        """The stamps that each rank can be given. `proven`: what ranks that have joined hold."""
        return self.recovery.restorable(proven)

    def sources(
        self, wanted: list[int], stamp: Stamp, proven: Mapping[int, frozenset[Stamp]]
    ) -> Mapping[int, RestoreSource]:
        """Where these ranks fetch `stamp` from."""
        return self.recovery.sources(wanted, stamp, proven)

    def shares(self) -> Mapping[tuple[int, Stamp], Share]:
        """What snapshots that nodes hold for others tell of shares."""
        return self.recovery.shares()

    def are_on_one(self, ranks: Sequence[int]) -> bool:
        """Whether all of them live on one node."""
        return self.parts.are_on_one(ranks)

    def fetch_parts(self, shared: Sequence[SharedSources], stamp: Stamp, then: Then) -> None:
        """Bring what ranks of other nodes keep for those here."""
        self.parts.bring(shared, stamp, then)

    def link_with_sources(self, sources: Mapping[int, RestoreSource]) -> None:
        """All that fetch or give make their links."""
        self.recovery.link_with_sources(sources)

    def fetch(self, source: RestoreSource, stamp: Stamp, then: Then) -> None:
        """Bring a rank's snapshot here."""
        self.recovery.fetch(source, stamp, then)

    def forget_newer(self, stamp: Stamp | None, before_epoch: int | None = None) -> None:
        """All ranks go back to `stamp` (None: to something that is not in memory)."""
        self._held.forget_newer(stamp, before_epoch)
        self._owner.forget_newer(stamp, before_epoch)

    def tell_inventory(self) -> None:
        """See `ResumeNodes`. Nothing, while what is held here is not proven."""
        if not self._held.is_proven:
            return
        where = self._memory, self._job_dir, self._job_hash
        self._links.to_leader(inventory_of(*where, self._held, self.mesh))

    # -- training

    def resumed(self, epoch: int, stamp: Stamp | None) -> None:
        """Everybody trains on, in this epoch; `stamp`: from where, None when that was not
        memory."""
        held = common([holding_of(status).sealed for status in self._pages.all().values()])
        self._epoch = epoch
        self.horizon = first_horizon(epoch, stamp, self._page.last(), held)
        self._page.write(self.horizon)
        self._sums.release()
        self._server.release()
        self.parts.resumed()
        self._links.restored()
        self._holder.follow(self.horizon)
        if self._leader is not None:
            self._leader.resumed(epoch)
        self._last_report = ()
        self.report()

    def trains(self) -> None:
        """Ranks were training when this keeper came: their pages say in which epoch."""
        if self._epoch < 0:
            statuses = self._pages.all().values()
            self._epoch = max((s.epoch for s in statuses), default=-1)
            # what the keeper before heard, and the ranks have acted upon
            last = self._page.last()
            if last.epoch != self._epoch:  # it died before it wrote a word of this epoch
                held = common([holding_of(status).sealed for status in statuses])
                last = first_horizon(self._epoch, last.floor, last, held)
                self._page.write(last)
            self.horizon = last
            self._holder.follow(self.horizon)
            self.report()

    @property
    def own_ranks(self) -> range:
        """Those that live here."""
        return self.mesh.ranks_of(self.mesh.node)

    def holdings(self) -> list[Holding]:
        """Of every rank of every node, as last reported; empty unless this node leads."""
        return self._leader.holdings() if self._leader is not None else []

    def ranks_changed(self, ranks: Iterable[int]) -> None:
        """These have sealed a snapshot, given one up, or skipped one."""
        self._owner.go_on()
        self._has_news = True
        self._pages.changed(ranks)

    def report(self) -> None:
        """Look at all pages here, and tell the leader what these ranks hold and what is protected
        of it, if that changed."""
        self._report(self._pages.all())

    def _report(self, pages: Mapping[int, RankStatus]) -> None:
        self._has_news = False
        if self._epoch < 0 or {status.epoch for status in pages.values()} - {self._epoch}:
            return
        is_alone = isinstance(self._policy, NoRedundancy)
        ranks = reported(pages, None if is_alone else self._owner.protected)
        span_steps = max([s.span_steps for s in pages.values()], default=1)
        policy = str(self._policy or Auto())
        said = (self._epoch, ranks, self._owner.hindered, span_steps, policy)
        if said == self._last_report:
            return
        self._last_report = said
        nbytes = sum([s.payload_bytes for s in pages.values()])
        slots = max([len(s.slots) for s in pages.values()], default=0)
        report = NodeReport(
            mesh_version=self.mesh.version,
            epoch=self._epoch,
            committed=self.horizon.committed,
            target=self.horizon.target,
            inherited=self.horizon.inherited,
            snapshot_bytes=nbytes,
            free_bytes=self._memory.free_bytes(self._arena_dir) + nbytes * slots,
            hindered=self._owner.hindered,
            ranks=ranks,
            span_steps=span_steps,
            policy=policy,
        )
        self._links.to_leader(report)

    # -- what the leader says

    def _follow(self, word: HorizonWord) -> None:
        if word.epoch != self._epoch:
            return
        self._take_policy(word.policy, word.why)
        said = Horizon(
            word.epoch,
            word.committed,
            word.target,
            frozenset(word.alive),
            word.decided_step,
            word.inherited,
            word.period_steps,
            self._has_copies(),
            word.agreed_steps,
            word.difference,
        )
        # another leader that has not heard all reports knows less
        self.horizon = horizon = newer(self.horizon, said)
        self._page.write(horizon)
        self._holder.follow(horizon)
        if horizon.target is not None:
            self._holder.target(horizon.target)
        self._owner.protect(horizon.target, horizon.floor)
        if horizon.committed is not None and self._policy is not None and not self._is_tidied:
            self._tidy()

    def _take_policy(self, policy: str, why: str) -> None:
        try:
            scheme = parse_policy(policy)
            if isinstance(scheme, Auto) or scheme == self._policy:
                return
            found = assignments(scheme, self.mesh)
        except ConfigError as error:
            self._host.refuse(f"node {LEADER}", str(error))
            return
        self._policy, self._assignments = scheme, found
        self._links.link_with(partners(found, self.mesh.node))
        self._owner.follow(found)
        self._journal.record("redundancy", f"{policy}: {why}", policy=policy)

    def _has_copies(self) -> bool:
        """Whether what is committed rests whole on other nodes, too, by the policy in force."""
        own = [self._assignments[rank] for rank in self.own_ranks if rank in self._assignments]
        return bool(own) and all(each.holders and not each.stripe_group for each in own)

    def _tidy(self) -> None:
        """A generation is committed under the present placement: what only an older one needed may
        go."""
        self._is_tidied = True
        for rank in ranks_in(self._memory, self._job_dir):
            if rank not in self.own_ranks:
                self._memory.remove(rank_dir(self._job_dir, rank))
        here = self.mesh.node
        copies = {
            rank
            for rank, known in self._assignments.items()
            if here in known.holders and not known.stripe_group
        }
        parities = {
            rank
            for rank, known in self._assignments.items()
            if known.node == here and known.stripe_group
        }
        self._holder.keep_only(copies, parities)

    # -- time, and what scrubbing found

    def tick(self) -> None:
        """Every half second or so."""
        self._owner.tick()
        if self._leader is not None:
            self._leader.tick()
        self.report()
        committed = self.horizon.committed
        now_ns = self._clock.monotonic_ns()
        self._node_links.tick(now_ns, None if committed is None else committed.step)
        self._announce_safety()

    def report_missing(self, return_ns: int) -> None:
        """Nodes whose next keeper has not come for so long are lost."""
        now_ns = self._clock.monotonic_ns()
        for node, missing in list(self._missing.items()):
            if now_ns - missing.since_ns > return_ns and not missing.is_reported:
                missing.is_reported = True
                self._host.peer_is_dead(self.mesh, node, missing.why)

    def _announce_safety(self) -> None:
        began_ns = self._clock.monotonic_ns()
        if self._leader is not None and began_ns >= self._next_safety_ns:
            self._say_safety(self._leader.safety(self._links.linked()), began_ns)
            took_ns = self._clock.monotonic_ns() - began_ns
            self._next_safety_ns = began_ns + SAFETY_PAUSES * took_ns

    def _say_safety(self, safety: SafetyWord | None, now_ns: int) -> None:
        last = self._last_safety
        if safety is None or safety == last:
            return
        only_another_step = last is not None and replace(safety, step=last.step) == last
        if only_another_step and now_ns - self._last_safety_ns < SAFETY_NS:
            return  # which everybody's horizon tells too
        self._last_safety, self._last_safety_ns = safety, now_ns
        self._links.to_all(safety)

    def compare(self) -> None:
        """Everything here has proven: have the holders compare what they hold with it."""
        self._owner.compare()

    def damaged_at_rest(self, path: Path, why: str) -> None:
        """What is held there for others does not prove any more."""
        self._holder.damaged_at_rest(path, why)
        self.tell_inventory()
