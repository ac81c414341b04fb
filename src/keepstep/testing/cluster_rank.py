"""Cluster rank: a rank that trains nothing, beside a real keeper: its states are bytes drawn from
(rank, step), captured into slots by the same rules as a session's.
"""

from __future__ import annotations

import json
import os
import random
import select
from collections.abc import Callable
from typing import Any

from keepstep.config import Settings
from keepstep.core.resume.slots import Skip, Take, choose
from keepstep.core.wire.conversations import RANK_WITH_KEEPER
from keepstep.edge.os.clock import CLOCK
from keepstep.edge.os.processes import ensure_keeper
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot, slot_path, slot_paths
from keepstep.edge.shm.status_page import StatusPage
from keepstep.errors import DamageError
from keepstep.model.layout import TensorSpec, lay_out
from keepstep.model.messages.keeper_rank import (
    JoinVote,
    PageChanged,
    StateLoaded,
    StateOffered,
    StateUnusable,
    TrainingPermitted,
    VoteRefused,
)
from keepstep.model.snapshot import Phase, SlotState, SlotView, Stamp
from keepstep.runtime.job_name import job_hash
from keepstep.runtime.rank.commit_view import LeadersWord

LAYOUT = lay_out([TensorSpec("w", "float32", (50, 50), 10_000)])
MANIFEST = json.dumps(LAYOUT.to_json()).encode()
EMPTY = SlotView(SlotState.EMPTY, Stamp(-1, 0))
State = Callable[[int, int, int], bytes | memoryview]  # rank, step, nbytes


def state_of(rank: int, step: int, nbytes: int) -> bytes:
    """What the rank's state is after that step, in whatever life."""
    return random.Random(f"{rank}/{step}").randbytes(nbytes)


