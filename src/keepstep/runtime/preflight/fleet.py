"""Fleet: a preflight from the first check to the evidence, on one node or on one of several.

Comes in: a request, what earlier preflights brought, a way to meet the others. Goes out: evidence,
the same on every node, which `core/preflight/judgement.py` judges.

    all take seats -> node 0 plans -> each checks itself (nodes of one machine take turns where
    figures count) -> who was slow checks that once more -> pairs measure their links and read each
    other's clocks, suspects again with good partners -> the ring

Nobody waits without end. A node that says nothing in time is silent: node 0 says so, all go on
without it, and it is no `ok`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from keepstep.core.preflight import catalogue
from keepstep.core.preflight.catalogue import PreflightCheck, with_floors
from keepstep.core.preflight.history import changed_losses
from keepstep.core.preflight.judgement import FleetEvidence
from keepstep.core.preflight.links import suspect
from keepstep.core.preflight.schedule import all_pairs, confirming
from keepstep.core.preflight.slow_figures import both_looks, second_looks
from keepstep.edge.net.tcp import interface_of
from keepstep.edge.preflight.link_probe import ProbeEffort
from keepstep.errors import MeetingError
from keepstep.model.messages.preflight import (
    CheckOutcome,
    CheckReading,
    LinkReading,
    NodeReadings,
    NodeReady,
    PreflightHistory,
    PreflightPlan,
    RingPlace,
    SilentNodes,
)
from keepstep.ports import MeetingPlaces
from keepstep.runtime.preflight.living import hear_living
from keepstep.runtime.preflight.local_checks import (
    Efforts,
    not_begun,
    reading_of,
    run_checks,
    start_check,
)
from keepstep.runtime.preflight.meeting import FleetSeats, PreflightMeeting
from keepstep.runtime.preflight.request import PreflightRequest, plan_checks, planned_checks
from keepstep.runtime.preflight.rounds import exchange, measure_links

PLAN_WITHIN_S = 60.0
AT_LEAST_S = 60.0  # that a phase of the others may take, beside its checks
BYE_WITHIN_S = 15.0
CONFIRMATIONS = 2
MOST_ROUNDS = 31  # of a large fleet each node measures so many partners
RING_WITHIN_S = 60.0

Told = Callable[[str], None]


def check_alone(
    request: PreflightRequest, history: PreflightHistory, environ: Mapping[str, str], told: Told
) -> FleetEvidence:
    """On a single node."""
    plan = plan_checks(request, history.checks)
    checks = planned_checks(request, plan)
    until_s = _until_s(request)
    local = [check for check in checks if check.name != catalogue.RING]
    readings = [*_own(request, plan), *check_self(local, request, environ, told, until_s)]
    quantities, machines = with_floors(request.floors), {0: request.host}
    first = {0: against_past(readings, history)}
    wanted = second_looks(first, machines, quantities).get(0, frozenset())
    again = _look_again(local, wanted, request, environ, told, until_s)
    by_node, twice = both_looks(first, {0: against_past(again, history)}, quantities)
    readings = list(by_node[0])
    if catalogue.RING in plan.checks and until_s is not None and time.monotonic() > until_s:
        readings.append(not_begun(catalogue.RING))
    elif catalogue.RING in plan.checks:
        told(catalogue.RING)
        readings.append(_ring_of_one(request, environ))
    return FleetEvidence(
        hosts={0: request.host},
        machines=machines,
        planned=plan.checks,
        skipped=plan.skipped,
        quantities=quantities,
        readings={0: tuple(readings)},
        looked_twice=twice,
    )


def check_self(
    checks: list[PreflightCheck],
    request: PreflightRequest,
    environ: Mapping[str, str],
    told: Told,
    until_s: float | None = None,
) -> list[CheckReading]:
    """What has a process of its own, and concerns nobody else. until_s: no check begins after
    that."""
    local = [check for check in checks if check.name not in NO_CHILD]
    if not request.has_device and any(check.name == catalogue.PCIE for check in local):
        local = [check for check in local if check.name != catalogue.PCIE]
        skipped = [CheckReading(catalogue.PCIE, CheckOutcome.SKIPPED, "no GPU on this machine")]
    else:
        skipped = []
    return [*run_checks(local, request.efforts, environ, told, until_s), *skipped]


def _look_again(
    checks: list[PreflightCheck],
    wanted: frozenset[str],
    request: PreflightRequest,
    environ: Mapping[str, str],
    told: Told,
    until_s: float | None,
) -> list[CheckReading]:
    """At what was slow."""
    slow = [check for check in checks if check.name in wanted]
    if slow:
        told("once more, for it was slow")
    return check_self(slow, request, environ, told, until_s) if slow else []


def _until_s(request: PreflightRequest) -> float | None:
    """When the time is over that was given, by the monotonic clock."""
    return None if request.within_s is None else time.monotonic() + request.within_s


NO_CHILD = (
    catalogue.STATIC,
    catalogue.SAME,
    catalogue.CLOCKS,
    catalogue.NETWORK,
    catalogue.RING,
)


def against_past(
    readings: list[CheckReading], history: PreflightHistory
) -> tuple[CheckReading, ...]:
    """A mini-training that gives another loss than the same machine and software gave before is
    bad, though nothing stands beside it."""
    found = []
    for reading in readings:
        changed = changed_losses(history, reading)
        if changed and reading.outcome is CheckOutcome.OK:
            reading = replace(
                reading,
                outcome=CheckOutcome.BAD,
                found=f"its loss is another one than before, with the same {changed[0].kind}",
            )
        found.append(reading)
    return tuple(found)


def _own(request: PreflightRequest, plan: PreflightPlan) -> list[CheckReading]:
    return [reading for reading in request.own if reading.check in plan.checks]


def _ring_of_one(request: PreflightRequest, environ: Mapping[str, str]) -> CheckReading:
    from keepstep.edge.torch.tcp_store import host_store  # imports torch

    store = host_store((request.address, 0))
    place = RingPlace(request.address, int(store.port))
    return _ring(request.efforts, place, range(request.ranks), request.ranks, environ)


class FleetPart:
    """One node's part in a preflight of several."""

    def __init__(
        self,
        request: PreflightRequest,
        history: PreflightHistory,
        meeting: PreflightMeeting,
        seats: FleetSeats,
        environ: Mapping[str, str],
        told: Told,
    ) -> None:
        self._request, self._history, self._meeting = request, history, meeting
        self._seats, self._environ, self._told = seats, environ, told
        self._node = seats.node
        self._silent: dict[int, str] = {}
        machines = Counter(seat.machine for seat in seats.seats)
        self._turns = max(machines.values())
        self._until_s: float | None = None

    def run(self) -> FleetEvidence:
        """All of it. Raises MeetingError when node 0 is not heard of any more, or the meeting point
        is gone."""
        plan = self._hear_plan()
        checks = planned_checks(self._request, plan)
        patience_s = AT_LEAST_S + 4 * self._turns * sum(check.expects_s for check in checks)
        self._until_s = _until_s(self._request) if self._turns == 1 else None
        readings = self._check_self(plan, checks, patience_s)
        by_node = self._collect("local", readings, patience_s)
        by_node, twice = self._look_again(by_node, checks, patience_s)
        first: tuple[LinkReading, ...] = ()
        confirmed: list[tuple[LinkReading, ...]] = []
        by_pairs = [name for name in (catalogue.CLOCKS, catalogue.NETWORK) if name in plan.checks]
        if by_pairs:
            self._told(", ".join(by_pairs))
            first, confirmed = self._measure_pairs(patience_s, catalogue.NETWORK in by_pairs)
        if catalogue.RING in plan.checks:
            self._told(catalogue.RING)
            of_ring = self._collect("ring", [self._ring(first)], RING_WITHIN_S + AT_LEAST_S)
            for node, more in of_ring.items():
                by_node[node] = (*by_node.get(node, ()), *more)
        return FleetEvidence(
            hosts={node: seat.host for node, seat in enumerate(self._seats.seats)},
            machines=self._machines(),
            planned=plan.checks,
            skipped=plan.skipped,
            quantities=with_floors(self._request.floors),
            readings=by_node,
            silent=dict(self._silent),
            links=first,
            confirming=tuple(confirmed),
            looked_twice=twice,
        )

    def leave(self, is_host: bool) -> None:
        """Whoever hosts the meeting point waits, for a while, until all have read what they
        need."""
        self._meeting.say(f"bye/{self._node}", NodeReady(self._node))
        if is_host:
            names = {node: f"bye/{node}" for node in self._present()}
            hear_living(self._meeting, self._seats, names, NodeReady, BYE_WITHIN_S)

    def _present(self) -> list[int]:
        return [node for node in range(len(self._seats.seats)) if node not in self._silent]

    def _hear_plan(self) -> PreflightPlan:
        if self._node == 0:
            self._meeting.say("plan", plan_checks(self._request, self._history.checks))
        plan = self._meeting.hear("plan", PreflightPlan, PLAN_WITHIN_S)
        if plan is None:
            raise MeetingError(f"preflight: node 0 has told no plan within {PLAN_WITHIN_S:g} s")
        return plan

    def _check_self(
        self, plan: PreflightPlan, checks: list[PreflightCheck], patience_s: float
    ) -> list[CheckReading]:
        """Figures count where nobody else is at work on the machine: its nodes begin with what only
        has to be right, wait for each other, and take turns."""
        run = partial(
            check_self,
            request=self._request,
            environ=self._environ,
            told=self._told,
            until_s=self._until_s,
        )
        beside = self._of_this_machine()
        readings = [*_own(self._request, plan), *run([c for c in checks if not c.is_alone])]
        if len(beside) > 1:
            self._meeting.say(f"together/{self._node}", NodeReady(self._node))
            together = {node: f"together/{node}" for node in beside}
            hear_living(self._meeting, self._seats, together, NodeReady, patience_s)
        alone = partial(run, [check for check in checks if check.is_alone])
        readings += self._in_turn("turn", beside, patience_s, alone)
        return list(against_past(readings, self._history))

    def _in_turn(
        self,
        name: str,
        nodes: list[int],
        patience_s: float,
        check: Callable[[], list[CheckReading]],
    ) -> list[CheckReading]:
        """Behind those of these nodes, all on this machine, that come before this one."""
        before = {node: f"{name}/{node}" for node in nodes if node < self._node}
        hear_living(self._meeting, self._seats, before, NodeReady, patience_s)
        readings = check()
        if len(nodes) > 1:
            self._meeting.say(f"{name}/{self._node}", NodeReady(self._node))
        return readings

    def _look_again(
        self,
        first: dict[int, tuple[CheckReading, ...]],
        checks: list[PreflightCheck],
        patience_s: float,
    ) -> tuple[dict[int, tuple[CheckReading, ...]], frozenset[tuple[int, str]]]:
        """At what was slow, in turns as before. All know of everybody whether there is such."""
        quantities = with_floors(self._request.floors)
        wanted = second_looks(first, self._machines(), quantities)
        if not wanted:
            return first, frozenset()
        again: list[CheckReading] = []
        if self._node in wanted:
            slow = [node for node in self._of_this_machine() if node in wanted]
            given = checks, wanted[self._node], self._request, self._environ, self._told
            look = partial(_look_again, *given, self._until_s)
            again = self._in_turn("again/turn", slow, patience_s, look)
        more = self._collect("again", list(against_past(again, self._history)), patience_s)
        return both_looks(first, more, quantities)

    def _machines(self) -> dict[int, str]:
        return {node: seat.machine for node, seat in enumerate(self._seats.seats)}

    def _of_this_machine(self) -> list[int]:
        machines = self._machines()
        return [node for node, each in machines.items() if each == machines[self._node]]

    def _collect(
        self, phase: str, mine: list[CheckReading], within_s: float
    ) -> dict[int, tuple[CheckReading, ...]]:
        """What all have found. Node 0 says who has not answered, so that all know the same."""
        meeting = self._meeting
        meeting.say(f"{phase}/{self._node}", NodeReadings(self._node, tuple(mine)))
        names = {node: f"{phase}/{node}" for node in self._present()}
        if self._node == 0:
            _, gone = hear_living(meeting, self._seats, names, NodeReadings, within_s)
            meeting.say(
                f"{phase}/silent", SilentNodes({str(node): why for node, why in gone.items()})
            )
        told = meeting.hear(f"{phase}/silent", SilentNodes, within_s + AT_LEAST_S)
        if told is None:
            raise MeetingError("preflight: node 0 is not heard of any more")
        self._silent |= {int(node): why for node, why in told.nodes.items() if node.isdecimal()}
        answered = {node: name for node, name in names.items() if node not in self._silent}
        heard = meeting.hear_all(answered, NodeReadings, AT_LEAST_S)
        return {node: word.readings for node, word in heard.items()}

    def _measure_pairs(
        self, within_s: float, with_speeds: bool
    ) -> tuple[tuple[LinkReading, ...], list[tuple[LinkReading, ...]]]:
        """Without speeds: the clocks alone."""
        meeting, seats, present = self._meeting, self._seats, self._present()
        effort = ProbeEffort() if with_speeds else ProbeEffort(samples=0)
        mine = measure_links(meeting, seats, all_pairs(present)[:MOST_ROUNDS], "links", effort)
        first = exchange(meeting, seats, present, "links", mine, within_s)
        if not with_speeds:
            return first, []
        floors = with_floors(self._request.floors)
        quantities = [floors[each.name] for each in (catalogue.LINK_SPEED, catalogue.ROUND_TRIP)]
        suspicion = suspect(first, quantities)
        confirmed = []
        for turn in range(CONFIRMATIONS if suspicion.pairs else 0):
            rounds = confirming(suspicion.suspects, suspicion.good, suspicion.pairs, turn)
            series = f"confirm-{turn}"
            mine = measure_links(meeting, seats, rounds, series, effort)
            confirmed.append(exchange(meeting, seats, present, series, mine, within_s))
        return first, confirmed

    def _ring(self, links: tuple[LinkReading, ...]) -> CheckReading:
        """With all ranks of this node. Where nodes do not reach each other it would only wait."""
        if self._silent or any(link.error for link in links):
            why = "nodes do not answer, or do not reach each other"
            return CheckReading(catalogue.RING, CheckOutcome.SKIPPED, why)
        seats = self._seats.seats
        with ExitStack() as undo:
            if self._node == 0:
                from keepstep.edge.torch.meeting_place import StoreMeetingPlaces  # imports torch

                places = StoreMeetingPlaces()
                undo.callback(places.close)
                self._meeting.say("ring/place", _open_ring(places, seats[0].address))
            place_heard = self._meeting.hear("ring/place", RingPlace, AT_LEAST_S)
            if place_heard is None or place_heard.port == 0:
                why = "node 0 told no place to meet" if place_heard is None else place_heard.error
                return CheckReading(catalogue.RING, CheckOutcome.UNKNOWN, why)
            before = sum(seat.ranks for seat in seats[: self._node])
            ranks = range(before, before + seats[self._node].ranks)
            world = sum(seat.ranks for seat in seats)
            environ = _with_interface(self._environ, seats[self._node].address)
            return _ring(self._request.efforts, place_heard, ranks, world, environ)


