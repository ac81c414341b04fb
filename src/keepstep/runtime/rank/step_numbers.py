"""Step numbers: the eyes and the doubts of one process, for its session.

Comes in: the steps of the program's loop, and its optimizers' updates. Goes out: whether a step
counts. Where nobody looks every step does: the option turns it off, or the parameters are on a
device, which each look would be waited for. There copies are looked at all the same where that was
asked for, and not by default: nobody could say what of them the program means.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from keepstep.config import Settings
from keepstep.core.numbers.spikes import Spikes
from keepstep.core.numbers.updates import UpdateJudge
from keepstep.edge.os.journal import read_journal
from keepstep.edge.torch.membership import membership
from keepstep.edge.torch.numbers.guard import Guard
from keepstep.edge.torch.numbers.update_replay import UpdateReplay
from keepstep.edge.torch.state import Protected
from keepstep.model.events import INFO, WARNING
from keepstep.model.numbers import Device
from keepstep.model.units import MS_NS, human_bytes
from keepstep.ports import Journal
from keepstep.runtime.rank.doubt import Doubt, Policy
from keepstep.runtime.rank.driven_rank import DrivenRank
from keepstep.runtime.rank.numbers_journal import OwnDevice
from keepstep.runtime.rank.world import RankIdentity

UNDO = "undo"


def own_device(settings: Settings, who: RankIdentity) -> OwnDevice:
    """What this rank computes on, and where errors of it are written down."""
    number = int(os.environ.get("LOCAL_RANK", who.rank % who.local_world_size))
    device = Device(os.uname().nodename, number)
    return OwnDevice(
        device, number == 0, partial(read_journal, settings.journal_path, os.geteuid())
    )


@dataclass
class _Updates:
    """Those that are made again."""

    replay: UpdateReplay
    judge: UpdateJudge
    most_bytes: int
    _told: str = ""

    def learn(self) -> None:
        """A body has begun that nobody looks at: what others are measured by is found out in the
        first ones."""
        if not (self.judge.is_calibrated or self.replay.is_due):
            self.replay.begin(is_rerun=False)

    def tell(self, step: int, journal: Journal, rank: int) -> None:
        """What calibrating has come to, once; and that nothing is made again any more, if so."""
        judge, cost = self.judge, self.replay.cost
        if judge.why == self._told:
            return
        self._told = judge.why
        each_ms = cost.took_ns / max(1, cost.updates) / MS_NS
        why = (
            f"rank {rank}: {judge.why}; {human_bytes(min(self.most_bytes, cost.alone_bytes))} at a "
            f"time of {human_bytes(cost.alone_bytes)} that no other rank has, {each_ms:.1f} ms each"
        )
        told: dict[str, Any] = {"step": step, "rank": rank, "within": judge.within}
        if judge.is_off or judge.within:
            journal.record("not-repeatable", why, WARNING, **told)
        else:
            journal.record("repeats", why, INFO, **told)


def _updates(settings: Settings, who: RankIdentity, protected: Protected) -> _Updates | None:
    most_bytes = settings.replay_update_bytes
    if not most_bytes or settings.wrong_numbers == "off":
        return None
    judge = UpdateJudge()
    replay = UpdateReplay(protected, who.rank, who.world_size, judge, most_bytes)
    return _Updates(replay, judge, most_bytes)


class NumbersOfProcess:
    """Of one job."""

    def __init__(
        self,
        settings: Settings,
        who: RankIdentity,
        protected: Protected,
        rank: DrivenRank,
        journal: Journal,
    ) -> None:
        self._guard: Guard | None = None
        self._doubt: Doubt | None = None
        self._protected, self._rank, self._began_ns = protected, rank, 0
        self._journal, self._number, self._speaks = journal, who.rank, who.rank == 0
        self._updates = _updates(settings, who, protected)
        self._look_every_steps = settings.look_every_steps
        only_undoes = settings.wrong_numbers == UNDO
        guard = Guard(
            protected,
            membership,
            who.world_size,
            Spikes(settings.skip_spikes),
            checks_products=settings.check_products,
            withholds=not only_undoes,
            updates=None if self._updates is None else self._updates.replay,
        )
        if settings.wrong_numbers == "off":
            return
        self._guard = guard
        self._doubt = Doubt(
            numbers=guard,
            rank=rank,
            journal=journal,
            number=who.rank,
            world_size=who.world_size,
            policy=Policy(
                may_skip=settings.wrong_numbers != "stop",
                skips_spikes=settings.skip_spikes,
                only_undoes=only_undoes,
                can_swap=guard.can_agree and not who.has_many_nodes,
                can_go_back=settings.slots != 1,
                has_more=settings.store is not None or who.has_many_nodes,
                look_every_steps=settings.look_every_steps,
                calibration_runs=settings.calibrate_runs,
            ),
            pause=rank.pause,
            own=own_device(settings, who),
        )
        if settings.slots == 1 and who.rank == 0 and not only_undoes:
            why = (
                "wrong numbers are told, and an update that is not finite is left out, but no step "
                "is taken back: that takes two slots, and this job has one (slots)"
            )
            journal.record("caveat", why, WARNING)

    def prepare(self, step: int) -> bool:
        """See `Doubt`."""
        return self._doubt is None or self._doubt.prepare(step)

    def begin(self, step: int) -> None:
        """The step's body begins."""
        if self._doubt is not None:
            if self._guard is not None:
                self._guard.know_what_is_meant()
            if self._updates is not None:
                self._updates.replay.turn = step // self._look_every_steps
            self._doubt.begin(step)
            if self._updates is not None and step % self._look_every_steps:
                self._updates.learn()
            self._began_ns = time.monotonic_ns()

    def before_update(self, optimizer: Any, args: Any, kwargs: Any, copy: object = None) -> None:
        """In an optimizer's pre-step hook, when nobody reads its parameters any more. `copy`: what
        was waited for."""
        if self._guard is not None:
            self._guard.before_update(optimizer, args, kwargs)
            if self._updates is not None:
                self._updates.replay.before_update(copy)

    def updated(self, optimizer: Any, *_: Any) -> None:
        """In an optimizer's post-step hook."""
        if self._guard is not None and self._updates is not None:
            self._updates.replay.updated(optimizer)

    def counts(self, step: int, loss: object, entered: bool, is_last: bool) -> bool:
        """The body is over: see `Doubt`."""
        if self._doubt is None:
            return True
        self._rank.step_took(time.monotonic_ns() - self._began_ns)
        if self._updates is not None:
            self._updates.replay.end()
            if erred := self._updates.replay.erred:
                self._doubt.replay_erred(step, erred)
        counts = self._doubt.counts(step, loss, entered, is_last)
        if self._updates is not None:
            self._updates.tell(step, self._journal, self._number)
        return counts

    def stand_down(self, caller: str) -> None:
        """`caller`, in a step's body: that step would not come to the same if it were run again, so
        nobody looks any more. One that is in doubt already is decided first."""
        if self._doubt is None or self._doubt.is_trying:
            return
        why = (
            f"with {caller} a step that is run again does not come to the same numbers, so wrong "
            "ones are not looked for any more"
        )
        if self._doubt.stand_down(why):
            self._protected.known_bad = None
            if self._speaks:
                self._journal.record("caveat", why)
        self.close()
        self._guard = self._doubt = None

    def close(self) -> None:
        """No step follows."""
        if self._guard is not None:
            self._guard.drop()
