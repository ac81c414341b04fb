"""Persister: from the slots of a node's ranks to that node's part of a checkpoint in the store.

Comes in: acts, one after the other. Goes out: their answers, and files in the store. Reads the
slots where they lie; the format verifies every block first, writes, and reads back. The leading
node's persister also clears the place, publishes, and applies retention. It holds the slots by
locks of its own from its survey to its part, so that what it writes is one state even when the
keeper dies.

Whatever else is removed is removed under a lease that the store holds
(`core/recovery/removal_lease.py`), looked at right before each checkpoint: a leader that stood
still and is followed by another one removes nothing any more. What may not be removed now waits
for the next checkpoint.

Invariant: an attempt's files are removed only by the leader of that attempt, and never when the
checkpoint exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from keepstep.core.economics.retention import CheckpointInfo, parse_rules, to_keep
from keepstep.core.recovery.removal_lease import RemovalLease
from keepstep.edge.shm.slot import Slot
from keepstep.edge.shm.whole import whole
from keepstep.errors import KeepstepError, StoreError
from keepstep.model.checkpoint import CheckpointAttempt, CheckpointName
from keepstep.model.mesh import LEADER
from keepstep.model.messages.persister import ActDone, CheckpointAct
from keepstep.model.snapshot import Stamp
from keepstep.model.timeline import history, is_overtaken, left_at, timelines_of
from keepstep.model.units import counted, human_bytes
from keepstep.ports import (
    Acts,
    CheckpointDraft,
    CheckpointFormat,
    CheckpointStore,
    Clock,
    Memory,
    StoredCheckpoint,
)
from keepstep.runtime.slot_locks import pin, unpin

D = TypeVar("D", bound=CheckpointDraft)
V = TypeVar("V")
FAILURES = (KeepstepError, OSError, LookupError, RuntimeError, ValueError)
MOST_IN_VAIN = 3  # removals that fail, one after the other: the store fails, not one directory


@dataclass
class _Work(Generic[D, V]):
    """What is kept of an attempt from one act to the next. `values`: None once they are written,
    and the ranks have their slots back."""

    attempt: CheckpointAttempt
    node: int
    draft: D
    values: V | None = None


class Persister(Generic[D, V]):
    """One node's. At most one attempt at a time: a new one takes the place of the one before."""

    def __init__(
        self,
        job: str,
        job_dir: Path,
        keep: str,
        memory: Memory,
        store: CheckpointStore[D],
        format_: CheckpointFormat[D, V],
        clock: Clock,
        holder: str,
    ) -> None:
        """`keep`: the retention rules (`core/economics/retention.py`). `holder`: names this life of
        a persister, and no other."""
        self._job, self._job_dir, self._keep = job, job_dir, keep
        self._memory, self._store, self._format = memory, store, format_
        self._clock, self._lease = clock, RemovalLease(holder)
        self._work: _Work[D, V] | None = None
        self._slots: list[Slot] = []  # held until they are written
        self._wholes = ExitStack()  # of those that share with others
        self._left = ""  # what of unfinished attempts could not be removed, and why

    def carry_out(self, request: CheckpointAct) -> Acts[ActDone]:
        """Do it, in pieces, and say how that went: a failure is an answer. Not while another act is
        under way."""
        attempt = CheckpointAttempt(
            self._job,
            Stamp(request.step, request.epoch),
            request.attempt,
            request.ranks,
            request.timeline,
        )
        try:
            if request.act == "survey":
                return (yield from self._survey(attempt, request.node))
            work = self._work
            if work is None or work.attempt != attempt:
                return self._not_surveyed(request)
            match request.act:
                case "part":
                    return self._write_part(work)
                case "publish":
                    return (yield from self._publish(work))
                case _:
                    self.give_up()
                    return ActDone(True, f"attempt {attempt.number} is given up")
        except FAILURES as error:
            self.give_up()
            return ActDone(False, f"{type(error).__name__}: {error}")

    def _not_surveyed(self, request: CheckpointAct) -> ActDone:
        why = (
            f"node {request.node}: expected a survey of this attempt before its {request.act}, "
            "found none"
        )
        return ActDone(request.act == "drop", why)

    def give_up(self) -> None:
        """Whatever is under way is over. A node that does not lead leaves its files to the leader:
        it may be publishing them."""
        work, self._work = self._work, None
        if work is not None:
            work.values = None  # it may look into the slots
        self._release()
        if work is not None and work.node == LEADER:
            work.draft.abandon()

    def _release(self) -> None:
        """Let the ranks have their slots back."""
        self._wholes.close()
        unpin(self._slots)
        self._slots = []

    def _survey(self, attempt: CheckpointAttempt, node: int) -> Acts[ActDone]:
        self.give_up()
        self._store.follow()
        yield
        if node == LEADER and (why := left_behind(attempt.name, self._own())):
            return ActDone(False, f"step {attempt.stamp.step} would not count: {why}")
        yield
        step = attempt.stamp.step
        slots = pin(self._memory, self._job_dir, attempt.stamp, attempt.ranks_of(node))
        if slots is None:
            why = (
                f"node {node}: expected its ranks to hold {attempt.stamp}, found that one does "
                "not any more"
            )
            return ActDone(False, why)
        self._slots = slots
        yield
        if node == LEADER and self._format.already_there(attempt):
            self._release()
            why = f"step {step} is in the store already, and intact"
            return ActDone(True, why, there=True)
        yield
        if node == LEADER:
            self._store.claim()
            self._announce(attempt)
            yield
            unfinished = self._store.incomplete(before=attempt.name)
            remove = self._store.remove_unpublished  # one may be published just now
            removed, why_not = yield from self._remove(unfinished.names, attempt, remove)
            self._left = ""
            if why_not:
                left = counted(len(unfinished.names) - len(removed), "unfinished checkpoint")
                self._left = f", left {left} for later: {why_not}"
            if unseen := unfinished.unseen:
                left = counted(len(unseen), "checkpoint")
                self._left += f", left {left} that cannot be looked at: {unseen[0]}"
        work: _Work[D, V] = _Work(attempt, node, self._store.draft(attempt.name))
        self._work = work
        yield
        wholes = [self._wholes.enter_context(whole(self._memory, slot)) for slot in slots]
        work.values = self._format.survey(work.draft, attempt, node, wholes)
        return ActDone(True, f"{counted(len(slots), 'rank')} surveyed")

    def _write_part(self, work: _Work[D, V]) -> ActDone:
        if work.values is None:
            return ActDone(False, f"node {work.node}: its part of this attempt is written already")
        nbytes = self._format.write_part(work.draft, work.attempt, work.node, work.values)
        work.values = None
        self._release()
        return ActDone(True, f"{human_bytes(nbytes)} written and read back")

    def _publish(self, work: _Work[D, V]) -> Acts[ActDone]:
        made = self._format.publish(work.draft, work.attempt)
        self._work = None
        self._release()
        yield
        told = f"{human_bytes(made.total_bytes)} written and read back{self._left}"
        try:
            unwanted = self._not_kept(work.attempt)
        except StoreError as error:  # it is published: what comes after cannot undo that
            return ActDone(True, f"{told}; what may be removed cannot be seen: {error}")
        removed, why_not = yield from self._remove(list(unwanted), work.attempt, self._store.remove)
        if removed:
            steps = [old.step for old in removed]
            told += f", removed steps {steps} ({next(iter(unwanted.values()))})"
        if why_not:
            told += f", left {counted(len(unwanted) - len(removed), 'checkpoint')} for later: "
            told += why_not
        return ActDone(True, told)

    def _announce(self, attempt: CheckpointAttempt) -> None:
        """From now on nobody removes who leads in an older epoch."""
        found = self._store.removal_record()
        now_ns = self._clock.monotonic_ns()
        record = self._lease.announcement(found, _epoch_of(attempt), now_ns)
        if record is not None:
            self._store.put_removal_record(record)  # where somebody is quicker: the next time

    def _remove(
        self,
        names: Sequence[CheckpointName],
        attempt: CheckpointAttempt,
        remove: Callable[[CheckpointName], None],
    ) -> Acts[tuple[list[CheckpointName], str]]:
        """As many as may be, one after the other; those, and why no more. One that cannot be
        removed (another user's, or open over NFS) is left where it is, and keeps no other."""
        removed: list[CheckpointName] = []
        why_not, in_vain = "", 0
        for name in names:
            try:
                if why_held := self._why_not_remove(attempt):
                    why_not = why_held
                    break
                remove(name)
                removed.append(name)
                in_vain = 0
            except StoreError as error:
                why_not = why_not or str(error)
                in_vain += 1
                if in_vain == MOST_IN_VAIN:
                    break
            yield
        if (record := self._lease.given_back()) is not None:
            with suppress(StoreError):  # then it ends by its time
                self._store.put_removal_record(record)  # where it was lost, somebody has put it
        return removed, why_not

    def _why_not_remove(self, attempt: CheckpointAttempt) -> str:
        """Empty: this persister has the lease now."""
        store, lease, clock = self._store, self._lease, self._clock
        if not store.is_newest_run():
            return "another run has begun"
        asked_ns = clock.monotonic_ns()
        found = store.removal_record()
        if not (lease.holds(found, asked_ns) and lease.is_fresh(asked_ns)):
            epoch = _epoch_of(attempt)
            if why := lease.refusal(found, epoch, clock.monotonic_ns()):
                return why
            record = lease.following(found, epoch)
            if not store.put_removal_record(record):
                return "another one has just begun to remove"
            lease.taken(record, asked_ns)
            found = store.removal_record()
        if lease.holds(found, clock.monotonic_ns()):
            return ""
        return "the lease was lost before it was used"

    def _own(self) -> Sequence[StoredCheckpoint]:
        """What the job has in the store."""
        return [stored for stored in self._store.published() if stored.job == self._job]

    def _not_kept(self, attempt: CheckpointAttempt) -> dict[CheckpointName, str]:
        """Of this job's, what the rules do not keep, and what counts no more: why. Nothing, when
        somebody has written in a later epoch: this leader is of yesterday."""
        own = self._own()
        if is_overtaken(_epoch_of(attempt), own):
            return {}
        counting, others = history(own)
        names = {stored.name.step: stored.name for stored in counting}
        infos = [_info(stored, attempt.stamp.step) for stored in counting]
        removed = to_keep(parse_rules(self._keep), infos).removed
        return {names[step]: why for step, why in removed.items()} | others


def left_behind(name: CheckpointName, own: Sequence[StoredCheckpoint]) -> str:
    """Why a checkpoint of this name does not count; empty where it does. This leader is of
    yesterday then: the job runs elsewhere, and went on from an earlier step."""
    step = left_at(name, timelines_of(own))
    return "" if step is None else f"a later run of this job went on from step {step}"


def _epoch_of(attempt: CheckpointAttempt) -> int:
    """In which its leader leads."""
    return attempt.timeline.epoch if attempt.timeline else attempt.stamp.epoch


def _info(stored: StoredCheckpoint, just_verified: int) -> CheckpointInfo:
    # It is there because its bytes were read back once.
    step = stored.name.step
    return CheckpointInfo(step, step <= just_verified, stored.metrics)
