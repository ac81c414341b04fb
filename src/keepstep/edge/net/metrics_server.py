"""Metrics: a node's numbers over HTTP, in the text format of Prometheus.

Comes in: a function that reads the numbers when somebody asks. Goes out: families with their names,
units and meaning. Decides nothing about the job; a reader that goes away, or none that ever comes,
costs nothing.

Counters are as old as what counts them: those of a rank begin with its process, the keeper's with
the keeper, the others with the agent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from keepstep.edge.net.bounded_http import serve
from keepstep.errors import ConfigError
from keepstep.model.parts import PartsReport, PartState
from keepstep.model.rhythm import Interleaved
from keepstep.model.snapshot import RankStatus
from keepstep.model.units import S_NS

if TYPE_CHECKING:
    from prometheus_client.core import Metric

BUCKETS_S = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass(frozen=True, slots=True)
class Reading:
    """What there is to tell at one moment. `ranks`: whether each lives, and its page. `held_bytes`
    and `spent_ns` by kind and by part; `recoveries`: cause, duration and lost steps of each;
    `interleaved`: None while the keeper has planned nothing. `stored_step`: None while this node
    has written none; `counted`: how often the journal tells of each kind of event;
    `redundancy_is_off`: None where no other node is known; `slow_ratios`: of each rank that is
    slow, how much of a step it needs beyond its peers; `slow_links`: of each that is slow its side,
    its nodes and how many times slower it is; `damaged_counts`: by node, messages and blocks;
    `parts`: of the machine, None: nobody has probed them. `unknown`: what nobody can tell, but for
    parts: of what, and the word for why. `unknown_losses`: how often nobody knew how many completed
    steps were lost."""

    job: str
    ranks: Mapping[int, tuple[bool, RankStatus | None]]
    committed_step: int | None
    keeper_alive: bool | None
    held_bytes: Mapping[str, int]
    spent_ns: Mapping[str, int]
    recoveries: tuple[tuple[str, int, int], ...]
    interleaved: Interleaved | None
    stored_step: int | None = None
    counted: Mapping[str, int] = field(default_factory=dict)
    redundancy_is_off: bool | None = None
    slow_ratios: Mapping[int, float] = field(default_factory=dict)
    slow_links: tuple[tuple[str, tuple[int, ...], float], ...] = ()
    damaged_counts: Mapping[int, int] = field(default_factory=dict)
    parts: PartsReport | None = None
    unknown: tuple[tuple[str, str], ...] = ()
    unknown_losses: int = 0


class Exposition:
    """Serves what `read` finds, on a thread of its own, until `close`."""

    def __init__(self, read: Callable[[], Reading], port: int, host: str) -> None:
        """Raises ConfigError: prometheus-client is not installed, or the port is taken."""
        try:
            from prometheus_client import CollectorRegistry, make_wsgi_app
        except ImportError as error:
            raise ConfigError(
                "metrics_port: expected prometheus-client (pip install 'keepstep[metrics]'), "
                "found none"
            ) from error
        self._read = read
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server = serve(make_wsgi_app(registry), host, port)
        except OSError as error:
            raise ConfigError(
                f"metrics_port: expected a free port of {host}, found {port}: {error}"
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="keepstep-metrics")
        self._thread.daemon = True
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_port

    def collect(self) -> Iterable[Metric]:
        return _families(self._read())

    def close(self) -> None:
        self._server.close()
        self._thread.join()


def _families(r: Reading) -> Iterator[Metric]:
    yield _many("keepstep_job_info", "The job by its name.", "name", {r.job: 1})
    yield from _of_ranks(r.ranks)
    pages = [page for _, page in r.ranks.values() if page is not None]
    if r.committed_step is not None:
        yield _one(
            "keepstep_committed_step",
            "The newest step that every rank of the job can be given from memory.",
            r.committed_step,
        )
    yield _one(
        "keepstep_epoch",
        "The training's epoch: goes up each time all ranks resume.",
        max((p.epoch for p in pages), default=0),
    )
    yield _one(
        "keepstep_keeper_up",
        "Whether this node's keeper lives and has said so lately.",
        bool(r.keeper_alive),
    )
    yield _unknown(r.unknown)
    yield _many(
        "keepstep_memory_bytes",
        "Memory taken by snapshots: this node's own, and what it holds for others.",
        "kind",
        r.held_bytes,
    )
    spent_s = {part: ns / S_NS for part, ns in r.spent_ns.items()}
    yield _many(
        "keepstep_goodput_seconds",
        "The job's time by what it went into; the parts sum to all of it.",
        "part",
        spent_s,
    )
    yield from _of_recoveries(r.recoveries)
    yield _one(
        "keepstep_unknown_losses_total",
        "How often all trained on and nobody knew how many completed steps were lost.",
        r.unknown_losses,
    )
    yield from _of_other_places(r)
    if r.interleaved is not None:
        yield from _of_interleaving(r.interleaved)


def _of_ranks(ranks: Mapping[int, tuple[bool, RankStatus | None]]) -> Iterator[Metric]:
    pages = {str(rank): page for rank, (_, page) in ranks.items() if page is not None}

    def each(name: str, what: str, value: Callable[[RankStatus], float]) -> Metric:
        return _many(name, what, "rank", {rank: value(page) for rank, page in pages.items()})

    yield _many(
        "keepstep_rank_up",
        "Whether the rank's process lives.",
        "rank",
        {str(rank): alive for rank, (alive, _) in ranks.items()},
    )
    yield each("keepstep_completed_step", "The last completed step.", lambda p: p.completed_step)
    yield each(
        "keepstep_step_seconds", "How long the last step took.", lambda p: p.step_ns_last / S_NS
    )
    yield each(
        "keepstep_captured_steps_total", "Steps captured into memory.", lambda p: p.captured_steps
    )
    yield each(
        "keepstep_skipped_steps_total",
        "Steps not captured, because no slot was free in time.",
        lambda p: p.skipped_steps,
    )
    yield each(
        "keepstep_torn_steps_total",
        "Captures discarded, because the state moved meanwhile.",
        lambda p: p.torn_steps,
    )
    yield each(
        "keepstep_stall_seconds_total",
        "Time in which the trainer waited for keepstep.",
        lambda p: p.stall_ns_total / S_NS,
    )


def _of_recoveries(recoveries: tuple[tuple[str, int, int], ...]) -> Iterator[Metric]:
    from prometheus_client.core import HistogramMetricFamily

    by_cause: dict[str, float] = {}
    for cause, _, _ in recoveries:
        by_cause[cause] = by_cause.get(cause, 0) + 1
    yield _many(
        "keepstep_recoveries_total",
        "Failures after which every rank trained again.",
        "cause",
        by_cause,
    )
    yield _one(
        "keepstep_lost_steps_total",
        "Completed steps that were lost and done again, as far as they are known.",
        sum(lost for _, _, lost in recoveries),
    )
    took_s = [ns / S_NS for _, ns, _ in recoveries]
    buckets = [(f"{limit:g}", float(sum(s <= limit for s in took_s))) for limit in BUCKETS_S]
    histogram = HistogramMetricFamily(
        "keepstep_recovery_seconds", "From a fault to the next step of every rank."
    )
    histogram.add_metric([], [*buckets, ("+Inf", float(len(took_s)))], sum(took_s))
    yield histogram


def _of_other_places(r: Reading) -> Iterator[Metric]:
    """The store, and the memory of other nodes."""
    if r.stored_step is not None:
        what = "The newest step whose checkpoint was written by way of this node."
        yield _one("keepstep_stored_step", what, r.stored_step)
    outcomes = {"stored": "persisted", "failed": "persist-failed"}
    yield _many(
        "keepstep_checkpoints_total",
        "Checkpoints that this node led, by what became of them.",
        "outcome",
        {outcome: r.counted.get(kind, 0) for outcome, kind in outcomes.items()},
    )
    troubles = {"hangs": "persister-stuck", "unreachable": "store-unreachable"}
    yield _many(
        "keepstep_store_troubles_total",
        "How often it was told that the store hangs over a checkpoint, or that all wait for it.",
        "kind",
        {trouble: r.counted.get(kind, 0) for trouble, kind in troubles.items()},
    )
    yield _one(
        "keepstep_declined_total",
        "How often this node had no memory for what another one sent.",
        r.counted.get("declined", 0),
    )
    yield _one(
        "keepstep_replica_differences_total",
        "How often what must be equal on several ranks was not: silent corruption.",
        r.counted.get("replicas-differ", 0),
    )
    yield _many(
        "keepstep_slow_ratio",
        "Of each rank that is slow now: how much of a step it needs beyond its peers.",
        "rank",
        {str(rank): ratio for rank, ratio in r.slow_ratios.items()},
    )
    yield _one(
        "keepstep_slow_total",
        "How often a rank of this node was called slow.",
        r.counted.get("slow-rank", 0),
    )
    yield from _of_links(r)
    yield from _of_parts(r)
    if r.redundancy_is_off is not None:
        yield _one(
            "keepstep_redundancy_off",
            "Whether snapshots lie on their own nodes alone: so it was asked for, or a node has no "
            "memory for more.",
            r.redundancy_is_off,
        )


def _unknown(unknown: Iterable[tuple[str, str]]) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(
        "keepstep_unknown",
        "1 for each thing that nobody can tell now, and why; parts have their own.",
        labels=["of", "doubt"],
    )
    for of, doubt in unknown:
        family.add_metric([of, doubt], 1)
    return family


def _of_links(r: Reading) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    slow = GaugeMetricFamily(
        "keepstep_slow_link_ratio",
        "Of each link that is slow now: how many times slower copies go than before.",
        labels=["side", "nodes"],
    )
    for side, nodes, ratio in r.slow_links:
        slow.add_metric([side, ",".join(map(str, nodes))], ratio)
    yield slow
    yield _one(
        "keepstep_slow_link_total",
        "How often a link was called slow, by the leading keeper where it is on this node.",
        r.counted.get("slow-link", 0),
    )
    yield _many(
        "keepstep_link_damages_total",
        "Messages and blocks from a node that were not as they were sent, where that was told.",
        "node",
        {str(node): count for node, count in r.damaged_counts.items()},
    )


def _of_parts(r: Reading) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    if r.parts is not None:
        health = GaugeMetricFamily(
            "keepstep_part_health",
            "Of a part of the machine: 1 what it is now (ok, bad, unknown), 0 what it is not.",
            labels=["part", "health"],
        )
        for part in r.parts.parts:
            for word in PartState:
                health.add_metric([part.part, word.value], part.health == word.value)
        yield health
        families: dict[tuple[str, str], dict[str, float]] = {}
        for name, label, of, value in r.parts.numbers:
            families.setdefault((name, label), {})[of] = value
        for (name, label), values in families.items():
            yield _many(name, "Of a part of the machine, as last probed.", label, values)
    yield _one(
        "keepstep_part_sick_total",
        "How often a part of the machine fell sick.",
        r.counted.get("part-sick", 0),
    )


def _of_interleaving(done: Interleaved) -> Iterator[Metric]:
    went = {"idle": done.idle_bytes, "late": done.late_bytes, "free": done.free_bytes}
    what = (
        "Bytes of copies by when they went: in idle spans; after waiting for too long; while "
        "nothing was held back."
    )
    yield _many("keepstep_interleave_bytes_total", what, "when", went)
    yield _one(
        "keepstep_interleave_plans_total",
        "How often copies were planned into a step's idle spans.",
        done.plans,
    )
    what = (
        "Of a step, as planned: idle time that is counted on; what of it copies take; what they "
        "take beyond."
    )
    of_step = {"idle": done.idle_ns, "used": done.used_ns, "overflow": done.overflow_ns}
    yield _many(
        "keepstep_interleave_step_seconds",
        what,
        "part",
        {part: ns / S_NS for part, ns in of_step.items()},
    )


def _one(name: str, what: str, value: float) -> Metric:
    return _many(name, what, "", {"": value})


def _many(name: str, what: str, label: str, values: Mapping[str, float]) -> Metric:
    """A family of what its name says it is: a counter when it ends in `_total`, else a gauge. A
    label and its values may be several, with commas between."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labels = label.split(",") if label else []
    made = (CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily)(
        name, what, labels=labels
    )
    for key, value in values.items():
        made.add_metric(key.split(",", len(labels) - 1) if label else [], value)
    return made
