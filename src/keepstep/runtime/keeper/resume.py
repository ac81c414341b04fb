"""Resume: the vote about what to resume from, as this node's ranks and their keeper take part in
it.

Comes in: what ranks here ask and answer, what the leader says. Goes out: questions and answers for
the leader, offers and permissions for the ranks here; snapshots that they lack are brought first.
The leader's half is `vote_leader.py`; in a job of one node both halves are here, and with another
life of the leader everything is said again.

Invariant: what ranks answer about an offer that is not the newest counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, Protocol

from keepstep.core.numbers.halt import KeptWords
from keepstep.core.resume.vote import Trust
from keepstep.model.checkpoint import StoreListing, StoreRefusal
from keepstep.model.events import WARNING
from keepstep.model.mesh import LEADER, Mesh
from keepstep.model.messages.keeper_rank import (
    HaltOrder,
    HaltWord,
    JoinVote,
    StateLoaded,
    StateOffered,
    StateUnusable,
    ToRank,
    TrainingPermitted,
    VoteDelayed,
    VoteRefused,
)
from keepstep.model.messages.peers import (
    OfferWord,
    RankGone,
    RankJoined,
    RanksTrain,
    VoteBody,
    VoteToAll,
    VoteToLeader,
)
from keepstep.model.restore_sources import RestoreSource, SharedSources
from keepstep.model.shares import RankRun, Share
from keepstep.model.snapshot import Stamp
from keepstep.ports import Clock, Journal
from keepstep.runtime.keeper.left_behind import LeftBehind
from keepstep.runtime.keeper.vote_leader import VoteHost, VoteLeader, VoteNodes, said_of

Then = Callable[[str | None], None]


class ResumeHost(VoteHost, Protocol):
    """What the keeper does for this node's half."""

    def tell(self, rank: int, message: ToRank) -> None:
        """Send it to that rank, if it is connected."""

    def refused(self, refusal: VoteRefused) -> None:
        """Nobody may train; ranks are told besides."""

    def here(self) -> list[int]:
        """Ranks that are connected."""

    def completed_step(self, rank: int) -> int | None:
        """How far the rank had come, as its page says."""

    def left_behind(self, world_size: int) -> LeftBehind:
        """By a job of another size than that."""

    def has_failed(self, rank: int) -> bool:
        """Whether the rank's last life said that the program failed."""

    def resumed(self, permitted: TrainingPermitted) -> None:
        """All ranks train on."""


class ResumeNodes(VoteNodes, Protocol):
    """The nodes of the job, as this half sees them: `runtime/replication/mesh_state.py`, or
    `OneNode`."""

    refusal: str  # why nobody may train; empty when all may

    @property
    def leads(self) -> bool:
        """Whether this node's keeper decides."""

    def to_leader(self, body: VoteToLeader) -> None:
        """Say it to the keeper that decides."""

    def link_with_sources(self, sources: Mapping[int, RestoreSource]) -> None:
        """All that fetch or give make their links."""

    def fetch(self, source: RestoreSource, stamp: Stamp, then: Then) -> None:
        """Bring a rank's snapshot here; `then` hears None, or why it cannot be had."""

    def fetch_parts(self, shared: Sequence[SharedSources], stamp: Stamp, then: Then) -> None:
        """Bring what ranks of other nodes keep for those here; `then` hears None, or what cannot be
        had. They stay until all train on, or others are brought."""

    def tell_inventory(self) -> None:
        """Tell the keeper that decides what this node holds now, for whoever lives where."""

    def forget_newer(self, stamp: Stamp | None, before_epoch: int | None = None) -> None:
        """Give up what is held for others and newer; None: all of it. `before_epoch`: the one that
        begins. What comes is of that one, then, and stays."""

    def resumed(self, epoch: int, stamp: Stamp | None) -> None:
        """All train on; `stamp`: from where, None when that was not memory."""


