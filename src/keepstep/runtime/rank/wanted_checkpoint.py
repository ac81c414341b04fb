"""Wanted checkpoint: one step that somebody waits for in the store, asked for again when those who
were to write it have died.

Comes in: the keeper's answers. Goes out: the same question, until a good answer comes or there is
no sense in asking any more. A keeper that dies is replaced within moments, and so are a persister
and the keeper that leads.
"""

from __future__ import annotations

from keepstep.model.messages.keeper_rank import CheckpointDone
from keepstep.model.units import S_NS, human_ns
from keepstep.ports import Timer
from keepstep.runtime.rank.keeper_client import Answered, KeeperClient
from keepstep.runtime.rank.world import RankWorld

AGAIN_NS = 2 * S_NS
KEEPER_WITHIN_NS = 60 * S_NS  # how long a keeper may be missing
TRIES = 4  # with a keeper that is there
# What took so long to be refused was waited for already: those who write it had not died.
TRIES_WITHIN_NS = 30 * S_NS
TOLD_NS = 5 * S_NS  # whoever sits at a screen hears then what is waited for


class WantedCheckpoint:
    """`begin` comes first; then `answered` hears the outcome, once."""

    def __init__(
        self,
        world: RankWorld,
        keeper: KeeperClient,
        step: int | None,
        why: str,
        answered: Answered,
        has_store: bool = True,
        steps_follow: bool = False,
    ) -> None:
        """step: that one or a newer one; None: the newest that every rank holds. steps_follow: as
        in `WantCheckpoint`."""
        self._world = world
        self._keeper = keeper
        self._step = step
        self._why = why
        self._answered = answered
        self._has_store = has_store
        self._steps_follow = steps_follow
        self._tries = 0
        self._missing_since_ns: int | None = None
        self._asked_ns = 0
        self._late: Timer | None = None

    def begin(self) -> None:
        if self._has_store and not self._steps_follow:
            self._late = self._world.timers.after(TOLD_NS, self._tell)
        self._ask()

    def _tell(self) -> None:
        """No step follows: there is nothing else to be seen."""
        which = "the newest step" if self._step is None else f"step {self._step}"
        why = f"waiting until {which} is in the store, for {human_ns(TOLD_NS)} so far: {self._why}"
        self._world.journal.record("persist-awaited", why, step=self._step)

    def _ask(self) -> None:
        self._asked_ns = self._world.clock.monotonic_ns()
        self._keeper.persist(self._step, self._why, self._heard, self._steps_follow)

    def _heard(self, done: CheckpointDone) -> None:
        if done.ok or not self._may_help(done):
            if self._late is not None:
                self._late.cancel()
            self._answered(done)
            return
        why = f"{done.why}; asking again: {self._why}"
        self._world.journal.record("persist-again", why, step=self._step)
        self._world.timers.after(AGAIN_NS, self._ask)

    def _may_help(self, done: CheckpointDone) -> bool:
        """Whether asking again may."""
        if not self._has_store:
            return False
        if self._step is not None and done.step is not None and done.step < self._step:
            return False  # it is not in memory, and never will be
        now_ns = self._world.clock.monotonic_ns()
        if self._keeper.is_connected:
            self._missing_since_ns = None
            self._tries += 1
            return self._tries < TRIES and now_ns - self._asked_ns < TRIES_WITHIN_NS
        if self._missing_since_ns is None:
            self._missing_since_ns = now_ns
        return now_ns - self._missing_since_ns < KEEPER_WITHIN_NS
