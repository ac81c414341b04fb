"""GEMINI's availability model: the effective training time ratio of three systems on its testbed
(SOSP 2023, figure 15).

Comes in: failures a day. Goes out: the part of a day that is training, by the paper's own account:
every failure costs the wasted time of equation 1 (`Tier.wasted_s`) and what follows until all train
again. The paper prints the curves; the constants are those its text gives, and the account was
inferred from them. It is linear: a failure during recovery is charged in full, as if it had
interrupted training, so it says less than `sim/economics/montecarlo.py` where failures are
frequent.

Never looks at a published ratio: tests/papers/test_gemini_fig15.py does.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.core.economics.costs import Tier
from keepstep.model.cluster import DAY_S

ITERATION_S = 62.0  # GPT-2 100B on 16 p4d.24xlarge
STATE_BYTES = 9.4e9 * 128  # 9.4 GB a GPU
STORE_GBPS = 20.0  # FSx, together
DETECTION_S = 15.0
SERIALIZATION_S = 162.0  # GEMINI writes its copies with torch.save when a failure comes
RESTART_S = 253.0
TORCH_SAVE_S = 81.0  # blocks training
HIGHFREQ_STEPS = 9  # "every 9 iterations", as profiled there; 481 s / 62 s would be 8
STRAWMAN_S = 3 * 3600.0
INSTANCE_FAILURES_PER_DAY = 0.015  # OPT-175B

STORE_S = STATE_BYTES * 8 / (STORE_GBPS * 1e9)


@dataclass(frozen=True, slots=True)
class System:
    """`stalled_ratio`: part of the time that saving holds up training. `after_s`: of a failure,
    beside the wasted time."""

    name: str
    tier: Tier
    after_s: float
    stalled_ratio: float = 0.0

    def effective_ratio(self, failures_per_day: float) -> float:
        cost_s = failures_per_day * (self.tier.wasted_s + self.after_s)
        return max(0.0, 1 - self.stalled_ratio - cost_s / DAY_S)


HIGHFREQ_S = HIGHFREQ_STEPS * ITERATION_S
SYSTEMS = (
    # A checkpoint travels during the whole next iteration; a software failure finds it in its own
    # memory.
    System(
        "gemini", Tier(ITERATION_S, ITERATION_S, 0.0), DETECTION_S + SERIALIZATION_S + RESTART_S
    ),
    System(
        "highfreq",
        Tier(HIGHFREQ_S, STORE_S, STORE_S),
        DETECTION_S + RESTART_S,
        TORCH_SAVE_S / HIGHFREQ_S,
    ),
    System("strawman", Tier(STRAWMAN_S, STORE_S, STORE_S), DETECTION_S + RESTART_S),
)


@dataclass(frozen=True, slots=True)
class Point:
    """Where figure 15 is looked at. `nodes`: None for the 16 instances of its left half."""

    failures_per_day: float
    nodes: int | None = None


PUBLISHED = (
    *(Point(failures) for failures in (2.0, 4.0, 6.0, 8.0)),
    *(Point(INSTANCE_FAILURES_PER_DAY * nodes, nodes) for nodes in (400, 600, 800, 1000)),
)
