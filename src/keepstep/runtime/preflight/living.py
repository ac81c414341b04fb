"""Living: the words of nodes that are waited for, as long as they are there to say them.

Comes in: whose words are awaited, where those nodes listen. Goes out: the words, and who is gone. A
process that was killed listens no more, so nobody waits for it any longer; one that hangs still
does, and is waited for until the limit.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import TypeVar

from keepstep.model.messages.preflight import PreflightSeat
from keepstep.runtime.preflight.meeting import FleetSeats, PreflightMeeting

LOOK_EVERY_S = 3.0
CONNECTS_WITHIN_S = 3.0
TRIES = 3  # a machine that is busy or far may miss one

Word = TypeVar("Word")


def hear_living(
    meeting: PreflightMeeting,
    seats: FleetSeats,
    names: Mapping[int, str],
    kind: type[Word],
    within_s: float,
) -> tuple[dict[int, Word], dict[int, str]]:
    """Words by node, and why each other one is given up."""
    begun_s = time.monotonic()
    missed = dict.fromkeys(names, 0)
    gone: dict[int, str] = {}
    found: dict[int, Word] = {}
    while True:
        left_s = begun_s + within_s - time.monotonic()
        awaited = {n: name for n, name in names.items() if n not in gone and n not in found}
        found |= meeting.hear_all(awaited, kind, max(0.0, min(left_s, LOOK_EVERY_S)))
        missing = [node for node in awaited if node not in found]
        if not missing:
            return found, gone
        if left_s <= 0:
            why = f"it said nothing for {within_s:.0f} s"
            return found, gone | dict.fromkeys(missing, why)
        for node in missing:
            is_there = node == seats.node or listens(seats.seats[node])
            missed[node] = 0 if is_there else missed[node] + 1
            if missed[node] == TRIES:
                gone[node] = "its process is gone: it listens no more"


def listens(seat: PreflightSeat) -> bool:
    """Whether it accepts a connection."""
    try:
        socket.create_connection((seat.address, seat.port), CONNECTS_WITHIN_S).close()
    except OSError:
        return False
    return True