def _open_ring(places: MeetingPlaces, address: str) -> RingPlace:
    try:
        return RingPlace(address, places.open(address, 0))
    except MeetingError as error:
        return RingPlace(address, 0, str(error))


def _with_interface(environ: Mapping[str, str], address: str) -> dict[str, str]:
    """Gloo takes the address of the machine's name unless it is told an interface."""
    interface = interface_of(address)
    if "GLOO_SOCKET_IFNAME" in environ or not interface:
        return dict(environ)
    return {**environ, "GLOO_SOCKET_IFNAME": interface}


def _ring(
    efforts: Efforts, place: RingPlace, ranks: range, world: int, environ: Mapping[str, str]
) -> CheckReading:
    """All ranks of this node at once; the worst of their readings, with the samples of the
    slowest."""
    given = {
        **efforts.of_check(catalogue.RING),
        "address": place.address,
        "port": place.port,
        "world": world,
        "within_s": RING_WITHIN_S / 2,
    }
    children = []
    try:
        for rank in ranks:
            children.append(start_check(catalogue.RING, {**given, "rank": rank}, environ))
    except OSError as error:
        for child in children:
            child.kill()
        found = f"no process can be started: {error.strerror}"
        return CheckReading(catalogue.RING, CheckOutcome.UNKNOWN, found)
    ends = [child.end(RING_WITHIN_S) for child in children]
    readings = [reading_of(catalogue.RING, end) for end in ends]
    order = [CheckOutcome.BAD, CheckOutcome.UNKNOWN, CheckOutcome.OK, CheckOutcome.SKIPPED]
    worst = min(readings, key=lambda reading: order.index(reading.outcome))
    slowest = min(
        (reading.samples for reading in readings if reading.samples),
        key=lambda samples: sorted(samples[0].values)[len(samples[0].values) // 2],
        default=(),
    )
    return replace(worst, samples=slowest, took_ms=max(end.took_ms for end in ends))
