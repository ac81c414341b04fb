"""Keeper run: one life of a keeper in somebody's loop, from the lock to the end of the job.

Comes in: what the connections of this node say, words of other keepers, timers, SIGTERM. Goes out:
calls of the `Keeper`, a beat, and whether the process may end. Whatever happens in one turn of the
loop is looked at once, behind all of it: a keeper that is behind catches up at once with what many
ranks have told.

Invariant: only who holds the lock of the job directory touches what is in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from keepstep.config import Settings
from keepstep.model.beats import KeeperBeat
from keepstep.model.units import MS_NS
from keepstep.ports import Box, BoxServer, Timer
from keepstep.runtime.beat import Beat
from keepstep.runtime.keeper.keeper import BUSY_TICK_NS, TICK_NS, FromNode, Keeper
from keepstep.runtime.keeper_world import KeeperWorld

LOCK = "keeper.lock"  # of the job directory: its holder is the keeper
SOCKET = "keeper.sock"
# an onlooker's question whether a keeper lives holds the lock for a moment
LOCK_TRIES, LOCK_AGAIN_NS = 20, 10 * MS_NS


class KeeperLock(Protocol):
    """The lock of the job directory."""

    def take(self) -> bool:
        """Try to have it; False when somebody else does."""

    def is_of_directory(self) -> bool:
        """Whether the lock that was taken still is that of the job directory: somebody may have
        removed that one, and another keeper may have made it anew."""


class KeeperRun:
    """See `ports.Hearer`: of every process of this node that connects."""

    def __init__(
        self,
        settings: Settings,
        world: KeeperWorld,
        lock: KeeperLock,
        over: Callable[[], None],
        turn_ns: int = 0,
        idle_ns: int = TICK_NS,
    ) -> None:
        """over: the process is to `close` this and to end. turn_ns: how long after something has
        come the keeper looks at it. idle_ns: how long it waits when nothing comes."""
        self._settings = settings
        self._world = world
        self._lock = lock
        self._over = over
        self._turn_ns = turn_ns
        self._idle_ns = idle_ns
        self.keeper: Keeper | None = None  # once it has the lock
        self._server: BoxServer | None = None  # likewise
        self._timer: Timer | None = None  # of the next look
        self._looks_soon = False
        self._beat = Beat(
            world.clock,
            world.memory,
            settings.job_dir,
            lambda at_ns, boot: KeeperBeat(at_ns, boot, world.pid),
        )

    def begin(self) -> None:
        """Be the keeper of the job directory, or find that another one is: the next call is
        `over` then."""
        self._try(LOCK_TRIES)

    def _try(self, tries: int) -> None:
        if self._lock.take():
            self._become_keeper()
        elif tries > 1:
            self._world.timers.after(LOCK_AGAIN_NS, lambda: self._try(tries - 1))
        else:
            self._world.timers.after(0, self._over)  # another keeper lives

    def _become_keeper(self) -> None:
        self.keeper = Keeper(self._settings, self._world, self._idle_ns)
        self._server = self._world.serve_boxes(self._settings.job_dir / SOCKET, self)
        self.keeper.begin()
        self.look_soon()

    # -- what the loop brings

    def hear(self, box: Box, message: FromNode, /) -> None:
        """See `ports.Hearer`."""
        if self.keeper is not None:
            self.keeper.hear(box, message)
            self.look_soon()

    def gone(self, box: Box, /) -> None:
        """See `ports.Hearer`."""
        if self.keeper is not None:
            self.keeper.gone(box)
            self.look_soon()

    def hear_peers(self) -> None:
        """Other keepers have said something: what `KeeperWorld.wake` asks for."""
        if self.keeper is not None:
            self.keeper.hear_peers()
            if self.keeper.is_busy:  # else they have told nothing that waits for a look
                self.look_soon()

    def refuse(self, sender: str, why: str) -> None:
        """A packet came that is no message."""
        if self.keeper is not None:
            self.keeper.refuse(sender, why)

    def preempted(self) -> None:
        """SIGTERM: see `Keeper`. One that is none yet ends."""
        if self.keeper is not None:
            self.keeper.preempted()
            self.look_soon()
        else:
            self._over()

    # -- looking

    def look_soon(self) -> None:
        """Something has come: look at the end of this turn."""
        if not self._looks_soon:
            self._looks_soon = True
            self._look_after(self._turn_ns)

    def _look_after(self, delay_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._world.timers.after(delay_ns, self._look)

    def _look(self) -> None:
        assert self.keeper is not None
        self._looks_soon = False
        if self.keeper.tick():
            self._over()
        else:
            if self._beat.is_due and self._lock.is_of_directory():  # else it is another keeper's
                self._beat.tick()
            self._look_after(BUSY_TICK_NS if self.keeper.is_busy else self._idle_ns)

    def close(self) -> None:
        """All is over: nobody can come any more, and the job's memory goes."""
        if self._timer is not None:
            self._timer.cancel()
        if self._server is not None:
            self._server.close()
        if self.keeper is not None:
            self.keeper.close(is_directory_ours=self._lock.is_of_directory())
