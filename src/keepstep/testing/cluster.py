"""A cluster of real keepers on loopback or in a lab, with ranks that train nothing: their states
are bytes drawn from (rank, step).

Stands where agent and sessions stand: tells keepers the mesh, kills and replaces machines, has the
ranks (`cluster_rank.py`) vote and train. So what is tested is what runs, but for torch.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from keepstep.config import Settings, resolve
from keepstep.core.wire.conversations import AGENT_WITH_KEEPER, RANK_WITH_KEEPER
from keepstep.edge.net.unix_socket import Mailbox
from keepstep.edge.os.journal import read_journal
from keepstep.edge.os.processes import ensure_keeper
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot, ranks_in, slot_paths
from keepstep.edge.shm.slot_store import SHELVES
from keepstep.model.events import Event
from keepstep.model.mesh import Member, Mesh
from keepstep.model.messages.keeper_agent import AgentHere, JobEnded
from keepstep.model.messages.keeper_rank import (
    Attach,
    BeginMesh,
    CountTraffic,
    Listen,
    Listening,
    StateOffered,
    TrafficCounted,
)
from keepstep.model.snapshot import SlotState
from keepstep.testing.cluster_rank import ClusterRank, State, state_of
from keepstep.testing.lab import Lab

JOB = "cluster"
PATIENCE_S = 40.0
START_KEEPER = """
import sys
from keepstep.config import settings_from_text
from keepstep.core.wire.conversations import RANK_WITH_KEEPER
from keepstep.edge.os.processes import ensure_keeper
ensure_keeper(settings_from_text(sys.argv[1]), RANK_WITH_KEEPER).close()
"""
M = TypeVar("M")


def wait_for(
    what: Callable[[], Any], why: Callable[[], str], patience_s: float = PATIENCE_S
) -> Any:
    """Until it is true; what it gives."""
    until = time.monotonic() + patience_s
    while not (found := what()):
        assert time.monotonic() < until, f"not within {patience_s} s: {why()}"
        select.select([], [], [], 0.005)
    return found


@dataclass
class ClusterMachine:
    """One node: its places, its keeper, its ranks."""

    settings: Settings
    host: str
    box: Mailbox | None = None
    port: int = 0
    incarnation: int = 0
    ranks: list[ClusterRank] = field(default_factory=list)
    seat: tuple[Lab, int] | None = None

    def start(self) -> None:
        self.settings.arena_dir.mkdir(parents=True, exist_ok=True)
        # unix sockets know no network namespaces: only the keeper has to live in one
        if self.seat is not None:
            lab, node = self.seat
            assert (
                lab.start(
                    node, [sys.executable, "-c", START_KEEPER, self.settings.to_text()]
                ).wait()
                == 0
            )
        self.box = ensure_keeper(self.settings, AGENT_WITH_KEEPER)
        self.box.send(AgentHere(os.getpid()))
        self.listen()

    def listen(self) -> None:
        assert self.box is not None
        self.box.send(Listen(self.host, self.port))
        answer = self.hear(Listening)
        self.port, self.incarnation = answer.port, answer.incarnation

    def hear(self, kind: type[M]) -> M:
        """The keeper's next message of that kind; what it says besides is an agent's business."""
        assert self.box is not None
        while (answer := self.box.recv(20)) is not None:
            if isinstance(answer, kind):
                return answer
        raise AssertionError(f"the keeper ended and never said {kind.__name__}")

    def keeper_pid(self) -> int:
        assert self.box is not None
        return self.box.peer()[0]

    def kill_keeper(self) -> None:
        assert self.box is not None
        pid = self.keeper_pid()
        pidfd = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        assert select.select([pidfd], [], [], 20)[0]
        os.close(pidfd)
        self.box.close()
        self.box = None

    def kill_ranks(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.ranks.clear()

    def vanish(self) -> None:
        """As a machine does: processes and memory at once."""
        self.kill_ranks()
        self.kill_keeper()
        shutil.rmtree(self.settings.arena_dir)

    def events(self) -> list[Event]:
        return list(read_journal(self.settings.journal_path))


class KeeperCluster:
    """`nodes` machines with `per_node` ranks each."""

    def __init__(
        self,
        room: Path,
        nodes: int,
        policy: str,
        per_node: int = 1,
        nbytes: int = 50_000,
        scrub_every_s: float = 0.0,
        lab: Lab | None = None,
        state: State = state_of,
    ) -> None:
        self.per_node, self.nbytes, self.state = per_node, nbytes, state
        self.machines: list[ClusterMachine] = []
        for i in range(nodes):
            arena_dir, state_dir = (
                (lab.arena_dir(i), lab.state_dir(i))
                if lab
                else (room / f"m{i}", room / f"state{i}")
            )
            config = {
                **{
                    "job": JOB,
                    "arena_dir": arena_dir,
                    "state_dir": state_dir,
                    "redundancy": policy,
                    "grace_s": 120.0,
                },
                **{"scrub_every_s": scrub_every_s, "link_dead_s": 2.0},
            }
            machine = ClusterMachine(
                resolve(config, {"HOME": str(room)}, JOB),
                lab.seats[i].address if lab else "127.0.0.1",
            )
            machine.seat = (lab, i) if lab else None
            self.machines.append(machine)
        self.mesh_version, self.secret, self.incarnation = 0, secrets.token_hex(16), 0
        self.members: tuple[Member, ...] | None = None

    def __enter__(self) -> KeeperCluster:
        for machine in self.machines:
            machine.start()
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.machines:
            machine.kill_ranks()
        for machine in self.machines:
            if machine.box is not None:
                pidfd = os.pidfd_open(machine.keeper_pid())
                machine.box.send(JobEnded(True, "the test is over"))
                gone = select.select([pidfd], [], [], 20)[0]
                os.close(pidfd)
                machine.box.close()
                assert gone, "a keeper does not go"

    @property
    def ranks(self) -> list[ClusterRank]:
        return [rank for machine in self.machines for rank in machine.ranks]

    # -- meshes

    def begin_mesh(self) -> None:
        """All ranks start, in the order of the machines."""
        self.mesh_version += 1
        self.incarnation += 1
        self.members = members = tuple(
            Member(i, m.host, m.port, m.incarnation, self.per_node)
            for i, m in enumerate(self.machines)
        )
        for i, machine in enumerate(self.machines):
            assert machine.box is not None
            machine.box.send(BeginMesh(Mesh(self.mesh_version, i, members, self.secret)))
        world = len(self.machines) * self.per_node
        for i, machine in enumerate(self.machines):
            for local in range(self.per_node):
                machine.ranks.append(
                    ClusterRank(
                        machine.settings,
                        i * self.per_node + local,
                        world,
                        self.nbytes,
                        self.incarnation,
                        self.state,
                    )
                )

    def hear(self) -> None:
        for rank in self.ranks:
            rank.hear()

    def resume(self) -> StateOffered:
        """A mesh, until every rank may go: what was offered last."""
        self.begin_mesh()

        def all_go() -> bool:
            self.hear()
            refused = next((r.refused for r in self.ranks if r.refused), None)
            assert refused is None, refused
            return all(r.epoch is not None for r in self.ranks)

        wait_for(all_go, lambda: f"go; {self.story()}")
        offer = self.ranks[0].offer
        assert offer is not None and len({r.offer and r.offer.step for r in self.ranks}) == 1
        if offer.source == "memory":
            # until then a rank with two old snapshots has no slot to give
            self.wait_committed(offer.step)
        return offer

    def restart(self) -> StateOffered:
        for machine in self.machines:
            machine.kill_ranks()
        return self.resume()

    def replace(self, *nodes: int) -> None:
        """These machines are gone, and others stand in their places."""
        for node in nodes:
            self.machines[node].vanish()
        for node in nodes:
            machine = self.machines[node]
            machine.port = 0
            machine.start()

    # -- steps

    def train(self, first: int, last: int, commit: bool = True) -> None:
        """Steps `first` to `last`, each committed before the next one when asked: then each waits
        for its slot, which a keeper may still be letting go of. Else it may be skipped."""
        for step in range(first, last + 1):
            for rank in self.ranks:
                if commit:
                    self._wait_room(rank, step)
                rank.step(step)
            if commit:
                self.wait_committed(step)

    def _wait_room(self, rank: ClusterRank, step: int) -> None:
        def has_room() -> bool:
            self.hear()
            return rank.has_room()

        wait_for(has_room, lambda: f"room for step {step} of rank {rank.rank}; {self.story()}")

    def committed(self) -> list[int]:
        found = []
        for rank in self.ranks:
            assert rank.epoch is not None
            horizon = rank.outlook.look(rank.epoch).horizon
            found.append(-1 if horizon is None else horizon.step)
        return found

    def wait_committed(self, step: int) -> None:
        def everywhere() -> bool:
            self.hear()
            return min(self.committed()) >= step

        wait_for(
            everywhere, lambda: f"step {step} committed, found {self.committed()}; {self.story()}"
        )

    def story(self) -> str:
        """What all journals and logs told last."""
        events = sorted((e for m in self.machines for e in m.events()), key=lambda e: e.mono_ns)
        logs = [
            m.settings.journal_path.with_name("keeper.log").read_text()[-1500:]
            for m in self.machines
        ]
        return "\n".join([*(f"{e.who} {e.kind}: {e.why}" for e in events[-25:]), *logs])

    def held(self) -> dict[int, list[tuple[int, int]]]:
        """By machine: (rank, step) of the sealed copies and parities it holds."""
        found: dict[int, list[tuple[int, int]]] = {}
        for i, machine in enumerate(self.machines):
            for path in _held_slots(machine.settings.job_dir):
                slot = Slot(MEMORY, path)
                header = slot.header()
                slot.close()
                if header.state is SlotState.SEALED:
                    found.setdefault(i, []).append((header.rank, header.stamp.step))
        return found

    def adopt(self, node: int) -> None:
        """The machine's keeper is dead; the ranks find the next one, which is then told what an
        agent would tell it."""
        machine = self.machines[node]
        machine.start()
        assert machine.box is not None and self.members is not None
        for rank in machine.ranks:
            rank.box.close()
            rank.box = ensure_keeper(rank.settings, RANK_WITH_KEEPER)
            rank.box.send(Attach(rank.rank, rank.world_size, rank.permitted))
        members = tuple(
            replace(m, incarnation=machine.incarnation) if m.node == node else m
            for m in self.members
        )
        machine.box.send(BeginMesh(Mesh(self.mesh_version, node, members, self.secret)))

    def wire_bytes(self) -> int:
        """Bytes of blocks that crossed the wire, as the keepers count them."""
        found = []
        for machine in self.machines:
            assert machine.box is not None
            machine.box.send(CountTraffic())
            answer = machine.hear(TrafficCounted)
            found.append(answer.counts.get("block bytes sent", 0))
        return sum(found)

    def flip(self, shelf: str, node: int, rank: int, step: int, at: int) -> None:
        """Turn one bit of a sealed slot's file."""
        for path in slot_paths(MEMORY, self.machines[node].settings.job_dir / shelf, rank):
            slot = Slot(MEMORY, path)
            header = slot.header()
            slot.close()
            if (header.state, header.stamp.step) == (SlotState.SEALED, step):
                with open(path, "r+b") as file:
                    file.seek(at)
                    byte = file.read(1)[0]
                    file.seek(at)
                    file.write(bytes([byte ^ 4]))
                return
        raise LookupError(f"no sealed slot of rank {rank} at step {step} on node {node}")

    def digest(self) -> str:
        return hashlib.sha256(
            b"".join(state_of(r.rank, r.completed, r.nbytes) for r in self.ranks)
        ).hexdigest()


def _held_slots(job_dir: Path) -> list[Path]:
    """Of copies, then of parities."""
    roots = [job_dir / below for below in SHELVES.values()]
    return [
        path
        for root in roots
        for rank in ranks_in(MEMORY, root)
        for path in slot_paths(MEMORY, root, rank)
    ]
