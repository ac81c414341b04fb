"""Monte Carlo: what a policy is worth on a cluster, failure by failure.

Comes in: a cluster, policies, days, seeds. Goes out: for each policy and seed where the time went.
Statistical: it moves no bytes and runs no protocol; what a failure costs is
`core/economics/costs.py`, whom it can take with it is the real placement, and whether memory
survives a set of lost nodes is asked of `core/redundancy/survival.py`, node by node.

How it counts. Failures are Poisson processes on the clock, drawn once a seed, so that policies are
compared on the same failures. Training makes `pace_ratio` of work a second; a failure sets the work
back to the newest state the policy can reach. One that strikes during a recovery starts it anew,
together with what is already lost. Every lost node orders a replacement; whoever needs nodes takes
the first to arrive, idle spares being there already.

Invariant: useful + lost + stalled + down = the days asked for.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from keepstep.core.economics.costs import Charges, ClusterPolicy, charges
from keepstep.core.redundancy.placement import place
from keepstep.core.redundancy.survival import out_of_reach
from keepstep.errors import ConfigError
from keepstep.model.cluster import DAY_S, Cluster, FailureKind, Scope
from keepstep.model.topology import Group, Placement


@dataclass(frozen=True, slots=True)
class DrawnFailure:
    """`at_s` on the clock; of a rack, `node` is any of its nodes."""

    at_s: float
    kind: FailureKind
    node: int


@dataclass(slots=True)
class WalkOutcome:
    """Where the time of one seed went, in seconds of the job, and from where it recovered.
    `redone_steps`: completed ones; `lost_s` counts the one under way too."""

    policy: str
    seed: int
    failures: int = 0
    redone_steps: int = 0
    useful_s: float = 0.0
    lost_s: float = 0.0
    stalled_s: float = 0.0
    down_s: float = 0.0
    recovered: dict[str, int] = field(default_factory=lambda: {"own": 0, "peers": 0, "store": 0})

    @property
    def total_s(self) -> float:
        return self.useful_s + self.lost_s + self.stalled_s + self.down_s

    @property
    def effective_ratio(self) -> float:
        return self.useful_s / self.total_s


@dataclass(frozen=True, slots=True)
class Case:
    """A policy made ready for a cluster."""

    name: str
    spares: int
    charges: Charges
    group_of: tuple[Group, ...]  # by node; empty when memory holds nothing
    placement: Placement | None


def prepare(cluster: Cluster, policy: ClusterPolicy) -> Case:
    """Raises ConfigError when there are too few nodes or racks, or too little memory."""
    spares = cluster.spares if policy.spares is None else policy.spares
    if policy.scheme is None:
        return Case(str(policy), spares, charges(cluster, policy, 0.0), (), None)
    placement = place(policy.scheme, cluster.topology())
    groups = {node: group for group in placement.groups for node in group.members}
    by_node = tuple(groups[node] for node in range(cluster.nodes))
    return Case(
        str(policy),
        spares,
        charges(cluster, policy, placement.two_slots_ratio),
        by_node,
        placement,
    )


def draw(cluster: Cluster, days: float, seed: int) -> list[DrawnFailure]:
    """All failures of one seed, in order."""
    random = Random(seed)
    found = []
    for kind in cluster.failures:
        per_s = kind.per_node_day * cluster.nodes / DAY_S
        at_s = random.expovariate(per_s) if per_s > 0 else days * DAY_S
        while at_s < days * DAY_S:
            found.append(DrawnFailure(at_s, kind, random.randrange(cluster.nodes)))
            at_s += random.expovariate(per_s)
    return sorted(found, key=lambda failure: failure.at_s)


def run(
    cluster: Cluster,
    cases: Sequence[Case],
    days: float,
    seeds: int,
    first_seed: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> list[list[WalkOutcome]]:
    """For each case its outcome of every seed; `tick` after each. Raises ConfigError."""
    if not 0 < days <= MOST_DAYS or seeds < 1:
        raise ConfigError(
            f"days, seeds: expected more than 0 and at most {MOST_DAYS:g} days and 1 or more "
            f"seeds, found {days:g} and {seeds}"
        )
    expected = cluster.failures_per_day * days
    if expected > MOST_FAILURES:
        raise ConfigError(
            f"failures: expected at most {MOST_FAILURES:,.0f} a seed, found about "
            f"{expected:,.0f} in {days:g} days"
        )
    outcomes: list[list[WalkOutcome]] = [[] for _ in cases]
    for seed in range(first_seed, first_seed + seeds):
        failures = draw(cluster, days, seed)
        for case, found in zip(cases, outcomes, strict=True):
            found.append(walk(cluster, case, failures, days, seed))
            tick()
    return outcomes


def walk(
    cluster: Cluster, case: Case, failures: Sequence[DrawnFailure], days: float, seed: int
) -> WalkOutcome:
    """One policy through these failures, which come in order."""
    return _Walk(cluster, case, seed).through(failures, days * DAY_S)


MOST_DAYS = 3660.0
MOST_FAILURES = 1e6


class _Walk:
    """One policy through one seed's failures. Work is counted in seconds of undisturbed
    training."""

    def __init__(self, cluster: Cluster, case: Case, seed: int) -> None:
        self.cluster, self.case, self.cost = cluster, case, case.charges
        self.outcome = WalkOutcome(case.name, seed)
        self.now_s = 0.0
        self.work_s = 0.0  # when training last began, or will begin
        self.up_s = 0.0  # from then on everybody trains
        self.stored_s = 0.0  # the newest checkpoint's work
        self.ready_s = 0.0  # when the nodes of the recovery under way are there
        self.lost: set[int] = set()  # whose memory has not been made good
        self.fetch_s = 0.0  # of the recovery under way, from the farthest source it needs
        self.from_store = False  # the recovery under way has nothing in memory
        self.arrivals = [0.0] * case.spares  # a heap: spares that idle, replacements on their way

    def through(self, failures: Sequence[DrawnFailure], end_s: float) -> WalkOutcome:
        for failure in failures:
            work_s = self._until(failure.at_s)
            self._fail(failure, work_s)
        self.outcome.useful_s = self._until(end_s)
        self.outcome.failures = len(failures)
        assert abs(self.outcome.total_s - end_s) <= 1e-6 * end_s, (
            f"{self.outcome.total_s} s accounted for of {end_s}"
        )
        return self.outcome

    def _until(self, at_s: float) -> float:
        """Recover and train until then; how much work there is now."""
        trained_s = max(0.0, at_s - self.up_s)
        self.outcome.down_s += min(at_s, self.up_s) - self.now_s
        self.outcome.stalled_s += trained_s * (1 - self.cost.pace_ratio)
        self.now_s = at_s
        work_s = self.work_s + trained_s * self.cost.pace_ratio
        self.stored_s = max(self.stored_s, self.cost.store.newest(work_s))
        return work_s

    def _fail(self, failure: DrawnFailure, work_s: float) -> None:
        at_s, kind = failure.at_s, failure.kind
        if at_s >= self.up_s:
            self.fetch_s, self.from_store, self.ready_s = 0.0, False, 0.0
            if at_s >= self.up_s + self.cost.redundant_s:
                self.lost.clear()
        gone = self._gone(failure)
        self.lost.update(gone)
        back_s, source = self._newest(kind, work_s, at_s, gone)
        detected_s = at_s + (
            self.cluster.detection_s if kind.detection_s is None else kind.detection_s
        )
        if gone:
            self.ready_s = max(self.ready_s, self._replaced(len(gone), detected_s))
        resumed_s = max(detected_s, self.ready_s) + self.fetch_s + self.cost.restart_s
        self.outcome.lost_s += work_s - back_s
        self.outcome.redone_steps += self._steps(work_s) - self._steps(back_s)
        self.outcome.recovered[source] += 1
        self.work_s, self.up_s = back_s, resumed_s

    def _steps(self, work_s: float) -> int:
        """Completed ones; a whole number of them may be a hair less in floats."""
        return math.floor(work_s / self.cluster.iteration_s + 1e-6)

    def _gone(self, failure: DrawnFailure) -> tuple[int, ...]:
        """The nodes to replace."""
        match failure.kind.scope:
            case Scope.RANK:
                return ()
            case Scope.RACK:
                return tuple(self.cluster.rack_of(failure.node))
        return (failure.node,)

    def _newest(
        self, kind: FailureKind, work_s: float, at_s: float, gone: tuple[int, ...]
    ) -> tuple[float, str]:
        """Work of the newest state that can be reached, and where it is; remembers how long loading
        takes."""
        cost = self.cost
        if kind.latency_s:
            # Wrong for so long: memory holds only newer states, and every checkpoint since is wrong
            # too.
            right_s = max(0.0, work_s - kind.latency_s * cost.pace_ratio)
            self.stored_s = min(
                self.stored_s, right_s // cost.store.interval_s * cost.store.interval_s
            )
            self.from_store = True
        elif cost.own is None or (gone and not self._memory_survives(gone)):
            self.from_store = True
        if self.from_store or cost.own is None or cost.peers is None:
            self.fetch_s = max(self.fetch_s, cost.store.fetch_s)
            return self.stored_s, "store"
        tier = cost.peers if gone else cost.own
        self.fetch_s = max(self.fetch_s, tier.fetch_s)
        # What everybody resumed from last is still there; during a recovery nothing newer is.
        newest_s = max(self.work_s, tier.newest(work_s)) if at_s >= self.up_s else self.work_s
        return newest_s, "peers" if gone else "own"

    def _memory_survives(self, gone: tuple[int, ...]) -> bool:
        """Asked of the groups that the newly lost nodes are in: the others are as they were."""
        groups = {self.case.group_of[node] for node in gone}
        if all(len(self.lost.intersection(group.members)) <= group.tolerates for group in groups):
            return True
        assert self.case.placement is not None
        touched = replace(self.case.placement, groups=tuple(groups))
        return not out_of_reach(touched, touched.holders, self.lost)

    def _replaced(self, count: int, at_s: float) -> float:
        """When so many nodes are there. Each lost one has ordered another."""
        for _ in range(count):
            heapq.heappush(self.arrivals, at_s + self.cluster.replacement_s)
        return max(at_s, *(heapq.heappop(self.arrivals) for _ in range(count)))
