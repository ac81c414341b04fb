"""Vote leader: the vote about what to resume from, as the keeper that leads carries it.

Comes in: which ranks ask, what they hold, whether loading worked; what the nodes hold; the store's
list; what ranks in doubt say of a halt. Goes out: offers, the permission, or a refusal, to all
nodes, and orders about a halt. `core/resume/vote.py` decides, and `core/numbers/halt.py`. Whoever
leads next needs nothing but the same questions again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from keepstep.core.numbers.halt import Halts
from keepstep.core.resume.vote import (
    Action,
    Ballot,
    Doubted,
    Go,
    ListStore,
    Offer,
    Refuse,
    Trust,
    Vote,
)
from keepstep.model.checkpoint import StoreListing, StoreRefusal
from keepstep.model.events import WARNING
from keepstep.model.loss import loss_words
from keepstep.model.messages.keeper_rank import (
    HaltOrder,
    HaltWord,
    StateLoaded,
    StateSource,
    StateUnusable,
    TrainingPermitted,
    VoteDelayed,
    VoteRefused,
)
from keepstep.model.messages.peers import (
    OfferWord,
    RankGone,
    RankJoined,
    RanksTrain,
    VoteToAll,
    VoteToLeader,
)
from keepstep.model.restore_sources import RestoreSource, SharedSources
from keepstep.model.shares import Share
from keepstep.model.snapshot import Stamp
from keepstep.model.units import MS_NS, counted
from keepstep.ports import Clock, Journal


class VoteHost(Protocol):
    """What the keeper does for the vote's leader."""

    def list_store(self, question: ListStore) -> None:
        """Have the store looked at; `store_listed` hears of it, and `store_awaited` meanwhile."""

    def newest_epoch(self) -> int:
        """That is on any page here."""

    def doubt_checkpoints(self, first: int, before_epoch: int) -> None:
        """Have those of that step and of later ones, that epochs before that one have computed,
        marked in the store: no later vote is to offer them."""


class VoteNodes(Protocol):
    """The nodes of the job, as the leader sees them."""

    def to_all(self, body: VoteToAll) -> None:
        """Say it to every node, this one among them."""

    def silent_nodes(self) -> frozenset[int]:
        """Nodes that have not told what they hold."""

    def restorable(self, proven: Mapping[int, frozenset[Stamp]]) -> Mapping[int, frozenset[Stamp]]:
        """The stamps that each rank can be given by other nodes. `proven`: what each rank that has
        joined holds itself."""

    def shares(self) -> Mapping[tuple[int, Stamp], Share]:
        """What snapshots that nodes hold for others tell of shares, by rank and stamp."""

    def are_on_one(self, ranks: Sequence[int]) -> bool:
        """Whether all of them live on one node."""

    def sources(
        self, wanted: list[int], stamp: Stamp, proven: Mapping[int, frozenset[Stamp]]
    ) -> Mapping[int, RestoreSource]:
        """Where these ranks fetch `stamp` from, by rank."""


