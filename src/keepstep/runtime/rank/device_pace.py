"""Device pace: a trainer that is ahead of its device waits for the last snapshot.

The host orders a step in less time than a device takes for it, and may come to a boundary while the
device is many steps behind. A snapshot is of the moment at which the *device* comes by. It would be
under way for as many boundaries as the host is ahead, and each of them would find no slot free:
seen on a device, 2 of 16 steps were captured. So the trainer waits at the boundary until the last
snapshot is sealed, for as long as the device has something left to do. A device never stands idle
for it, and a trainer that is not ahead does not wait.

Comes in: a rank, its driver, the live state. Goes out: nothing; it comes back when the trainer may
go on.
"""

from __future__ import annotations

from keepstep.ports import LiveState
from keepstep.runtime.rank.driver import Driver
from keepstep.runtime.rank.rank import Rank

AGAIN_S = 0.001  # nobody tells that a device has nothing left to do


def wait_for_snapshot(rank: Rank, driver: Driver, live: LiveState) -> None:
    """On the trainer's thread, before a step's boundary."""
    is_behind = live.device_behind()
    if is_behind is None:
        return
    while is_behind() and driver.call(rank.awaits_snapshot):
        driver.wait(lambda: False, AGAIN_S)