class OneNode:
    """A job of one node: there is no other keeper to tell or ask."""

    refusal = ""
    leads = True

    def __init__(self, obey: Callable[[VoteToAll], None]) -> None:
        self._obey = obey

    def to_all(self, body: VoteToAll) -> None:
        """See `VoteNodes`."""
        self._obey(body)

    def to_leader(self, body: VoteToLeader) -> None:
        """Nobody else decides."""

    def tell_inventory(self) -> None:
        """Nothing is held."""

    def silent_nodes(self) -> frozenset[int]:
        """See `VoteNodes`."""
        return frozenset()

    def restorable(self, proven: Mapping[int, frozenset[Stamp]]) -> Mapping[int, frozenset[Stamp]]:
        """See `VoteNodes`."""
        return {}

    def shares(self) -> Mapping[tuple[int, Stamp], Share]:
        """See `VoteNodes`."""
        return {}

    def are_on_one(self, ranks: Sequence[int]) -> bool:
        """See `VoteNodes`."""
        return True

    def sources(
        self, wanted: list[int], stamp: Stamp, proven: Mapping[int, frozenset[Stamp]]
    ) -> Mapping[int, RestoreSource]:
        """See `VoteNodes`."""
        return {}

    def link_with_sources(self, sources: Mapping[int, RestoreSource]) -> None:
        """There are none."""

    def fetch_parts(self, shared: Sequence[SharedSources], stamp: Stamp, then: Then) -> None:
        """See `ResumeNodes`."""
        then(None)

    def fetch(self, source: RestoreSource, stamp: Stamp, then: Then) -> None:
        """See `ResumeNodes`."""
        then("there is no other node")

    def forget_newer(self, stamp: Stamp | None, before_epoch: int | None = None) -> None:
        """Nothing is held for others."""

    def resumed(self, epoch: int, stamp: Stamp | None) -> None:
        """Ranks see each other's pages."""


class MeshVote:
    """What belongs to one mesh: who has asked, and what was answered to the newest offer."""

    def __init__(self, nodes: ResumeNodes, leader: VoteLeader | None) -> None:
        self.nodes, self.leader = nodes, leader
        self.joins: dict[int, RankJoined] = {}  # of ranks here that wait for permission
        self.answers: dict[int, StateLoaded | StateUnusable] = {}  # theirs to the newest offer
        self.offer = -1  # the number of the newest that was heard here
        self.handed: set[int] = set()  # ranks here that have it, or for which it is being fetched
        self.awaited: set[int] = set()  # of those, for which it is being fetched
        self.shared: tuple[SharedSources, ...] = ()  # by ranks of several nodes
        # whether what ranks of other nodes keep for those here has come, and why it cannot be had
        self.parts: Literal["wanted", "coming", "here"] = "here"
        self.why_no_parts = ""
        self.had_differed = False
        self.ready: dict[int, None] = {}  # of those, who can be told
        self.permitted: TrainingPermitted | None = None  # what ranks here train by
        self.halts = KeptWords()

    def to_leader(self, body: VoteToLeader) -> None:
        """To this keeper itself, if it leads."""
        if self.leader is not None:
            self.leader.receive(body)
        else:
            self.nodes.to_leader(body)

    def say_again(self) -> None:
        """All that the leader has to know of the ranks here."""
        if self.permitted is not None:
            self.to_leader(RanksTrain(self.permitted))
        for rank, join in self.joins.items():
            self.to_leader(join)
            answer = self.answers.get(rank)
            # an offer may be newer than all that were heard here: the keeper before had heard it
            if answer is not None and answer.offer >= self.offer:
                self.to_leader(answer)
        for word in self.halts.all():
            self.to_leader(word)


