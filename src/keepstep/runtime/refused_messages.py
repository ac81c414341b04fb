"""Refused messages: what came to this process and was no message, counted and told.

Comes in: why, each time. Goes out: an event in the journal (`message-refused`) for the first, and
for every hundredth. A refused message ends nothing: its sender is answered by `NotUnderstood`.
"""

from __future__ import annotations

from keepstep.ports import Journal

TOLD_EVERY = 100


class RefusedMessages:
    """Of one process."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.count = 0

    def tell(self, kind: str, why: str) -> None:
        """What connections of this node tell: also of who wanted to connect."""
        if kind == "message-refused":
            self("a process of this node", why)
        elif kind == "connection-refused":
            self._journal.record("connection-refused", why)
        else:
            self._journal.record("stranger-refused", why)

    def __call__(self, sender: str, why: str) -> None:
        """`sender` has sent something that is refused."""
        self.count += 1
        if self.count % TOLD_EVERY == 1:
            told = f"a message of {sender} is refused: {why}"
            self._journal.record("message-refused", told, count=self.count)
