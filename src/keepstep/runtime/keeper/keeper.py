"""Keeper: outlives the trainers and answers for their memory.

    messages of ranks and the agent, of other keepers, of the persister; what workers found; the
        clock -> vote, lifetime, commit -> replies, copies, removal

Ranks write their own slots, and the keeper reads them; it writes only what it holds for other
nodes. So it may die at any moment: ranks keep capturing, and the next keeper adopts the job
directory as it finds it. Everything happens in one loop, which is somebody else's
(`runtime/keeper/run.py`), and nothing is touched but through the `KeeperWorld`.

Invariant: no message ends the keeper, whatever it says; an implausible one is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from keepstep.config import Settings, ending_dir_of
from keepstep.core.recovery.job_lifetime import Finish, JobLifetime
from keepstep.core.resume.cut import Holding, cut, holding_of
from keepstep.core.resume.vote import ListStore
from keepstep.core.wire.plausible import flaw_of_local
from keepstep.edge.shm.slot import rank_dir, ranks_in, slot_paths
from keepstep.edge.shm.status_page import StatusPages
from keepstep.errors import KeeperError
from keepstep.model.checkpoint import Timeline
from keepstep.model.mesh import Mesh
from keepstep.model.messages.keeper_agent import (
    AgentHere,
    FromAgent,
    JobEnded,
    MemoryKept,
    MeshKnown,
    PeerDead,
    RemoveMemory,
    StillWriting,
)
from keepstep.model.messages.keeper_rank import (
    AreYouThere,
    Attach,
    BeginMesh,
    CannotListen,
    CountTraffic,
    FromRank,
    Goodbye,
    HaltWord,
    JoinVote,
    Listen,
    Listening,
    NotUnderstood,
    PageChanged,
    Released,
    StateLoaded,
    StateUnusable,
    StillHere,
    ToRank,
    TrafficCounted,
    TrainingPermitted,
    VoteRefused,
    WantCheckpoint,
)
from keepstep.model.messages.peers import CheckpointBody, VoteBody
from keepstep.model.snapshot import RankStatus
from keepstep.model.units import MS_NS, S_NS
from keepstep.ports import Box
from keepstep.runtime.job_name import job_hash
from keepstep.runtime.keeper.checkpoint_desk import CheckpointDesk
from keepstep.runtime.keeper.checkpointing import Checkpointing
from keepstep.runtime.keeper.left_behind import LeftBehind, left_behind
from keepstep.runtime.keeper.persister_client import PersisterClient
from keepstep.runtime.keeper.persister_watch import PersisterWatch
from keepstep.runtime.keeper.resume import Resume
from keepstep.runtime.keeper.scrubber import Scrubber
from keepstep.runtime.keeper.store_look import StoreLook
from keepstep.runtime.keeper.store_marks import StoreMarks
from keepstep.runtime.keeper_world import KeeperWorld
from keepstep.runtime.refused_messages import RefusedMessages
from keepstep.runtime.replication.mesh_state import MeshState
from keepstep.runtime.replication.node import TICK_NS as MESH_TICK_NS
from keepstep.runtime.replication.node import Node
from keepstep.runtime.replication.peer_inbox import PeerInbox

FromNode = FromRank | FromAgent

TICK_NS = 200 * MS_NS
BUSY_TICK_NS = 5 * MS_NS


class Keeper:
    """One job's keeper on one machine. See `ports.Hearer`."""

    def __init__(self, settings: Settings, world: KeeperWorld, idle_ns: int = TICK_NS) -> None:
        """idle_ns: how long it is left alone when nothing comes."""
        self._settings, self._journal = settings, world.journal
        self._idle_ns = idle_ns
        self._world, self._clock, self._memory = world, world.clock, world.memory
        self._refused = RefusedMessages(world.journal)
        self._job_hash = job_hash(settings.job, world.uid)
        self._pages = StatusPages(self._memory, settings.job_dir)
        grace_ns = int(settings.grace_s * S_NS)
        self._lifetime = JobLifetime(grace_ns, self._clock.monotonic_ns())
        has_store = settings.store is not None
        self._resume = resume = Resume(self._clock, self._journal, has_store, self)
        self._store_look = StoreLook(world, resume.store_listed, resume.store_awaited)
        self._store_marks = StoreMarks(world)
        self._persister = PersisterClient(world.persisters) if world.persisters else None
        self._persister_watch = (
            PersisterWatch(self._persister, self._clock, self._journal) if self._persister else None
        )
        checkpointing = Checkpointing(
            settings.job_dir, self._memory, self._clock, self._journal, self._persister
        )
        self._checkpoints = CheckpointDesk(checkpointing, self._clock, has_store)
        self._scrubber = Scrubber(settings.job_dir, settings.scrub_every_s, world, self)
        self.inbox: PeerInbox | None = None  # once it was asked to listen
        self.node: Node | None = None  # once it was told of a mesh
        self._ranks: dict[int, Box] = {}
        self._is_attached = False  # ranks that train have found this keeper
        # ranks whose last life told of an error, until all train again
        self._failed: set[int] = set()
        self._agent: Box | None = None
        self._changed: set[int] = set()  # ranks here whose page tells more since the last look
        self._finish: Finish | None = None  # once the job is over
        # who is to hear that the memory is kept, once the last checkpoint is written
        self._kept_for: Box | None = None
        slots = sum(
            len(slot_paths(self._memory, settings.job_dir, rank)) for rank in self.statuses()
        )
        found = f"adopted {slots} slots" if slots else "nothing there yet"
        why = f"keeper {world.pid} looks after {settings.job_dir}; {found}"
        job_dir = str(settings.job_dir)
        self._journal.record(
            "keeper-started", why, pid=world.pid, adopted_slots=slots, job_dir=job_dir
        )

    # -- the loop

    def begin(self) -> None:
        """The loop runs now."""
        if self._persister is not None:
            self._persister.start()

    @property
    def is_busy(self) -> bool:
        """Whether the next `tick` is to come soon even if nothing else does."""
        return self._checkpoints.pending or self._lifetime.all_nodes_ended

    def tick(self) -> bool:
        """What time brings, and what many have told. True when all is over: `close` then."""
        if self._changed:
            changed, self._changed = self._changed, set()
            if self.node is not None:
                self.node.state.ranks_changed(changed)
        self._scrubber.tick()
        if self._persister_watch is not None:
            self._persister_watch.look()
        self._write_checkpoints()
        self._tell_kept()
        if self.node is not None:
            self.node.tick()
        return self._is_over()

    def hear_peers(self) -> None:
        """Other keepers have said something."""
        if self.node is not None:
            self.node.hear_peers()

    def preempted(self) -> None:
        """SIGTERM: the machine is being taken away. Save what is committed and stay while anybody
        is there."""
        self._checkpoints.want_newest("the keeper received SIGTERM")

    # -- who comes and goes

    def hear(self, box: Box, message: FromNode) -> None:
        """A message of a rank or of the agent."""
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
                self._resume.loaded(rank, offer)
            case StateUnusable():
                self._resume.failed(message)
            case PageChanged(rank):
                self._changed.add(rank)
            case WantCheckpoint(ticket, step, why, steps_follow):
                self._checkpoints.ask(box, step, why, ticket, steps_follow)
            case HaltWord():
                self._resume.halt(message)
            case Goodbye(rank, ok, why):
                self._rank_said_bye(box, rank, ok, why)
            case AgentHere():
                self._agent = box
                self._lifetime.agent_came()
            case JobEnded(ok, why):
                self._agent_ended(box, ok, why)
            case RemoveMemory(why):
                self._lifetime.memory_unwanted(why)
            case Listen(host, port, after):
                box.send(self._listen(host, port, after))
            case BeginMesh(mesh):
                self._mesh_told(box, mesh)
            case AreYouThere():
                box.send(StillHere())
            case CountTraffic():
                counts = self.inbox.counts() if self.inbox is not None else {}
                box.send(TrafficCounted(counts))
            case NotUnderstood(why):
                told = f"process {box.pid} does not understand this keeper: {why}"
                self._journal.record("not-understood", told, pid=box.pid)

    def refuse(self, sender: str, why: str) -> None:
        """Something came that is no message, or not a plausible one."""
        self._refused(sender, why)

    def _agent_ended(self, box: Box, ok: bool, why: str) -> None:
        if not self._lifetime.agent_said_end(ok, why, self._holds_snapshots()):
            self._journal.record("memory-kept", f"{why}; {self._kept()}")
            self._kept_for = box
            if self._settings.store:
                self._checkpoints.want_newest(why)
                self._write_checkpoints()
                if not self._checkpoints.is_done:
                    told = f"it writes the newest step to the store; {self._kept()}"
                    box.send(StillWriting(told))

    def _holds_snapshots(self) -> bool:
        """Whether there may be anything to start again from; what rests here for other nodes
        counts."""
        if self.node is not None:
            return True
        ranks = ranks_in(self._memory, self._settings.job_dir)
        return any(slot_paths(self._memory, self._settings.job_dir, rank) for rank in ranks)

    def _tell_kept(self) -> None:
        """Whoever waits for the last checkpoint may go when it is written."""
        if self._kept_for is not None and self._checkpoints.is_done:
            box, self._kept_for = self._kept_for, None
            box.send(MemoryKept(self._kept()))

    def _kept(self) -> str:
        """What is left of the job, and from where it would go on."""
        job, grace_s = self._settings.job, self._settings.grace_s
        newest = cut(self._holdings(), self._world_size() or 1)
        stored = self._checkpoints.stored_step
        also = "" if stored is None else f"; step {stored} is in the store"
        goes_on = (
            # a start may just have been refused for its number of ranks
            "start the job again with as many ranks as it was of to go on from it"
            if newest is None
            else f"start the same command again to go on from step {newest.step}"
        )
        return (
            f"the memory is kept for {grace_s:.0f} s: {goes_on}{also}; "
            f"`keepstep clean --job {job} --force --yes` removes it"
        )

    def _rank_said_bye(self, box: Box, rank: int, ok: bool, why: str) -> None:
        self._lifetime.rank_said_bye(rank, ok, why)
        self._journal.record("rank-bye", f"rank {rank} says goodbye: {why}", rank=rank, ok=ok)
        if self._lifetime.ended_here and self.node is not None:
            self.node.state.ranks_ended()
        if self._agent is not None or not self._lifetime.ended_here:
            # else the connection ends when the memory is gone
            box.send(Released())

    def _rank_came(self, box: Box, rank: int, world_size: int) -> None:
        self._ranks[rank] = box
        ok, why = self._lifetime.goodbyes.get(rank, (True, ""))
        if not ok and why != "interrupted":
            self._failed.add(rank)
        here = world_size if self.node is None else len(self.node.state.own_ranks)
        self._lifetime.rank_came(rank, here)

    def _rank_attached(self, box: Box, attached: Attach) -> None:
        rank, permitted = attached.rank, attached.permitted
        self._rank_came(box, rank, attached.world_size)
        doing = "is training" if permitted is not None else "will ask where to resume"
        why = f"rank {rank} (process {box.pid}) {doing} and found this keeper"
        self._journal.record("rank-attached", why, rank=rank, pid=box.pid)
        if permitted is None:
            # what its page and its slots say is of a mesh before: nothing of it is being trained
            return
        self._is_attached = True
        if self.node is not None:
            self.node.state.trains()
        self._resume.attached(permitted)
        self._go_on(permitted)

    def _rank_joined(self, box: Box, join: JoinVote) -> None:
        rank = join.rank
        self._rank_came(box, rank, join.world_size)
        held = ", ".join(map(str, sorted(join.holds))) or "nothing usable"
        self._journal.record(
            "rank-joined",
            f"rank {rank} of {join.world_size} (process {box.pid}) holds {held} in memory",
            rank=rank,
            pid=box.pid,
            incarnation=join.incarnation,
            goes_on=join.goes_on,
        )
        self._resume.joined(join)

    def gone(self, box: Box) -> None:
        """Nobody is at the other end any more."""
        now_ns = self._clock.monotonic_ns()
        self._checkpoints.forget(box)
        if box is self._agent:
            self._agent = None
            self._lifetime.agent_left(now_ns)
        for rank, known in list(self._ranks.items()):
            if known is box:
                del self._ranks[rank]
                self._lifetime.rank_left(rank, now_ns)
                self._resume.left(rank)
                self._record_left(rank, box.pid)

    def _record_left(self, rank: int, pid: int) -> None:
        is_expected = rank in self._lifetime.goodbyes
        status = self.status(rank)
        why = f"rank {rank} (process {pid}) is gone"
        if not is_expected:
            why += " without goodbye"
            if status is not None:
                why += (
                    f" in step {status.step}, phase {status.phase.name.lower()}, newest completed "
                    f"step {status.completed_step}"
                )
        facts: dict[str, Any] = {"completed_step": None}
        if status is not None:
            facts = {"completed_step": status.completed_step, "stall_ns": status.stall_ns_total}
        self._journal.record("rank-left", why, rank=rank, pid=pid, expected=is_expected, **facts)

    # -- other nodes

    def _listen(self, host: str, port: int, after: int) -> Listening | CannotListen:
        if self.inbox is None:
            link_dead_s = self._settings.link_dead_s
            try:
                self.inbox = PeerInbox(
                    self._world, self._job_hash, (host, port), link_dead_s, after
                )
            except KeeperError as error:
                return CannotListen(str(error))
        host, port = self.inbox.address
        number = None if self.node is None else self.node.mesh.node
        return Listening(host, port, self.inbox.incarnation, self.inbox.mesh_version, number)

    def _mesh_told(self, box: Box, mesh: Mesh) -> None:
        self._begin_mesh(mesh)
        # its ranks may ask now: nothing they say is taken for the mesh before
        if box is self._agent:
            box.send(MeshKnown(mesh.version))

    def _begin_mesh(self, mesh: Mesh) -> None:
        if self.inbox is None:
            why = "was told of a mesh before it was asked to listen"
            self._journal.record("mesh-refused", why)
            return
        if mesh.version <= self.inbox.mesh_version:
            return  # every session of a node tells it
        is_first = self.node is None
        self._lifetime.mesh_began(len(mesh.members), mesh.ranks_of(mesh.node))
        if self.node is None:
            self.node = Node(
                self._world,
                self._settings,
                self.inbox,
                self._job_hash,
                self,
                mesh,
                max(MESH_TICK_NS, self._idle_ns),
            )
        else:
            self.node.begin(mesh)
        state = self.node.state
        self._resume.begin_mesh(state, mesh)
        self._checkpoints.join_mesh(state)
        # this keeper came in the middle of a mesh, and its ranks were quicker than the agent
        if is_first and self._is_attached:
            state.trains()

    def receive_vote(self, node: int, body: VoteBody) -> None:
        """See `ReplicationHost`."""
        self._resume.receive(body)

    def receive_checkpoint(self, node: int, body: CheckpointBody) -> None:
        """See `ReplicationHost`."""
        self._checkpoints.receive(node, body)

    def inventories_changed(self) -> None:
        """See `ReplicationHost`."""
        self._resume.inventories_changed()

    def leader_is_back(self) -> None:
        """See `ReplicationHost`."""
        self._checkpoints.leader_is_back()
        self._resume.leader_is_back()
        if self._lifetime.ended_here and self.node is not None:
            self.node.state.ranks_ended()

    def all_nodes_ended(self) -> None:
        """See `ReplicationHost`."""
        self._lifetime.all_nodes_ended = True

    def link_is_gone(self, node: int, why: str) -> None:
        """See `ReplicationHost`."""
        self._checkpoints.node_gone(node, why)

    def peer_is_dead(self, mesh: Mesh, node: int, why: str) -> None:
        """See `ReplicationHost`."""
        self._journal.record("node-lost", f"node {node} does not answer: {why}", node=node)
        self._resume.ranks_are_gone(mesh.ranks_of(node))
        if self._agent is not None:
            self._agent.send(PeerDead(mesh.version, node, why))

    def scrub_soon(self) -> None:
        """See `ReplicationHost`."""
        self._scrubber.soon()

    # -- what the vote and the scrubber need

    @property
    def mesh_state(self) -> MeshState | None:
        """Of the present mesh; None in a job of one node."""
        return None if self.node is None else self.node.state

    def tell(self, rank: int, message: ToRank) -> None:
        """See `ResumeHost`."""
        if rank in self._ranks:
            self._ranks[rank].send(message)

    def refused(self, refusal: VoteRefused) -> None:
        """See `ResumeHost`."""
        if self._agent is not None and refusal.is_final:
            self._agent.send(refusal)

    def here(self) -> list[int]:
        """See `ResumeHost`."""
        return sorted(self._ranks)

    def newest_epoch(self) -> int:
        """See `VoteHost`."""
        return max((s.epoch for s in self.statuses().values()), default=0)

    def completed_step(self, rank: int) -> int | None:
        """See `ResumeHost`."""
        status = self.status(rank)
        return None if status is None or status.completed_step < 0 else status.completed_step

    def left_behind(self, world_size: int) -> LeftBehind:
        """See `ResumeHost`."""
        job_dir, pages = self._settings.job_dir, self.statuses().values()
        return left_behind(self._memory, job_dir, self._job_hash, world_size, pages)

    def has_failed(self, rank: int) -> bool:
        """See `ResumeHost`."""
        return rank in self._failed

    def list_store(self, question: ListStore) -> None:
        """See `VoteHost`."""
        self._store_look.begin(question)

    def doubt_checkpoints(self, first: int, before_epoch: int) -> None:
        """See `VoteHost`."""
        self._checkpoints.doubt(first)
        self._store_marks.doubt(first, before_epoch)

    def resumed(self, permitted: TrainingPermitted) -> None:
        """See `ResumeHost`."""
        self._failed.clear()
        self._store_look.forget()
        self._go_on(permitted)
        if self.node is None:
            self._remove_other_ranks()

    def _go_on(self, permitted: TrainingPermitted) -> None:
        timeline = Timeline(permitted.epoch, permitted.stamp.step)
        self._checkpoints.goes_on(timeline, from_store=permitted.source == "store")

    def _remove_other_ranks(self) -> None:
        # All ranks of this world stand on proven state: what a larger world left is of no more use,
        # and its pages would hold back the cut.
        for rank in ranks_in(self._memory, self._settings.job_dir):
            if rank >= (self._world_size() or 0):
                self._memory.remove(rank_dir(self._settings.job_dir, rank))

    # -- the memory

    def statuses(self) -> dict[int, RankStatus]:
        """Every rank's page that can be read."""
        return self._pages.read_all()

    def status(self, rank: int) -> RankStatus | None:
        """See `ReplicationHost`."""
        return self._pages.read(rank)

    def _write_checkpoints(self) -> None:
        if self._checkpoints.pending:
            self._checkpoints.advance(self._holdings(), self._world_size(), bool(self._ranks))
        self._checkpoints.hurry()

    def _holdings(self) -> Sequence[Holding]:
        if self.node is not None:
            return self.node.state.holdings()
        return [holding_of(status) for status in self.statuses().values()]

    def _world_size(self) -> int | None:
        if self.node is not None:
            return self.node.mesh.world_size
        on_pages = (status.world_size for status in self.statuses().values())
        return self._lifetime.world_size or next(on_pages, None)

    # -- the end

    def _is_over(self) -> bool:
        holds = bool(self._ranks) or self._agent is not None or self._holds_snapshots()
        now_ns = self._clock.monotonic_ns()
        before = self._finish
        self._finish = finish = self._lifetime.decide(now_ns, holds, self._is_entered)
        if finish is None:
            return False  # or not any more: who comes while the last checkpoint is written goes on
        if before is None:
            self._journal.record("job-over", finish.why, ok=finish.ok)
            if self._settings.store:
                self._checkpoints.want_newest(finish.why)
                self._write_checkpoints()
        return self._checkpoints.is_done

    def _is_entered(self) -> bool:
        """Whether a living process owns the page of a rank: it comes here soon, and what is removed
        before would be missed for as long as it lives."""
        ranks = ranks_in(self._memory, self._settings.job_dir)
        return any(self._pages.alive(rank) for rank in ranks)

    def close(self, is_directory_ours: bool) -> None:
        """Remove the job's memory. Nobody can come any more. `is_directory_ours`: nobody has
        removed the directory and made another one."""
        if self.node is not None:
            self.node.close()
        self._pages.close()
        if is_directory_ours:
            self._remove_directory()
        if self._persister is not None:
            self._persister.close()
        told = "the job's memory has been removed"
        if not is_directory_ours:
            told = "somebody has removed the job's memory before; what is there now is not ours"
        ok = self._finish is not None and self._finish.ok
        self._journal.record("keeper-ended", told, ok=ok)

    def _remove_directory(self) -> None:
        # A new run of the same job may start this very moment: the old directory leaves its name in
        # one step.
        job_dir = self._settings.job_dir
        gone = ending_dir_of(job_dir, self._world.pid)
        with suppress(FileNotFoundError):  # somebody has removed it while the job trained
            self._memory.rename(job_dir, gone)
        self._memory.remove(gone)
