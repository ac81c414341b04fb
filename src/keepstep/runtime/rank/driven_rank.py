"""Driven rank: what lets a rank's doubts be acted upon from the trainer's thread.

Comes in: what `Doubt` asks for. Goes out: calls of the rank under its driver's lock, how all ranks'
standing behind a step has ended, and another rank's snapshot loaded into the live state, for one
run of one step that never counts. Decides nothing.

Invariant: the trainer waits here only while a step's numbers are in doubt, and never without end.
"""

from __future__ import annotations

from collections import deque

from keepstep.core.numbers.told_sight import from_text, to_text
from keepstep.edge.shm.slot import Slot, check_identity, slot_paths
from keepstep.edge.shm.whole import whole
from keepstep.errors import DamageError, IdentityError
from keepstep.model.numbers import NotFinite, Sight
from keepstep.model.snapshot import Stamp
from keepstep.model.units import S_NS
from keepstep.runtime.rank.driver import Driver
from keepstep.runtime.rank.rank import Rank
from keepstep.runtime.rank.world import RankIdentity, RankOptions, RankWorld

SETTLED_WITHIN_S = 60.0
# All stand behind one step after so long, and so many of the longest of the newest steps; less than
# a rank may stand still before it is said to hang (core/detection/deadlines.py).
STANDS_WITHIN_S = 4.0
STANDS_WITHIN_STEPS = 2
NEWEST_STEPS = 64
ANSWERED_WITHIN_S = 60.0  # by the keeper, or by the one that follows it


class DrivenRank:
    """A rank, as its program's thread may ask it. See `takes_back.TakesBack`."""

    def __init__(
        self,
        rank: Rank,
        driver: Driver,
        world: RankWorld,
        options: RankOptions,
        who: RankIdentity,
    ) -> None:
        self._rank, self._driver = rank, driver
        self._world, self._options, self._who = world, options, who
        self._steps_ns: deque[int] = deque(maxlen=NEWEST_STEPS)

    def step_took(self, duration_ns: int) -> None:
        """From the beginning of its body to the end."""
        self._steps_ns.append(duration_ns)

    @property
    def resumed_at(self) -> int:
        return self._rank.resumed_at

    @property
    def not_finite(self) -> tuple[int, NotFinite] | None:
        return self._rank.finite.first

    @property
    def differs_since(self) -> int | None:
        wrong = self._rank.watch.difference
        return None if wrong is None else wrong.stamp.step

    def doubt(self, step: int | None) -> None:
        self._driver.call(self._rank.finite.doubt, step)

    def forgive(self) -> None:
        self._driver.call(self._rank.finite.forget)

    @property
    def holds(self) -> tuple[Stamp, ...]:
        return self._rank.holds

    @property
    def has_lost_peer(self) -> bool:
        return self._rank.has_lost_peer

    @property
    def regroups(self) -> int:
        return self._rank.regroups

    @property
    def halts_at(self) -> int | None:
        return self._rank.halting.at

    def ask_to_halt(self, step: int) -> None:
        self._driver.call(self._rank.halting.ask, step)

    def meet(self, step: int, turn: int, mine: Sight) -> tuple[Sight, ...] | str:
        if self._who.world_size == 1:
            return (mine,)
        rank, halting, wait = self._rank, self._rank.halting, self._driver.wait

        def is_over() -> bool:
            return halting.is_decided or rank.has_lost_peer

        longest_ns = max(self._steps_ns, default=0)
        within_s = STANDS_WITHIN_S + STANDS_WITHIN_STEPS * longest_ns / S_NS
        self._driver.call(halting.stand, step, turn, to_text(mine))
        wait(lambda: is_over() or not halting.is_unheard, ANSWERED_WITHIN_S)
        if not wait(is_over, within_s):
            self._driver.call(halting.leave)
            wait(is_over, ANSWERED_WITHIN_S)
        self._driver.call(halting.go_on)
        if halting.found is None:
            return halting.why_void or "no keeper answers"
        try:
            return tuple(map(from_text, halting.found))
        except DamageError as error:  # all ranks have the same words
            return str(error)

    def take_back(self, first: int) -> None:
        self._driver.call(self._rank.take_back, first)

    def settle(self) -> None:
        over: list[bool] = []
        self._driver.call(self._rank.drain, lambda: over.append(True))
        self._driver.wait(lambda: bool(over), SETTLED_WITHIN_S)

    def pause(self, duration_ns: int) -> None:
        """Let a device cool down."""
        self._driver.wait(lambda: False, duration_ns / S_NS)

    def stand_in(self, role: int) -> None:
        """Raises DamageError, IdentityError or LayoutError when it cannot be loaded here."""
        who, resumed = self._who, self._rank.resumed
        assert resumed is not None, "nobody stands in before a vote"
        for path in slot_paths(self._world.memory, self._options.job_dir, role):
            slot = Slot(self._world.memory, path)
            try:
                with whole(self._world.memory, slot) as found:
                    header, layout = found.verify(threads=self._world.proof_threads)
                    if (header.stamp.step, header.stamp.epoch) != (resumed.step, resumed.epoch):
                        continue
                    check_identity(header, path, who.job, who.job_hash, role)
                    self._world.live.load(found, header, layout)
                    return
            except (DamageError, LookupError):
                continue  # it holds something else, or nothing
            finally:
                slot.close()
        raise IdentityError(
            f"expected rank {role}'s snapshot of step {resumed.step} in {self._options.job_dir}, "
            "found none that proves"
        )
