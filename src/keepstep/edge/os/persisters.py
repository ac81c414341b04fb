"""Persisters: a persister as a child process of its keeper, which talks to it over its pipes.

It imports torch and may die without harm: whoever hears its connection is told so. One that writes
a line that is no message is ended, because what it answers cannot be trusted any more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from keepstep.config import Settings
from keepstep.edge.os.computed import computed_ns
from keepstep.edge.os.lines import LineBox
from keepstep.edge.os.loop import Loop
from keepstep.edge.os.own_modules import module_words
from keepstep.edge.os.priority import place_child
from keepstep.ports import Hearer, MessageCodec

PERSISTER_MODULE = "keepstep.runtime.persister.process"  # stands on a persister's command line
END_WITHIN_S = 1.0
PERSISTER_NICE = 15  # a checkpoint may take its time, unless somebody waits for it

# a kind of event and a sentence, as `ports.Journal.record` takes them
Tell = Callable[[str, str], object]


def persister_command(settings: Settings) -> list[str]:
    """The command line of the job's persister."""
    return [sys.executable, *module_words(PERSISTER_MODULE, settings.to_text())]


class ChildPersisters:
    """See `ports.Persisters`."""

    def __init__(
        self, loop: Loop, command: Sequence[str], codec: MessageCodec, tell: Tell, nice: int = 0
    ) -> None:
        """command: starts a child, as `persister_command` does. codec: of this end. tell: of
        children that ended by themselves, and of lines that were no message. nice: of a child in a
        hurry; never below what this process began with."""
        self._loop = loop
        self._command = command
        self._codec = codec
        self._tell = tell
        self._nice = nice

    def start(self, hearer: Hearer) -> ChildBox:
        """See `ports.Persisters`."""
        requests, to_child = os.pipe2(os.O_CLOEXEC)
        from_child, answers = os.pipe2(os.O_CLOEXEC)
        try:
            child = subprocess.Popen(
                self._command, stdin=requests, stdout=answers, start_new_session=True
            )
        except OSError:
            os.close(to_child)
            os.close(from_child)
            raise
        finally:
            os.close(requests)
            os.close(answers)
        box = ChildBox(self._loop, from_child, to_child, child, self._codec, self._tell, self._nice)
        box.begin(hearer)
        return box


class ChildBox(LineBox):
    """The connection with a child, which lives no longer than that."""

    def __init__(
        self,
        loop: Loop,
        reads: int,
        writes: int,
        child: subprocess.Popen[bytes],
        codec: MessageCodec,
        tell: Tell,
        nice: int,
    ) -> None:
        super().__init__(loop, reads, writes, child.pid, codec, lambda _, why: self._distrust(why))
        self._child = child
        self._tell = tell
        self._nice = nice

    @property
    def computed_ns(self) -> int:
        """See `ports.ChildConnection`."""
        return computed_ns(self.pid)

    def hurry(self, is_urgent: bool, /) -> bool:
        """See `ports.ChildConnection`."""
        nice = self._nice if is_urgent else max(self._nice, PERSISTER_NICE)
        try:
            place_child(self.pid, nice, self._nice)
        except BlockingIOError:
            return False
        return True

    def send(self, message: Any, /) -> bool:
        """See `ports.Box`. False, too, when the child has died and that was not heard yet."""
        return self._child.poll() is None and super().send(message)

    def close(self) -> None:
        """See `ports.Box`. Ends the child."""
        if self._hearer is not None:
            self.drop_unsent()
            super().close()
            # It may die at any moment without harm, so it need not be asked. One that hangs in the
            # kernel ends when that lets it go.
            self._child.kill()
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(END_WITHIN_S)

    def end(self) -> None:
        """The child has died, or has to: tell so."""
        hearer = self._hearer
        if hearer is not None:
            self.close()
            why = f"the persister (process {self.pid}) ended with {self._child.returncode}"
            self._tell("persister-ended", why)
            hearer.gone(self)

    def _distrust(self, why: str) -> None:
        told = f"the persister (process {self.pid}) sent an invalid message: {why}; it is ended"
        self._tell("message-refused", told)
        self.end()
