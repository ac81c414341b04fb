"""Rounds: this node's part in measuring the links of a fleet.

Comes in: rounds of pairs, a meeting, a door that is open. Goes out: what this node measured as the
one that dials. In each round the partners wait for each other, and one that does not come costs a
bounded time and is told; nobody else waits for it.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from keepstep.core.preflight.schedule import Rounds
from keepstep.edge.preflight.link_probe import ProbeEffort, probe
from keepstep.errors import MeetingError
from keepstep.model.messages.preflight import LinkReading, LinkReadings, NodeReady
from keepstep.runtime.preflight.living import hear_living
from keepstep.runtime.preflight.meeting import FleetSeats, PreflightMeeting

PARTNER_WITHIN_S = 20.0
PAIR_WITHIN_S = 15.0


def measure_links(
    meeting: PreflightMeeting,
    seats: FleetSeats,
    rounds: Rounds,
    series: str,
    effort: ProbeEffort,
) -> list[LinkReading]:
    """All pairs of this node, in their rounds."""
    found = []
    for number, pairs in enumerate(rounds):
        for one, other in pairs:
            name = f"{series}/{number}/{one}-{other}"
            if seats.node == other:
                meeting.say(f"{name}/ready", NodeReady(other))
                meeting.hear(f"{name}/done", NodeReady, PARTNER_WITHIN_S + PAIR_WITHIN_S)
            elif seats.node == one:
                found.append(_measure(meeting, seats, other, name, effort))
    return found


def _measure(
    meeting: PreflightMeeting, seats: FleetSeats, other: int, name: str, effort: ProbeEffort
) -> LinkReading:
    mine, theirs = seats.seats[seats.node], seats.seats[other]
    ready = meeting.hear(f"{name}/ready", NodeReady, PARTNER_WITHIN_S)
    if ready is None:
        return LinkReading(seats.node, other, error=f"no word of it for {PARTNER_WITHIN_S:g} s")
    try:
        samples = probe(
            (theirs.address, theirs.port), mine.address, theirs.token, PAIR_WITHIN_S, effort
        )
    except socket.gaierror as error:
        return LinkReading(seats.node, other, error=f"{theirs.address}: {error.strerror}")
    except OSError as error:
        return LinkReading(seats.node, other, error=str(error.strerror or error))
    finally:
        meeting.say(f"{name}/done", NodeReady(seats.node))
    return LinkReading(
        seats.node,
        other,
        samples.there,
        samples.back,
        samples.round_trips,
        clock=samples.clock,
    )


def exchange(
    meeting: PreflightMeeting,
    seats: FleetSeats,
    present: Sequence[int],
    series: str,
    mine: list[LinkReading],
    within_s: float,
) -> tuple[LinkReading, ...]:
    """All nodes' measurements of a series, the same list for everybody: node 0 collects it. Raises
    MeetingError when it does not."""
    meeting.say(f"{series}/of/{seats.node}", LinkReadings(seats.node, tuple(mine)))
    if seats.node == min(present):
        names = {node: f"{series}/of/{node}" for node in present}
        heard, _ = hear_living(meeting, seats, names, LinkReadings, within_s)
        links = tuple(
            link for node in sorted(heard) for link in heard[node].links if link.one == node
        )
        meeting.say(f"{series}/all", LinkReadings(seats.node, links))
    merged = meeting.hear(f"{series}/all", LinkReadings, 2 * within_s)
    if merged is None:
        raise MeetingError(f"preflight: node {min(present)} has not told what all have measured")
    # of nodes that are not here nobody has measured anything
    return tuple(
        link
        for link in merged.links
        if link.one in present and link.other in present and link.one != link.other
    )
