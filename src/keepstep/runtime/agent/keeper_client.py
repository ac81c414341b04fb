"""Agent link: the agent's line to the keeper.

Keeps the keeper alive while the job runs, tells it where to listen, who the other nodes are, and
the end. A keeper that dies is replaced on a thread of its own, so that the agent's loop never waits
for it; the next one is told the same. Never stops the job.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from keepstep.config import Settings
from keepstep.core.wire.conversations import AGENT_WITH_KEEPER
from keepstep.edge.net.unix_socket import Mailbox
from keepstep.edge.os.journal import Journal
from keepstep.edge.os.processes import ensure_keeper
from keepstep.errors import KeeperError, KeepstepError
from keepstep.model.mesh import Mesh
from keepstep.model.messages.keeper_agent import AgentHere, JobEnded, MemoryKept, ToAgent
from keepstep.model.messages.keeper_rank import BeginMesh, CannotListen, Listen, Listening
from keepstep.model.units import S_NS, human_ns
from keepstep.runtime.refused_messages import RefusedMessages

RETRY_S = 5.0
DYING_S = 0.01
LISTEN_WITHIN_S = 10.0
_START_ERRORS = (KeepstepError, OSError, subprocess.SubprocessError)


class AgentLink:
    """`box` is None while no keeper is there; `on_return` is called from the thread that found the
    next one. `listens` is where it was last heard to, once it was asked."""

    def __init__(self, settings: Settings, journal: Journal, on_return: Callable[[], None]) -> None:
        """Raises KeepstepError: a job that cannot have a keeper had better not start."""
        self._settings, self._journal, self._on_return = settings, journal, on_return
        self._found: Mailbox | None = None
        self._last_word: JobEnded | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._lost_ns = 0
        self.listens: Listening | None = None
        self._asked = False
        self._mesh: Mesh | None = None
        self.box: Mailbox | None = None
        self._refused = RefusedMessages(journal)
        self._greet(self._ensure())

    def _ensure(self, timeout_s: float = 10.0) -> Mailbox:
        return ensure_keeper(self._settings, AGENT_WITH_KEEPER, timeout_s, self._refused)

    def _greet(self, box: Mailbox) -> None:
        self.box, (self._pid, _) = box, box.peer()
        box.send(AgentHere(os.getpid()))
        if self._last_word:
            box.send(self._last_word)
        elif self.listens:
            self._asked = box.send(Listen(self.listens.host, self.listens.port))

    def listen(self, host: str) -> None:
        """Have the keeper listen for those of other nodes. Raises KeeperError: without it the job
        cannot begin."""
        assert self.box is not None
        asked = f"the keeper (process {self._pid}) was asked to listen on {host}"
        self.box.send(Listen(host, 0))
        deadline = time.monotonic() + LISTEN_WITHIN_S
        try:
            while (message := self.box.recv(max(0.0, deadline - time.monotonic()))) is not None:
                match message:
                    case Listening():
                        self._listening(message)
                        return
                    case CannotListen(why):
                        raise KeeperError(f"{asked} and cannot: {why}")
        except TimeoutError:
            raise KeeperError(
                f"{asked} and did not answer within {LISTEN_WITHIN_S:.0f} s"
            ) from None
        raise KeeperError(f"{asked} and is gone")

    def _listening(self, message: Listening) -> None:
        self.listens, self._asked = message, False
        why = (
            f"the keeper (process {self._pid}) listens at "
            f"{self.listens.host}:{self.listens.port} for those of other nodes"
        )
        self._journal.record("keeper-listens", why, host=self.listens.host, port=self.listens.port)
        if self._mesh is not None:
            self.tell(self._mesh)

    def _unheard(self, why: str) -> None:
        assert self.listens is not None and self.box is not None
        port, self.listens = self.listens.port, replace(self.listens, port=0)
        why = (
            f"the keeper (process {self._pid}) cannot listen at {self.listens.host}:{port}, as "
            f"the one before it did: {why}"
        )
        self._journal.record("keeper-unheard", why, logging.WARNING)
        if port:  # any other one then: in the next round the others will know it
            self.box.send(Listen(self.listens.host, 0))

    def tell(self, mesh: Mesh) -> None:
        """The nodes of the round. Its own life in it is the one that listens now; one that does not
        yet is told when it does."""
        self._mesh = mesh
        if self.box is not None and self.listens is not None and not self._asked:
            mine = replace(
                mesh.members[mesh.node],
                port=self.listens.port,
                incarnation=self.listens.incarnation,
            )
            members = (*mesh.members[: mesh.node], mine, *mesh.members[mesh.node + 1 :])
            self.box.send(BeginMesh(replace(mesh, members=members)))

    def hear(self) -> ToAgent | None:
        """The message that makes `box` readable. None when it was none, or says that the keeper is
        gone: then `box` is None, and the search for another one begins."""
        assert self.box is not None
        try:
            message: ToAgent | None = self.box.recv(0)
        except TimeoutError:
            return None
        match message:
            case None:
                self.box.close()
                self.box, self._lost_ns = None, time.monotonic_ns()
                self._thread = threading.Thread(
                    target=self._search, name="keepstep-link", daemon=True
                )
                self._thread.start()
            case Listening():
                self._listening(message)
            case CannotListen(why):
                self._unheard(why)
        return message

    def _search(self) -> None:
        while not self._over.is_set():
            try:
                self._found = self._ensure()
            except _START_ERRORS as error:
                why = (
                    f"no keeper can be started ({error}); training goes on, trying again in "
                    f"{RETRY_S:.0f} s"
                )
                self._journal.record("keeper-missing", why, logging.WARNING)
                self._over.wait(RETRY_S)
                continue
            if self._found.peer()[0] != self._pid:
                self._on_return()
                return
            # A dying process closes one socket after the other: the one that listens may be the
            # last.
            self._found.close()
            self._found = None
            self._over.wait(DYING_S)

    def take(self) -> None:
        """After `on_return`: `box` is another keeper's now."""
        assert self._found is not None
        old_pid, box, self._found = self._pid, self._found, None
        self._greet(box)
        took = human_ns(time.monotonic_ns() - self._lost_ns)
        why = (
            f"the keeper (process {old_pid}) is gone; process {self._pid} has taken over after "
            f"{took}"
        )
        self._journal.record(
            "keeper-restarted", why, logging.WARNING, old_pid=old_pid, pid=self._pid
        )

    def end(self, ok: bool, why: str, within_ns: int) -> None:
        """Tell the keeper that the job is over and wait until it has cleaned up and gone."""
        self._over.set()
        self._last_word = JobEnded(ok, why)
        deadline_ns = time.monotonic_ns() + within_ns
        if self.box:
            self.box.send(self._last_word)
        else:
            self._replace(deadline_ns)
        while self.box:
            try:
                message = self.box.recv(max(0, deadline_ns - time.monotonic_ns()) / S_NS)
            except TimeoutError:
                why = (
                    f"the keeper (process {self._pid}) is still busy after "
                    f"{human_ns(within_ns)}: it cleans up by itself"
                )
                self._journal.record("keeper-busy", why)
                return
            if isinstance(message, MemoryKept):
                print(f"keepstep: {message.why}", file=sys.stderr)
                return
            if message is None:
                self.box.close()
                self.box = None
                if self._settings.job_dir.exists():  # it died before it had cleaned up
                    self._replace(deadline_ns)

    def _replace(self, deadline_ns: int) -> None:
        """A keeper that only has to clean up."""
        left_s = max(0.0, (deadline_ns - time.monotonic_ns()) / S_NS)
        if self._thread:
            self._thread.join(left_s)
        try:
            self._greet(self._found or self._ensure(left_s))
        except _START_ERRORS as error:
            why = (
                f"no keeper cleans up ({error}): `keepstep clean` removes {self._settings.job_dir}"
            )
            self._journal.record("keeper-missing", why, logging.WARNING)
