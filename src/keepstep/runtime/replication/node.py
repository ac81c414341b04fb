"""Node: the many-nodes half of a keeper, one mesh after the other.

Comes in: meshes, and what the inbox brings. Goes out: everything that the present mesh's
`MeshState` does. What rests here for others, the horizon page and what is known about which nodes
may be lost outlive a mesh.
"""

from __future__ import annotations

from keepstep.config import Settings
from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.model.mesh import Mesh
from keepstep.model.units import S_NS
from keepstep.runtime.keeper_world import KeeperWorld
from keepstep.runtime.replication.held import HeldSnapshots
from keepstep.runtime.replication.known_safety import KnownSafety
from keepstep.runtime.replication.mesh_links import MeshLinks
from keepstep.runtime.replication.mesh_state import MeshState, ReplicationHost
from keepstep.runtime.replication.peer_inbox import (
    FromPeer,
    LinkOver,
    LinkUp,
    LinkWritable,
    LoopCall,
    PeerEvent,
    PeerInbox,
)

TICK_NS = S_NS // 2


class Node:
    """Made with its first mesh. `state`: of the present one. `tick_ns`: how long what time brings
    may wait."""

    def __init__(
        self,
        world: KeeperWorld,
        settings: Settings,
        inbox: PeerInbox,
        job_hash: bytes,
        host: ReplicationHost,
        mesh: Mesh,
        tick_ns: int = TICK_NS,
    ) -> None:
        self._world, self._settings, self._inbox = world, settings, inbox
        self._job_hash, self._host = job_hash, host
        self._held = HeldSnapshots(world.memory, world.workers, settings.job_dir)
        self._page = HorizonPage(world.memory, settings.job_dir)
        self._safety = KnownSafety(world.memory, settings.job_dir)
        self._tick_ns = tick_ns
        self._ticked_ns = 0
        self._record(mesh)
        self.state = self._new_state(mesh)
        self.state.open()
        world.workers.submit(self._held.prove, self._proved)

    @property
    def mesh(self) -> Mesh:
        """The present one."""
        return self.state.mesh

    def begin(self, mesh: Mesh) -> None:
        """The next mesh."""
        self._record(mesh)
        self.state.end()
        self.state = self._new_state(mesh)
        self.state.open()

    def _record(self, mesh: Mesh) -> None:
        ranks = list(mesh.ranks_of(mesh.node))
        why = f"mesh {mesh.version}: node {mesh.node} of {len(mesh.members)}, ranks {ranks}"
        facts = {"mesh_version": mesh.version, "node": mesh.node, "nodes": len(mesh.members)}
        self._world.journal.record("mesh", why, **facts)

    def _new_state(self, mesh: Mesh) -> MeshState:
        return MeshState(
            self._world,
            self._settings,
            MeshLinks(self._inbox, mesh),
            self._held,
            self._page,
            self._safety,
            self._job_hash,
            self._host,
        )

    def _proved(self, flaws: list[str]) -> None:
        for flaw in flaws:
            self._world.journal.record("damaged", f"{flaw}; it no longer counts")
        self._held.is_proven = True
        self.state.held_is_proven()

    def hear_peers(self) -> None:
        """The inbox has something."""
        with self.state.gathering():
            for event in self._inbox.take():
                self._handle(event)
        self.state.report_news()

    def _handle(self, event: PeerEvent) -> None:
        state = self.state
        match event:
            case FromPeer(node, message):
                state.receive(node, message)
            case LoopCall(call):
                call()
            case LinkUp(node):
                state.link_is_open(node)
            case LinkWritable(node):
                state.writable(node)
            case LinkOver(node, why, is_loss):
                state.link_is_dead(node, why, is_loss)

    def tick(self) -> None:
        """What time brings."""
        now_ns = self._world.clock.monotonic_ns()
        if now_ns - self._ticked_ns >= self._tick_ns:
            self._ticked_ns = now_ns
            with self.state.gathering():
                self.state.tick()
        self.state.report_news()
        self.state.report_missing(self._inbox.return_ns)

    def close(self) -> None:
        """The job is over here: say goodbye to all."""
        self._inbox.close()
        self._page.close()