class VoteLeader:
    """Of one mesh, or of a job of one node."""

    def __init__(
        self,
        clock: Clock,
        journal: Journal,
        has_store: bool,
        trust: Trust,
        nodes: VoteNodes,
        host: VoteHost,
    ) -> None:
        self._clock, self._journal, self._has_store = clock, journal, has_store
        self._trust, self._nodes, self._host = trust, nodes, host
        self._vote: Vote | None = None  # begins with the first rank that asks
        self._completed: dict[int, int] = {}  # by rank: how far it had come
        self._recorded = -1  # the number of the newest offer in the journal
        self._permitted: TrainingPermitted | None = None  # by this leader, or by the one before
        self._halts = Halts()

    def receive(self, body: VoteToLeader) -> None:
        """What a rank of any node says, by its keeper."""
        vote = self._vote
        match body:
            case RankJoined():
                self._joined(body)
            case RanksTrain(permitted):
                self._ranks_train(permitted)
            case HaltWord():
                self._order(self._halts.hear(body))
            case RankGone(rank):
                self.ranks_are_gone([rank])
            case _ if vote is None:
                pass  # it is about a leader's vote before
            case StateLoaded(rank, offer):
                self._carry_out(vote, vote.has_loaded(rank, offer))
            case StateUnusable(rank, offer, why, unread, brought):
                self._carry_out(vote, vote.has_failed(rank, offer, why, unread, brought))

    def _joined(self, body: RankJoined) -> None:
        rank, world_size = body.rank, body.world_size
        self._halts.came(rank)
        vote = self._vote
        if vote is None or vote.world_size != world_size:
            vote = self._vote = self._new_vote(world_size)
        vote.epoch = max(vote.epoch, body.epoch)
        if body.completed_step is not None:
            self._completed[rank] = body.completed_step
        if self._trust.is_back(body.completed_step, body.failed):
            self._record_condemned(max(self._trust.condemned))
        vote.condemned = self._trust.condemned
        holds = frozenset(body.holds)
        self._look_elsewhere(vote, {rank: holds})  # others may be rebuilt from what it holds
        ballot = Ballot(
            rank=rank,
            world_size=world_size,
            holds=holds,
            foreign_world=body.foreign_world,
            incarnation=body.incarnation,
            fresh=body.fresh,
            group=body.group,
            digests=body.digests,
            doubted_from=body.doubted_from,
            goes_on=body.goes_on,
            shares=body.shares,
        )
        actions = vote.joined(ballot)
        self._carry_out(vote, actions or self._look_elsewhere(vote, {}))

    def _ranks_train(self, permitted: TrainingPermitted) -> None:
        """A leader before this one has permitted it, and perhaps died before all had heard it."""
        if self._permitted is not None and self._permitted.epoch >= permitted.epoch:
            return
        self._permitted = permitted
        self._begin_epoch(permitted)
        if self._vote is not None:
            self._carry_out(self._vote, self._vote.ranks_train(_go_of(permitted)))

    def _new_vote(self, world_size: int) -> Vote:
        vote = Vote(
            world_size,
            self._has_store,
            self._host.newest_epoch(),
            # Offers count from the time: those of a keeper that led before must not come again.
            number=self._clock.wall_ns() // MS_NS,
        )
        vote.silent_nodes = self._nodes.silent_nodes()
        if self._permitted is not None:
            vote.ranks_train(_go_of(self._permitted))
        return vote

    def _record_condemned(self, condemned: Stamp) -> None:
        why = (
            f"{condemned} is condemned: the program failed twice after it without completing "
            "another step; an older state is taken"
        )
        self._journal.record("condemned", why, step=condemned.step)

    def inventories_changed(self) -> None:
        """A node has told what it holds."""
        if self._vote is not None:
            self._carry_out(self._vote, self._look_elsewhere(self._vote, {}))

    def _look_elsewhere(self, vote: Vote, coming: Mapping[int, frozenset[Stamp]]) -> list[Action]:
        """What each rank can be given, once all have told what they hold (`coming` this moment):
        before that nothing is decided."""
        silent = self._nodes.silent_nodes()
        here = len(vote.ballots) + sum(rank not in vote.ballots for rank in coming)
        if silent or here < vote.world_size:  # it is asked with every rank that comes
            vote.silent_nodes = silent
            return []
        proven = {rank: ballot.holds for rank, ballot in vote.ballots.items()} | dict(coming)
        return vote.restorable(silent, self._nodes.restorable(proven), self._nodes.shares())

    def ranks_are_gone(self, ranks: Sequence[int]) -> None:
        """They have ended, or their node is lost."""
        for rank in ranks:
            if self._vote is not None:
                self._vote.left(rank)
            self._order(self._halts.gone(rank))

    def _order(self, orders: Sequence[HaltOrder]) -> None:
        for order in orders:
            self._nodes.to_all(order)

    def store_listed(self, found: StoreListing | StoreRefusal) -> None:
        """What the store has, or why it cannot be read."""
        vote = self._vote
        if vote is None:
            return
        if isinstance(found, StoreRefusal):
            self._carry_out(vote, vote.unlistable(found.why, found.is_final))
        else:
            self._carry_out(vote, vote.listed(found))

    def store_awaited(self, why: str) -> None:
        """The store does not answer yet."""
        if self._vote is not None and self._vote.has_all:
            self._nodes.to_all(VoteDelayed(why))

    # -- what was decided

    def _carry_out(self, vote: Vote, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Offer():
                    self._offer(vote, action)
                case Go():
                    self._permit(action)
                case Refuse(why, is_final):
                    self._journal.record("restore-refused", why)
                    self._nodes.to_all(VoteRefused(why, is_final))
                case ListStore():
                    self._host.list_store(action)

    def _offer(self, vote: Vote, offer: Offer) -> None:
        if offer.number != self._recorded:
            self._recorded = offer.number
            self._journal.record(
                "restore-offered",
                offer.why,
                source=offer.source,
                step=offer.stamp.step,
                offer=offer.number,
            )
        sources: Mapping[int, RestoreSource] = {}
        shared: tuple[SharedSources, ...] = ()
        if offer.source == "memory":
            proven = {rank: ballot.holds for rank, ballot in vote.ballots.items()}
            without = [rank for rank, holds in proven.items() if offer.stamp not in holds]
            sources = self._nodes.sources(without, offer.stamp, proven)
            shared = self._shared(vote, offer.stamp, proven)
        self._nodes.to_all(
            OfferWord(
                offer.number,
                cast(StateSource, offer.source),
                offer.stamp,
                offer.why,
                tuple(sources.values()),
                offer.keeps_newer,
                shared,
                vote.had_differed(offer.stamp),
            )
        )

    def _shared(
        self, vote: Vote, stamp: Stamp, proven: Mapping[int, frozenset[Stamp]]
    ) -> tuple[SharedSources, ...]:
        """Where the parts of what ranks of several nodes share come from."""
        alike: dict[int, list[int]] = {}
        told = vote.shares_of(stamp)
        lacking = {share.digest for share in told.values() if share.ranks > 1}
        for rank, share in told.items():
            if share.digest in lacking:
                alike.setdefault(share.digest, []).append(rank)
        return tuple(
            SharedSources(tuple(self._nodes.sources(ranks, stamp, proven).values()))
            for ranks in alike.values()
            if not self._nodes.are_on_one(ranks)
        )

    def _permit(self, go: Go) -> None:
        permitted = self._permitted
        if permitted is None or permitted.epoch < go.epoch:
            permitted = self._permitted = self._decide_permission(go)
            self._begin_epoch(permitted)
            if go.doubted is not None:
                self._leave_out(go.doubted, go.epoch)
        else:
            why = (
                f"ranks had proven their state and not heard that all may train in epoch "
                f"{permitted.epoch}: they may"
            )
            self._journal.record("permitted-again", why, step=permitted.stamp.step, epoch=go.epoch)
        self._nodes.to_all(permitted)

    def _leave_out(self, doubted: Doubted, epoch: int) -> None:
        for stamp, ranks in doubted.elsewhere:
            why = (
                f"what other nodes hold of {stamp} for {counted(len(ranks), 'rank')} is in doubt, "
                f"as is every state from step {doubted.first} on: nobody is given it, and it goes"
            )
            self._journal.record("condemned", why, WARNING, step=stamp.step, ranks=list(ranks))
        if self._has_store:
            self._host.doubt_checkpoints(doubted.first, epoch)

    def _decide_permission(self, go: Go) -> TrainingPermitted:
        stamp, source = go.offer.stamp, go.offer.source
        lost, at_least = self._loss(go)
        why = (
            f"every rank has proven step {stamp.step} from {source}: "
            f"{loss_words(lost, at_least)}, epoch {go.epoch} begins"
        )
        if source == "fresh" and lost == 0:
            why = f"every rank starts afresh: epoch {go.epoch} begins"
        permitted = TrainingPermitted(
            go.epoch, go.offer.number, cast(StateSource, source), stamp, lost, why, at_least
        )
        self._journal.record("resumed", why, **said_of(permitted))
        return permitted

    def _loss(self, go: Go) -> tuple[int | None, int]:
        """Completed steps that are done again, None where nobody knows; and how many for certain.
        Ranks' words of how far they had come count unless the store has a later step: then they are
        of a time before that."""
        told = min(self._completed.values(), default=-1)
        if told >= max(go.reached, 0):
            lost = max(0, told - go.offer.stamp.step)
            return lost, lost
        at_least = max(0, go.begun - go.offer.stamp.step)
        if go.offer.source == "fresh" and not at_least:
            return 0, 0  # nothing tells of a time before this start
        return None, at_least

    def _begin_epoch(self, permitted: TrainingPermitted) -> None:
        self._completed.clear()
        self._trust.resumed_from(permitted.stamp if permitted.source == "memory" else None)


def said_of(permitted: TrainingPermitted) -> dict[str, Any]:
    """The facts of a permission, for the journal."""
    told = {"lost_at_least": permitted.lost_at_least} if permitted.lost_steps is None else {}
    return {
        "step": permitted.stamp.step,
        "source": permitted.source,
        "lost_steps": permitted.lost_steps,
        **told,
        "epoch": permitted.epoch,
    }


def _go_of(permitted: TrainingPermitted) -> Go:
    offer = Offer(permitted.offer, permitted.source, permitted.stamp, permitted.why)
    return Go(permitted.epoch, offer)
