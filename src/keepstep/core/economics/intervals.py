"""Intervals: how much work to do between two checkpoints.

Comes in: what a checkpoint holds up training, how often failures need one. Goes out: seconds of
work between two checkpoints. All formulas are for exponential failures (no memory), and maximise
the part of the time that is work which lasts (Daly's complete model: failures strike in stalls and
restarts too).

* Young (1974): the first-order optimum, sqrt(2CM).
* Daly (2006): a higher-order estimate, without iteration.
* `optimal`: the exact optimum, where exp((tau + C)/M) (1 - tau/M) = 1, which is
  tau = M (1 + W(-exp(-(1 + C/M)))) with Lambert's W on its main branch.
* Silent errors (Saxena et al., arXiv 2410.18124): a checkpoint taken after the state went wrong is
  useless, so the checkpoints kept must together reach back further than an error may stay
  unnoticed.
"""

from __future__ import annotations

import math


def young(stall_s: float, mtbf_s: float) -> float:
    """Seconds of work between checkpoints. `stall_s`: what one holds up training. `mtbf_s`: mean
    time between the failures that need one."""
    return math.sqrt(2 * stall_s * mtbf_s)


def daly(stall_s: float, mtbf_s: float) -> float:
    """Work between checkpoints, without the stall."""
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    x = stall_s / (2 * mtbf_s)
    return young(stall_s, mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - stall_s


def optimal(stall_s: float, mtbf_s: float) -> float:
    """The exact optimum. 0 when a checkpoint costs nothing: then as often as possible."""
    if stall_s <= 0:
        return 0.0
    # With u = 1 - tau/M the condition reads u - 1 - ln(u) = C/M, 0 < u < 1: convex and falling, so
    # Newton from the left converges.
    ratio = stall_s / mtbf_s
    u = math.exp(-1 - ratio)
    for _ in range(60):
        step = (u - 1 - math.log(u) - ratio) / (1 - 1 / u)
        u -= step
        if abs(step) <= 1e-14 * u:
            break
    return mtbf_s * (1 - u)


def with_silent_errors(
    stall_s: float, mtbf_s: float, silent_mtbf_s: float, latency_s: float, kept: int
) -> float:
    """The optimum when errors also stay unnoticed for `latency_s`, and `kept` checkpoints are kept,
    the newest of them perhaps unfinished.

    What is redone after a silent error is the latency and, on average, half an interval: a constant
    and what any failure costs. So the latency moves the optimum only through the oldest checkpoint,
    which must be older than it.
    """
    assert kept >= 2, f"{kept} checkpoints kept: the newest may be unfinished"
    together_s = 1 / (1 / mtbf_s + 1 / silent_mtbf_s)
    return max(optimal(stall_s, together_s), latency_s / (kept - 1))
