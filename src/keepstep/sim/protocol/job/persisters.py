"""Persisters: a keeper's persister as a simulated process, as `ports.Persisters`.

Comes in: where the store's files lie, and how long things take. Goes out: a process that runs the
product's `Persister` over its `Store`, and a connection with it. It ends when the connection does:
at once when its keeper closes that, and behind the act under way when its keeper has died.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, TypeVar

from keepstep.config import Settings
from keepstep.edge.store.owner import StoreUser
from keepstep.edge.store.store import Store
from keepstep.model.messages.persister import ToPersister
from keepstep.ports import Acts, Box, ChildConnection, Executor, Hearer
from keepstep.runtime.persister.conversation import KEEPER_WITH_PERSISTER, PERSISTER_WITH_KEEPER
from keepstep.runtime.persister.persister import Persister
from keepstep.runtime.persister.server import PersisterServer
from keepstep.sim.protocol.job.checkpoint_format import SimFormat
from keepstep.sim.protocol.world.boxes import LocalSockets, SimBox, Tell
from keepstep.sim.protocol.world.executor import SimExecutor
from keepstep.sim.protocol.world.filesystem import SharedDisk, SimFileSystem
from keepstep.sim.protocol.world.memory import SimMemory
from keepstep.sim.protocol.world.world import Process

BLOCK_BYTES = 128  # small states still have several

T = TypeVar("T")


def open_store(
    url: str, disk: SharedDisk, process: Process, job: str | None = None, adopts: bool = False
) -> Store:
    """As that process sees it. `job`: whose it is to be; None: somebody only looks."""
    user = None if job is None else StoreUser(job, adopts)
    return Store(url, fs=SimFileSystem(disk, process), block_bytes=BLOCK_BYTES, user=user)


class SimPersisters:
    """See `ports.Persisters`."""

    def __init__(
        self,
        sockets: LocalSockets,
        keeper: Process,
        settings: Settings,
        disk: SharedDisk,
        start_ns: Callable[[], int],
        act_ns: int,
        tell: Tell,
    ) -> None:
        """start_ns: how long one takes to begin, each time. act_ns: how long a piece of an act
        takes at most. tell: of persisters that ended by themselves, and of what was no message."""
        self._sockets = sockets
        self._keeper = keeper
        self._settings = settings
        self._disk = disk
        self._start_ns = start_ns
        self._act_ns = act_ns
        self._tell = tell

    def start(self, hearer: Hearer) -> ChildConnection:
        """See `ports.Persisters`."""
        keeper = self._keeper
        if keeper.touch("start persister"):
            raise OSError(errno.EAGAIN, "the machine gives no more processes")
        child = keeper.machine.start("persister", parent_pid=keeper.pid)
        here = PersisterBox(self._sockets, keeper, child, self._tell)
        there = SimBox(self._sockets, child, keeper.pid, PERSISTER_WITH_KEEPER, _untold)
        self._sockets.join(here, there)
        here.hearer = hearer
        child.after(self._start_ns(), self._begin, child, there)
        return here

    def _begin(self, child: Process, keeper: SimBox) -> None:
        """In the child."""
        settings = self._settings
        machine = child.machine
        assert settings.store is not None
        store = open_store(settings.store, self._disk, child, settings.job, settings.adopt)
        persister = Persister(
            job=settings.job,
            job_dir=settings.job_dir,
            keep=settings.keep,
            memory=SimMemory(machine.files, child),
            store=store,
            format_=SimFormat(store, machine.clock),
            clock=machine.clock,
            holder=f"process {child.pid} on machine {machine.number}",
        )
        life = PersisterLife(child, persister, SimExecutor(child, self._act_ns))
        keeper.begin(lambda box: life)


class PersisterBox(SimBox):
    """The keeper's end. It lives no longer than the persister, and closing it ends that."""

    def __init__(self, sockets: LocalSockets, keeper: Process, child: Process, tell: Tell) -> None:
        super().__init__(sockets, keeper, child.pid, KEEPER_WITH_PERSISTER, tell)
        self._child = child
        self._computed_ns = 0

    @property
    def computed_ns(self) -> int:
        """See `ports.ChildConnection`: whenever it may."""
        if not self._child.is_stopped:
            self._computed_ns = self._child.world.now_ns
        return self._computed_ns

    def hurry(self, is_urgent: bool, /) -> bool:
        """See `ports.ChildConnection`. Here an act takes as long as drawn."""
        return True

    def close(self) -> None:
        super().close()
        self._child.end("its keeper needs it no more")

    def _end(self) -> None:
        if not self.is_over:
            self.close()
            why = f"the persister (process {self.pid}) ended: {self._child.why_ended}"
            self._tell("persister-ended", why)
            self.hearer.gone(self)

    def _refuse(self, why: str) -> None:
        self.refused += 1
        told = f"the persister (process {self.pid}) sent an invalid message: {why}; it is ended"
        self._tell("message-refused", told)
        self._end()


class PersisterLife:
    """One life of a persister: what `runtime/persister/process.py` does. See `ports.Hearer` and
    `ports.Executor`."""

    def __init__(
        self, process: Process, persister: Persister[Any, Any], executor: Executor
    ) -> None:
        self._process = process
        self._executor = executor
        self._server = PersisterServer(persister, self)

    def hear(self, box: Box, message: ToPersister, /) -> None:
        self._server.hear(box, message)

    def gone(self, box: Box, /) -> None:
        self._server.gone(box)
        self._end_if_over()

    def submit(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        self._executor.submit(work, lambda found: self._found(then, found))

    def act(self, acts: Acts[T], then: Callable[[T], None]) -> None:
        self._executor.act(acts, lambda found: self._found(then, found))

    def _found(self, then: Callable[[T], None], found: T) -> None:
        then(found)
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self._server.is_over:
            self._process.end("its keeper is gone")


def _untold(kind: str, why: str) -> None:
    """A persister has no journal."""
