"""Persister server: does what the keeper asks of a persister, one act after the other.

Comes in: acts of one connection, and its end. Goes out: their answers, in order. The process around
it lends its loop, an executor and the connection: `process.py` the real one.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any, Generic, TypeVar

from keepstep.model.messages.keeper_rank import NotUnderstood
from keepstep.model.messages.persister import ActDone, CheckpointAct, ToPersister
from keepstep.ports import Box, CheckpointDraft, Executor
from keepstep.runtime.persister.persister import Persister

D = TypeVar("D", bound=CheckpointDraft)


class PersisterServer(Generic[D]):
    """See `ports.Hearer`."""

    def __init__(self, persister: Persister[D, Any], executor: Executor) -> None:
        self._persister = persister
        self._executor = executor
        self._waiting: deque[tuple[Box, CheckpointAct]] = deque()
        self._is_busy = False
        self._is_alone = False  # the keeper is gone

    @property
    def is_over(self) -> bool:
        """Whether the process may end: nobody asks any more, and nothing is under way."""
        return self._is_alone and not self._is_busy

    def hear(self, box: Box, message: ToPersister, /) -> None:
        """See `ports.Hearer`."""
        match message:
            case CheckpointAct():
                self._waiting.append((box, message))
                if not self._is_busy:
                    self._next()
            case NotUnderstood():
                """The keeper ends who says what it does not understand."""

    def gone(self, box: Box, /) -> None:
        """See `ports.Hearer`. What was asked and has not begun is not done any more."""
        self._waiting.clear()
        self._is_alone = True
        if not self._is_busy:
            self._persister.give_up()

    def _next(self) -> None:
        box, act = self._waiting.popleft()
        self._is_busy = True
        self._executor.act(self._persister.carry_out(act), partial(self._done, box))

    def _done(self, box: Box, done: ActDone) -> None:
        self._is_busy = False
        box.send(done)
        if self._is_alone:
            self._persister.give_up()
        elif self._waiting:
            self._next()
