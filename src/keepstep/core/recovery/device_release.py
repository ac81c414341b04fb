"""Device release: how a process that stays gets its device back from a lost peer's collectives.

    lost -> abort every communicator at once -> look at the device, twice -> free
               one is late or fails                late, or wrong both times
                        -> this process cannot stay; another one takes its rank

Until it is over nothing may be ordered on the device: it would stand behind a kernel that waits for
a peer that is gone. All communicators are aborted before any of them is waited for, because an
abort may wait for the whole device, and with it for the others (nccl#1013, pytorch#119797). The
device is looked at twice because CUDA tells an error of the past once and a broken context at every
call: what is well the second time can be used.

Comes in: that a peer is lost, what came of each act, the time. Goes out: the next act, or that the
device is free, or why it cannot be. Does nothing itself.

Invariant: FREE follows an abort that went well and a look that went well, both since the last loss;
and every act has a limit, so that one of FREE and CANNOT follows a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from keepstep.model.device import DeviceAnswer
from keepstep.model.units import S_NS, human_ns

ABORT_WITHIN_NS = 15 * S_NS
LOOK_WITHIN_NS = 10 * S_NS
LOOKS = 2
# What the limits above do not cover: threads that start late. A process that is silent for longer
# is told from outside that it cannot stay.
OVERHEAD_NS = 2 * S_NS


class ReleaseStage(Enum):
    HELD = auto()  # by nothing: no peer is lost
    ABORTING = auto()
    LOOKING = auto()
    FREE = auto()
    CANNOT = auto()


@dataclass(frozen=True, slots=True)
class AbortAll:
    """Every communicator of this process, in parallel. `loss`: which one this is about; an answer
    about an earlier one counts for nothing."""

    loss: int
    within_ns: int = ABORT_WITHIN_NS


@dataclass(frozen=True, slots=True)
class LookAtDevice:
    """Wait until it has nothing to do. `number`: the how manieth look, from 1."""

    loss: int
    number: int
    within_ns: int = LOOK_WITHIN_NS


Act = AbortAll | LookAtDevice


class DeviceRelease:
    """Of one process, which has one device."""

    def __init__(self) -> None:
        self.stage = ReleaseStage.HELD
        self.why = ""  # why the process cannot stay; else how it went, once it is over
        self._loss = 0
        self._looks = 0
        self._began_ns = 0
        self._due_ns = 0
        self._error = ""  # of the first look

    @property
    def is_over(self) -> bool:
        return self.stage in (ReleaseStage.FREE, ReleaseStage.CANNOT)

    def lost(self, now_ns: int) -> Act | None:
        """A peer is lost, for the first time or again: what was built since is to be aborted as
        well. What cannot stay stays so."""
        if self.stage is ReleaseStage.CANNOT:
            return None
        self._loss += 1
        self.stage = ReleaseStage.ABORTING
        self._looks, self._error, self.why = 0, "", ""
        self._began_ns = now_ns
        return self._ordered(AbortAll(self._loss), now_ns)

    def aborted(self, loss: int, failures: Sequence[str], now_ns: int) -> Act | None:
        """`failures`: of the communicators that could not be aborted, in words."""
        if loss != self._loss or self.stage is not ReleaseStage.ABORTING:
            return None
        if failures:
            more = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
            return self._cannot(f"a communicator could not be aborted: {failures[0]}{more}")
        self.stage = ReleaseStage.LOOKING
        return self._next_look(now_ns)

    def looked(self, loss: int, answer: DeviceAnswer, now_ns: int) -> Act | None:
        if loss != self._loss or self.stage is not ReleaseStage.LOOKING:
            return None
        if answer.is_late:
            return self._cannot(
                "the device is still at work after every communicator was aborted, "
                f"look {self._looks} of {LOOKS}: {human_ns(now_ns - self._began_ns)} after the loss"
            )
        if self._looks < LOOKS:
            self._error = answer.error
            return self._next_look(now_ns)
        if answer.error:
            return self._cannot(
                f"CUDA says the same at every call, so its context is broken: {answer.error}"
            )
        self.stage = ReleaseStage.FREE
        passed = f"; an error that has passed: {self._error}" if self._error else ""
        self.why = f"the device is free {human_ns(now_ns - self._began_ns)} after the loss{passed}"
        return None

    def late(self, now_ns: int) -> None:
        """Some time has passed; an act that does not answer is the process's end."""
        if self.stage in (ReleaseStage.ABORTING, ReleaseStage.LOOKING) and now_ns >= self._due_ns:
            what = (
                "aborting the communicators"
                if self.stage is ReleaseStage.ABORTING
                else f"look {self._looks} of {LOOKS} at the device"
            )
            self._cannot(f"{what} did not end within {human_ns(now_ns - self._began_ns)}")

    @property
    def due_ns(self) -> int | None:
        """When `late` is to be called; None when nothing is under way."""
        is_under_way = self.stage in (ReleaseStage.ABORTING, ReleaseStage.LOOKING)
        return self._due_ns if is_under_way else None

    def built(self) -> None:
        """The process is among its peers again."""
        if self.stage is ReleaseStage.FREE:
            self.stage = ReleaseStage.HELD

    def _next_look(self, now_ns: int) -> Act:
        self._looks += 1
        return self._ordered(LookAtDevice(self._loss, self._looks), now_ns)

    def _ordered(self, act: Act, now_ns: int) -> Act:
        self._due_ns = now_ns + act.within_ns + OVERHEAD_NS
        return act

    def _cannot(self, why: str) -> Act | None:
        """There is no next act."""
        self.stage, self.why = ReleaseStage.CANNOT, why
        return None
