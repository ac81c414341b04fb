"""Stall: how long the training has waited for keepstep, a step and in all.

On the CPU that is the trainer's own time, at a boundary and in front of an update. Where the state
is on a device the trainer is ahead of it and only orders the waits: what counts is how long the
device stood in them, and that is known some time later.

Comes in: the trainer's time, the copies that were begun. Goes out: totals, for the rank's page.
"""

from __future__ import annotations

from keepstep.ports import StateCopy

KEPT_COPIES = 8  # whose figures are not known yet; a device is never so many steps behind


class Stall:
    """One rank's."""

    def __init__(self) -> None:
        self.total_ns = 0
        self.last_ns = 0
        self.for_store_ns = 0  # of all, what no step has
        self._unknown: list[StateCopy] = []

    @property
    def of_steps_ns(self) -> int:
        """Without what the trainer waited for the store, between steps or behind the last."""
        return self.total_ns - self.for_store_ns

    def waited_for_store(self, waited_ns: int) -> None:
        self.total_ns += waited_ns
        self.for_store_ns += waited_ns

    def waited(self, host_ns: int, is_boundary: bool, copy: StateCopy | None) -> None:
        """The trainer was in keepstep for so long. `copy`: the one under way, if there is one."""
        if copy is None or not copy.is_on_device:
            self.total_ns += host_ns
            self.last_ns = host_ns if is_boundary else self.last_ns + host_ns
        elif is_boundary and copy not in self._unknown:
            self._unknown = [*self._unknown[1 - KEPT_COPIES :], copy]
        for older in self._unknown[:-1]:  # no update waits for these any more
            waited_ns = older.waited_ns()
            if waited_ns is not None:
                self._unknown.remove(older)
                self.total_ns += waited_ns
                self.last_ns = waited_ns
