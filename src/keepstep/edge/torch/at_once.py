"""At once: calls that may never return, all begun together and waited for only so long.

Comes in: what to call, by name. Goes out: what did not go well, in words. A call that is late goes
on in its thread, which nobody waits for any more: a driver's call cannot be called off.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping

from keepstep.edge.torch.first_line import first_line
from keepstep.model.units import S_NS, human_ns

LATE = "has not ended within"


def all_within(acts: Mapping[str, Callable[[], object]], within_ns: int) -> list[str]:
    """Run these, each on a thread of its own. A line for each that raised RuntimeError or has not
    ended in time; empty when all went well."""
    ended: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def run(name: str, act: Callable[[], object]) -> None:
        why = ""
        try:
            act()
        except RuntimeError as error:
            why = first_line(error) or type(error).__name__
        finally:
            ended.put((name, why))

    for name, act in acts.items():
        threading.Thread(
            target=run, args=(name, act), name=f"keepstep-at-once-{name}", daemon=True
        ).start()
    due_ns = time.monotonic_ns() + within_ns
    waits_for = set(acts)
    problems: list[str] = []
    while waits_for:
        try:
            name, why = ended.get(timeout=max(0.0, (due_ns - time.monotonic_ns()) / S_NS))
        except queue.Empty:
            late = [f"{name} {LATE} {human_ns(within_ns)}".lstrip() for name in sorted(waits_for)]
            return problems + late
        waits_for.discard(name)
        if why:
            problems.append(f"{name}: {why}" if name else why)
    return problems
