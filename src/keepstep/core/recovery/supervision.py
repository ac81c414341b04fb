"""Supervision: whether an agent that has ended is followed by another one, and whether one that is
stopped is to be killed.

Comes in: looks at the agent; how it ended, what it had said, how long it lived. Goes out: that it
is to be killed; the exit code of `keepstep run` on this node, or that another agent is to be
started.

An agent that is killed, or dies of an error once it has taken part in an attempt, is followed by
another one, but not for ever: a few short lives in a row are no accident. One that a signal was to
end is followed, too, to end what it left: the other nodes may not have heard of it. Nobody follows
an agent that had said its last word: the memory may be gone by then, and what is done would be
begun from nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.model.launch import Predecessor
from keepstep.model.units import S_NS

SHORT_LIFE_NS = 10 * S_NS
MAX_SHORT_LIVES = 3
LOOK_NS = 1 * S_NS
KILLED_AFTER_LOOKS = 30


@dataclass(slots=True)
class Supervision:
    """Of one node's agents, one after the other."""

    short_lives: int = 0
    stopped_looks: int = 0

    def is_to_be_killed(self, is_stopped: bool) -> bool:
        """At each look at an agent that lives: whether it was stopped at so many in a row. Looks
        are counted, not time: while the supervisor is stopped itself it does not look."""
        self.stopped_looks = self.stopped_looks + 1 if is_stopped else 0
        if self.stopped_looks < KILLED_AFTER_LOOKS:
            return False
        self.stopped_looks = 0
        return True

    def exit_code(
        self,
        code: int,
        last_word: int | None,
        signum: int | None,
        lived_ns: int,
        attempt: int,
    ) -> int | None:
        """None: start another agent.

        code: the agent's exit code, or minus the signal that killed it. last_word: the code with
            which it had said that the job ends here; None when it had not. signum: the first signal
            that was passed on to it or to one before it, None for none. attempt: the newest that it
            or one before it took part in, -1 for none: who ends by itself or was to end before that
            has left nothing behind.
        """
        if last_word is not None:
            return last_word
        if code >= 0 and attempt < 0:
            return code
        if signum is not None and attempt < 0:
            return 128 + signum
        self.short_lives = self.short_lives + 1 if lived_ns < SHORT_LIFE_NS else 0
        if self.short_lives < MAX_SHORT_LIVES:
            return None
        if signum is not None:
            return 128 + signum
        return 128 - code if code < 0 else code or 1


def predecessor(
    before: Predecessor | None, pid: int, attempt: int, signum: int | None
) -> Predecessor:
    """What the agent that is started next must know. One that was killed before it took part in an
    attempt may not have ended what those before it had left: what it was told is handed on.

    before: what the killed agent was told. attempt: the newest it took part in, -1 for none.
    signum: the first signal that was passed on to it or to one before it.
    """
    if before is None or attempt >= 0:
        return Predecessor((pid,), attempt, int(signum or 0))
    return Predecessor((*before.pids, pid), before.attempt, int(signum or 0))
