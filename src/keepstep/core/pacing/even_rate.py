"""Even rate: how many bytes of copies may go now, where they have a network of their own.

Comes in: what a step's copies take, how long a step is, the time. Goes out: a Grant. No collective
is met on another network card, so there is nothing to wait for; but copies that go at once take the
host's memory and its buses for as long as they last, and what the trainers move over these waits.
Spread over half of the step they take a small part of both; over all of it the step would be
protected later, and whoever loses a node then goes back further.

Invariant: in any stretch of time no more is granted than the rate times that and `BURST_NS`.
"""

from __future__ import annotations

from keepstep.core.pacing.gate import LEAST_WAIT_NS, MOST_WAIT_NS, Grant
from keepstep.model.units import MS_NS, S_NS

SPREAD = 0.5  # of a step
LEAST_BYTES_PER_S = 100_000_000  # what no host's memory notices: less would only be later
BURST_NS = 8 * MS_NS  # who waits asks every MOST_WAIT_NS, and a busy machine lets it ask later


def even_rate(step_bytes: int, step_ns: int) -> int:
    """Bytes a second. 0: what a step takes is not known yet."""
    if not step_bytes or not step_ns:
        return 0
    return max(LEAST_BYTES_PER_S, round(step_bytes * S_NS / (SPREAD * step_ns)))


class EvenRate:
    """A bucket of time: what was granted has used up the rate until some moment."""

    def __init__(self) -> None:
        self._used_until_ns = 0

    def grant(self, want_bytes: int, bytes_per_s: int, now_ns: int) -> Grant:
        """Of `want_bytes`, so many may go now: all, or at least half of what a burst has."""
        assert bytes_per_s > 0
        used_until_ns = max(self._used_until_ns, now_ns)
        left_ns = now_ns + BURST_NS - used_until_ns
        wanted_ns = -(-want_bytes * S_NS // bytes_per_s)
        if left_ns < min(wanted_ns, BURST_NS // 2):
            short_ns = min(wanted_ns, BURST_NS // 2) - left_ns
            return Grant(0, min(MOST_WAIT_NS, max(LEAST_WAIT_NS, short_ns)))
        granted = min(want_bytes, max(1, left_ns * bytes_per_s // S_NS))
        self._used_until_ns = used_until_ns + granted * S_NS // bytes_per_s
        return Grant(granted)
