"""Device release: the acts that `core/recovery/device_release.py` asks for, done beside the rank.

Comes in: that a peer is lost. Goes out: to whoever waits, that the device is free, or why this
process cannot stay; the same in the journal. The acts run on the world's `aside`, because the
trainer's own thread may stand behind the very kernel that is to be aborted.

Where collectives are not queued on a device there is nothing to release, and nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep.core.recovery.device_release import (
    AbortAll,
    Act,
    DeviceRelease,
    LookAtDevice,
    ReleaseStage,
)
from keepstep.model.events import INFO, WARNING
from keepstep.runtime.rank.world import RankWorld


class ReleaseUnderWay:
    """One rank's."""

    def __init__(self, world: RankWorld, rank: int) -> None:
        self._world, self._rank = world, rank
        self._release = DeviceRelease()
        self._waiting: Callable[[str | None], None] | None = None

    def lost(self) -> None:
        """A peer is lost, and the groups know it: begin at once, whatever the trainer does."""
        if self._world.groups.has_device:
            self._do(self._release.lost(self._world.clock.monotonic_ns()))

    def when_free(self, then: Callable[[str | None], None]) -> None:
        """`then` hears None when the device is free, or why this process cannot stay. One waits at
        a time: who waited before hears nothing any more."""
        if not self._world.groups.has_device:
            then(None)
            return
        self._waiting = then
        if self._release.stage is ReleaseStage.HELD:
            self.lost()  # nobody has told: the connections alone say so
        self._tell()

    def built(self) -> None:
        """The groups are there again."""
        self._release.built()

    def _do(self, act: Act | None) -> None:
        world, groups = self._world, self._world.groups
        match act:
            case AbortAll(loss, within_ns):
                world.aside.submit(
                    lambda: groups.abort(within_ns),
                    lambda failures: self._did(
                        self._release.aborted(loss, failures, world.clock.monotonic_ns())
                    ),
                )
            case LookAtDevice(loss, _, within_ns):
                world.aside.submit(
                    lambda: groups.look_at_device(within_ns),
                    lambda answer: self._did(
                        self._release.looked(loss, answer, world.clock.monotonic_ns())
                    ),
                )
        due_ns = self._release.due_ns
        if act is not None and due_ns is not None:
            world.timers.after(due_ns - world.clock.monotonic_ns(), self._late)

    def _did(self, act: Act | None) -> None:
        self._do(act)
        if act is None:
            self._tell()

    def _late(self) -> None:
        was_over = self._release.is_over
        self._release.late(self._world.clock.monotonic_ns())
        if not was_over:
            self._tell()

    def _tell(self) -> None:
        if not self._release.is_over:
            return
        then, self._waiting = self._waiting, None
        if then is None:
            return
        is_free = self._release.stage is ReleaseStage.FREE
        why, rank = self._release.why, self._rank
        told = why if is_free else f"this process cannot stay: {why}"
        self._world.journal.record(
            "device-release", f"rank {rank}: {told}", INFO if is_free else WARNING, rank=rank
        )
        then(None if is_free else told)
