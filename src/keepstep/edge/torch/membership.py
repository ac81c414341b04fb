"""Membership: who of this process's peers is believed to be alive, and what that means for every
collective under way.

Comes in: "a peer is lost" and "these are the peers now", from whoever watches. Goes out: to every
`Group` of the process, that its works end and that it is to be built anew. One a process, because a
lost peer ends all of its groups.

A collective does not raise when a peer is lost: it ends, its result is worthless, and so do all
that follow, until `regroup`. The loop's body runs on to the next optimizer step or to its end and
is given up there. An exception out of a backward pass would leave DDP's reducer and FSDP's shards
in states that they do not come back from. A body in which none was worthless has computed what it
would have computed anyhow, and counts.

A process that takes a lost one's place runs the same program up to the same point; what its peers
did in these collectives is over. Its own are *muted* until it has joined: they end at once and
leave what is there, which the restored state replaces.

A collective on a device is queued, and ends when the device says so. The trainer may be a step
ahead of it: what it has computed and captured by then rests on what may never have ended. An
aborted one ends, too, and nothing shows it afterwards. So `lose` looks at each before anybody
aborts it: what has not ended by then is worthless, with all that was ordered behind it, and
`stands` says of a moment whether it is before the first of these.

Invariant: between `lose` and `regroup` no collective reaches another process, and after `regroup`
none of before does. What `stands` has denied once it denies for ever.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from keepstep.edge.torch.entered import EnteredGroups
from keepstep.model.step_work import GroupEntries

# for whoever watches, to say what a transport's error was about; longer than it takes to give up a
# node
NOTICE_WITHIN_S = 30.0


class Regroupable(Protocol):
    @property
    def group_name(self) -> str: ...

    def rebuild(self, store: Any, attempt: int, given_up: threading.Event) -> None: ...

    def abort(self) -> None:
        """Give up the transport, also one that is being built. May wait for the device."""


class Pending(Protocol):
    def finish(self) -> None: ...


class Queued(Protocol):
    """A collective on a device's queue."""

    def has_ended(self) -> bool:
        """Whether its end event is over and nothing is known to have gone wrong. Never waits."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment: how many collectives had been queued in this life of the groups."""

    life: int
    queued: int


class _Broken:
    """A collective that failed as it was queued, until somebody says which peer that was."""

    def finish(self) -> None:
        """Nobody waits for it."""


