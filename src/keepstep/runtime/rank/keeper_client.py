"""Link: the session's line to the keeper.

Asks where to resume and then listens on a thread of its own. A keeper that dies is replaced and
told who is training; training notices nothing. Requests (persist) are answered through futures.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from keepstep.config import Settings
from keepstep.core.resume.vote import Offer
from keepstep.core.wire.conversations import RANK_WITH_KEEPER
from keepstep.edge.net.unix_socket import Mailbox
from keepstep.edge.os.journal import Journal
from keepstep.edge.os.processes import ensure_keeper
from keepstep.errors import KeeperError, KeepstepError
from keepstep.model.mesh import Mesh
from keepstep.model.messages.keeper_rank import (
    Attach,
    BeginMesh,
    CannotListen,
    CheckpointDone,
    Goodbye,
    JoinVote,
    Listen,
    Listening,
    PageChanged,
    Released,
    SlotDamaged,
    StateLoaded,
    StateOffered,
    StateUnusable,
    TrainingPermitted,
    VoteRefused,
    WantCheckpoint,
)
from keepstep.model.snapshot import Stamp
from keepstep.runtime.refused_messages import RefusedMessages

VoteWords = StateOffered | TrainingPermitted | VoteRefused

IMPATIENT_S = 15.0
AGAIN_S = 1.0
LOOK_S = 0.02


class Link:
    """One rank's connection. `on_damage(slot, why)` is called from the listening thread."""

    def __init__(
        self,
        settings: Settings,
        rank: int,
        world_size: int,
        journal: Journal,
        on_damage: Callable[[int, str], None],
    ) -> None:
        self._settings, self._rank, self._world_size = settings, rank, world_size
        self._journal, self._on_damage = journal, on_damage
        self._refused = RefusedMessages(journal)
        self._box = self._find()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._tickets = itertools.count(1)
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._closing = False
        self._mesh: Mesh | None = None
        self._join: JoinVote | None = None  # while a vote is under way
        # about it, once a thread listens
        self._words: queue.SimpleQueue[VoteWords] = queue.SimpleQueue()
        self._listening = False

    def _find(self) -> Mailbox:
        return ensure_keeper(self._settings, RANK_WITH_KEEPER, on_refused=self._refused)

    # -- before training

    def listen_at(self, host: str, port: int = 0) -> tuple[str, int, int, int]:
        """Without an agent: have the keeper listen to other nodes. (host, port, incarnation, its
        newest round). Raises KeeperError."""
        self._box.send(Listen(host, port))
        try:
            answer = self._box.recv(IMPATIENT_S)
        except TimeoutError:
            raise KeeperError(
                f"the keeper was asked to listen at {host} and did not answer within "
                f"{IMPATIENT_S:.0f} s"
            ) from None
        match answer:
            case Listening():
                return answer.host, answer.port, answer.incarnation, answer.mesh_version
            case CannotListen(why):
                raise KeeperError(f"the keeper cannot listen at {host}: {why}")
            case _:
                raise KeeperError(f"the keeper cannot listen at {host}: it died")

    def take_part(self, mesh: Mesh) -> None:
        """Without an agent: tell the keeper of the nodes of this round."""
        self._mesh = mesh
        self._box.send(BeginMesh(mesh))

    def _introduce(self) -> None:
        """Another keeper lives here now: without an agent it knows of no other nodes."""
        if self._mesh is not None:
            members = list(self._mesh.members)
            me = members[self._mesh.node]
            host, port, incarnation, _ = self.listen_at(me.host, me.port)
            members[me.node] = replace(me, host=host, port=port, incarnation=incarnation)
            self.take_part(replace(self._mesh, members=tuple(members)))

    def agree(
        self,
        incarnation: int,
        holds: set[Stamp],
        foreign_world: int | None,
        load: Callable[[Offer], None],
        given_up: Callable[[], bool] = lambda: False,
    ) -> tuple[Offer, int] | None:
        """Take part in the vote until every rank has proven the same state: (what was loaded,
        epoch), or None when `given_up()`.

        `load` raises Unusable when the offer cannot be used here; after Damaged the rank asks anew
        with what it still holds, since others may have a copy. Raises KeeperError when refused.
        """
        join = JoinVote(
            self._rank, self._world_size, incarnation, tuple(sorted(holds)), foreign_world
        )
        self._join = join
        self._box.send(join)
        offer: Offer | None = None
        waited_s = 0.0
        while not given_up():
            try:
                message = self._next_word(LOOK_S if self._listening else IMPATIENT_S)
            except (TimeoutError, queue.Empty):
                waited_s += LOOK_S if self._listening else IMPATIENT_S
                if waited_s >= IMPATIENT_S:
                    waited_s = 0.0
                    why = (
                        f"rank {self._rank} has waited {IMPATIENT_S:.0f} s more for the other "
                        "ranks to ask where to resume"
                    )
                    self._journal.record("waiting", why)
                continue
            match message:
                case None:  # the keeper died: ask the next one
                    self._box = self._find()
                    self._introduce()
                    self._box.send(self._join)
                case VoteRefused(why):
                    raise KeeperError(why)
                case StateOffered():
                    stamp = Stamp(message.step, message.epoch)
                    offer = Offer(message.offer, message.source, stamp, message.why)
                    self._try(offer, load)
                case TrainingPermitted(epoch, _):
                    assert offer is not None
                    self._join = None
                    return offer, epoch
        return None

    def _next_word(self, timeout_s: float) -> Any:
        return self._words.get(timeout=timeout_s) if self._listening else self._box.recv(timeout_s)

    def forget_vote(self) -> None:
        """What was said about a vote that was given up is not about the next one."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._words.get_nowait()

    def _try(self, offer: Offer, load: Callable[[Offer], None]) -> None:
        try:
            load(offer)
        except Damaged as error:
            self._journal.record(
                "damaged",
                f"{offer.stamp} proves no more: {error}; asking anew, others may have it",
                rank=self._rank,
            )
            assert self._join is not None
            self._join = replace(self._join, holds=tuple(sorted(error.holds)))
            self._box.send(self._join)
        except Unusable as error:
            self._box.send(StateUnusable(self._rank, offer.number, str(error)))
        else:
            self._box.send(StateLoaded(self._rank, offer.number))

    # -- during training

    def listen(self) -> None:
        """Start listening for the keeper's words."""
        self._listening = True
        threading.Thread(target=self._listen, name="keepstep-link", daemon=True).start()

    def _listen(self) -> None:
        while not self._released.is_set():
            message = self._box.recv()
            match message:
                case None:
                    self._lost()
                case CheckpointDone(ticket, ok, step, why):
                    with self._lock:
                        future = self._waiting.pop(ticket, None)
                    if future:
                        future.set_result({"ok": ok, "step": step, "why": why})
                case SlotDamaged(slot, why):
                    self._on_damage(slot, why)
                case StateOffered() | TrainingPermitted() | VoteRefused():
                    self._words.put(message)
                case Released():
                    self._released.set()

    def _lost(self) -> None:
        if self._closing:  # we said goodbye, so it is free to go
            self._released.set()
            return
        self._journal.record(
            "keeper-lost",
            f"rank {self._rank} lost the keeper; training goes on while another one starts",
        )
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_result({"ok": False, "step": None, "why": "the keeper died meanwhile"})
        self._box.close()
        while not self._closing:
            try:
                self._box = self._find()
                self._introduce()
            except KeepstepError as error:
                self._journal.record(
                    "keeper-missing", f"no keeper is there ({error}); trying again"
                )
                self._box.close()
                time.sleep(AGAIN_S)
                continue
            self._box.send(self._join or Attach(self._rank, self._world_size))
            return

    def changed(self) -> None:
        """Have the keeper look at this rank's page; never waits."""
        self._box.poke(PageChanged(self._rank))

    def persist(self, step: int | None, why: str) -> Future[dict[str, Any]]:
        """Ask for a checkpoint; the future gives {"ok", "step", "why"}."""
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            ticket = next(self._tickets)
            self._waiting[ticket] = future
        if not self._box.send(WantCheckpoint(ticket, step, why)):
            with self._lock:
                lost = self._waiting.pop(ticket, None)
            if lost:
                lost.set_result(
                    {"ok": False, "step": None, "why": "the keeper is not there to be asked"}
                )
        return future

    def goodbye(self, ok: bool, why: str, timeout_s: float = 5.0) -> None:
        """Say the last word and wait until it was heard."""
        self._closing = True
        if self._box.send(Goodbye(self._rank, ok, why)):
            self._released.wait(timeout_s)

    def end(self) -> None:
        """Hang up; the keeper sees the rank gone."""
        self._closing = True
        self._box.hang_up()

    def release(self) -> None:
        """In a forked child: let the parent alone hold the connection, so that its end is seen."""
        self._box.close()


class Unusable(Exception):
    """The offered state cannot be used here; another source may do."""


class Damaged(Unusable):
    """What was offered lay here, proven, and proves no more: `holds` is what still does."""

    def __init__(self, why: str, holds: set[Stamp]) -> None:
        super().__init__(why)
        self.holds = holds