class Resume:
    """One keeper's."""

    def __init__(self, clock: Clock, journal: Journal, has_store: bool, host: ResumeHost) -> None:
        self._clock, self._journal, self._has_store, self._host = clock, journal, has_store, host
        self._trust = Trust()
        alone = OneNode(self._obey)
        self._current = MeshVote(alone, self._new_leader(alone))
        self._is_alone = True

    def _new_leader(self, nodes: VoteNodes) -> VoteLeader:
        return VoteLeader(
            self._clock, self._journal, self._has_store, self._trust, nodes, self._host
        )

    def begin_mesh(self, nodes: ResumeNodes, mesh: Mesh) -> None:
        """Ranks that have asked and are not permitted yet wait in this one: a process that stood by
        asks at once, and may be heard before the mesh. Whoever gives a vote up asks anew."""
        before = self._current
        self._current = current = MeshVote(nodes, self._new_leader(nodes) if nodes.leads else None)
        here = mesh.ranks_of(mesh.node)
        current.joins = {
            rank: join
            for rank, join in before.joins.items()
            if rank in here and join.world_size == mesh.world_size
        }
        if self._is_alone:  # ranks that train have found this keeper before it found the others
            current.answers = before.answers
            current.permitted = before.permitted
            current.halts = before.halts
        self._is_alone = False
        current.say_again()

    # -- what ranks here say

    def joined(self, join: JoinVote) -> None:
        """A rank here asks where to resume."""
        rank, current = join.rank, self._current
        if current.nodes.refusal:
            refused = VoteRefused(current.nodes.refusal, is_final=True)
            self._host.refused(refused)
            self._host.tell(rank, refused)
            return
        # only who has nothing of its own asks what others have left here
        left = LeftBehind() if join.holds else self._host.left_behind(join.world_size)
        completed_step = self._host.completed_step(rank)
        joined = RankJoined(
            rank=rank,
            world_size=join.world_size,
            incarnation=join.incarnation,
            holds=join.holds,
            foreign_world=join.foreign_world or left.world_size,
            completed_step=left.completed_step if completed_step is None else completed_step,
            epoch=self._host.newest_epoch(),
            failed=self._host.has_failed(rank),
            fresh=join.fresh,
            group=join.group,
            digests=join.digests,
            doubted_from=join.doubted_from,
            goes_on=join.goes_on,
            shares=join.shares,
        )
        current.joins[rank] = joined
        current.answers.pop(rank, None)
        current.handed.discard(rank)
        current.nodes.tell_inventory()  # first: what has come since the mesh began counts as well
        current.to_leader(joined)

    def attached(self, permitted: TrainingPermitted) -> None:
        """A rank here trains, as a keeper before this one has permitted."""
        current = self._current
        if current.permitted is None or current.permitted.epoch < permitted.epoch:
            current.permitted = permitted
            current.to_leader(RanksTrain(permitted))

    def halt(self, word: HaltWord) -> None:
        """A rank here says something about a halt of all of them."""
        self._current.halts.said(word)
        self._current.to_leader(word)

    def left(self, rank: int) -> None:
        """A rank here is gone."""
        self._current.joins.pop(rank, None)
        self._current.halts.gone(rank)
        self._current.to_leader(RankGone(rank))

    def loaded(self, rank: int, offer: int) -> None:
        """A rank here has loaded and proven what was offered."""
        self._answer(StateLoaded(rank, offer))

    def failed(self, answer: StateUnusable) -> None:
        """A rank here cannot use what was offered."""
        told = f"rank {answer.rank} cannot use the offered state: {answer.why}"
        self._journal.record("restore-failed", told, rank=answer.rank)
        self._answer(answer)

    def _answer(self, answer: StateLoaded | StateUnusable) -> None:
        self._current.answers[answer.rank] = answer
        self._current.to_leader(answer)

    # -- what the leader says, and what becomes of it

    def receive(self, body: VoteBody) -> None:
        """A word of another node's keeper, or of this one as the leader."""
        match body:
            case OfferWord() | TrainingPermitted() | VoteRefused() | VoteDelayed() | HaltOrder():
                self._obey(body)
            case _:
                if self._current.leader is not None:
                    self._current.leader.receive(body)

    def leader_is_back(self) -> None:
        """It may be another life of it, which has heard nothing yet, or a link may have died with
        an answer."""
        self._current.say_again()

    def inventories_changed(self) -> None:
        """A node has told what it holds."""
        if self._current.leader is not None:
            self._current.leader.inventories_changed()

    def ranks_are_gone(self, ranks: Sequence[int]) -> None:
        """Their node is lost."""
        if self._current.leader is not None:
            self._current.leader.ranks_are_gone(ranks)

    def store_listed(self, found: StoreListing | StoreRefusal) -> None:
        """What the store has, or why it cannot be read."""
        if self._current.leader is not None:
            self._current.leader.store_listed(found)

    def store_awaited(self, why: str) -> None:
        """The store does not answer yet."""
        if self._current.leader is not None:
            self._current.leader.store_awaited(why)

    def _obey(self, body: VoteToAll) -> None:
        match body:
            case OfferWord():
                self._hand_on(body)
            case TrainingPermitted():
                self._go(body)
            case VoteRefused():
                self._host.refused(body)
                self._tell_all(body)
            case HaltOrder():
                self._current.halts.ordered(body)
                self._tell_all(body)
            case VoteDelayed(why):
                if not self._current.nodes.leads:
                    self._journal.record("store-unreachable", f"node {LEADER} says: {why}", WARNING)
                self._tell_all(body)

    def _tell_all(self, message: ToRank) -> None:
        for rank in self._host.here():
            self._host.tell(rank, message)

    def _hand_on(self, word: OfferWord) -> None:
        current, stamp = self._current, word.stamp
        offer = StateOffered(
            word.offer, word.source, stamp.step, stamp.epoch, word.why, word.keeps_newer
        )
        sources = {source.rank: source for source in word.sources}
        if word.offer != current.offer:  # else it is said again, for somebody who asked once more
            current.offer = word.offer
            current.handed.clear()
            current.awaited.clear()
            current.ready.clear()
            self._hear_of(word)
            current.shared, current.had_differed = word.shared, word.had_differed
            current.parts = "wanted" if word.shared else "here"
            current.why_no_parts = ""
        ranks = [rank for rank in self._host.here() if rank not in current.handed]
        if not ranks:
            return
        current.handed.update(ranks)
        current.nodes.link_with_sources(sources)
        current.awaited.update(rank for rank in ranks if rank in sources)
        current.ready.update((rank, None) for rank in ranks if rank not in sources)
        for rank in ranks:
            if rank in sources:
                then = partial(self._fetched, current, rank, offer)
                current.nodes.fetch(sources[rank], stamp, then)
        self._tell_ready(current, offer)

    def _hear_of(self, word: OfferWord) -> None:
        current, stamp = self._current, word.stamp
        if not current.nodes.leads:
            self._journal.record(
                "offer",
                f"node {LEADER} says: {word.why}",
                source=word.source,
                step=stamp.step,
                offer=word.offer,
            )
        if word.source == "memory" and not word.keeps_newer:
            # what may be all there is, or whole, stays until all do without it
            current.nodes.forget_newer(stamp)

    def _fetched(self, asked_in: MeshVote, rank: int, offer: StateOffered, why: str | None) -> None:
        if asked_in is not self._current or offer.offer != asked_in.offer:
            return
        asked_in.awaited.discard(rank)
        if why is None:
            asked_in.ready[rank] = None
        else:
            self.failed(StateUnusable(rank, offer.offer, why))
        self._tell_ready(asked_in, offer)

    def _tell_ready(self, current: MeshVote, offer: StateOffered) -> None:
        """Once nothing is on its way any more: of a snapshot that ranks share each of them needs
        the others' parts."""
        if current.awaited or offer.offer != current.offer:
            return
        if current.parts == "wanted":
            # behind what ranks here lack themselves: of one snapshot there is one fetch at a time
            current.parts = "coming"
            stamp, then = Stamp(offer.step, offer.epoch), partial(self._has_parts, current, offer)
            current.nodes.fetch_parts(current.shared, stamp, then)
            return
        if current.parts == "coming":
            return
        ready, current.ready = current.ready, {}
        for rank in ready:
            replicas = self._replicas_of(current, rank)
            if current.why_no_parts and replicas:
                self.failed(StateUnusable(rank, offer.offer, current.why_no_parts))
            else:
                goes_on = None if current.had_differed else replicas
                self._host.tell(rank, replace(offer, replicas=goes_on))

    def _has_parts(self, asked_in: MeshVote, offer: StateOffered, why: str | None) -> None:
        if asked_in is not self._current or offer.offer != asked_in.offer:
            return
        asked_in.parts, asked_in.why_no_parts = "here", why or ""
        self._tell_ready(asked_in, offer)

    def _replicas_of(self, current: MeshVote, rank: int) -> tuple[RankRun, ...]:
        """The ranks of several nodes that share with that one, this one among them."""
        for shared in current.shared:
            if any(part.rank == rank for part in shared.parts):
                return shared.runs
        return ()

    def _go(self, go: TrainingPermitted) -> None:
        current = self._current
        is_news = go != current.permitted  # else some rank had not heard it
        if is_news:
            self._record_go(current, go)
            current.permitted = go
            current.joins.clear()
            current.halts = KeptWords()
            self._host.resumed(go)
        for rank, answer in current.answers.items():
            if answer == StateLoaded(rank, go.offer):
                current.joins.pop(rank, None)
        stamp = go.stamp if go.source == "memory" else None
        if is_news:  # before any rank here trains: a keeper after this one has not heard it
            current.nodes.forget_newer(stamp, before_epoch=go.epoch)
        for rank in self._host.here():
            self._host.tell(rank, go)
        if is_news:
            current.nodes.resumed(go.epoch, stamp)

    def _record_go(self, current: MeshVote, go: TrainingPermitted) -> None:
        if not current.nodes.leads:
            self._journal.record("go", f"node {LEADER} says: {go.why}", **said_of(go))
