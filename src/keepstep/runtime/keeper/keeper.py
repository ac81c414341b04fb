"""Keeper: outlives the trainers and answers for their memory.

    words of ranks and the agent, of other keepers, of the persister; what workers found; the clock
        -> vote, custody, commit -> replies, copies, removal

Ranks write their own slots, and the keeper reads them; it writes only what it holds for other
nodes. So it may die at any moment: ranks keep capturing, and the next keeper adopts the job
directory as it finds it. Everything happens in one loop, which is somebody else's
(`runtime/keeper/process.py`), and nothing is touched but through the `World`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from keepstep.config import Settings
from keepstep.core.recovery.job_lifetime import Custody, Finish
from keepstep.core.resume.cut import holding_of
from keepstep.core.wire.plausible import flaw_of_local
from keepstep.edge.shm.slot import rank_dir, ranks_in, slot_paths
from keepstep.edge.shm.status_page import StatusPages
from keepstep.errors import KeeperError, StoreError
from keepstep.model.mesh import LEADER, Mesh
from keepstep.model.messages.keeper_agent import (
    AgentHere,
    FromAgent,
    JobEnded,
    MemoryKept,
    MeshKnown,
    PeerDead,
)
from keepstep.model.messages.keeper_rank import (
    Attach,
    BeginMesh,
    CannotListen,
    CheckpointDone,
    CountTraffic,
    FromRank,
    Goodbye,
    JoinVote,
    Listen,
    Listening,
    NotUnderstood,
    PageChanged,
    Released,
    StateLoaded,
    StateUnusable,
    ToRank,
    TrafficCounted,
    WantCheckpoint,
)
from keepstep.model.messages.peers import (
    ActAnswer,
    ActOrdered,
    CheckpointAnswer,
    CheckpointAsked,
    CheckpointBody,
    VoteBody,
)
from keepstep.model.messages.persister import ActName
from keepstep.model.snapshot import RankStatus, Stamp
from keepstep.model.units import MS_NS, S_NS
from keepstep.ports import Box
from keepstep.runtime.job_name import job_hash
from keepstep.runtime.keeper.checkpointing import Checkpointing
from keepstep.runtime.keeper.resume import Election
from keepstep.runtime.keeper.scrubber import Scrubbing
from keepstep.runtime.refused_messages import RefusedMessages
from keepstep.runtime.replication.node import Node
from keepstep.runtime.replication.peer_inbox import PeerInbox
from keepstep.runtime.world import World

FromNode = FromRank | FromAgent

TICK_NS = 200 * MS_NS
BUSY_TICK_NS = 5 * MS_NS
# how long a node that follows waits at the end until the leader says that the last checkpoint is
# written
LAST_ANSWER_NS = 60 * S_NS


class FarAsker:
    """A rank of another node, as persisting sees it."""

    def __init__(self, say: Callable[[int, CheckpointBody], None], node: int) -> None:
        self._say, self._node = say, node

    def send(self, done: CheckpointDone, /) -> bool:
        """What became of it."""
        self._say(self._node, CheckpointAnswer(done.ticket, done.ok, done.step, done.why))
        return True


class Keeper:
    """One job's keeper on one machine."""

    def __init__(self, settings: Settings, world: World) -> None:
        self.settings, self.journal = settings, world.journal
        self._world, self._clock, self._memory = world, world.clock, world.memory
        self._refused = RefusedMessages(world.journal)
        self._job_hash = job_hash(settings.job, world.uid)
        self._pages = StatusPages(self._memory, settings.job_dir)
        self.custody = Custody(int(settings.grace_s * S_NS), self._clock.monotonic_ns())
        self.election = Election(self._clock, self.journal, settings.store is not None, self)
        self.checkpointing = Checkpointing(
            settings.job_dir, self._memory, self._clock, self.journal, world.writer
        )
        self.scrubbing = Scrubbing(settings, world, self)
        self._tickets = itertools.count(1)
        self._asked: dict[int, tuple[Box | None, int]] = {}  # of another node's keeper, which leads
        self.lines: PeerInbox | None = None
        self.node: Node | None = None
        self.ranks: dict[int, Box] = {}
        self._attached = False  # ranks that train have found this keeper
        # ranks whose last life told of an error, until all train again
        self._failed: set[int] = set()
        self.agent: Box | None = None
        self._finishing: Finish | None = None
        self._last_ask_ns = 0
        self._leader_gone = ""  # why, while the leading keeper cannot be asked
        slots = sum(
            len(slot_paths(self._memory, settings.job_dir, rank)) for rank in self.statuses()
        )
        found = f"adopted {slots} slots" if slots else "nothing there yet"
        why = f"keeper {world.pid} has {settings.job_dir}; {found}"
        self.journal.record("keeper-started", why, pid=world.pid, adopted_slots=slots)

    # -- the loop

    @property
    def tick_ns(self) -> int:
        """How long the loop may wait for something to happen before the next `tick`."""
        return BUSY_TICK_NS if self.checkpointing.pending else TICK_NS

    def tick(self) -> bool:
        """What time brings. True when all is over: `close` then."""
        self.scrubbing.tick()
        self._persist()
        if self.node is not None:
            self.node.tick()
        return self._is_over()

    def hear_lines(self) -> None:
        """Other keepers have said something."""
        if self.node is not None:
            self.node.hear()

    # -- who comes and goes

    def hear(self, box: Box, message: FromNode) -> None:
        """A message of a rank or of the agent. See `ports.Hearer`."""
        mesh = self.node.mesh if self.node is not None else None
        if flaw := flaw_of_local(message, mesh):
            self.refuse(f"process {box.pid}", flaw)
            box.poke(NotUnderstood(flaw))
            return
        match message:
            case JoinVote():
                self._rank_joined(box, message)
            case Attach():
                self._rank_attached(box, message)
            case StateLoaded(rank, offer):
                self.election.loaded(rank, offer)
            case StateUnusable(rank, offer, why):
                self.election.failed(rank, offer, why)
            case PageChanged():
                if self.node is not None:
                    self.node.rank_changed()
            case WantCheckpoint(ticket, step, why):
                self._ask_to_persist(box, step, why, ticket)
            case Goodbye(rank, ok, why):
                self._rank_said_bye(box, rank, ok, why)
            case AgentHere():
                self.agent = box
                self.custody.agent_came()
            case JobEnded(ok, why):
                self._agent_ended(box, ok, why)
            case Listen(host, port):
                box.send(self._listen(host, port))
            case BeginMesh(mesh):
                self._mesh_told(box, mesh)
            case CountTraffic():
                counts = self.lines.counts() if self.lines is not None else {}
                box.send(TrafficCounted(counts))
            case NotUnderstood(why):
                told = f"process {box.pid} does not understand this keeper: {why}"
                self.journal.record("not-understood", told, pid=box.pid)

    def _agent_ended(self, box: Box, ok: bool, why: str) -> None:
        holds_snapshots = any(
            slot_paths(self._memory, self.settings.job_dir, rank) for rank in self.statuses()
        )
        if not self.custody.agent_said_end(ok, why, holds_snapshots):
            kept = (
                f"{why}; it never resumed, so the memory it found is kept for "
                f"{self.settings.grace_s:.0f} s"
            )
            self.journal.record("memory-kept", kept)
            box.send(MemoryKept(kept))

    def _mesh_told(self, box: Box, mesh: Mesh) -> None:
        self._begin_round(mesh)
        # its ranks may ask now: nothing they say is taken for the round before
        if box is self.agent:
            box.send(MeshKnown(mesh.version))

    def _rank_said_bye(self, box: Box, rank: int, ok: bool, why: str) -> None:
        self.custody.rank_said_bye(rank, ok, why)
        self.journal.record("rank-bye", f"rank {rank} says goodbye: {why}", rank=rank, ok=ok)
        if self.custody.ended_here and self.node is not None:
            self.node.say_ended()
        if self.agent is not None or not self.custody.ended_here:
            # else the connection ends when the memory is gone
            box.send(Released())

    def _rank_came(self, box: Box, rank: int, world_size: int) -> None:
        self.ranks[rank] = box
        ok, why = self.custody.last_words.get(rank, (True, ""))
        if not ok and why != "interrupted":
            self._failed.add(rank)
        self.custody.rank_came(rank, self._expected_here(world_size))

    def _rank_attached(self, box: Box, attached: Attach) -> None:
        rank = attached.rank
        self._rank_came(box, rank, attached.world_size)
        self.custody.resumed = True
        self._attached = True
        self.journal.record(
            "rank-attached",
            f"rank {rank} (process {box.pid}) is training and found this keeper",
            rank=rank,
            pid=box.pid,
        )
        if self.node is not None:
            self.node.trains()

    def _rank_joined(self, box: Box, join: JoinVote) -> None:
        rank = join.rank
        self._rank_came(box, rank, join.world_size)
        held = ", ".join(map(str, sorted(join.holds))) or "nothing usable"
        self.journal.record(
            "rank-joined",
            f"rank {rank} of {join.world_size} (process {box.pid}) holds {held} in memory",
            rank=rank,
            pid=box.pid,
            incarnation=join.incarnation,
        )
        self.election.joined(join)

    def _expected_here(self, world: int) -> int:
        mesh = self.node.mesh if self.node is not None else None
        return world if mesh is None else len(mesh.ranks_of(mesh.node))

    def gone(self, box: Box) -> None:
        """Nobody is at the other end any more."""
        now_ns = self._clock.monotonic_ns()
        self.checkpointing.forget(box)
        self._asked = {
            number: (None if who is box else who, ticket)
            for number, (who, ticket) in self._asked.items()
        }
        if box is self.agent:
            self.agent = None
            self.custody.agent_left(now_ns)
        for rank, known in list(self.ranks.items()):
            if known is box:
                del self.ranks[rank]
                self.custody.rank_left(rank, now_ns)
                self.election.left(rank)
                self._say_left(rank, box.pid)

    def _say_left(self, rank: int, pid: int) -> None:
        ok_why = self.custody.last_words.get(rank)
        status = self.status(rank)
        at = (
            f" in step {status.step}, phase {status.phase.name.lower()}, newest completed "
            f"step {status.completed_step}"
            if status
            else ""
        )
        why = f"rank {rank} (process {pid}) is gone" + ("" if ok_why else f" without goodbye{at}")
        told = (
            {"completed_step": status.completed_step, "stall_ns": status.stall_ns_total}
            if status
            else {"completed_step": None}
        )
        self.journal.record(
            "rank-left", why, rank=rank, pid=pid, expected=ok_why is not None, **told
        )

    # -- other nodes

    def _listen(self, host: str, port: int) -> Listening | CannotListen:
        if self.lines is None:
            try:
                self.lines = PeerInbox(
                    self._world, self._job_hash, (host, port), self.settings.link_dead_s
                )
            except KeeperError as error:
                return CannotListen(str(error))
        host, port = self.lines.address
        return Listening(host, port, self.lines.incarnation, self.lines.mesh_version)

    def _begin_round(self, mesh: Mesh) -> None:
        if self.lines is None:
            self.journal.record(
                "mesh-refused", "a mesh was told before the keeper was asked to listen"
            )
            return
        first = self.node is None
        if self.node is None:
            self.node = Node(self._world, self.settings, self.lines, self._job_hash, self)
        if self.node.mesh is not None and mesh.version <= self.node.mesh.version:
            return  # every session of a node tells it
        self.custody.round_began(len(mesh.members), mesh.ranks_of(mesh.node))
        self._leader_gone = ""
        self.node.begin(mesh)
        self.election.begin_round(self.node)
        self.checkpointing.join_mesh(mesh, self._order_persisting)
        # this keeper came in the middle of a round, and its ranks were quicker than the agent
        if first and self._attached:
            self.node.trains()

    def vote_word(self, node: int, body: VoteBody) -> None:
        self.election.heard(node, body)

    def inventories_changed(self) -> None:
        self.election.inventories_changed()

    def leader_is_back(self) -> None:
        self._leader_gone = ""
        self.election.leader_is_back()
        if self.custody.ended_here and self.node is not None:
            self.node.say_ended()

    def all_nodes_ended(self) -> None:
        self.custody.all_nodes_ended = True

    def link_is_gone(self, node: int, why: str) -> None:
        self.checkpointing.node_gone(node, why)
        if node == LEADER:
            self._leader_gone = f"the leading keeper is gone: {why}"
            asked, self._asked = self._asked, {}
            for box, ticket in asked.values():
                self._cannot_persist(box, ticket)

    def peer_is_dead(self, node: int, why: str) -> None:
        self.journal.record("node-lost", f"node {node} does not answer: {why}", node=node)
        self.election.node_is_dead(node)
        assert self.node is not None and self.node.mesh is not None
        if self.agent is not None:
            self.agent.send(PeerDead(self.node.mesh.version, node, why))

    # -- checkpoints

    @property
    def _follows(self) -> bool:
        """Whether another node's keeper leads."""
        return self.node is not None and self.node.mesh is not None and not self.node.mesh.leads

    def _ask_to_persist(self, box: Box | None, step: int | None, why: str, ticket: int) -> None:
        if not self._follows or self.settings.store is None:
            self.checkpointing.ask(box, step, why, ticket)
            return
        if self._leader_gone:
            self._cannot_persist(box, ticket)
            return
        assert self.node is not None
        number = next(self._tickets)
        self._asked[number] = (box, ticket)
        self.node.say_persist(LEADER, CheckpointAsked(number, step, why[:500]))

    def _cannot_persist(self, box: Box | None, ticket: int) -> None:
        if box is not None:
            box.send(CheckpointDone(ticket, False, None, self._leader_gone))

    def _order_persisting(self, node: int, act: ActName, stamp: Stamp, attempt: int) -> None:
        assert self.node is not None
        self.node.say_persist(node, ActOrdered(act, stamp, attempt))

    def checkpoint_word(self, node: int, body: CheckpointBody) -> None:
        assert self.node is not None
        say = self.node.say_persist
        match body:
            case CheckpointAsked(ticket, step, why):
                self.checkpointing.ask(FarAsker(say, node), step, why, ticket)
            case CheckpointAnswer():
                box, ticket = self._asked.pop(body.ticket, (None, 0))
                if box is not None:
                    box.send(CheckpointDone(ticket, body.ok, body.step, body.why))
            case ActOrdered(act, stamp, attempt):

                def answer(ok: bool, why: str) -> None:
                    say(node, ActAnswer(act, attempt, ok, why))

                self.checkpointing.carry_out(act, stamp, attempt, answer)
            case ActAnswer(act, attempt, ok, why):
                self.checkpointing.answered(node, act, attempt, ok, why)

    # -- what the election needs

    def tell(self, rank: int, message: ToRank) -> None:
        if rank in self.ranks:
            self.ranks[rank].send(message)

    def here(self) -> list[int]:
        return sorted(self.ranks)

    def newest_epoch(self) -> int:
        return max((s.epoch for s in self.statuses().values()), default=0)

    def completed_step(self, rank: int) -> int | None:
        status = self.status(rank)
        return None if status is None or status.completed_step < 0 else status.completed_step

    def list_store(self) -> None:
        self._world.workers.submit(self._list_store, self.election.store_listed)

    def has_failed(self, rank: int) -> bool:
        return rank in self._failed

    def went(self, source: str, step: int) -> None:
        self.custody.resumed = True
        self._failed.clear()
        if source == "store":
            self.checkpointing.resumed_from_store(step)
        if self.node is None:
            self._remove_other_ranks()

    def _remove_other_ranks(self) -> None:
        # All ranks of this world stand on proven state: what a larger world left is of no more use,
        # and its pages would hold back the cut.
        for rank in ranks_in(self._memory, self.settings.job_dir):
            if rank >= (self._world_size() or 0):
                self._memory.remove(rank_dir(self.settings.job_dir, rank))

    def _list_store(self) -> list[int] | str:
        """Steps of the usable checkpoints, or why the store cannot be read."""
        assert self._world.checkpoints is not None
        try:
            steps, damaged = self._world.checkpoints.usable()
        except StoreError as error:
            return str(error)
        for step, why in damaged.items():
            self.journal.record(
                "checkpoint-damaged",
                f"the checkpoint of step {step} is not usable: {why}",
                step=step,
            )
        return steps

    # -- the memory

    def statuses(self) -> dict[int, RankStatus]:
        """Every rank's page that can be read."""
        return self._pages.read_all()

    def status(self, rank: int) -> RankStatus | None:
        return self._pages.read(rank)

    def _persist(self) -> None:
        if self.checkpointing.pending:
            holdings = (
                [holding_of(s) for s in self.statuses().values()]
                if self.node is None
                else self.node.holdings()
            )
            self.checkpointing.advance(holdings, self._world_size(), bool(self.ranks))

    def _world_size(self) -> int | None:
        if self.node is not None and self.node.mesh is not None:
            return self.node.mesh.world_size
        return self.custody.world_size or next(
            (s.world_size for s in self.statuses().values()), None
        )

    def refuse(self, sender: str, why: str) -> None:
        """Something came that is no message, or that nobody can mean."""
        self._refused(sender, why)

    def scrub_soon(self) -> None:
        """Something that lies here does not prove."""
        self.scrubbing.soon()

    # -- the end

    def _is_over(self) -> bool:
        if self._finishing is None:
            self._finishing = self.custody.decide(self._clock.monotonic_ns())
            if self._finishing is None:
                return False
            self.journal.record("job-over", self._finishing.why, ok=self._finishing.ok)
            if self.settings.store:
                self._ask_to_persist(None, None, self._finishing.why, 0)
                self._persist()
            self._last_ask_ns = self._clock.monotonic_ns()
        return not self.checkpointing.pending and not (
            self._asked and self._clock.monotonic_ns() - self._last_ask_ns < LAST_ANSWER_NS
        )

    def close(self) -> None:
        """Remove the job's memory. Nobody can come any more."""
        assert self._finishing is not None
        if self.node is not None:
            self.node.close()
        self._pages.close()
        # A new run of the same job may start this very moment: the old directory leaves its name in
        # one step.
        gone = self.settings.job_dir.with_name(
            f"{self.settings.job_dir.name}.ending-{self._world.pid}"
        )
        self._memory.rename(self.settings.job_dir, gone)
        self._memory.remove(gone)
        if self._world.writer is not None:
            self._world.writer.close()
        self.journal.record(
            "keeper-ended", "the job's memory has been removed", ok=self._finishing.ok
        )

    def preempted(self) -> None:
        """SIGTERM: the machine is being taken away. Save what is committed and stay while anybody
        is there."""
        self._ask_to_persist(None, None, "the keeper received SIGTERM", 0)