class ClusterRank:
    """One rank of one node: slots, page, and the line to its keeper."""

    def __init__(
        self,
        settings: Settings,
        rank: int,
        world_size: int,
        nbytes: int,
        incarnation: int,
        state: State,
    ) -> None:
        self.settings, self.rank, self.world_size, self.nbytes, self.state = (
            settings,
            rank,
            world_size,
            nbytes,
            state,
        )
        page = StatusPage.own(MEMORY, settings.job_dir, rank)
        assert page is not None
        self.page, self.outlook, self.incarnation = (
            page,
            LeadersWord(MEMORY, settings.job_dir),
            incarnation,
        )
        last = page.read()
        self.completed = last.completed_step if last else -1
        page.publish(
            **{
                "rank": rank,
                "world_size": world_size,
                "pid": os.getpid(),
                "incarnation": incarnation,
                "phase": Phase.RESTORE,
            },
            **{
                "epoch": last.epoch if last else 0,
                "completed_step": self.completed,
                "decided_step": -1,
                "slots": (),
            },
        )
        self.box = ensure_keeper(settings, RANK_WITH_KEEPER)
        self.slots: list[Slot] = []
        self.views: list[SlotView] = []
        self.look()
        self.offer: StateOffered | None = None
        self.permitted: TrainingPermitted | None = None  # what it trains by
        self.epoch: int | None = None
        self.refused: str | None = None
        self.join()

    def look(self) -> None:
        """Open and prove the slots that are there."""
        for slot in self.slots:
            slot.close()
        self.slots = [
            Slot(MEMORY, path) for path in slot_paths(MEMORY, self.settings.job_dir, self.rank)
        ]
        self.views = [EMPTY] * len(self.slots)
        for index, slot in enumerate(self.slots):
            try:
                header, _ = slot.verify_bytes()
                self.views[index] = SlotView(SlotState.SEALED, header.stamp)
            except (DamageError, LookupError):
                continue

    def holds(self) -> dict[Stamp, int]:
        return {v.stamp: i for i, v in enumerate(self.views) if v.state is SlotState.SEALED}

    def join(self) -> None:
        holds = tuple(sorted(self.holds()))
        self.box.send(JoinVote(self.rank, self.world_size, self.incarnation, holds))

    def hear(self) -> None:
        """Whatever the keeper says now; obey it."""
        while select.select([self.box], [], [], 0)[0]:
            message = self.box.recv()
            if message is None:
                self.box.close()
                self.box = ensure_keeper(self.settings, RANK_WITH_KEEPER)
                return
            match message:
                case StateOffered():
                    self.load(message)
                case TrainingPermitted(epoch=epoch):
                    self.permitted = message
                    self.go(epoch)
                case VoteRefused(why):
                    self.refused = why

    def go(self, epoch: int) -> None:
        assert self.offer is not None
        step = self.offer.step
        self.epoch, self.completed = epoch, step
        self.page.publish(
            epoch=epoch, phase=Phase.STEP, step=step, completed_step=step, decided_step=step
        )
        self.publish()

    def load(self, offer: StateOffered) -> None:
        self.offer = offer
        stamp = Stamp(offer.step, offer.epoch)
        if offer.source == "memory":
            if stamp not in self.holds():
                self.look()
            if stamp not in self.holds():
                self.box.send(StateUnusable(self.rank, offer.offer, f"{stamp} is not here"))
                return
            slot = self.slots[self.holds()[stamp]]
            header, _ = slot.verify_bytes()
            found = slot.payload[: header.payload_bytes]
            assert found == self.state(self.rank, stamp.step, self.nbytes), (
                "wrong bytes were restored"
            )
        for index, view in enumerate(self.views):
            if offer.source != "memory" or view.state is not SlotState.SEALED or view.stamp > stamp:
                self.slots[index].void()
                self.views[index] = EMPTY
        self.publish()
        self.box.send(StateLoaded(self.rank, offer.offer))

    def publish(self, **changes: Any) -> None:
        self.page.publish(slots=tuple(self.views), **changes)
        self.box.poke(PageChanged(self.rank))

    def has_room(self) -> bool:
        """Whether a snapshot would find a slot now."""
        return not isinstance(self._choose(), Skip)

    def _choose(self) -> Take | Skip:
        assert self.epoch is not None
        while len(self.slots) < (self.settings.slots or 2):
            self.slots.append(
                Slot.create(
                    MEMORY,
                    slot_path(self.settings.job_dir, self.rank, len(self.slots)),
                    self.nbytes,
                    len(MANIFEST),
                )
            )
            self.views.append(EMPTY)
        seen = self.outlook.look(self.epoch)
        views = [
            v
            if v.state is SlotState.EMPTY or self._is_free(i)
            else SlotView(v.state, v.stamp, True)
            for i, v in enumerate(self.views)
        ]
        released = seen.released if self.settings.slots == 1 else None
        return choose(views, seen.horizon, seen.is_hopeless, released)

    def step(self, step: int) -> bool:
        """Compute a step and capture it; False when it is skipped."""
        assert self.epoch is not None
        self.completed = step
        self.page.publish(completed_step=step, step=step)
        decision = self._choose()
        if isinstance(decision, Skip):
            self.publish(decided_step=step)
            return False
        slot, stamp = self.slots[decision.slot], Stamp(step, self.epoch)
        slot.begin(
            job_hash(self.settings.job, os.getuid()),
            self.rank,
            self.world_size,
            self.incarnation,
            stamp,
        )
        self.views[decision.slot] = SlotView(SlotState.WRITING, stamp)
        self.publish(decided_step=step)
        slot.payload[: self.nbytes] = self.state(self.rank, step, self.nbytes)
        slot.seal(slot.write_table(self.nbytes, MANIFEST), LAYOUT.hash(), 0.0, CLOCK.wall_ns())
        self.views[decision.slot] = SlotView(SlotState.SEALED, stamp)
        self.publish(payload_bytes=self.nbytes)
        return True

    def _is_free(self, index: int) -> bool:
        free = self.slots[index].lock(exclusive=True)
        if free:
            self.slots[index].unlock()
        return free

    def close(self) -> None:
        for slot in self.slots:
            slot.close()
        self.page.close()
        self.outlook.close()
        self.box.hang_up()
