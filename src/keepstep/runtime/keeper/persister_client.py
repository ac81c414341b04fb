"""Persister client: what a keeper asks of its persister, and who waits for the answers.

Comes in: acts, and what the persister says. Goes out: the acts in their order, and each answer to
its caller. The persister may die at any moment: waiting callers hear that, and the next act starts
another one.

Invariant: every act is answered once, in order, until `close`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from keepstep.model.messages.keeper_rank import NotUnderstood
from keepstep.model.messages.persister import ActDone, ActName, CheckpointAct, FromPersister
from keepstep.ports import Box, ChildConnection, Persisters

Then = Callable[[ActDone], None]


class PersisterClient:
    """See `ports.Hearer`."""

    def __init__(self, persisters: Persisters) -> None:
        self._persisters = persisters
        # for answers, in the order of the acts
        self._waiting: deque[tuple[ActName, Then]] = deque()
        self._box: ChildConnection | None = None
        self._is_urgent: bool | None = None  # as the persister has it; None: it does not know
        self._is_ready = False  # it has answered something
        self.succeeded = 0  # acts, of all that were answered
        self.answered = 0

    @property
    def pid(self) -> int | None:
        """The persister's process; None while there is none."""
        return None if self._box is None else self._box.pid

    @property
    def awaited(self) -> ActName | None:
        """What it is at, of all that it has been asked for and has not answered."""
        return self._waiting[0][0] if self._waiting else None

    @property
    def computed_ns(self) -> int:
        """How long it has computed; 0 while there is none."""
        return 0 if self._box is None else self._box.computed_ns

    def start(self) -> None:
        """Before it is asked anything: importing torch takes seconds that SIGTERM's notice may not
        have. Where none can be started, the first act tries again."""
        self._running()

    def _running(self) -> ChildConnection | OSError:
        """The connection, with a persister that is started if there is none; or why none can be."""
        if self._box is None:
            try:
                self._box = self._persisters.start(self)
            except OSError as error:
                return error
            self._is_urgent, self._is_ready = None, False
        return self._box

    def hurry(self, is_urgent: bool) -> None:
        """Say it at every look: whether somebody waits for what it has been asked. Until its first
        answer it computes as others do: to get ready takes seconds, which nobody may have later."""
        box = self._box
        if box is None or self._is_urgent is is_urgent or not (self._is_ready or is_urgent):
            return
        if box.hurry(is_urgent):
            self._is_urgent = is_urgent

    def ask(self, act: CheckpointAct, then: Then) -> None:
        """Have it do that. `then` hears the answer, or why there is none: when it died, or, at
        once, when none can be started."""
        box = self._running()
        if not isinstance(box, OSError) and not box.send(act):
            self._lost(box, "died")
            # who heard of that may have started it already; if this one is dead too, `gone` comes
            box = self._running()
            if not isinstance(box, OSError):
                box.send(act)
        if isinstance(box, OSError):
            then(ActDone(False, f"the persister cannot be started: {box}"))
        else:
            self._waiting.append((act.act, then))

    def hear(self, box: Box, message: FromPersister, /) -> None:
        """See `ports.Hearer`."""
        own = self._box
        if own is None or box is not own:
            return
        match message:
            case ActDone():
                if self._waiting:
                    self._is_ready = True
                    self.answered += 1
                    self.succeeded += message.ok
                    _, then = self._waiting.popleft()
                    then(message)
            case NotUnderstood(why):
                self._lost(own, f"it did not understand this keeper and was ended: {why}")

    def abandon(self, why: str) -> None:
        """The store hangs: end it. Nothing it was asked is waited for any more."""
        if self._box is not None:
            self._lost(self._box, why, hung=True)

    def gone(self, box: Box, /) -> None:
        """See `ports.Hearer`."""
        if self._box is not None and box is self._box:
            self._lost(self._box, "died")

    def _lost(self, box: ChildConnection, how: str, hung: bool = False) -> None:
        """The persister is gone, and with it everything that it was asked."""
        self._box = None
        box.close()
        waiting, self._waiting = self._waiting, deque()
        for _, then in waiting:
            then(ActDone(False, f"the persister {how}", hung=hung))

    def close(self) -> None:
        """End it. Nothing is answered any more."""
        box, self._box = self._box, None
        if box is not None:
            box.close()
