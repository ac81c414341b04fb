"""Store look: one question to the store, asked until it is answered or patience is at its end.

    keeper: "what is there?" -> a thread looks -> listing, or why not -> again later, or the answer

Comes in: that somebody wants to know, and what the looks found. Goes out: the answer, once; and
every 15 s that all wait, as long as they do. How long is `core/resume/patience.py`'s. A look may
never return, as on a dead mount: each has a thread of its own, and the clock ends the wait.

Invariant: a store of which something newer than all that can be used could not be looked at is not
answered for before patience is at its end; then everybody is answered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from keepstep.core.resume.patience import (
    BESIDE_MEMORY_NS,
    IN_ALL_NS,
    TELL_EVERY_NS,
    StorePatience,
    pause_before,
)
from keepstep.core.resume.vote import ListStore
from keepstep.errors import ConfigError, DamageError, IdentityError, StoreError
from keepstep.model.checkpoint import StoreListing, StoreRefusal
from keepstep.model.events import WARNING
from keepstep.model.units import S_NS, human_ns
from keepstep.runtime.keeper_world import KeeperWorld

Answered = Callable[[StoreListing | StoreRefusal], None]
Waits = Callable[[str], None]


class StoreLook:
    """One keeper's; at most one question at a time."""

    def __init__(self, world: KeeperWorld, answered: Answered, waits: Waits) -> None:
        """answered: hears what the store has, or why it cannot be read. waits: hears every now and
        then that all wait, and for what."""
        self._world, self._answered, self._waits = world, answered, waits
        self._question: ListStore | None = None
        self._patience = StorePatience(0)
        self._why = ""  # it does not answer
        self._listing: StoreListing | None = None  # the newest, of which something was not read
        self._number = 0  # of the newest question: what comes for another counts for nothing

    def begin(self, question: ListStore) -> None:
        """Find out. The same question again changes nothing."""
        if self._question == question:
            return
        self.forget()
        self._question = question
        self._patience = StorePatience(self._world.clock.monotonic_ns())
        self._why, self._listing = "", None
        in_all_ns = BESIDE_MEMORY_NS if question.memory_waits else IN_ALL_NS
        self._world.timers.after(in_all_ns, partial(self._enough, self._number, in_all_ns))
        self._world.timers.after(TELL_EVERY_NS, partial(self._tell, self._number))
        pause_ns = pause_before(question.cut_off - 1) if question.cut_off else 0
        if pause_ns:
            self._world.timers.after(pause_ns, partial(self._look, self._number))
        else:
            self._look(self._number)

    def forget(self) -> None:
        """Nobody waits for the answer any more."""
        self._question = None
        self._number += 1

    def _look(self, number: int) -> None:
        question = self._question
        if question is not None and number == self._number:
            self._world.aside.submit(
                partial(self._ask_store, question), partial(self._found, number)
            )

    def _ask_store(self, question: ListStore) -> StoreListing | StoreRefusal:
        """What it has, or why it does not say."""
        checkpoints, journal = self._world.checkpoints, self._world.journal
        if checkpoints is None:
            return StoreRefusal("the job has no store", is_final=True)
        try:
            where = checkpoints.begin_run() if question.begins_run else None
            if where is not None:
                why = (
                    "a fresh start was asked for: the checkpoints there are stay and are not taken "
                    f"any more; those of this run go to {where}"
                )
                journal.record("run-begun", why, where=where)
            return checkpoints.look()
        except StoreError as error:
            return StoreRefusal(str(error))
        except (ConfigError, IdentityError, DamageError) as error:
            return StoreRefusal(str(error), is_final=True)

    def _found(self, number: int, found: StoreListing | StoreRefusal) -> None:
        if number != self._number:
            return
        self._why = _why_ask_again(found)
        self._listing = found if isinstance(found, StoreListing) else None
        if self._why:
            now_ns = self._world.clock.monotonic_ns()
            pause_ns = self._patience.next_try_after_ns(now_ns)
            if pause_ns is not None:
                self._world.timers.after(pause_ns, partial(self._look, number))
                return
        self._answer(found)

    @property
    def _is_beside_memory(self) -> bool:
        return self._question is not None and self._question.memory_waits

    def _enough(self, number: int, in_all_ns: int) -> None:
        """All have waited for so long: without the store, or with what it showed."""
        if number != self._number:
            return
        if self._listing is not None and not self._is_beside_memory:
            self._answer(self._listing)
            return
        self._answer(StoreRefusal(self._why or f"no answer within {in_all_ns // S_NS} s"))

    def _tell(self, number: int) -> None:
        """That all wait, and again as long as the question stands, whatever the look is at."""
        if number != self._number:
            return
        self._world.timers.after(TELL_EVERY_NS, partial(self._tell, number))
        now_ns = self._world.clock.monotonic_ns()
        waited = human_ns(now_ns - self._patience.began_ns)
        in_all_ns = BESIDE_MEMORY_NS if self._is_beside_memory else IN_ALL_NS
        why = (
            f"the store has not answered for {waited}, and nobody starts before it does: "
            f"{self._why or 'a question is under way'}; tried again, given up after "
            f"{in_all_ns // S_NS} s"
        )
        self._world.journal.record("store-unreachable", why, WARNING)
        self._waits(why)

    def _answer(self, found: StoreListing | StoreRefusal) -> None:
        self.forget()
        if isinstance(found, StoreListing):
            for step, why in {**found.unfinished, **found.unreachable, **found.damaged}.items():
                told = f"the checkpoint of step {step} is not usable: {why}"
                self._world.journal.record("checkpoint-damaged", told, step=step)
        self._answered(found)


def _why_ask_again(found: StoreListing | StoreRefusal) -> str:
    """What an answer leaves open that another one may tell; empty when nothing."""
    if isinstance(found, StoreRefusal):
        return "" if found.is_final else found.why
    newest = max(found.usable, default=-1)
    unread = [step for step in found.unreachable if step > newest]
    return found.unreachable[max(unread)] if unread else ""
