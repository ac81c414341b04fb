"""Keeper client: a rank's connection to the keeper of its node.

Asks where to resume, hears offers, asks for checkpoints. A keeper that dies is replaced and told
who is training, or asked again if it was being asked; training notices nothing. Every request is
answered: by the keeper, or because it died, or hung and was ended.

Comes in: the keeper's messages. Goes out: the rank's, and calls of the `KeeperHearer`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from keepstep.errors import KeepstepError
from keepstep.model.loss import loss_words
from keepstep.model.mesh import Mesh
from keepstep.model.messages.keeper_rank import (
    Attach,
    BeginMesh,
    CannotListen,
    CheckpointDone,
    Goodbye,
    HaltOrder,
    HaltWord,
    JoinVote,
    Listen,
    Listening,
    NotUnderstood,
    PageChanged,
    Released,
    SlotDamaged,
    StateLoaded,
    StateOffered,
    StateUnusable,
    ToRank,
    TrainingPermitted,
    VoteDelayed,
    VoteRefused,
    WantCheckpoint,
)
from keepstep.model.units import S_NS
from keepstep.ports import Box
from keepstep.runtime.keeper_watch import KeeperWatch
from keepstep.runtime.rank.world import RankWorld

SEARCH_AGAIN_NS = 1 * S_NS
LISTEN_WITHIN_NS = 45 * S_NS  # long enough for the next keeper, if this one hangs

Answered = Callable[[CheckpointDone], None]


class KeeperHearer(Protocol):
    """Who acts on what the keeper says."""

    def offered(self, offer: StateOffered) -> None: ...

    def permitted(self, epoch: int, offer: int, loss: str) -> None:
        """All ranks have proven what was offered under this number. `loss`: what has to be done
        again, in words; empty for nothing."""

    def refused(self, why: str, is_final: bool = False) -> None:
        """Nobody may train, and with `is_final` an agent has heard it too; or the keeper does not
        understand this rank."""

    def delayed(self, why: str) -> None:
        """All wait, and for what."""

    def slot_damaged(self, index: int, why: str) -> None: ...

    def halt_ordered(self, order: HaltOrder) -> None:
        """About all ranks standing behind one step."""

    def released(self) -> None:
        """The keeper has the goodbye, or there is no keeper."""


class KeeperClient:
    """`connect` comes first."""

    def __init__(self, world: RankWorld, rank: int, world_size: int) -> None:
        self._world = world
        self._rank = rank
        self._world_size = world_size
        self.hearer: KeeperHearer | None = None  # nobody yet
        self._box: Box | None = None
        self._mesh: Mesh | None = None  # as this rank told it, where no agent does
        self._join: JoinVote | None = None  # while this rank asks where to resume
        self._loaded: StateLoaded | None = None  # what it has said last in answer to an offer
        self._permitted: TrainingPermitted | None = None  # what it trains by
        self._listening: Callable[[Listening | str], None] | None = None
        self._at: Listening | None = None  # where this node's keeper listens, where no agent says
        self._listen: Listen | None = None  # what it was asked last
        self._tickets = itertools.count(1)
        self._waiting: dict[int, Answered] = {}
        self._halt: HaltWord | None = None  # what it has said last about one, while that matters
        self._heard_before_halt = 0  # so often the keeper had been heard when that was said
        self._said_goodbye = False
        self._is_over = False
        self._watch = KeeperWatch(world.timers, world.journal, world.keepers, self._awaited)

    def _awaited(self) -> Box | None:
        """The keeper's connection, while this rank waits for an answer."""
        asks = self._join is not None or self._listening is not None or bool(self._waiting)
        return self._box if asks or self._halt is not None else None

    @property
    def is_silent(self) -> bool:
        """Whether the keeper is waited for and gives no sign of life."""
        return self._watch.is_silent

    # -- finding it

    def connect(self, found: Callable[[], None], missing: Callable[[KeepstepError], None]) -> None:
        """Find the keeper for the first time; `missing` hears why there is none."""

        def take(box: Box) -> None:
            self._box = box
            found()

        self._world.keepers.find(self, take, missing)

    def gone(self, box: Box) -> None:
        """The keeper died, or ended after our goodbye."""
        self._box = None
        waiting, self._waiting = self._waiting, {}
        for ticket, answered in waiting.items():
            answered(CheckpointDone(ticket, False, None, "the keeper died meanwhile"))
        if self._is_over:
            return
        if self._said_goodbye:
            self._released()
            return
        why = f"rank {self._rank} lost its keeper; training continues while another one starts"
        self._world.journal.record("keeper-lost", why)
        self._search()

    def _search(self) -> None:
        def missing(error: KeepstepError) -> None:
            why = f"no keeper answers ({error}); trying again"
            self._world.journal.record("keeper-missing", why)
            self._world.timers.after(SEARCH_AGAIN_NS, self._search)

        if not self._is_over:
            self._world.keepers.find(self, self._found_again, missing)

    def _found_again(self, box: Box) -> None:
        """Another keeper lives here now. Without an agent it knows of no other nodes."""
        if self._is_over:
            box.close()
            return
        self._box = box
        if self._mesh is None and self._listening is not None:  # nobody has heard where it listens
            self._ask(self._listen)
            return
        at = self._at
        if at is None:
            self._introduce()
            return

        def listening(answer: Listening | str) -> None:
            if isinstance(answer, Listening) and self._mesh is not None:
                self._tell_mesh(self._mesh, answer)
            self._introduce()

        self.listen_at(at.host, at.port, listening, after=at.incarnation)

    def _introduce(self) -> None:
        if self._join is None:
            self._send(Attach(self._rank, self._world_size, self._permitted))
        else:
            self._ask(self._join)
            if self._loaded is not None:  # others may have been permitted to train on from there
                self._send(self._loaded)
        if self._halt is not None:
            self._send(self._halt)

    # -- without an agent: who the other nodes are

    def listen_at(
        self, host: str, port: int, then: Callable[[Listening | str], None], after: int = 0
    ) -> None:
        """Have the keeper listen to other nodes there; port 0: at a free one. `then` hears where it
        does, or why it cannot. `after`: the incarnation of the keeper before."""
        self._listening = then
        self._listen = Listen(host, port, after)
        self._ask(self._listen)

        def late() -> None:
            if self._listening is then:
                self._heard_listening(f"it did not answer within {LISTEN_WITHIN_NS // S_NS} s")

        self._world.timers.after(LISTEN_WITHIN_NS, late)

    def _heard_listening(self, answer: Listening | str) -> None:
        then, self._listening = self._listening, None
        if then is not None:
            if isinstance(answer, Listening):
                self._at = answer
            then(answer)

    def begin_mesh(self, mesh: Mesh) -> None:
        """Tell this keeper, and each later one, which nodes take part in this attempt."""
        self._mesh = mesh
        if self._at is not None and self._listening is None:  # else one that has just taken over
            self._tell_mesh(mesh, self._at)  # is told once it listens

    def _tell_mesh(self, mesh: Mesh, at: Listening) -> None:
        """The others know where this node's keeper listened when they met; since then another one
        may have taken over, which listens there in its place."""
        me = replace(
            mesh.members[mesh.node], host=at.host, port=at.port, incarnation=at.incarnation
        )
        members = (*mesh.members[: mesh.node], me, *mesh.members[mesh.node + 1 :])
        self._mesh = replace(mesh, members=members)
        self._send(BeginMesh(self._mesh))

    # -- the vote

    def join(self, question: JoinVote) -> None:
        """Ask where to resume. A keeper that takes over is asked again."""
        self._join = question
        self._loaded = self._permitted = None
        self._ask(question)

    def leave_vote(self) -> None:
        """Nothing that is said about the vote counts any more."""
        self._join = None

    def loaded(self, offer: StateOffered) -> None:
        self._loaded = StateLoaded(self._rank, offer.offer)
        self._send(self._loaded)

    def unusable(
        self, offer: StateOffered, why: str, unread: bool = False, brought: bool = False
    ) -> None:
        self._send(StateUnusable(self._rank, offer.offer, why[:1000], unread, brought))

    # -- during training

    def page_changed(self) -> None:
        """Have the keeper look at this rank's page; never waits. From any thread."""
        box = self._box
        if box is not None:
            box.poke(PageChanged(self._rank))

    @property
    def is_connected(self) -> bool:
        """Whether there is a keeper, as far as is known."""
        return self._box is not None

    def persist(
        self, step: int | None, why: str, answered: Answered, steps_follow: bool = False
    ) -> None:
        """Ask for a checkpoint of `step` or a newer one (None: of the newest). `steps_follow`: as
        in `WantCheckpoint`."""
        ticket = next(self._tickets)
        self._waiting[ticket] = answered
        if not self._ask(WantCheckpoint(ticket, step, why[:1000], steps_follow)):
            del self._waiting[ticket]
            answered(CheckpointDone(ticket, False, None, "there is no keeper to ask"))

    def say_of_halt(self, word: HaltWord, is_kept: bool) -> None:
        """About a halt. `is_kept`: each keeper that follows is to hear it, too, until another word
        is kept."""
        self._send(word)
        if is_kept:
            self._halt, self._heard_before_halt = word, self._watch.times_heard
            self._watch.ask()  # nothing else need be said before all ranks stand there

    @property
    def is_halt_unheard(self) -> bool:
        """Whether no keeper has said anything since this rank's word about a halt."""
        return self._watch.times_heard == self._heard_before_halt

    def forget_halt(self) -> None:
        """Nothing that was said about one matters any more."""
        self._halt = None

    def goodbye(self, ok: bool, why: str) -> None:
        """Say the last word; `released` follows."""
        self._said_goodbye = True
        if not self._send(Goodbye(self._rank, ok, why[:1000])):
            self._released()

    def _released(self) -> None:
        if self.hearer is not None:
            self.hearer.released()

    def close(self) -> None:
        """Hang up."""
        self._is_over = True
        box, self._box = self._box, None
        if box is not None:
            box.close()

    def _send(self, message: object) -> bool:
        return self._box is not None and self._box.send(message)

    def _ask(self, message: object) -> bool:
        """Send what is to be answered."""
        is_sent = self._send(message)
        self._watch.begin()
        return is_sent

    # -- what it says

    def hear(self, box: Box, message: ToRank) -> None:
        self._watch.heard()
        match message:
            case CheckpointDone(ticket=ticket):
                answered = self._waiting.pop(ticket, None)
                if answered is not None:
                    answered(message)
            case Listening():
                self._heard_listening(message)
            case CannotListen(why=why):
                self._heard_listening(why)
            case Released():
                self._released()
            case _:
                if self.hearer is not None:
                    self._hand_on(self.hearer, message)

    def _hand_on(self, hearer: KeeperHearer, message: ToRank) -> None:
        match message:
            case SlotDamaged(slot=index, why=why):
                hearer.slot_damaged(index, why)
            case HaltOrder():
                hearer.halt_ordered(message)
            case _ if self._join is None:
                pass  # it is about a vote that was given up, or is over
            case StateOffered(offer=offer):
                if self._loaded != StateLoaded(self._rank, offer):
                    self._loaded = None
                hearer.offered(message)
            case TrainingPermitted(epoch=epoch, offer=offer):
                if self._loaded == StateLoaded(self._rank, offer):
                    self._permitted = message
                loss = loss_words(message.lost_steps, message.lost_at_least)
                hearer.permitted(epoch, offer, loss if message.lost_steps != 0 else "")
            case VoteRefused(why=why, is_final=is_final):
                hearer.refused(why, is_final)
            case NotUnderstood(why=why):
                hearer.refused(why)
            case VoteDelayed(why=why):
                hearer.delayed(why)
            case _:
                pass  # a sign of life; or counts of traffic, which ranks do not ask for

    def release(self) -> None:
        """In a forked child: let the parent alone hold the connection."""
        if self._box is not None:
            self._box.release()
