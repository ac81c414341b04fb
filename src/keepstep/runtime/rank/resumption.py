"""Resumption: one rank's part in one vote about where all resume.

    prove the own slots -> ask -> load what is offered, perhaps another offer -> permitted

Comes in: offers and the permission of the keeper. Goes out: the question, and whether each offer
could be used here. One is made for every vote, and dropped when the vote is over or given up: what
its work brings later counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from keepstep.errors import ConfigError, KeepstepError
from keepstep.model.events import WARNING
from keepstep.model.messages.keeper_rank import JoinVote, StateOffered
from keepstep.model.snapshot import Phase, Stamp
from keepstep.model.units import S_NS, human_ns
from keepstep.ports import Acts
from keepstep.runtime.rank.capture import Capture
from keepstep.runtime.rank.holdings import Holdings
from keepstep.runtime.rank.keeper_client import KeeperClient
from keepstep.runtime.rank.restore import Restored, Restorer, Unusable
from keepstep.runtime.rank.world import RankIdentity, RankWorld

IMPATIENT_NS = 15 * S_NS

T = TypeVar("T")


class Resumption:
    """`in_midst`: others of the job are in the middle of it, in their processes. `wants_fresh`: its
    run is to start over. `goes_on`: its launch has trained on what is here. `doubted_from`: states
    of that step and of later ones may be wrong."""

    def __init__(
        self,
        world: RankWorld,
        who: RankIdentity,
        capture: Capture,
        keeper: KeeperClient,
        in_midst: bool,
        wants_fresh: bool,
        goes_on: bool,
        doubted_from: int | None,
        announce: Callable[[Phase, int], None],
        failed: Callable[[KeepstepError], None],
    ) -> None:
        self._world = world
        self._who = who
        self._capture = capture
        self._keeper = keeper
        self._in_midst = in_midst
        self._wants_fresh = wants_fresh
        self._goes_on = goes_on
        self._doubted_from = doubted_from
        self._announce = announce
        self._failed = failed
        self._restorer: Restorer | None = None
        self._foreign_world: int | None = None
        self._is_over = False
        self._loaded: StateOffered | None = None

    def begin(self) -> None:
        self._on_trainer(self._capture.prove(), self._ask_first)

    def _ask_first(self, found: Holdings) -> None:
        self._restorer = Restorer(
            self._world, self._capture, found, self._in_midst, self._wants_fresh
        )
        self._foreign_world = found.foreign_world
        self._group, self._digests = found.group, found.digests
        self._shares = found.shares
        self._ask(tuple(sorted(found.slot_of)))
        self._wait_patiently()

    def _ask(self, holds: tuple[Stamp, ...]) -> None:
        question = JoinVote(
            rank=self._who.rank,
            world_size=self._who.world_size,
            incarnation=self._capture.incarnation,
            holds=holds,
            foreign_world=self._foreign_world,
            fresh=self._wants_fresh,
            goes_on=self._goes_on,
            group=self._group,
            digests=self._digests,
            doubted_from=self._doubted_from,
            shares=tuple(told for told in self._shares if told[0] in holds),
        )
        self._keeper.join(question)

    def _wait_patiently(self) -> None:
        def still_waits() -> None:
            if self._is_over:
                return
            elsewhere = self._world.elsewhere()
            if elsewhere:
                self._failed(self._scattered(elsewhere))
                return
            waited = human_ns(IMPATIENT_NS)
            what = "the other ranks to ask where to resume"
            if self._keeper.is_silent:
                what = "its keeper to answer"
            why = f"rank {self._who.rank} has waited {waited} more for {what}"
            self._world.journal.record("waiting", why)
            self._wait_patiently()

        self._world.timers.after(IMPATIENT_NS, still_waits)

    def _scattered(self, elsewhere: str) -> ConfigError:
        return ConfigError(
            f"rank {self._who.rank} is in job {self._who.job!r}: expected all ranks of this "
            f"training there, found {elsewhere}; give all of them the same job and arena_dir"
        )

    def delayed(self, why: str) -> None:
        """Nobody is offered anything yet."""
        if self._who.rank == 0:  # for all: what is on the screen is theirs
            self._world.journal.record("waiting", why, WARNING)

    def offered(self, offer: StateOffered) -> None:
        """Load it, and say how that went."""
        if self._restorer is not None:
            self._announce(Phase.RESTORE, offer.step)
            acts = self._restorer.load(offer)
            self._on_trainer(acts, lambda found: self._tried(offer, found))

    def _tried(self, offer: StateOffered, found: Restored | Unusable) -> None:
        match found:
            case Restored():
                self._loaded = offer
                self._keeper.loaded(offer)
            case Unusable(why=why, holds=None, unread=unread, brought=brought):
                self._keeper.unusable(offer, why, unread, brought)
            case Unusable(why=why, holds=holds) if holds is not None:
                stamp = Stamp(offer.step, offer.epoch)
                told = f"{stamp} proves no more: {why}; asking again, others may have it"
                self._world.journal.record("damaged", told, WARNING, rank=self._who.rank)
                self._ask(holds)

    def permitted(self, offer: int) -> StateOffered | None:
        """What all stand on now, and this vote is over; None when the permission is about another
        state than was loaded here: it is an older vote's."""
        loaded = self._loaded
        if loaded is None or loaded.offer != offer:
            return None
        self.end()
        return loaded

    def end(self) -> None:
        """It is over, or given up."""
        self._is_over = True
        self._keeper.leave_vote()

    def _on_trainer(self, acts: Acts[T], then: Callable[[T], None]) -> None:
        def worked(found: T | KeepstepError | None) -> None:
            if self._is_over or found is None:
                return
            if isinstance(found, KeepstepError):
                self._failed(found)
            else:
                then(found)

        self._world.trainer.act(attempted(self._while_wanted(acts)), worked)

    def _while_wanted(self, acts: Acts[T]) -> Acts[T | None]:
        """No act after this is over: what it works on may be closed by then."""
        while not self._is_over:
            try:
                next(acts)
            except StopIteration as end:
                found: T = end.value
                return found
            yield
        acts.close()
        return None


def attempted(acts: Acts[T]) -> Acts[T | KeepstepError]:
    """The same work; an error that keepstep raises on purpose is its result."""
    try:
        return (yield from acts)
    except KeepstepError as error:
        return error