class Membership:
    """Of this process. `watched`: somebody tells of lost peers; else a transport's error is the
    only sign, and is raised.

    `on_enter` hears every collective that is called, `on_begin` and `on_end` those of the CPU that
    use the network, `on_order` that one is about to be queued on the device, and where it returns
    True `on_queued` that it was, with an event behind its end, or with None that it was not,
    `on_busy` that one is under way or none is any more, `on_wait` that a thread begins to wait in
    one, and has waited, `on_give` what is given to sums over ranks, on whichever thread that is.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._groups: list[Regroupable] = []
        self._pending: set[Pending] = set()
        self._lost = threading.Event()
        self._worthless = False
        self._life = 0
        self._queued: deque[tuple[int, Queued]] = deque()  # by their number in this life
        self._queued_count = 0
        self._first_worthless: int | None = None  # of the queued ones
        self.device: Any = None  # on which collectives are queued, besides those on the CPU
        self.why = ""
        self.watched = False
        self.muted = False
        self._sequence = 0
        self._by_group = EnteredGroups()
        self.on_enter: Callable[[int], object] = lambda sequence: None
        self.on_error: Callable[[str], None] = lambda why: None
        self.on_begin: Callable[[], None] = lambda: None
        self.on_end: Callable[[int], None] = lambda count: None
        self.on_order: Callable[[], bool] = lambda: False
        self.on_queued: Callable[[Any], None] = lambda end: None
        self.on_busy: Callable[[bool], None] = lambda is_busy: None
        self.on_wait: Callable[[bool], None] = lambda begins: None
        self.on_give: Callable[[Any], None] = lambda tensors: None

    @property
    def is_lost(self) -> bool:
        return self._lost.is_set()

    @property
    def is_worthless(self) -> bool:
        """Whether a collective of the present body has ended with nothing in it."""
        return self._worthless

    def begin_body(self) -> None:
        """Another body of the loop begins."""
        with self._lock:
            self._worthless = self._lost.is_set()

    def add_group(self, group: Regroupable) -> None:
        with self._lock:
            self._groups.append(group)

    def remove_group(self, group: Regroupable) -> None:
        with self._lock:
            self._groups = [g for g in self._groups if g is not group]
            # whose transport is gone may not tell any more that they have ended
            self._queued = deque(q for q in self._queued if not q[1].has_ended())

    @property
    def entered(self) -> int:
        """How many collectives were called in this life of the groups."""
        return self._sequence

    @property
    def entered_by_group(self) -> tuple[GroupEntries, ...]:
        """Likewise, of each of the first few process groups."""
        return self._by_group.sums

    def enter(self, group: int = 0, is_message: bool = False) -> None:
        """A collective is called: who has called fewer than the others is the one they wait for.
        group: its number, 0 where none is known. is_message: it is of two ranks."""
        self._sequence += 1
        self._by_group.add(group, is_message)
        self.on_enter(self._sequence)

    def begin(self, work: Pending) -> bool:
        """A collective is under way; False when a peer was lost meanwhile."""
        with self._lock:
            if self._lost.is_set():
                return False
            if not self._pending:
                self.on_busy(True)
            self._pending.add(work)
            self.on_begin()
            return True

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """This thread, or the stream on which it orders, waits for others in there."""
        on_wait = self.on_wait
        on_wait(True)
        try:
            yield
        finally:
            on_wait(False)

    def spoil(self) -> None:
        """A collective of the present body had nobody to talk to."""
        self._worthless = True

    def end(self, work: Pending) -> None:
        with self._lock:
            if work in self._pending:
                self._pending.remove(work)
                self.on_end(1)
                if not self._pending:
                    self.on_busy(False)

    def queued(self, work: Queued) -> None:
        """A collective has been queued on the device."""
        with self._lock:
            self._forget_ended()
            number, self._queued_count = self._queued_count, self._queued_count + 1
            if self._lost.is_set():  # it came too late to be looked at before the abort
                self._deny_from(number)
            else:
                self._queued.append((number, work))

    def mark(self) -> Mark:
        """This moment, between two collectives."""
        with self._lock:
            return Mark(self._life, self._queued_count)

    def stands(self, mark: Mark) -> bool:
        """Whether all that was queued by then had ended before a peer was lost, if one was."""
        with self._lock:
            first = self._first_worthless
            return mark.life == self._life and (first is None or mark.queued <= first)

    def _forget_ended(self) -> None:
        """From the oldest on: what waits for its end is kept, with its tensors, no longer than
        until the next one is queued."""
        while self._queued and self._queued[0][1].has_ended():
            self._queued.popleft()

    def _deny_from(self, number: int) -> None:
        self._worthless = True
        first = self._first_worthless
        self._first_worthless = number if first is None else min(first, number)

    def lose(self, why: str) -> None:
        """From any thread: a peer is lost. Everything under way ends. Comes before anybody aborts a
        communicator."""
        with self._lock:
            if not self._lost.is_set():
                self.why = why
            self._lost.set()
            pending, self._pending = self._pending, set()
            self._worthless = self._worthless or bool(pending)
            queued, self._queued = self._queued, deque()
            for number, one in queued:  # those of another group may have ended before older ones
                if not one.has_ended():
                    self._deny_from(number)
            self.on_end(len(pending))
            if pending:
                self.on_busy(False)
        for work in pending:
            work.finish()

    def failed(self, work: Pending, why: str) -> bool:
        """The transport failed: True when the work is over already, or is to wait for who says
        why."""
        with self._lock:
            abandoned = work not in self._pending
        if abandoned or not self.watched:
            return abandoned
        self.on_error(why)
        timer = threading.Timer(
            NOTICE_WITHIN_S,
            self._lose_with,
            [work, f"{why}; nobody said within {NOTICE_WITHIN_S:.0f} s which peer that was"],
        )
        timer.daemon = True
        timer.start()
        return True

    def broke(self, why: str) -> bool:
        """The device's transport failed: True when a peer is lost, or somebody will say so; else
        the error is the caller's. What has failed is worthless at once."""
        if self._lost.is_set():
            self.spoil()
            return True
        if not self.watched:
            return False
        stands_for_it = _Broken()
        self.spoil()
        return self.begin(stands_for_it) and self.failed(stands_for_it, why)

    def _lose_with(self, work: Pending, why: str) -> None:
        """That work has waited for a word in vain. If it is over, somebody has said it, and this
        process has peers again, or will have."""
        with self._lock:
            waits = work in self._pending
        if waits:
            self.lose(why)

    @property
    def groups(self) -> list[Regroupable]:
        """All of the process's."""
        with self._lock:
            return list(self._groups)

    def regroup(self, store: Any, attempt: int, given_up: threading.Event) -> bool:
        """Build every group anew over `store`, which all members use; False when `given_up` was set
        before all were there.

        Raises RuntimeError when the transport cannot be built.
        """
        for group in self.groups:
            group.rebuild(store, attempt, given_up)
            if given_up.is_set():
                return False
        with self._lock:
            if given_up.is_set():
                return False
            self._lost.clear()
            self._life += 1
            self._queued_count, self._first_worthless = 0, None
            # a newcomer counts from here as well
            self.why, self.muted, self._sequence = "", False, 0
            self._by_group = EnteredGroups()
        return True


membership = Membership()
