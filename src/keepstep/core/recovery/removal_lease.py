"""Removal lease: who may remove checkpoints and what was never published from a store.

Comes in: the newest record of the lease that stands in the store, and the time. Goes out: the next
record, or why nothing may be removed. The store answers one question for certain: who was the first
to write the record of that number. It has no clock, and no two clocks are compared: a holder trusts
its record from when it *asked* for it, for nine tenths of a lease; anybody else takes the lease of
one that has not given it back a whole lease after it has *seen* that record (Gray & Cheriton,
Leases, SOSP 1989). So no two hold it at one instant while clocks run within 5 % of each other's
rate, whatever time they tell.

The epoch in the record fences: each leader announces its own before it writes its first checkpoint,
and from then on who leads an older one has and gets the lease no more, however long it has stood
still.

Invariant: numbers only grow, and the epoch of a record is never below that of the one before it.
"""

from __future__ import annotations

from dataclasses import replace

from keepstep.model.removal import RemovalRecord
from keepstep.model.units import S_NS, human_ns

LEASE_NS = 60 * S_NS
TRUSTED_NS = LEASE_NS - LEASE_NS // 10
RENEW_NS = LEASE_NS // 3


class RemovalLease:
    """One persister's part."""

    def __init__(self, holder: str) -> None:
        self._holder = holder
        self._seen: RemovalRecord | None = None
        self._seen_ns = 0  # since when that very record was seen
        self._not_before_ns = 0  # somebody had it when this side announced its epoch
        self._held: RemovalRecord | None = None
        self._asked_ns = 0

    def refusal(self, found: RemovalRecord | None, epoch: int, now_ns: int) -> str:
        """Why it may not be taken by who leads in that epoch; empty where it may. `found`: what
        stands in the store, read before now."""
        if found != self._seen:
            self._seen, self._seen_ns = found, now_ns
        if found is None:
            return ""
        if found.epoch > epoch:
            return f"{found.holder} removes in epoch {found.epoch}, and this is epoch {epoch}"
        if not found.is_held:
            return ""
        is_mine = found.holder == self._holder
        until_ns = self._not_before_ns if is_mine else self._seen_ns + LEASE_NS
        if until_ns <= now_ns:
            return ""
        who = "an earlier leader" if is_mine else found.holder
        return f"{who} may still remove, for at most {human_ns(until_ns - now_ns)}"

    def announcement(
        self, found: RemovalRecord | None, epoch: int, now_ns: int
    ) -> RemovalRecord | None:
        """What to write before the first checkpoint in an epoch, so that who leads an older one
        takes the lease no more, and loses one that it has; None where that stands there, or a later
        one does. Where it may have one the new record says held: it may be in the middle of
        removing, and this side waits for as long as anybody else."""
        if found is not None and found.epoch >= epoch:
            return None
        is_free = not self.refusal(found, epoch, now_ns)
        if not is_free:
            self._not_before_ns = self._seen_ns + LEASE_NS
        return replace(self.following(found, epoch), is_held=not is_free)

    def following(self, found: RemovalRecord | None, epoch: int) -> RemovalRecord:
        """What to write to take the lease, or to go on having it."""
        return RemovalRecord(found.number + 1 if found else 1, epoch, self._holder, is_held=True)

    def taken(self, record: RemovalRecord, asked_ns: int) -> None:
        """This side was the first to write it. `asked_ns`: from before it did."""
        self._held, self._asked_ns = record, asked_ns

    def holds(self, found: RemovalRecord | None, now_ns: int) -> bool:
        """Whether what stands in the store is this side's, and still to be trusted."""
        return self._held is not None and found == self._held and self._left_ns(now_ns) > 0

    def is_fresh(self, now_ns: int) -> bool:
        """Whether it need not be renewed yet."""
        return now_ns - self._asked_ns < RENEW_NS

    def given_back(self) -> RemovalRecord | None:
        """What to write at the end; None where this side has it not."""
        held, self._held = self._held, None
        return None if held is None else replace(held, number=held.number + 1, is_held=False)

    def _left_ns(self, now_ns: int) -> int:
        return self._asked_ns + TRUSTED_NS - now_ns
