"""Last step: it is not skipped, so its capture waits until there is a slot for it.

Comes in: a rank and its driver. Goes out: nothing; it comes back when there is room, or when it has
waited long enough.
"""

from __future__ import annotations

import time

from keepstep.model.events import WARNING
from keepstep.ports import Journal
from keepstep.runtime.rank.driver import Driver
from keepstep.runtime.rank.rank import Rank

WITHIN_S = 60.0
TOLD_S = 5.0
AGAIN_S = 0.01  # what is waited for may be another rank's, which nobody tells


def wait_for_room(rank: Rank, driver: Driver, journal: Journal) -> None:
    """On the trainer's thread, before the boundary of the last step."""
    began_s, is_told = time.monotonic(), False
    while (waited_s := time.monotonic() - began_s) < WITHIN_S:
        if driver.call(rank.may_end_last_step):
            return
        if waited_s >= TOLD_S and not is_told:
            is_told = True
            why = (
                f"the last step, {rank.step + 1}, waits for a free slot: other ranks have not "
                f"captured what this one has. After {WITHIN_S:.0f} s it goes on without"
            )
            journal.record("last-step-waits", why, WARNING, step=rank.step + 1)
        driver.wait(lambda: False, AGAIN_S)
