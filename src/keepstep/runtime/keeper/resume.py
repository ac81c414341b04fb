"""Election: the vote about what to resume from, carried between ranks, their keepers and the keeper
that leads.

Comes in: words of this node's ranks, words of other keepers, the store's list. Goes out: offers,
permissions and refusals to this node's ranks; snapshots that they lack are brought first. The
deciding is `core/resume/vote.py`'s, on one node or many; with many, node 0's keeper decides and the
others pass words on, and say them again when it has been replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol, cast

from keepstep.core.resume.vote import Action, Ballot, Go, ListStore, Offer, Refuse, Trust, Vote
from keepstep.model.mesh import LEADER
from keepstep.model.messages.keeper_rank import (
    JoinVote,
    StateOffered,
    StateSource,
    ToRank,
    TrainingPermitted,
    VoteRefused,
)
from keepstep.model.messages.peers import (
    GoWord,
    OfferWord,
    RankFailed,
    RankGone,
    RankJoined,
    RankLoaded,
    RefusalWord,
    VoteBody,
    VoteToAll,
    VoteToLeader,
)
from keepstep.model.restore_sources import RestoreSource
from keepstep.model.snapshot import Stamp
from keepstep.model.units import MS_NS
from keepstep.ports import Clock, Journal
from keepstep.runtime.replication.node import Node


class Host(Protocol):
    """What the keeper does for the election."""

    def tell(self, rank: int, message: ToRank) -> None: ...

    def here(self) -> list[int]:
        """Ranks that are connected."""
        ...

    def list_store(self) -> None: ...

    def newest_epoch(self) -> int: ...

    def completed_step(self, rank: int) -> int | None: ...

    def has_failed(self, rank: int) -> bool:
        """Whether the rank's last life said that the program failed."""
        ...

    def went(self, source: str, step: int) -> None: ...


