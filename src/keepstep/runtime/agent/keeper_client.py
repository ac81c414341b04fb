"""Keeper client of the agent: keeps the node's keeper alive while the job runs, tells it where to
listen, who the other nodes are, and the end.

A keeper that dies or hangs is replaced, whether anybody waits for it or not; the next one is told
the same. Never stops the job.

Comes in: the keeper's messages. Goes out: the agent's, and calls of the `KeeperEvents`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from keepstep.errors import KeepstepError
from keepstep.model.events import WARNING
from keepstep.model.mesh import Mesh
from keepstep.model.messages.keeper_agent import (
    AgentHere,
    JobEnded,
    MemoryKept,
    MeshKnown,
    PeerDead,
    StillWriting,
    ToAgent,
)
from keepstep.model.messages.keeper_rank import (
    BeginMesh,
    CannotListen,
    Listen,
    Listening,
    NotUnderstood,
    VoteRefused,
)
from keepstep.model.units import MS_NS, S_NS, human_ns
from keepstep.ports import Box, Timer
from keepstep.runtime.agent.world import AgentWorld
from keepstep.runtime.keeper_watch import KeeperWatch

SEARCH_AGAIN_NS = 5 * S_NS
DYING_NS = 10 * MS_NS  # a dying keeper may still be connected to for a moment
DIES_WITHIN_NS = 1 * S_NS  # who lives longer lives, and the connection broke
LISTEN_WITHIN_NS = 45 * S_NS  # long enough for the next keeper, if this one hangs


class KeeperEvents(Protocol):
    """Who acts on what the keeper says."""

    def peer_dead(self, mesh_version: int, node: int, why: str) -> None: ...

    def mesh_known(self, mesh_version: int) -> None: ...

    def restore_refused(self, why: str) -> None: ...


class AgentKeeperClient:
    """`connect` comes first, `end` last."""

    def __init__(self, world: AgentWorld, job_dir: Path, hearer: KeeperEvents) -> None:
        self._world = world
        self._job_dir = job_dir
        self._hearer = hearer
        self._box: Box | None = None
        self._pid = 0  # of the keeper that is there, or was last
        self._mesh: Mesh | None = None
        self._lost_ns = 0
        self._asked: Callable[[Listening | str], None] | None = None
        self._asked_host = ""
        self._ending: _Ending | None = None
        self.listens: Listening | None = None  # where it was last heard to, once it was asked
        # Always: where nobody waits for a keeper that hangs, nothing is committed either.
        self._watch = KeeperWatch(world.timers, world.journal, world.keepers, lambda: self._box)

    # -- finding it

    def connect(self, found: Callable[[], None], missing: Callable[[KeepstepError], None]) -> None:
        """Find the keeper for the first time: a job that cannot have one had better not start."""

        def take(box: Box) -> None:
            self._greet(box)
            found()

        self._world.keepers.find(self, take, missing)

    def _greet(self, box: Box) -> None:
        self._box = box
        self._pid = box.pid
        box.send(AgentHere(self._world.pid))
        self._watch.begin()

    def gone(self, box: Box) -> None:
        self._box = None
        self._lost_ns = self._world.clock.monotonic_ns()
        if self._ending is not None:
            self._gone_at_the_end(self._ending)
        else:
            self._search()

    def _search(self) -> None:
        if self._ending is None:
            self._world.keepers.find(self, self._found_again, self._missing)

    def _missing(self, error: KeepstepError) -> None:
        again = human_ns(SEARCH_AGAIN_NS)
        told = f"no keeper can be started ({error}); training continues, next try in {again}"
        self._world.journal.record("keeper-missing", told, WARNING)
        self._world.timers.after(SEARCH_AGAIN_NS, self._search)

    def _found_again(self, box: Box) -> None:
        away_ns = self._world.clock.monotonic_ns() - self._lost_ns
        if box.pid == self._pid and away_ns < DIES_WITHIN_NS:
            # A dying process closes one socket after the other: the one that listens may be last.
            box.close()
            self._world.timers.after(DYING_NS, self._search)
            return
        old_pid = self._pid
        self._greet(box)
        if old_pid != self._pid:
            why = (
                f"the keeper (process {old_pid}) is gone; process {self._pid} has taken over after "
                f"{human_ns(away_ns)}"
            )
            self._world.journal.record(
                "keeper-restarted", why, WARNING, old_pid=old_pid, pid=self._pid
            )
        if self.listens is not None:
            self._listen(self.listens.host, self.listens.port)
        elif self._asked is not None:  # the one that was asked died over the answer
            self._listen(self._asked_host, 0)

    # -- other nodes

    def listen(self, host: str, then: Callable[[str | None], None]) -> None:
        """Have the keeper listen for those of other nodes; `then` hears None, or why it cannot:
        without it the job cannot begin."""

        def answered(answer: Listening | str) -> None:
            asked = f"the keeper (process {self._pid}) was asked to listen on {host}"
            then(None if isinstance(answer, Listening) else f"{asked} and cannot: {answer}")

        self._asked, self._asked_host = answered, host
        self._listen(host, 0)

        def late() -> None:
            if self._asked is answered:
                self._asked = None
                answered(f"no answer within {human_ns(LISTEN_WITHIN_NS)}")

        self._world.timers.after(LISTEN_WITHIN_NS, late)

    def _listen(self, host: str, port: int) -> None:
        if self._box is not None:
            after = 0 if self.listens is None else self.listens.incarnation
            self._box.send(Listen(host, port, after))

    def _listening(self, answer: Listening) -> None:
        self.listens = answer
        where = f"{answer.host}:{answer.port}"
        why = f"the keeper (process {self._pid}) listens at {where} for the keepers of other nodes"
        self._world.journal.record("keeper-listens", why, host=answer.host, port=answer.port)
        self._answer_listen(answer)
        if self._mesh is not None:
            self._tell_mesh(self._mesh, answer)

    def _cannot_listen(self, why: str) -> None:
        listens = self.listens
        if listens is None:
            self._answer_listen(why)
            return
        where = f"{listens.host}:{listens.port}"
        told = (
            f"the keeper (process {self._pid}) cannot listen at {where}, as the one before it "
            f"did: {why}"
        )
        self._world.journal.record("keeper-unheard", told, WARNING)
        if listens.port:  # any other one then: in the next attempt the others will know it
            self.listens = replace(listens, port=0)
            self._listen(listens.host, 0)

    def _answer_listen(self, answer: Listening | str) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            asked(answer)

    def begin_mesh(self, mesh: Mesh) -> None:
        """The nodes of the attempt. One that does not listen yet is told when it does."""
        self._mesh = mesh
        if self.listens is not None:
            self._tell_mesh(mesh, self.listens)

    def _tell_mesh(self, mesh: Mesh, listens: Listening) -> None:
        """Its own life in the mesh is the one that listens now."""
        if self._box is not None:
            me = mesh.members[mesh.node]
            mine = replace(me, port=listens.port, incarnation=listens.incarnation)
            members = (*mesh.members[: mesh.node], mine, *mesh.members[mesh.node + 1 :])
            self._box.send(BeginMesh(replace(mesh, members=members)))

    # -- what it says

    def hear(self, box: Box, message: ToAgent) -> None:
        self._watch.heard()
        match message:
            case Listening():
                self._listening(message)
            case CannotListen(why=why):
                self._cannot_listen(why)
            case PeerDead(mesh_version=version, node=node, why=why):
                self._hearer.peer_dead(version, node, why)
            case MeshKnown(mesh_version=version):
                self._hearer.mesh_known(version)
            case VoteRefused(why=why):
                self._hearer.restore_refused(why)
            case MemoryKept(why=why):
                if self._ending is not None:
                    self._world.show(f"keepstep: {why}")
                    self._over(self._ending)
            case StillWriting(why=why):
                if self._ending is not None:
                    self._ending.left_to_do = why
            case NotUnderstood(why=why):
                told = f"the keeper (process {self._pid}) does not understand this agent: {why}"
                self._world.journal.record("not-understood", told, WARNING)
            case _:
                pass  # a sign of life; or counts of traffic, which nobody has asked for

    # -- the end

    def end(self, ok: bool, why: str, within_ns: int, then: Callable[[], None]) -> None:
        """Tell the keeper that the job is over; `then` is called when it has cleaned up and gone,
        or does not within that time."""
        ending = self._ending = _Ending(JobEnded(ok, why[:1000]), then)

        def late() -> None:
            told = (
                f"the keeper (process {self._pid}) is still busy after {human_ns(within_ns)} and "
                f"goes on by itself: {ending.left_to_do}"
            )
            self._world.journal.record("keeper-busy", told)
            self._over(ending)

        ending.late = self._world.timers.after(within_ns, late)
        if self._box is not None:
            self._box.send(ending.last_word)
        else:
            self._replace(ending)

    def _gone_at_the_end(self, ending: _Ending) -> None:
        if self._world.memory.names(self._job_dir):  # it died before it had cleaned up
            self._replace(ending)
        else:
            self._over(ending)

    def _replace(self, ending: _Ending) -> None:
        """Another keeper, which only has to clean up."""

        def found(box: Box) -> None:
            if ending.is_over:
                box.close()
            else:
                self._greet(box)
                box.send(ending.last_word)

        def missing(error: KeepstepError) -> None:
            told = f"no keeper to clean up ({error}): `keepstep clean` removes {self._job_dir}"
            self._world.journal.record("keeper-missing", told, WARNING)
            self._over(ending)

        self._world.keepers.find(self, found, missing)

    def _over(self, ending: _Ending) -> None:
        if ending.is_over:
            return
        ending.is_over = True
        if ending.late is not None:
            ending.late.cancel()
        box, self._box = self._box, None
        if box is not None:
            box.close()
        ending.then()


class _Ending:
    """What is left to do."""

    def __init__(self, last_word: JobEnded, then: Callable[[], None]) -> None:
        self.last_word = last_word
        self.then = then
        self.late: Timer | None = None
        # the keeper's, as far as it has said
        self.left_to_do = (
            "it cleans up"
            if last_word.ok
            else "what memory has is kept for the next start, as far as the grace time lets it "
            "(`keepstep status`)"
        )
        self.is_over = False
