"""Keeper process: the real world of a keeper, and its loop: `python -m
keepstep.runtime.keeper.process <settings as JSON>`.

Never imports torch. One lives in a job directory: a lock says so.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from keepstep.config import Settings, settings_from_text
from keepstep.core.wire.conversations import KEEPER_WITH_NODE
from keepstep.core.wire.streams import StreamLimits
from keepstep.edge.net import boxes
from keepstep.edge.net.tcp import interface_of
from keepstep.edge.os.clock import CLOCK
from keepstep.edge.os.flock import hold, leads_to
from keepstep.edge.os.job_directory import claim_job_dir, leave_arena
from keepstep.edge.os.journal import FileJournal
from keepstep.edge.os.keeper_settings import write_keeper_settings
from keepstep.edge.os.loop import Loop
from keepstep.edge.os.persisters import ChildPersisters, persister_command
from keepstep.edge.os.priority import give_way
from keepstep.edge.os.signals import Signals
from keepstep.edge.os.threads import AsideThreads, Threads
from keepstep.edge.shm.memory import MEMORY
from keepstep.model.checkpoint import StoreListing
from keepstep.model.events import WARNING
from keepstep.model.hosts import parse_hosts
from keepstep.ports import Checkpoints, Links, Receiver
from keepstep.runtime.keeper.open_links import open_tcp_links
from keepstep.runtime.keeper.run import LOCK, KeeperRun
from keepstep.runtime.keeper_world import KeeperWorld
from keepstep.runtime.persister.conversation import KEEPER_WITH_PERSISTER
from keepstep.runtime.replication.pacing import Pacing

if TYPE_CHECKING:
    from keepstep.edge.store.store import Store

KEEPER_NICE = 5  # it must answer in time also on a machine that is busy
MOST_STRANGERS = 64  # addresses that are told of
WORKERS = 4  # scrubbing takes long: copies do not wait for it


class JobLock:
    """See `KeeperLock`."""

    def __init__(self, settings: Settings, teller: str) -> None:
        self._settings, self._teller = settings, teller
        self._path = settings.job_dir / LOCK
        self._fd: int | None = None

    def take(self) -> bool:
        """See `KeeperLock`. Others can read what the keeper acts on, then. Raises what
        `claim_job_dir` raises."""
        self.close()
        claim_job_dir(self._settings.job_dir)  # the keeper before removes it when it ends
        try:
            self._fd = hold(self._path)
        except FileNotFoundError:
            return False
        if not self.is_of_directory():
            return False
        write_keeper_settings(self._settings, self._teller)
        return True

    def is_of_directory(self) -> bool:
        """See `KeeperLock`."""
        return self._fd is not None and leads_to(self._path, self._fd)

    def close(self) -> None:
        """Give it up."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class KeeperProcess:
    """The keeper and what drives it."""

    def __init__(self, settings: Settings, teller: str, nice: int, undo: ExitStack) -> None:
        """teller: the rank that has started it, as text; empty for none. nice: what the process was
        begun with. undo: closes what this opens, when the process ends."""
        self._settings, self._nice = settings, nice
        self._loop = loop = Loop()
        undo.callback(loop.close)
        signals = Signals(loop)
        undo.callback(signals.close)
        self._journal = FileJournal(settings.journal_path, "keeper")
        undo.callback(self._journal.close)
        self._workers = Threads(WORKERS, self._post)
        undo.callback(self._workers.close)
        lock = JobLock(settings, teller)
        undo.callback(lock.close)
        self._is_woken = False
        self._is_over = False
        self._strangers: set[str] = set()
        self._run = KeeperRun(settings, self._world(), lock, self._end)
        signals.on(signal.SIGTERM, self._run.preempted)

    def _world(self) -> KeeperWorld:
        has_store = self._settings.store is not None
        return KeeperWorld(
            clock=CLOCK,
            timers=self._loop,
            memory=MEMORY,
            journal=self._journal,
            workers=self._workers,
            aside=AsideThreads(self._post),
            serve_boxes=lambda path, hearer: boxes.listen(
                self._loop, path, KEEPER_WITH_NODE, lambda box: hearer, self._tell
            ),
            open_links=self._open_links,
            wake=self._wake,
            checkpoints=self._checkpoints() if has_store else None,
            persisters=self._persisters() if has_store else None,
            pid=os.getpid(),
            uid=os.getuid(),
        )

    def _checkpoints(self) -> Checkpoints:
        return StoredCheckpoints(self._settings)

    def _persisters(self) -> ChildPersisters:
        command = persister_command(self._settings)
        return ChildPersisters(
            self._loop, command, KEEPER_WITH_PERSISTER, self._journal.record, self._nice
        )

    def _open_links(
        self,
        job_hash: bytes,
        incarnation: int,
        address: tuple[str, int],
        dead_ns: int,
        receiver: Receiver,
    ) -> Links:
        """See `ports.OpenLinks`."""
        settings = self._settings
        more_hosts = () if settings.host is None else parse_hosts(settings.host)[1:]
        gate = None
        if settings.interleave == "auto":
            hosts = (address[0], *more_hosts)
            gate = Pacing(settings.job_dir, hosts, MEMORY, CLOCK, self._journal, interface_of)
        return open_tcp_links(
            job_hash,
            incarnation,
            address,
            dead_ns,
            receiver,
            gate,
            settings.block_mac,
            StreamLimits.of(settings.link_streams),
            more_hosts,
            settings.transport,
            self._knocked_wrong,
            settings.copy_dscp,
        )

    def _knocked_wrong(self, source: str, why: str) -> None:
        """On the thread that hears who knocks. Told once of each address; the rest is counted."""
        told = self._strangers
        if source in told or len(told) > MOST_STRANGERS:
            return
        told.add(source)
        if len(told) > MOST_STRANGERS:
            why = f"strangers from more than {MOST_STRANGERS} addresses: of others nothing is told"
        else:
            why = f"somebody at {source} came to this keeper's port and was sent away: {why}"
        told_why = why
        self._loop.post(
            lambda: self._journal.record("stranger-refused", told_why, WARNING, source=source)
        )

    def _tell(self, kind: str, why: str) -> None:
        """What connections tell: of messages, or of who wanted to connect."""
        if kind == "message-refused":
            self._run.refuse("a process of this node", why)
        elif kind == "connection-refused":
            self._journal.record("connection-refused", why)
        else:
            self._journal.record("stranger-refused", why)

    def _post(self, call: Callable[[], None]) -> None:
        """From any thread: what workers have found."""

        def hand_in() -> None:
            call()
            self._run.look_soon()

        self._loop.post(hand_in)

    def _wake(self) -> None:
        """From any thread. Who is awake already hears it all the same."""
        if not self._is_woken:
            self._is_woken = True
            self._loop.post(self._hear_peers)

    def _hear_peers(self) -> None:
        self._is_woken = False
        self._run.hear_peers()

    def _end(self) -> None:
        self._is_over = True

    def run(self) -> None:
        """Until the job is over, or another keeper is found to live."""
        self._run.begin()
        self._loop.run(lambda: self._is_over)
        self._run.close()
        leave_arena(self._settings.job_dir.parent)


class StoredCheckpoints:
    """See `ports.Checkpoints`. What reads stores is imported when one is read: most keepers never
    do."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def _open(self) -> Store:
        from keepstep.edge.store.job_store import open_job_store

        return open_job_store(self._settings)

    def begin_run(self) -> str | None:
        """See `ports.Checkpoints`."""
        return self._open().begin_run()

    def doubt(self, first: int, before_epoch: int) -> Sequence[str]:
        """See `ports.Checkpoints`."""
        return self._open().doubt(first, before_epoch)

    def look(self) -> StoreListing:
        """See `ports.Checkpoints`."""
        return self._open().look()


def main() -> None:
    """Run until the job is over."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    give_way(KEEPER_NICE)
    with ExitStack() as undo:
        settings = settings_from_text(sys.argv[1], os.environ)
        teller = sys.argv[2] if len(sys.argv) > 2 else ""
        KeeperProcess(settings, teller, nice, undo).run()


if __name__ == "__main__":
    main()
