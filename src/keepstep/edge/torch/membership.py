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

Invariant: between `lose` and `regroup` no collective reaches another process, and after `regroup`
none of before does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

# for whoever watches, to say what a transport's error was about; longer than it takes to give up a
# node
NOTICE_WITHIN_S = 30.0


class Regroupable(Protocol):
    def rebuild(self, store: Any, attempt: int, given_up: threading.Event) -> None: ...


class Pending(Protocol):
    def finish(self) -> None: ...


class Membership:
    """Of this process. `watched`: somebody tells of lost peers; else a transport's error is the
    only sign, and is raised.

    `on_enter` hears every collective that is called, `on_begin` and `on_end` those that use the
    network, on whichever thread that is.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._groups: list[Regroupable] = []
        self._pending: set[Pending] = set()
        self._lost = threading.Event()
        self._worthless = False
        self.why = ""
        self.watched = False
        self.muted = False
        self._sequence = 0
        self.on_enter: Callable[[int], object] = lambda sequence: None
        self.on_error: Callable[[str], None] = lambda why: None
        self.on_begin: Callable[[], None] = lambda: None
        self.on_end: Callable[[int], None] = lambda count: None

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

    def enter(self) -> None:
        """A collective is called: who has called fewer than the others is the one they wait for."""
        self._sequence += 1
        self.on_enter(self._sequence)

    def begin(self, work: Pending) -> bool:
        """A collective is under way; False when a peer was lost meanwhile."""
        with self._lock:
            if self._lost.is_set():
                return False
            self._pending.add(work)
            self.on_begin()
            return True

    def spoil(self) -> None:
        """A collective of the present body had nobody to talk to."""
        self._worthless = True

    def end(self, work: Pending) -> None:
        with self._lock:
            if work in self._pending:
                self._pending.remove(work)
                self.on_end(1)

    def lose(self, why: str) -> None:
        """From any thread: a peer is lost. Everything under way ends."""
        with self._lock:
            if not self._lost.is_set():
                self.why = why
            self._lost.set()
            pending, self._pending = self._pending, set()
            self._worthless = self._worthless or bool(pending)
            self.on_end(len(pending))
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

    def _lose_with(self, work: Pending, why: str) -> None:
        """That work has waited for a word in vain. If it is over, somebody has said it, and this
        process has peers again, or will have."""
        with self._lock:
            waits = work in self._pending
        if waits:
            self.lose(why)

    def regroup(self, store: Any, attempt: int, given_up: threading.Event) -> bool:
        """Build every group anew over `store`, which all members use; False when `given_up` was set
        before all were there.

        Raises RuntimeError when the transport cannot be built.
        """
        with self._lock:
            groups = list(self._groups)
        for group in groups:
            group.rebuild(store, attempt, given_up)
            if given_up.is_set():
                return False
        with self._lock:
            if given_up.is_set():
                return False
            self._lost.clear()
            # a newcomer counts from here as well
            self.why, self.muted, self._sequence = "", False, 0
        return True


membership = Membership()
