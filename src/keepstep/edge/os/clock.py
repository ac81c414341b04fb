"""Clock: what time it is on this machine."""

from __future__ import annotations

import time


class SystemClock:
    monotonic_ns = staticmethod(time.monotonic_ns)
    wall_ns = staticmethod(time.time_ns)


CLOCK = SystemClock()
