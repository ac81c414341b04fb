"""Judgement: from all that the nodes of a preflight have measured to what is wrong, and where.

Comes in: readings of every node, the pairs' measurements, who said nothing. Goes out: findings,
each with node, check, reason and remedy, and an outcome for each check of each node.

The verdict is a function of the evidence alone, so all nodes come to the same one. What was asked
for and gave no answer is `unknown`, and keeps the fleet from passing: silence is never `ok`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from keepstep.core.preflight.agreement import dissent
from keepstep.core.preflight.catalogue import (
    BY_CHECK,
    CLOCK_OFFSET,
    CLOCKS,
    LINK_SPEED,
    NETWORK,
    ROUND_TRIP,
    SAME,
    STATIC,
    Quantity,
    in_words,
)
from keepstep.core.preflight.clock_gaps import FleetClocks, judge_clocks
from keepstep.core.preflight.links import FaultSide, LinkFault, faults, suspect
from keepstep.core.preflight.outliers import FEWEST_NODES, middle_of
from keepstep.core.preflight.slow_figures import samples_of, slow_figures
from keepstep.model.messages.preflight import CheckOutcome, CheckReading, LinkReading
from keepstep.model.units import counted, first_names

FOUND, UNKNOWN = 1, 2  # exit codes
LONGEST_VALUE = 60
SHARED_RATIO = 0.3  # more nodes than this do not break by themselves


@dataclass(frozen=True, slots=True)
class FleetEvidence:
    """hosts: by node. machines: which machine each node is on. planned: the checks that all were
    to run. readings: of each node that gave any. silent: nodes that did not answer, and why.
    confirming: one series of links after the other. quantities: with their floors. looked_twice:
    the nodes and checks that had a second look; the readings are of both."""

    hosts: Mapping[int, str]
    machines: Mapping[int, str]
    planned: tuple[str, ...]
    skipped: Mapping[str, str]
    quantities: Mapping[str, Quantity]
    readings: Mapping[int, tuple[CheckReading, ...]]
    silent: Mapping[int, str] = field(default_factory=dict)
    links: tuple[LinkReading, ...] = ()
    confirming: tuple[tuple[LinkReading, ...], ...] = ()
    looked_twice: frozenset[tuple[int, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class PreflightFinding:
    """`nodes`: where, one or several that nobody can tell apart."""

    check: str
    outcome: CheckOutcome
    nodes: tuple[int, ...]
    found: str
    why: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class PreflightVerdict:
    """outcomes: by check and node. figures: by quantity and node. notes: what was not compared."""

    findings: tuple[PreflightFinding, ...]
    outcomes: Mapping[str, Mapping[int, CheckOutcome]]
    figures: Mapping[str, Mapping[int, int]]
    notes: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """0: all that was asked for is in order. 1: a defect is named. 2: none is, and something
        gave no answer."""
        found = {finding.outcome for finding in self.findings}
        if CheckOutcome.BAD in found:
            return FOUND
        return UNKNOWN if CheckOutcome.UNKNOWN in found else 0

    def is_bad(self, node: int) -> bool:
        """Whether a defect of that node is named."""
        return any(
            node in finding.nodes and finding.outcome is CheckOutcome.BAD
            for finding in self.findings
        )


def judge(evidence: FleetEvidence) -> PreflightVerdict:
    """All that is wrong, in the order of the catalogue."""
    found = [
        *_said(evidence),
        *_silent(evidence),
        *_slow(evidence),
        *_different(evidence),
        *_clocks(evidence),
        *_network(evidence),
    ]
    order = {name: place for place, name in enumerate(BY_CHECK)}
    found.sort(key=lambda finding: (order.get(finding.check, -1), finding.nodes))
    return PreflightVerdict(
        tuple(found), _outcomes(evidence, found), _figures(evidence), _notes(evidence, found)
    )


def _said(evidence: FleetEvidence) -> Iterator[PreflightFinding]:
    """What checks have said themselves."""
    for node, readings in sorted(evidence.readings.items()):
        for reading in readings:
            if reading.outcome in (CheckOutcome.BAD, CheckOutcome.UNKNOWN):
                yield _finding(
                    reading.check, (node,), reading.found, reading.outcome, reading.why, reading.fix
                )
            elif reading.outcome is CheckOutcome.OK and _measured_nothing(reading):
                found = "it says that all is well, and has measured nothing"
                yield _finding(reading.check, (node,), found, CheckOutcome.UNKNOWN)


def _measured_nothing(reading: CheckReading) -> bool:
    """Where the check is one of figures that each node measures by itself."""
    check = BY_CHECK.get(reading.check)
    measures = check is not None and check.quantities and check.name not in (CLOCKS, NETWORK)
    return bool(measures) and not reading.samples


def _silent(evidence: FleetEvidence) -> Iterator[PreflightFinding]:
    for node, why in sorted(evidence.silent.items()):
        yield PreflightFinding(
            NETWORK if NETWORK in evidence.planned else STATIC,
            CheckOutcome.UNKNOWN,
            (node,),
            f"it gave no answer: {why}",
            "a node that does not answer now will not answer the job",
            "look whether keepstep preflight still runs there, and at its output",
        )
    for node, readings in sorted(evidence.readings.items()):
        given = {reading.check for reading in readings}
        for name in evidence.planned:
            by_pairs = name in (CLOCKS, NETWORK, SAME)
            if name not in given and not by_pairs and node not in evidence.silent:
                yield _finding(
                    name, (node,), "it was asked for and not answered", CheckOutcome.UNKNOWN
                )


def _slow(evidence: FleetEvidence) -> Iterator[PreflightFinding]:
    for slow in slow_figures(evidence.readings, evidence.machines, evidence.quantities):
        twice = (slow.node, slow.check) in evidence.looked_twice
        found = f"{slow.found}; measured twice" if twice else slow.found
        yield _finding(slow.check, (slow.node,), found)


def _different(evidence: FleetEvidence) -> Iterator[PreflightFinding]:
    values: dict[tuple[str, str, str], dict[int, str]] = defaultdict(dict)
    for node, readings in evidence.readings.items():
        for reading in readings:
            for trait in reading.traits:
                values[reading.check, trait.name, trait.kind][node] = trait.value
    for (check, name, _), by_node in sorted(values.items()):
        differing = dissent(by_node)
        if differing is None:
            continue
        camps = "; ".join(
            f"{_shown(value) or 'none'} on {_nodes(evidence, nodes)}"
            for value, nodes in differing.camps
        )
        undecided = "" if differing.is_decided else ": who is right, nobody can tell"
        yield _finding(check, differing.nodes, f"{name} differs: {camps}{undecided}")


def _fleet_clocks(evidence: FleetEvidence) -> FleetClocks | None:
    """None: nobody was to read them."""
    nodes = [node for node in evidence.hosts if node not in evidence.silent]
    if CLOCKS not in evidence.planned or len(evidence.hosts) < 2:
        return None
    limit_ns = evidence.quantities[CLOCK_OFFSET.name].floor
    return judge_clocks(nodes, [*evidence.links, *_again(evidence)], limit_ns)


def _clocks(evidence: FleetEvidence) -> Iterator[PreflightFinding]:
    clocks = _fleet_clocks(evidence)
    if clocks is None:
        return
    measure, limit_ns = CLOCK_OFFSET.measure, evidence.quantities[CLOCK_OFFSET.name].floor
    limit = in_words(measure, limit_ns)

    def told(node: int) -> str:
        gap = clocks.gaps[node]
        way = "ahead" if gap.ahead_ns > 0 else "behind"
        return (
            f"{in_words(measure, abs(gap.ahead_ns))} {way}, known to "
            f"{in_words(measure, gap.within_ns)}"
        )

    if not clocks.is_decided:
        camps = "; ".join(f"node {node} {told(node)}" for node in clocks.off[:8])
        undecided = f"the clocks are more than {limit} apart: {camps}"
        yield _finding(CLOCKS, clocks.off, f"{undecided}: who is right, nobody can tell")
    else:
        for node in clocks.off:
            found = f"its clock is {told(node)}, against the median; at most {limit} passes"
            yield _finding(CLOCKS, (node,), found)
    for node in clocks.unsure:
        found = f"its clock may be off: {told(node)}; at most {limit} passes"
        yield _finding(CLOCKS, (node,), found, CheckOutcome.UNKNOWN)
    for node in clocks.unseen:
        found = "nobody could read its clock"
        yield _finding(CLOCKS, (node,), found, CheckOutcome.UNKNOWN)


def _again(evidence: FleetEvidence) -> Iterator[LinkReading]:
    for series in evidence.confirming:
        yield from series


def _network(evidence: FleetEvidence) -> Iterator[PreflightFinding]:
    if not evidence.links or NETWORK not in evidence.planned:
        return
    quantities = [evidence.quantities[each.name] for each in (LINK_SPEED, ROUND_TRIP)]
    suspicion = suspect(evidence.links, quantities)
    accused: set[tuple[int, ...]] = set()
    for quantity in quantities:
        for fault in faults(evidence.links, evidence.confirming, quantity, suspicion):
            if fault.nodes not in accused:  # a slow link has a long way round, too
                accused.add(fault.nodes)
                yield _finding(NETWORK, fault.nodes, _of_link(evidence, fault, quantity))


def _of_link(evidence: FleetEvidence, fault: LinkFault, quantity: Quantity) -> str:
    times = f"{1 + len(evidence.confirming)} times"
    usual = "" if fault.usual is None else f", {in_words(quantity.measure, fault.usual)} is usual"
    measured = f"{quantity.name} {in_words(quantity.measure, fault.value)} at best{usual}"
    if not fault.value:
        measured = f"no connection ({fault.error})" if fault.error else "no connection"
    if fault.side is FaultSide.LINK:
        ends = _nodes(evidence, fault.nodes)
        return f"the link between {ends} is slow, and neither with others: {measured}"
    what = quantity.name if fault.side is FaultSide.BOTH else f"it {fault.side.value} slowly"
    return f"{what} with every sound partner, {times}: {measured}"


def _finding(
    check: str,
    nodes: tuple[int, ...],
    found: str,
    outcome: CheckOutcome = CheckOutcome.BAD,
    why: str = "",
    fix: str = "",
) -> PreflightFinding:
    """With the catalogue's reason and remedy where there is no better one. What gave no answer has
    neither."""
    known = BY_CHECK.get(check)
    if known is None or outcome is CheckOutcome.UNKNOWN:
        return PreflightFinding(check, outcome, nodes, found, why, fix)
    return PreflightFinding(check, outcome, nodes, found, why or known.why, fix or known.fix)


def _outcomes(
    evidence: FleetEvidence, findings: list[PreflightFinding]
) -> dict[str, dict[int, CheckOutcome]]:
    table: dict[str, dict[int, CheckOutcome]] = {}
    for name in BY_CHECK:
        if name not in evidence.planned:
            continue
        row = table.setdefault(name, {})
        for node in sorted(evidence.hosts):
            given = [r.outcome for r in evidence.readings.get(node, ()) if r.check == name]
            bad = CheckOutcome.UNKNOWN if node in evidence.silent else CheckOutcome.OK
            row[node] = given[0] if given else bad
    for finding in findings:
        for node in finding.nodes:
            row = table.setdefault(finding.check, {})
            if row.get(node) is not CheckOutcome.BAD:
                row[node] = finding.outcome
    return table


def _figures(evidence: FleetEvidence) -> dict[str, dict[int, int]]:
    found = {
        name: {node: middle_of(values) for node, values in sorted(samples.items())}
        for name in evidence.quantities
        if (samples := samples_of(evidence.readings, name))
    }
    for name in (LINK_SPEED.name, ROUND_TRIP.name):
        by_node: dict[int, list[int]] = defaultdict(list)
        for reading in evidence.links:
            way = [*reading.there_bytes_per_s, *reading.back_bytes_per_s]
            values = way if name == LINK_SPEED.name else list(reading.round_trip_ns)
            by_node[reading.one] += values
            by_node[reading.other] += values
        of_links = {node: middle_of(values) for node, values in sorted(by_node.items()) if values}
        if of_links:
            found[name] = of_links
    if (clocks := _fleet_clocks(evidence)) is not None and clocks.gaps:
        found[CLOCK_OFFSET.name] = {n: abs(gap.ahead_ns) for n, gap in clocks.gaps.items()}
    return found


def _notes(evidence: FleetEvidence, findings: list[PreflightFinding]) -> tuple[str, ...]:
    left_out: dict[str, list[str]] = defaultdict(list)
    for name, why in evidence.skipped.items():
        left_out[why].append(name)
    notes = [
        f"{', '.join(names)} {'was' if len(names) == 1 else 'were'} left out: {why}"
        for why, names in left_out.items()
    ]
    if len(evidence.hosts) < FEWEST_NODES:
        notes.append(
            f"{counted(len(evidence.hosts), 'node')}: no fleet to compare with, figures are held "
            "against floors alone"
        )
    shared = [m for m, count in Counter(evidence.machines.values()).items() if count > 1]
    if shared:
        notes.append("nodes share a machine: they took turns, and step times are not compared")
    for name in BY_CHECK:
        of_check = (f for f in findings if f.check == name and f.outcome is CheckOutcome.BAD)
        bad = {node for finding in of_check for node in finding.nodes}
        if len(evidence.hosts) >= FEWEST_NODES and len(bad) > SHARED_RATIO * len(evidence.hosts):
            notes.append(
                f"{name} fails on {len(bad)} of {len(evidence.hosts)} nodes: look for a cause that "
                "they share, or a floor that is too high, before nodes are replaced"
            )
    return tuple(notes)


def _nodes(evidence: FleetEvidence, nodes: tuple[int, ...]) -> str:
    return first_names([f"node {node} ({evidence.hosts.get(node, '?')})" for node in nodes])


def _shown(value: str) -> str:
    return value if len(value) <= LONGEST_VALUE else f"{value[:LONGEST_VALUE]}..."
