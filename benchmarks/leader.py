"""What the leader of a large job spends: the CPU time of its keeper's thread for a step of all.

    python benchmarks/leader.py [--nodes 128 1250 12500] [--steps 5]

Nodes of 8 ranks each, `copies:2`. In a step every node reports twice: its ranks have sealed the
step, and all holders have proven it. Reports come as the signed frames of real connections and are
decoded, checked and decided about, a hundred in one turn of the loop; what follows is encoded once
and signed for each node. Left out are the kernel's sockets: a report costs one read, a word a
write.

safety      Which nodes may be lost, worked out once. The keeper leaves `SAFETY_PAUSES` times as
            long between two of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import harness  # beside this file: it is started as a script

from keepstep.core.wire.connection import Connection
from keepstep.core.wire.messages import encode
from keepstep.core.wire.plausible import flaw_of_peer
from keepstep.edge.os.clock import CLOCK
from keepstep.model.mesh import Member, Mesh
from keepstep.model.messages.peers import MeshMessage, NodeReport, RanksReport
from keepstep.model.snapshot import Stamp
from keepstep.model.topology import parse_policy
from keepstep.model.units import GIB, MIB
from keepstep.model.wire import Dial, Identity, Received, WireEvent
from keepstep.ports import Journal
from keepstep.runtime.replication.leader import Leader
from keepstep.runtime.replication.mesh_links import MeshLinks
from keepstep.runtime.replication.mesh_state import SAFETY_PAUSES

RANKS = 8
EPOCH = 1
VERSION = 1
IN_ONE_TURN = 100
SECRET = b"a secret of the benchmark"


class Words:
    """What the leader says: encoded once, signed for each node."""

    def __init__(self, mesh: Mesh, connection: Connection) -> None:
        self.mesh, self.node, self.version = mesh, mesh.node, mesh.version
        self._connection = connection

    def to_others(self, message: MeshMessage) -> None:
        body = encode(message)
        for number in range(1, len(self.mesh.members)):
            self._connection.encoded(body, number)

    def send(self, node: int, message: MeshMessage) -> bool:
        self._connection.message(message, 1)
        return True


class Quiet:
    """A journal that keeps nothing."""

    def record(self, *_: Any, **__: Any) -> None:
        """See `ports.Journal`."""


def mesh_of(nodes: int) -> Mesh:
    members = (
        Member(n, f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}", 9000, 50 + n, RANKS)
        for n in range(nodes)
    )
    return Mesh(VERSION, 0, tuple(members), SECRET.decode())


def connected() -> tuple[Connection, Connection]:
    """A node's end and the leader's."""
    admit = cast(Any, lambda identity, dial: None)
    node, leader = Identity(bytes(16), 1, 1), Identity(bytes(16), 0, 1)
    one = Connection(node, SECRET, b"1" * 32, admit, Dial(1, 0))
    two = Connection(leader, SECRET, b"2" * 32, admit)
    while _hand_over(one, two) | _hand_over(two, one):
        pass
    return one, two


def _hand_over(sender: Connection, receiver: Connection) -> bool:
    out = sender.take()
    at = 0
    while at < len(out):
        at += (taken := min(receiver.wanted, len(out) - at))
        receiver.receive(out[at - taken : at])
    return bool(out)


def report_of(node: int, step: int, is_proven: bool) -> NodeReport:
    stamp = Stamp(step, EPOCH)
    ranks = tuple(range(node * RANKS, (node + 1) * RANKS))
    row = RanksReport(ranks, (stamp,), None, step, (stamp,) if is_proven else ())
    return NodeReport(
        mesh_version=VERSION,
        epoch=EPOCH,
        committed=Stamp(step - 1, EPOCH) if step else None,
        target=stamp if is_proven else None,
        inherited=None,
        snapshot_bytes=MIB,
        free_bytes=GIB,
        hindered="",
        ranks=(row,),
    )


def cpu_s(work: Callable[[], Any]) -> float:
    began_ns = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - began_ns) / 1e9


def hear(leader: Leader, mesh: Mesh, end: Connection, frames: list[bytes]) -> None:
    """What the keeper does with reports that have come."""
    for node, frame in enumerate(frames):
        event: WireEvent | None
        event, _ = end.read(memoryview(frame), 0)
        assert isinstance(event, Received) and isinstance(event.message, NodeReport)
        assert not flaw_of_peer(node, event.message, mesh)
        leader.receive_report(node, event.message)
        if node % IN_ONE_TURN == IN_ONE_TURN - 1:
            leader.decide()
    leader.decide()


def measure(nodes: int, steps: int) -> str:
    mesh = mesh_of(nodes)
    far, near = connected()
    words = cast(MeshLinks, Words(mesh, near))
    leader = Leader(
        words, parse_policy("copies:2"), CLOCK, cast(Journal, Quiet()), lambda word: None
    )
    leader.resumed(EPOCH)
    each: list[float] = []
    for step in range(steps):
        spent_s = 0.0
        for is_proven in (False, True):
            reports = [report_of(node, step, is_proven) for node in range(nodes)]
            frames = [far.message(report, number + 1) for number, report in enumerate(reports)]
            spent_s += cpu_s(lambda frames=frames: hear(leader, mesh, near, frames))  # type: ignore[misc]
        each.append(spent_s)
    linked = set(range(nodes))
    safety_s = statistics.median(cpu_s(lambda: leader.safety(linked)) for _ in range(5))
    assert leader.safety(linked) is not None
    return (
        f"{nodes:6,} nodes, {nodes * RANKS:7,} ranks: a step {statistics.median(each) * 1e3:7.1f} "
        f"ms (least {min(each) * 1e3:.1f}), safety {safety_s * 1e3:6.1f} ms, "
        f"{1 / SAFETY_PAUSES:.0%} of a core at most; load {os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[128, 1250, 12500])
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()
    watch = harness.watch()
    for nodes in given.nodes:
        print(measure(nodes, given.steps), flush=True)
    harness.tell(watch.end())


if __name__ == "__main__":
    main()
