"""Rank lines: the agent's lines to the ranks of its node and to the process that stands by to
become one.

Comes in: who connects at the agent's socket and what they say. Goes out: that a peer is lost, where
the ranks meet again, which rank the standby process is to become. Knows who has said what; decides
nothing and never waits.

Invariant: a line belongs to one life of a rank: what a process says whose place another one has
taken is not heard.
"""

from __future__ import annotations

import os
import select
import selectors
import socket
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from keepstep.core.wire.conversations import AGENT_WITH_PROCESS
from keepstep.edge.net.unix_socket import Mailbox, OnRefused, ignore_refused, listen
from keepstep.model.launch import Place
from keepstep.model.messages.agent_rank import (
    BecomeRank,
    CannotStay,
    CanStay,
    FromProcess,
    PeerLostNotice,
    RegroupAt,
    Regrouped,
    StandbyReady,
    TrainingEnded,
)


class RankLines:
    """Registers itself with `selector` under keys that begin with "line"."""

    def __init__(
        self,
        path: Path,
        selector: selectors.BaseSelector,
        on_refused: OnRefused = ignore_refused,
    ) -> None:
        self.path = path
        self._selector, self._on_refused = selector, on_refused
        self._server: socket.socket = listen(path)
        self._boxes: dict[int, Mailbox] = {}  # by process
        self._able: set[int] = set()  # processes that can stay when a peer is lost
        # processes started into a running job: they are not able yet and will be
        self._joining: set[int] = set()
        self._ended: set[int] = set()  # processes whose training has ended well
        self.standby: int | None = None  # a process that is ready to become a rank
        self.regrouped: set[int] = set()  # ranks that train on since the last order
        selector.register(self._server, selectors.EVENT_READ, "line server")

    def accept(self) -> None:
        sock, _ = self._server.accept()
        box = Mailbox(sock, AGENT_WITH_PROCESS, self._on_refused)
        pid, uid = box.peer()
        if uid != os.getuid():
            box.close()
            return
        self._boxes[pid] = box
        self._selector.register(box, selectors.EVENT_READ, f"line {pid}")

    def hear(self, pid: int) -> FromProcess | None:
        """What the process has said, if it was anything; its end is told by its pidfd, not here."""
        box = self._boxes.get(pid)
        if box is None:
            return None
        try:
            message: FromProcess | None = box.recv(0)
        except TimeoutError:
            return None
        match message:
            case None:
                self._hang_up(pid)
            case CanStay():
                self._able.add(pid)
            case CannotStay():
                self._able.discard(pid)
                self._joining.discard(pid)
            case TrainingEnded():
                self._ended.add(pid)
            case Regrouped(rank):
                self.regrouped.add(rank)
            case StandbyReady():
                self.standby = pid
        return message

    def _hang_up(self, pid: int) -> None:
        box = self._boxes.pop(pid)
        self._selector.unregister(box)
        box.close()
        if self.standby == pid:
            self.standby = None

    def forget(self, pid: int) -> None:
        """The process has ended."""
        if pid in self._boxes:
            self._hang_up(pid)
        self._able.discard(pid)
        self._joining.discard(pid)
        self._ended.discard(pid)

    def has_ended(self, pid: int) -> bool:
        """Whether the process, which is dead, had said that its training ended well: everything it
        has said is heard first."""
        while pid in self._boxes and select.select([self._boxes[pid]], [], [], 0)[0]:
            self.hear(pid)
        return pid in self._ended

    def joining(self, pids: Collection[int]) -> None:
        """These have just been started to take the places of lost ones."""
        self._joining.update(pids)

    def can_stay(self, pid: int) -> bool:
        """Whether this process can go on when a peer is lost."""
        return pid in self._able

    def are_able(self, pids: Collection[int]) -> bool:
        """Whether the ranks of these processes are ones that stay when a peer is lost; there is at
        least one."""
        return bool(pids) and (self._able | self._joining).issuperset(pids)

    def lost(self, pids: Collection[int], why: str) -> None:
        for pid in pids:
            if pid in self._boxes:
                self._boxes[pid].poke(PeerLostNotice(why))

    def regroup(self, pids: Collection[int], place: Place) -> None:
        """Where the ranks meet now."""
        order = RegroupAt(place.attempt, place.master_addr, place.master_port)
        for pid in pids:
            if pid in self._boxes:
                self._boxes[pid].send(order)

    def become(self, command: tuple[str, ...], environ: Mapping[str, str]) -> int | None:
        """Have the standby process become a rank: its pid. None when there is none."""
        pid = self.standby
        if pid is None:
            return None
        self.standby = None
        sent = self._boxes[pid].send(BecomeRank(command, dict(environ)))
        return pid if sent else None

    def close(self) -> None:
        for pid in list(self._boxes):
            self._hang_up(pid)
        self._selector.unregister(self._server)
        self._server.close()
        with suppress(OSError):
            self.path.unlink()