class Election:
    def __init__(self, clock: Clock, journal: Journal, has_store: bool, host: Host) -> None:
        self._clock, self._journal, self._has_store, self._host = clock, journal, has_store, host
        self._vote: Vote | None = None
        self._node: Node | None = None
        self._joins: dict[int, RankJoined] = {}  # of ranks here that wait for permission
        self._answers: dict[int, RankLoaded | RankFailed] = {}  # theirs to the newest offer
        self._completed: dict[int, int] = {}
        self._trust = Trust()
        self._round = -1  # of the newest offer heard here
        self._told_round = -1  # of the newest offer made here

    def begin_round(self, node: Node) -> None:
        """Another round of many nodes: all ranks will join anew. Those that came before this keeper
        knew of any round are of this one."""
        early = self._joins if self._node is None else {}
        self._node, self._vote, self._round = node, None, -1
        self._joins = early
        self._answers.clear()
        self._completed.clear()
        for body in early.values():
            self._to_leader(body)

    @property
    def _leads(self) -> bool:
        return self._node is None or (self._node.mesh is not None and self._node.mesh.leads)

    # -- words of ranks here

    def joined(self, join: JoinVote) -> None:
        """A rank here asks where to resume."""
        rank = join.rank
        if self._node is not None and self._node.refusal is not None:
            self._host.tell(rank, VoteRefused(self._node.refusal))
            return
        body = RankJoined(
            rank=rank,
            world_size=join.world_size,
            incarnation=join.incarnation,
            holds=join.holds,
            foreign_world=join.foreign_world,
            completed_step=self._host.completed_step(rank),
            epoch=self._host.newest_epoch(),
            failed=self._host.has_failed(rank),
        )
        self._joins[rank] = body
        self._answers.pop(rank, None)
        self._to_leader(body)

    def left(self, rank: int) -> None:
        self._joins.pop(rank, None)
        self._to_leader(RankGone(rank))

    def loaded(self, rank: int, round_: int) -> None:
        self._answer(RankLoaded(rank, round_))

    def failed(self, rank: int, round_: int, why: str) -> None:
        self._journal.record(
            "restore-failed", f"rank {rank} cannot use the offered state: {why}", rank=rank
        )
        self._answer(RankFailed(rank, round_, why))

    def _answer(self, body: RankLoaded | RankFailed) -> None:
        self._answers[body.rank] = body
        self._to_leader(body)

    def _to_leader(self, body: VoteToLeader) -> None:
        if self._leads:
            self._lead(body)
        else:
            assert self._node is not None
            self._node.say_to_leader(body)

    def leader_is_back(self) -> None:
        """It may be another life of it, which has heard nothing yet, or a link may have died with
        an answer."""
        for rank, body in self._joins.items():
            self._to_leader(body)
            answer = self._answers.get(rank)
            if answer is not None and answer.offer == self._round:
                self._to_leader(answer)

    # -- leading

    def _lead(self, body: VoteBody) -> None:
        match body:
            case RankJoined():
                self._take_ballot(body)
            case RankGone(rank):
                if self._vote is not None:
                    self._vote.left(rank)
            case RankLoaded(rank, offer):
                if self._vote is not None:
                    self._carry_out(self._vote.has_loaded(rank, offer))
            case RankFailed(rank, offer, why):
                if self._vote is not None:
                    self._carry_out(self._vote.has_failed(rank, offer, why))
            case _:
                return  # what a leader says

    def _take_ballot(self, body: RankJoined) -> None:
        rank, world_size = body.rank, body.world_size
        if self._vote is None or self._vote.world_size != world_size:
            # Rounds begin at the time: those of a keeper that led before must not come again.
            self._vote = Vote(
                world_size,
                self._has_store,
                self._host.newest_epoch(),
                round=self._clock.wall_ns() // MS_NS,
            )
            if self._node is not None:
                self._vote.silent_nodes = self._node.restoring.silent_nodes()
        self._vote.epoch = max(self._vote.epoch, body.epoch)
        if body.completed_step is not None:
            self._completed[rank] = body.completed_step
        if self._trust.is_back(body.completed_step, body.failed):
            condemned = max(self._trust.condemned)
            why = (
                f"{condemned} is condemned: the program failed twice after it without completing "
                "another step; an older state is taken"
            )
            self._journal.record("condemned", why, step=condemned.step)
        self._vote.condemned = self._trust.condemned
        holds = frozenset(body.holds)
        self._reach_out({rank: holds})  # what it holds may be what others are rebuilt from
        actions = self._vote.joined(
            Ballot(rank, world_size, holds, body.foreign_world, body.incarnation)
        )
        self._carry_out(actions or self._look_elsewhere())

    def inventories_changed(self) -> None:
        if self._vote is not None:
            self._carry_out(self._look_elsewhere())

    def _look_elsewhere(self) -> list[Action]:
        return self._reach_out({})

    def _reach_out(self, coming: dict[int, frozenset[Stamp]]) -> list[Action]:
        """What each rank can be given, once all have told what they hold (`coming` this moment):
        before that nothing is decided."""
        if self._node is None or self._vote is None:
            return []
        proven = {rank: ballot.holds for rank, ballot in self._vote.ballots.items()} | coming
        silent = self._node.restoring.silent_nodes()
        if silent or len(proven) < self._vote.world_size:
            self._vote.silent_nodes = silent
            return []
        return self._vote.reached(silent, self._node.restoring.elsewhere(proven))

    def node_is_dead(self, node: int) -> None:
        """Its ranks are gone with it."""
        if self._vote is not None and self._node is not None and self._node.mesh is not None:
            for rank in self._node.mesh.ranks_of(node):
                self._vote.left(rank)

    def store_listed(self, found: Sequence[int] | str) -> None:
        if self._vote is not None:
            self._carry_out(
                self._vote.unlistable(found) if isinstance(found, str) else self._vote.listed(found)
            )

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Offer):
                self._make_offer(action)
            elif isinstance(action, Go):
                self._say_go(action)
            elif isinstance(action, Refuse):
                self._journal.record("restore-refused", action.why)
                self._to_all(RefusalWord(action.why))
            elif isinstance(action, ListStore):
                self._host.list_store()

    def _make_offer(self, offer: Offer) -> None:
        if offer.round != self._told_round:
            self._told_round = offer.round
            self._journal.record(
                "restore-offered",
                offer.why,
                source=offer.source,
                step=offer.stamp.step,
                round=offer.round,
            )
        assert self._vote is not None
        found: dict[int, RestoreSource] = {}
        if self._node is not None and offer.source == "memory":
            proven = {rank: ballot.holds for rank, ballot in self._vote.ballots.items()}
            found = self._node.restoring.sources(
                [r for r, holds in proven.items() if offer.stamp not in holds], offer.stamp, proven
            )
        source = cast(StateSource, offer.source)
        sources = tuple(found.values())
        self._to_all(OfferWord(offer.round, source, offer.stamp, offer.why, sources))

    def _say_go(self, go: Go) -> None:
        step, source = go.offer.stamp.step, go.offer.source
        assert self._vote is not None
        lost = max(0, min(self._completed.values(), default=-1) - step)
        why = (
            f"every rank has proven step {step} from {source}: {lost} completed steps lost, "
            f"epoch {go.epoch} begins"
        )
        if source == "fresh" and lost == 0:
            why = f"every rank starts afresh: epoch {go.epoch} begins"
        self._journal.record(
            "resumed", why, step=step, source=source, lost_steps=lost, epoch=go.epoch
        )
        self._completed.clear()
        self._trust.went(go.offer.stamp if source == "memory" else None)
        said = cast(StateSource, source)
        self._to_all(GoWord(go.offer.round, go.epoch, said, go.offer.stamp, lost, why))

    def _to_all(self, body: VoteToAll) -> None:
        if self._node is None:
            self._obey(body)
        else:
            self._node.say_to_all(body)

    # -- words of other keepers

    def heard(self, node: int, body: VoteBody) -> None:
        match body:
            case OfferWord() | GoWord() | RefusalWord():
                self._obey(body)
            case _:
                if self._leads:
                    self._lead(body)

    # -- what the leader says

    def _obey(self, body: VoteToAll) -> None:
        match body:
            case OfferWord():
                self._hand_on(body)
            case GoWord():
                self._go(body)
            case RefusalWord():
                for rank in self._host.here():
                    self._host.tell(rank, VoteRefused(body.why))

    def _go(self, go: GoWord) -> None:
        if not self._leads:
            self._journal.record(
                "go",
                f"node {LEADER} says: {go.why}",
                step=go.stamp.step,
                source=go.source,
                lost_steps=go.lost_steps,
                epoch=go.epoch,
            )
        self._joins.clear()
        self._host.went(go.source, go.stamp.step)
        for rank in self._host.here():
            self._host.tell(rank, TrainingPermitted(go.epoch, go.offer))
        if self._node is not None:
            if go.source == "fresh":
                self._node.forget_newer(None)
            self._node.went(go.epoch, go.stamp if go.source == "memory" else None)

    def _hand_on(self, word: OfferWord) -> None:
        offer = StateOffered(word.offer, word.source, word.stamp.step, word.stamp.epoch, word.why)
        if self._node is None:
            for rank in self._host.here():
                self._host.tell(rank, offer)
            return
        if word.offer == self._round:
            return  # said again for somebody else
        self._round = word.offer
        if not self._leads:
            self._journal.record(
                "offer",
                f"node {LEADER} says: {word.why}",
                source=word.source,
                step=word.stamp.step,
                round=word.offer,
            )
        if word.source != "fresh":  # what may be all there is goes only when all do start afresh
            self._node.forget_newer(word.stamp if word.source == "memory" else None)
        found = {source.rank: source for source in word.sources}
        self._node.restoring.link_with_sources(found)
        for rank in self._host.here():
            if rank in found:
                self._node.restoring.fetch(
                    found[rank], word.stamp, partial(self._fetched, rank, offer)
                )
            else:
                self._host.tell(rank, offer)

    def _fetched(self, rank: int, offer: StateOffered, why: str | None) -> None:
        if offer.offer != self._round:
            return
        if why is None:
            self._host.tell(rank, offer)
        else:
            self.failed(rank, offer.offer, why)
