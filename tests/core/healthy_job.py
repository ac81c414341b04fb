"""A healthy job in simulated time, and faults in it: what a detector would see at every tick.

Every step, each rank computes for a time drawn from a heavy-tailed distribution and then waits for
the slowest in a collective. While it computes it burns the processor, or sleeps without moving a
byte (`asleep_share` of the steps: a stalled data source looks like that). Now and then a rank
collects garbage for half a minute; every 40 steps rank 0 alone persists, every 100 all evaluate,
both ten times slower than a step; the first step compiles for minutes. From `fault.at_s` on the
rank it names does nothing any more but what its kind says.

`python -m tests.core.healthy_job 40` prints how many of 40 hours of each kind see a false alarm:
the table of docs/detection.md.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from keepstep.core.detection.deadlines import Deadlines, derive
from keepstep.core.detection.diagnosis import diagnose
from keepstep.core.detection.progress import Progress
from keepstep.edge.shm.status_page import BLANK
from keepstep.model.diagnosis import Diagnosis, ProcessSample, State
from keepstep.model.snapshot import Phase, RankStatus
from keepstep.model.units import S_NS

Draw = Callable[[random.Random], float]  # seconds that one rank computes in one step


def lognormal(median_s: float, sigma: float) -> Draw:
    return lambda rng: median_s * rng.lognormvariate(0, sigma)


def pareto(median_s: float, alpha: float) -> Draw:
    return lambda rng: median_s * rng.paretovariate(alpha) / 2 ** (1 / alpha)


@dataclass(frozen=True)
class Fault:
    rank: int
    at_s: float
    state: State  # stopped, frozen, asleep, uninterruptible, running (spinning)


@dataclass(frozen=True)
class Span:
    """What a rank does until `until_ns`."""

    until_ns: int
    phase: Phase
    state: State


class HealthyJob:
    """`look` at it with times that do not decrease."""

    def __init__(
        self,
        draw: Draw,
        seed: int,
        ranks: int = 4,
        asleep_share: float = 0.2,
        first_s: float = 240.0,
        counts: bool = True,
    ) -> None:
        self.ranks = ranks
        self._rng, self._draw, self._asleep_share, self._first_s, self._counts = (
            random.Random(seed),
            draw,
            asleep_share,
            first_s,
            counts,
        )
        self.typical_s = sorted(draw(self._rng) for _ in range(101))[50]
        self._cpu_ns = [0] * ranks
        self.step, self._began_ns = -1, 0
        self._ends_ns = 0
        self._spans: list[list[Span]] = []
        self._next_step()

    def _next_step(self) -> None:
        self.step, self._began_ns = self.step + 1, self._ends_ns
        self._spans = [self._draw_spans(rank) for rank in range(self.ranks)]
        self._ends_ns = max(spans[-1].until_ns for spans in self._spans)

    def _draw_spans(self, rank: int) -> list[Span]:
        rng, at_ns, spans = self._rng, self._began_ns, []
        slow_ns = int(10 * self.typical_s * S_NS)
        if self.step and self.step % 100 == 0:
            spans.append(Span(at_ns := at_ns + slow_ns, Phase.EVALUATE, "running"))
        if self.step and self.step % 40 == 0 and rank == 0:
            spans.append(Span(at_ns := at_ns + slow_ns, Phase.PERSIST, "asleep"))
        state: State = "asleep" if rng.random() < self._asleep_share else "running"
        took_s = self._draw(rng)
        if self.step == 0:
            took_s, state = self._first_s, "running"
        elif rng.random() < 0.0005:
            took_s, state = took_s + 30, "running"  # collects garbage
        return [*spans, Span(at_ns + int(took_s * S_NS), Phase.STEP, state)]

    def look(
        self, rank: int, now_ns: int, fault: Fault | None = None
    ) -> tuple[RankStatus, ProcessSample]:
        """The rank's page and process at that time."""
        stuck_ns = now_ns if fault is None else min(now_ns, int(fault.at_s * S_NS))
        while self._ends_ns <= stuck_ns:
            self._next_step()
        is_hit = fault is not None and fault.rank == rank and stuck_ns < now_ns
        seen_ns = stuck_ns if is_hit else now_ns
        ahead = [span for span in self._spans[rank] if span.until_ns > seen_ns]
        waits = not ahead  # for the others, in a collective
        phase: Phase = Phase.STEP if waits else ahead[0].phase
        state: State = "asleep" if waits else ahead[0].state
        if is_hit and fault is not None:
            state = fault.state
        if state == "running":
            self._cpu_ns[rank] += S_NS // 2
        entered = self.step + waits if self._counts else 0
        page = BLANK._replace(
            rank=rank, world_size=self.ranks, epoch=1, phase=phase, collective=entered
        )
        return page._replace(step=self.step, completed_step=self.step - 1), ProcessSample(
            state, self._cpu_ns[rank], 4
        )


def watch(
    job: HealthyJob, deadlines: Deadlines, hours: float, fault: Fault | None = None
) -> Iterator[tuple[int, Diagnosis]]:
    """Every verdict, with its time: a detector that looks at every tick."""
    progress = Progress(deadlines)
    for rank in range(job.ranks):
        progress.begin(rank, 0)
    for now_ns in range(0, int(hours * 3600 * S_NS), deadlines.tick_ns):
        progress.tick(now_ns)
        for rank in range(job.ranks):
            progress.observe(rank, *job.look(rank, now_ns, fault), now_ns)
        if progress.is_suspicious(now_ns):
            for verdict in diagnose(progress.evidence(now_ns), job.ranks, deadlines):
                yield now_ns, verdict


KINDS = {
    "lognormal, sigma 1, median 0.3 s": (lognormal(0.3, 1.0), 0.2),
    "lognormal, sigma 1, median 1 s": (lognormal(1, 1.0), 0.2),
    "lognormal, sigma 1, median 10 s": (lognormal(10, 1.0), 0.2),
    "lognormal, sigma 1, median 1 s, all quiet": (lognormal(1, 1.0), 1.0),
    "lognormal, sigma 1, median 10 s, all quiet": (lognormal(10, 1.0), 1.0),
    "pareto, alpha 2, median 1 s": (pareto(1, 2), 0.2),
    "pareto, alpha 2, median 10 s, all quiet": (pareto(10, 2), 1.0),
    "pareto, alpha 1.5, median 1 s": (pareto(1, 1.5), 0.2),
    "pareto, alpha 1.5, median 10 s": (pareto(10, 1.5), 0.2),
    "pareto, alpha 1.5, median 1 s, all quiet": (pareto(1, 1.5), 1.0),
}

if __name__ == "__main__":
    hours = int(sys.argv[1])
    for name, (draw, share) in KINDS.items():
        alarms = [
            any(
                v.is_deadly
                for _, v in watch(HealthyJob(draw, seed, asleep_share=share), derive(), hours=1)
            )
            for seed in range(hours)
        ]
        print(f"{name}: {sum(alarms)} of {hours}", flush=True)
