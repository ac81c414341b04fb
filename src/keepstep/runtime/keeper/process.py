"""Keeper process: the real world of a keeper, and its loop: unix sockets, other keepers, the
persister's pipe, workers, signals.

Never imports torch. One lives in a job directory: a lock says so.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from fcntl import LOCK_EX, LOCK_NB, flock
from queue import SimpleQueue
from typing import Any

from keepstep.config import Settings, settings_from_text
from keepstep.core.wire.conversations import KEEPER_WITH_NODE
from keepstep.edge.net.unix_socket import Mailbox, listen
from keepstep.edge.os.clock import CLOCK
from keepstep.edge.os.eventfd import Waker
from keepstep.edge.os.journal import Journal
from keepstep.edge.os.threads import Threads
from keepstep.edge.shm.memory import MEMORY
from keepstep.model.units import S_NS
from keepstep.ports import Box, Links, Receiver
from keepstep.runtime.keeper.keeper import Keeper
from keepstep.runtime.keeper.open_links import open_tcp_links
from keepstep.runtime.keeper.persister_client import PersisterClient, persister_command
from keepstep.runtime.replication.pacing import Pacing
from keepstep.runtime.world import World

WORKERS = 4  # scrubbing and listing the store take long: copies do not wait for them


class KeeperProcess:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._selector = selectors.DefaultSelector()
        self._waker = Waker()
        self._posted: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._workers = Threads(WORKERS, self._post)
        self._journal = Journal(settings.journal_path, "keeper")
        self._writer = (
            PersisterClient(persister_command(settings), self._selector)
            if settings.store is not None
            else None
        )
        world = World(
            clock=CLOCK,
            memory=MEMORY,
            journal=self._journal,
            workers=self._workers,
            open_links=self._open_links,
            wake=self._waker.wake,
            checkpoints=Checkpoints(settings.store) if settings.store is not None else None,
            writer=self._writer,
            pid=os.getpid(),
            uid=os.getuid(),
        )
        self._uid = world.uid
        self.keeper = Keeper(settings, world)
        self._server = listen(settings.job_dir / "keeper.sock")
        self._selector.register(self._server, selectors.EVENT_READ, self._accept)
        self._selector.register(self._waker, selectors.EVENT_READ, self._woken)

    def _open_links(
        self,
        job_hash: bytes,
        incarnation: int,
        address: tuple[str, int],
        dead_ns: int,
        receiver: Receiver,
    ) -> Links:
        """See `ports.OpenLinks`."""
        interleaves = self._settings.interleave == "auto"
        gate = Pacing(self._settings.job_dir, address[0], self._journal) if interleaves else None
        return open_tcp_links(job_hash, incarnation, address, dead_ns, receiver, gate)

    def _post(self, call: Callable[[], None]) -> None:
        """From any thread."""
        self._posted.put(call)
        self._waker.wake()

    def run(self) -> None:
        """Until the job is over."""
        if self._writer is not None:
            self._writer.start()
        over = False
        while not over:
            for key, _ in self._selector.select(self.keeper.tick_ns / S_NS):
                key.data()
            over = self.keeper.tick()
        self._server.close()
        self.keeper.close()
        self._workers.close()

    def _accept(self) -> None:
        sock, _ = self._server.accept()
        box = Mailbox(sock, KEEPER_WITH_NODE, self.keeper.refuse)
        pid, uid = box.peer()
        if uid != self._uid:
            self._journal.record(
                "stranger-refused",
                f"process {pid} of user {uid} wanted to join the job of user {self._uid}",
            )
            box.close()
            return
        self._selector.register(box, selectors.EVENT_READ, lambda: box.hear(self))

    def hear(self, box: Box, message: Any) -> None:
        """See `ports.Hearer`."""
        self.keeper.hear(box, message)

    def gone(self, box: Box) -> None:
        """See `ports.Hearer`."""
        self._selector.unregister(box)  # type: ignore[arg-type]  # all boxes here are sockets
        self.keeper.gone(box)
        box.close()

    def _woken(self) -> None:
        self._waker.rest()
        while not self._posted.empty():
            self._posted.get()()
        self.keeper.hear_peers()


class Checkpoints:
    """See `ports.Checkpoints`. What reads stores is imported when one is read: most keepers never
    do."""

    def __init__(self, url: str) -> None:
        self._url = url

    def usable(self) -> tuple[list[int], dict[int, str]]:
        from keepstep.edge.store.store import Store

        listing = Store(self._url).list_checkpoints()
        return [c.step for c in listing.checkpoints], dict(listing.broken)


def main() -> None:
    """`python -m keepstep.runtime.keeper.process <settings as JSON>`: run until the job is over."""
    settings = settings_from_text(sys.argv[1])
    lock_fd = os.open(
        settings.job_dir / "keeper.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
    )
    for _ in range(20):  # an onlooker's question whether a keeper lives holds the lock for a moment
        try:
            flock(lock_fd, LOCK_EX | LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.01)
    else:
        return  # another keeper lives
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    process = KeeperProcess(settings)
    signal.signal(signal.SIGTERM, lambda *_: process.keeper.preempted())
    process.run()


if __name__ == "__main__":
    main()
