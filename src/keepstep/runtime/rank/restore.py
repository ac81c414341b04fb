"""Restore: an offered state into the live objects, proven before and after.

Comes in: the rank's slots, and what its keeper offers. Goes out: the live state, or why the offer
cannot be used here. A source that does not prove is refused, and the next one is offered to all;
what had proven here and does no more may be had from others. What has another shape, or is changed
by the program as it loads, is an error and removes nothing. Decides nothing: `core/resume/vote.py`
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from keepstep.edge.shm.whole import whole
from keepstep.errors import DamageError, IdentityError, KeeperError, LayoutError, StoreError
from keepstep.model.events import WARNING
from keepstep.model.messages.keeper_rank import StateOffered
from keepstep.model.snapshot import Stamp
from keepstep.model.units import human_ns
from keepstep.ports import Acts
from keepstep.runtime.rank.capture import Capture
from keepstep.runtime.rank.holdings import Holdings
from keepstep.runtime.rank.world import RankWorld

SHOWN_DIFFERENCES = 5


@dataclass(frozen=True, slots=True)
class Restored:
    """The offer is loaded and proven, and what is newer is forgotten, unless it is to stay until
    all may go."""

    stamp: Stamp


@dataclass(frozen=True, slots=True)
class Unusable:
    """The offer cannot be used here; another source may do. `holds`: what this rank asked with
    proves no more, and this is what it still has; None when it never had it. `unread`: it may be
    good, the store did not say. `brought`: it was brought here and does not prove; the holder's
    may."""

    why: str
    holds: tuple[Stamp, ...] | None = None
    unread: bool = False
    brought: bool = False


class Restorer:
    """For one vote. `in_midst`: others of the job are in the middle of it, in their processes:
    nobody starts afresh then. `wants_fresh`: the run is to start over; what it gives up stays until
    all do."""

    def __init__(
        self,
        world: RankWorld,
        capture: Capture,
        holdings: Holdings,
        in_midst: bool,
        wants_fresh: bool = False,
    ) -> None:
        self._world = world
        self._capture = capture
        self._slot_of = dict(holdings.slot_of)
        self._has_loaded = False  # anything, into the live state
        self._in_midst = in_midst
        self._wants_fresh = wants_fresh

    def load(self, offer: StateOffered) -> Acts[Restored | Unusable]:
        """Raises LayoutError (what is there has another shape, or does not stay as it was loaded),
        KeeperError (there is no going on
        in this process)."""
        clock = self._world.clock
        began_ns = clock.monotonic_ns()
        stamp = Stamp(offer.step, offer.epoch)
        if offer.source == "memory":
            found = yield from self._load_memory(stamp, offer.keeps_newer)
        elif offer.source == "store":
            found = self._load_checkpoint(stamp)
        else:
            found = self._start_fresh(offer.why)
        if isinstance(found, Unusable):
            return found
        for remark in found:
            self._world.journal.record("restore-remark", remark, WARNING)
        took_ns = clock.monotonic_ns() - began_ns
        why = f"loaded and proven in {human_ns(took_ns)}"
        self._world.journal.record("loaded", why, step=offer.step, duration_ns=took_ns)
        return Restored(stamp)

    def _load_memory(self, stamp: Stamp, keeps_newer: bool) -> Acts[list[str] | Unusable]:
        was_asked_with = stamp in self._slot_of
        if not was_asked_with:  # other nodes had it, and the keeper has brought it
            again = yield from self._capture.look_again()
            self._slot_of.update(again.slot_of)
        if stamp not in self._slot_of:
            why = f"{stamp} should have been fetched and is not in any slot"
            return Unusable(why, brought=True)
        index = self._slot_of[stamp]
        loaded = yield from self._load_slot(stamp, index)
        if isinstance(loaded, Unusable):
            del self._slot_of[stamp]
            yield from self._capture.could_not_load(index, loaded.why)
            if not was_asked_with:
                return replace(loaded, brought=True)
            return Unusable(loaded.why, tuple(sorted(self._slot_of)))
        self._capture.forget_newer(stamp, keeps_newer, index)
        return loaded

    def _load_slot(self, stamp: Stamp, index: int) -> Acts[list[str] | Unusable]:
        own, live = self._capture.slot(index), self._world.live
        try:
            with whole(self._world.memory, own) as slot:
                header, layout = slot.verify(threads=self._world.proof_threads)
                if header.stamp != stamp:
                    raise IdentityError(
                        f"{slot.path}: expected {stamp} of epoch {stamp.epoch}, found "
                        f"{header.stamp} of epoch {header.stamp.epoch}"
                    )
                yield
                self._has_loaded = True
                remarks = live.load(slot, header, layout)
                yield
                wrong = live.differing(slot, header, layout)
        except (DamageError, LookupError) as error:
            return Unusable(str(error))
        if wrong:
            raise LayoutError(_changed_by_program(stamp, wrong))
        return remarks

    def _load_checkpoint(self, stamp: Stamp) -> list[str] | Unusable:
        try:
            remarks = self._world.live.load_checkpoint(stamp.step)
        except DamageError as error:
            return Unusable(str(error))
        except StoreError as error:
            return Unusable(str(error), unread=True)
        self._has_loaded = True
        return remarks

    def _start_fresh(self, why: str) -> list[str]:
        if self._in_midst:
            raise KeeperError(
                f"{why}: that is not possible in the middle of a job, all ranks have to start anew"
            )
        if self._has_loaded:
            raise KeeperError(
                f"{why}: this process has loaded a state before, so it cannot start fresh; it has "
                "to be started anew"
            )
        return []


def _changed_by_program(stamp: Stamp, wrong: Sequence[str]) -> str:
    """What to tell a person when an intact snapshot was loaded and the live state is another."""
    shown = "; ".join(wrong[:SHOWN_DIFFERENCES])
    more = f"; and {len(wrong) - SHOWN_DIFFERENCES} more" if len(wrong) > SHOWN_DIFFERENCES else ""
    return (
        f"the snapshot of {stamp} is intact, and after loading it {len(wrong)} of its tensors are "
        f"not as saved: {shown}{more}. Something in the program changes them as they load (a load "
        "hook, a load_state_dict of its own). The snapshot is kept: mend that, or use another job "
        "name, or start over with KEEPSTEP_FRESH=1"
    )
