"""Rank server: the agent's side of the connections with the ranks of its node and with the process
that stands by to become one.

Comes in: who connects at the agent's socket and what they say. Goes out: that a peer is lost, where
the ranks meet again, which rank the standby process is to become. Knows who has said what; decides
nothing and never waits.

Invariant: a connection belongs to one process. When another process has taken its place, what it
says is ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

from keepstep.model.launch import RankAssignment
from keepstep.model.messages.agent_rank import (
    BecomeRank,
    CannotStay,
    CanStay,
    ConnectionSuspect,
    FromProcess,
    PeerLostNotice,
    RankHere,
    RegroupAt,
    Regrouped,
    StandbyReady,
    TrainingEnded,
)
from keepstep.ports import Box, BoxServer, ServeBoxes


class RankHearer(Protocol):
    """Who acts on what the ranks say."""

    def rank_has_state(self) -> None:
        """A rank that was started is through with its beginning."""

    def rank_regrouped(self) -> None: ...

    def rank_cannot_stay(self, rank: int) -> None:
        """It will not be among its peers again, should one be lost."""

    def rank_suspects(self, rank: int, why: str) -> None: ...

    def standby_ready(self, pid: int, unbuilt: str) -> bool:
        """Whether it is the one that was started; else it is another agent's, and hung up on.
        `unbuilt`: what it could not build ahead."""


class RankServer:
    """One node's. `open` comes first."""

    def __init__(self, path: Path, serve: ServeBoxes, hearer: RankHearer) -> None:
        self._path = path
        self._serve = serve
        self._hearer = hearer
        self._server: BoxServer | None = None
        self._boxes: dict[int, Box] = {}  # by process
        self._can_stay: set[int] = set()
        self._joining: set[int] = set()  # started into a running job: they will be able to stay
        self._ended: set[int] = set()
        self._standby: int | None = None
        self.regrouped: set[int] = set()  # ranks that train on since the last notice

    def open(self) -> None:
        """Processes may connect. The job directory is there."""
        self._server = self._serve(self._path, self)

    @property
    def standby(self) -> int | None:
        """The process that is ready to become a rank."""
        return self._standby

    # -- what processes say

    def hear(self, box: Box, message: FromProcess) -> None:
        pid = box.pid
        self._boxes.setdefault(pid, box)
        match message:
            case RankHere():
                self._hearer.rank_has_state()
            case CanStay():
                self._can_stay.add(pid)
            case CannotStay(rank=rank):
                self._can_stay.discard(pid)
                self._joining.discard(pid)
                self._hearer.rank_cannot_stay(rank)
            case TrainingEnded():
                self._ended.add(pid)
            case Regrouped(rank=rank):
                self.regrouped.add(rank)
                self._hearer.rank_regrouped()
            case ConnectionSuspect(rank=rank, why=why):
                self._hearer.rank_suspects(rank, why)
            case StandbyReady(unbuilt=unbuilt):
                self._standby = pid
                if not self._hearer.standby_ready(pid, unbuilt):
                    self.forget(pid)
            case _:
                pass  # it did not understand what it was told; its own log says so

    def gone(self, box: Box) -> None:
        """Its end itself is told by the kernel, not here."""
        self._boxes.pop(box.pid, None)
        if self._standby == box.pid:
            self._standby = None

    def forget(self, pid: int) -> None:
        """The process has ended, or its place is another's."""
        box = self._boxes.pop(pid, None)
        if box is not None:
            box.close()
        if self._standby == pid:
            self._standby = None
        self._can_stay.discard(pid)
        self._joining.discard(pid)
        self._ended.discard(pid)

    def has_ended_training(self, pid: int) -> bool:
        """Whether the process, which is dead, had said that its training ended well: everything it
        has said is heard first."""
        box = self._boxes.get(pid)
        if box is not None:
            box.hear_rest()
        return pid in self._ended

    # -- who can stay in its process when a peer is lost

    def joining(self, pids: Collection[int]) -> None:
        """These have just been started to take the places of lost ones."""
        self._joining.update(pids)

    def can_stay(self, pid: int) -> bool:
        return pid in self._can_stay

    def can_all_stay(self, pids: Collection[int]) -> bool:
        """Whether the ranks of these processes can, or will as soon as they train; there is at
        least one."""
        return bool(pids) and (self._can_stay | self._joining).issuperset(pids)

    # -- what they are told

    def peer_lost(self, pids: Collection[int], why: str) -> None:
        for pid in pids:
            if pid in self._boxes:
                self._boxes[pid].poke(PeerLostNotice(why[:1000]))

    def regroup(self, pids: Collection[int], place: RankAssignment) -> None:
        """Where the ranks meet now."""
        order = RegroupAt(place.attempt, place.master_addr, place.master_port)
        for pid in pids:
            if pid in self._boxes:
                self._boxes[pid].send(order)

    def become(self, command: tuple[str, ...], environ: Mapping[str, str]) -> int | None:
        """Have the standby process become a rank: which process that is. None when there is
        none."""
        pid, self._standby = self._standby, None
        if pid is None:
            return None
        return pid if self._boxes[pid].send(BecomeRank(command, dict(environ))) else None

    def close(self) -> None:
        for pid in list(self._boxes):
            self.forget(pid)
        if self._server is not None:
            self._server.close()
