"""What every formula for intervals maximises."""

from __future__ import annotations

import math


def work_ratio(interval_s: float, stall_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """Part of the time that is work which lasts, by Daly's complete model: failures strike in
    stalls and restarts too."""
    attempts = math.expm1((interval_s + stall_s) / mtbf_s)
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * attempts)
