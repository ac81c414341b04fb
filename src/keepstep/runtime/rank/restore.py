"""Resuming: how a rank comes to stand where all others stand: it proves what it holds, votes, loads
what was offered and compares.

Comes in: the rank's slots, and what its keeper offers. Goes out: the live state, a step and an
epoch. A source that does not prove is refused, and the next one is offered to all (what had proven
here and does no more may be had from others); what has another shape is an error and removes
nothing. Decides nothing: `core/resume/vote.py` does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from keepstep.config import Settings
from keepstep.core.resume.vote import Offer
from keepstep.edge.os.journal import Journal
from keepstep.edge.shm.status_page import StatusPage
from keepstep.edge.torch import checkpoint, restore
from keepstep.edge.torch.state import Protected
from keepstep.errors import DamageError, KeeperError, StoreError
from keepstep.model.snapshot import Phase, Stamp
from keepstep.model.units import human_ns
from keepstep.runtime.rank.capture import Capturing, Identity, snapshot_of
from keepstep.runtime.rank.keeper_client import Damaged, Link, Unusable
from keepstep.runtime.rank.regroup import Peers


class Resuming:
    """`announce(phase, step)`: what the trainer does now."""

    def __init__(
        self,
        settings: Settings,
        who: Identity,
        protected: Protected,
        page: StatusPage,
        capturing: Capturing,
        link: Link,
        peers: Peers,
        journal: Journal,
        announce: Callable[[Phase, int], None],
    ) -> None:
        self._settings, self._who, self._protected, self._page = settings, who, protected, page
        self._capturing, self._link, self._peers, self._journal, self._announce = (
            capturing,
            link,
            peers,
            journal,
            announce,
        )

    def resume(self, given_up: Callable[[], bool]) -> tuple[int, int] | None:
        """Stand where all others stand: the step that is loaded, and the epoch that begins; None
        when it was given up.

        Raises LayoutError (what is there has another shape), KeeperError (there is no going on in
        this process).
        """
        self._link.forget_vote()
        last = self._page.read()
        incarnation = last.incarnation + 1 if last else 1
        self._capturing.incarnation = incarnation
        self._page.publish(
            rank=self._who.rank,
            world_size=self._who.world_size,
            pid=os.getpid(),
            incarnation=incarnation,
            epoch=last.epoch if last else 0,
            phase=Phase.RESTORE,
            # Until the vote is over the page goes on telling what the last life had reached: it
            # says what was lost.
            completed_step=last.completed_step if last else -1,
            decided_step=-1,
            slots=(),
        )
        holds, foreign = self._capturing.verified()
        agreed = self._link.agree(
            incarnation, set(holds), foreign, lambda o: self._load(o, holds), given_up
        )
        if agreed is None:
            return None
        offer, epoch = agreed
        step = offer.stamp.step
        self._page.publish(
            epoch=epoch, phase=Phase.STARTING, step=step, completed_step=step, decided_step=step
        )
        if offer.source != "fresh":
            self._journal.record(
                "restored",
                f"restored step {step} from {offer.source}: {offer.why}",
                step=step,
                source=offer.source,
            )
        return step, epoch

    def _load(self, offer: Offer, holds: dict[Stamp, int]) -> None:
        began_ns = time.monotonic_ns()
        self._announce(Phase.RESTORE, offer.stamp.step)
        remarks: list[str] = []
        if offer.source == "memory":
            own = offer.stamp in holds
            if not own:  # other nodes had it, and the keeper has brought it
                holds.update(self._capturing.look_again())
            if offer.stamp not in holds:
                raise Unusable(f"{offer.stamp} was to be brought here and is not in any slot")
            try:
                remarks = self._load_memory(offer.stamp, holds[offer.stamp])
            except Unusable as error:
                if not own:
                    raise
                del holds[offer.stamp]
                raise Damaged(str(error), set(holds)) from error
            self._capturing.forget_newer(offer.stamp)
        elif offer.source == "store":
            assert self._settings.store is not None
            try:
                remarks = checkpoint.load(
                    self._settings.store,
                    offer.stamp.step,
                    self._who.rank,
                    self._who.world_size,
                    self._protected,
                )
            except (DamageError, StoreError) as error:
                raise Unusable(str(error)) from error
            self._capturing.forget_newer(None)
        else:
            if self._peers.lost or self._peers.newcomer:
                raise KeeperError(
                    f"{offer.why}: that cannot be had in the middle of a job, all ranks have "
                    "to start anew"
                )
            self._capturing.forget_newer(None)
        for remark in remarks:
            self._journal.record("restore-remark", remark)
        took_ns = time.monotonic_ns() - began_ns
        self._journal.record(
            "loaded",
            f"loaded and proved in {human_ns(took_ns)}",
            step=offer.stamp.step,
            duration_ns=took_ns,
        )

    def _load_memory(self, stamp: Stamp, index: int) -> list[str]:
        try:
            slot, header, layout = snapshot_of(self._capturing, stamp, index)
        except (DamageError, LookupError) as error:
            raise Unusable(str(error)) from error
        remarks = restore.apply(
            self._protected, restore.open_snapshot(self._protected, slot, header, layout)
        )
        wrong = restore.prove(self._protected, slot, layout)
        if wrong:
            raise Unusable(
                f"after loading, {len(wrong)} tensors differ from the snapshot: "
                f"{', '.join(wrong[:5])}"
            )
        try:
            # what was loaded is what lies there: prove once more that what lies there is what was
            # sealed
            slot.verify()
        except DamageError as error:
            raise Unusable(str(error)) from error
        return remarks
