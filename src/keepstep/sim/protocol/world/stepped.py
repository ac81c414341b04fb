"""Stepped world: a second world beside one that runs, which goes on only when it is told to, and
can be held in the middle of a call.

Comes in: until when it runs; at which of its calls of the store it is to stand still. Goes out:
that it has come so far, or stands. It has a thread of its own, because what calls the store is
ordinary code that knows of no pause; only one of the two threads ever runs, so that a run is still
one order of things.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from keepstep.sim.protocol.world.world import Process, World


def _any_call(_: str) -> bool:
    return True


class SteppedWorld:
    """`is_held`: it stands in the middle of a call, until it is told to run. `close` it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_held = False
        self._held_at = 0  # counted down by calls of the store; 0: it is not to stand
        self._held_before: Callable[[str], bool] = _any_call
        self.held_at = ""  # the call in which it stands, or stood last
        self._until_ns = 0
        self._is_over = False
        self._has_failed = False  # by a mistake of the simulation, which its thread tells
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._live, name="a stepped world", daemon=True)
        self._thread.start()
        world.on_call = self._called

    def hold_at(self, call: int, before: Callable[[str], bool] = _any_call) -> None:
        """It is to stand at the `call`-th call of the store from now on, before it takes effect.
        `before`: which calls count."""
        self._held_at, self._held_before = call, before

    def run(self, until_ns: int) -> None:
        """Until then, or until it stands. One that stood may come less far."""
        self._until_ns = until_ns
        self._turn.release()
        self._back.acquire()
        if self._has_failed and not self.is_held:
            raise RuntimeError("the world beside this one has failed")

    def close(self) -> None:
        """What stands in a call is killed there."""
        self._is_over = True
        self.world.stop()
        self._turn.release()
        self._thread.join()

    def _live(self) -> None:
        while True:
            self._turn.acquire()
            if self._is_over:
                return
            self._has_failed = True
            try:
                self.world.run(self._until_ns)
                self._has_failed = False
            finally:
                self._back.release()
            if self._is_over:
                return

    def _called(self, process: Process, what: str) -> None:
        """In its own thread."""
        if not self._held_at or " in the store" not in what or not self._held_before(what):
            return
        self._held_at -= 1
        if self._held_at:
            return
        self.is_held, self.held_at = True, what
        self.world.note(process.name, f"is held at {what}")
        self._back.release()
        self._turn.acquire()
        self.is_held = False
        if self._is_over:
            process.dies_at_call = 1
