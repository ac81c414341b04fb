"""Recurrence: the same failure again: is it the program or the hardware?

Comes in: failures with the life of the ranks they ended, and how far the job has come since. Goes
out: findings, each with the failures it rests on. Two failures are the same when cause, step and
error are. The same failure in two lives on different hardware is the program's: two devices seldom
break alike at one step. In two lives on the same hardware that is suspect, as what is tried
elsewhere decides: when the failure follows, it is the program; when the step goes well, it was the
hardware (as ByteRobust, SOSP 2025, finds out by replay). A device that the program says is broken
is suspect at once.

A failure that hits several ranks in one life, a data server gone, say, is one event: it has not
been reproduced.

Invariant: nothing is found from failures whose step is not known, and never `code` from what comes
from outside.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field

from keepstep.model.failure import Cause, Failure, Finding
from keepstep.model.units import first_line

ERROR_LENGTH = 200
_VARIES = (
    (re.compile(r"0x[0-9a-fA-F]+"), "?"),
    (re.compile(r"(?:/[\w.@+-]+){2,}/?"), "/?"),  # paths: temporary ones differ
    (re.compile(r"\d+"), "?"),  # ranks, ports, processes, sizes, times
)


def normalised(message: str) -> str:
    """The first line of an error without what differs from one time to the next: numbers,
    addresses, paths."""
    line = first_line(message)
    for pattern, instead in _VARIES:
        line = pattern.sub(instead, line)
    return line[:ERROR_LENGTH]


@dataclass
class Recurrence:
    # with the life it ended
    _seen: dict[tuple[Cause, int, str], list[tuple[int, Failure]]] = field(default_factory=dict)
    _suspect: Finding | None = None  # not decided yet

    def note(self, failure: Failure, life: int) -> Finding | None:
        """What this failure and those before it say together; None when that is nothing."""
        if failure.cause is Cause.DEVICE:
            self._suspect = Finding(
                "suspect", f"that hardware says that it is broken: {failure}", (failure,)
            )
            return self._suspect
        if failure.step is None or not failure.cause.may_be_code:
            return None
        same = self._seen.setdefault((failure.cause, failure.step, failure.error), [])
        if not any(number == life and f.hardware == failure.hardware for number, f in same):
            same.append((life, failure))
        lives, found = len({number for number, _ in same}), tuple(f for _, f in same)
        if lives < 2:
            return None
        if len({f.hardware for f in found}) > 1:
            self._suspect = None
            where = " and ".join(dict.fromkeys(_hardware(f) for f in found))
            why = (
                f"the same failure {lives} times on different hardware ({where}): the program is "
                f"at fault; {failure}"
            )
            return Finding("code", why, found)
        why = (
            f"the same failure {lives} times on the same hardware: the program or that hardware "
            f"is at fault; {failure}"
        )
        self._suspect = Finding("suspect", why, found)
        return self._suspect

    @property
    def awaited_step(self) -> int | None:
        """The step that decides about a suspicion when a newer one is done: while one rank fails in
        it others may complete it."""
        return None if self._suspect is None else self._suspect.failures[-1].step

    def passed(self, completed_step: int, hosts: Collection[str]) -> Finding | None:
        """The job, on these hosts now, has come so far: what that says about a suspicion, once."""
        step = self.awaited_step
        if self._suspect is None or step is None or completed_step <= step:
            return None
        found, self._suspect = self._suspect.failures, None
        where = f"failed {len(found)} times on {_hardware(found[-1])}"
        if hosts and found[-1].host not in hosts:
            why = (
                f"step {step}, which {where}, went well without it: that hardware is at fault, "
                "not the program"
            )
            return Finding("hardware", why, found)
        why = f"step {step}, which {where}, went well there now: the failure comes and goes"
        return Finding("passing", why, found)


def _hardware(failure: Failure) -> str:
    host = failure.host or "this host"
    return f"device {failure.device} of {host}" if failure.device else host
