"""Persisting over several nodes: real persisters and real slots of three nodes in one process,
words between them carried by hand."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.config import Settings, resolve
from keepstep.core.resume.cut import Holding
from keepstep.edge.os.clock import CLOCK
from keepstep.edge.os.journal import FileJournal, read_journal
from keepstep.edge.os.loop import Loop
from keepstep.edge.os.persisters import ChildPersisters, persister_command
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.edge.store.store import Store
from keepstep.edge.torch import checkpoint
from keepstep.edge.torch.capture import TensorCopy
from keepstep.edge.torch.state import Protected
from keepstep.model.mesh import Member, Mesh
from keepstep.model.messages.keeper_rank import CheckpointDone
from keepstep.model.snapshot import Stamp
from keepstep.model.units import KIB, S_NS
from keepstep.runtime.job_name import job_hash
from keepstep.runtime.keeper.checkpointing import OVERWRITTEN, Checkpointing
from keepstep.runtime.keeper.persister_client import PersisterClient
from keepstep.runtime.persister.conversation import KEEPER_WITH_PERSISTER

RANKS = (1, 2)
WORLD = sum(RANKS)
PATIENCE_S = 60.0


def trained(step: int, rank: int) -> dict[str, Any]:
    """What a data-parallel rank protects after a step: the same on all, but for its own place in
    the data."""
    torch.manual_seed(step)
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 30)).square().sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "mine": torch.full((3,), float(rank)),
        "at": [step, rank],
    }


def bytes_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, dict):
        return {key: bytes_of(v) for key, v in value.items()}
    return [bytes_of(v) for v in value] if isinstance(value, (list, tuple)) else value


def state_of(protected: Protected) -> Any:
    return bytes_of({name: value for name, value in protected.tree().items() if name != "rng"})


class Asker:
    """A rank that has asked."""

    def __init__(self) -> None:
        self.heard: list[CheckpointDone] = []

    def send(self, message: CheckpointDone, /) -> bool:
        self.heard.append(message)
        return True


class Cluster:
    """Nodes with a keeper's `Checkpointing` each, and the network: orders and answers wait in
    `posted` until they are carried.

    `on_order(node, act)` is called before an order is carried; False loses it.
    """

    def __init__(self, where: Path) -> None:
        self.where = where
        self.members = tuple(
            Member(node, "127.0.0.1", 1, 1, ranks) for node, ranks in enumerate(RANKS)
        )
        self.loop = Loop()
        self.posted: deque[Callable[[], None]] = deque()
        self.on_order: Callable[[int, str], bool | None] = lambda node, act: True
        self.settings = [self._settings(node) for node in range(len(RANKS))]
        self.children = [
            PersisterClient(
                ChildPersisters(
                    self.loop, persister_command(s), KEEPER_WITH_PERSISTER, lambda kind, why: None
                )
            )
            for s in self.settings
        ]
        self.nodes = [
            Checkpointing(s.job_dir, MEMORY, CLOCK, FileJournal(s.journal_path, "keeper"), child)
            for s, child in zip(self.settings, self.children, strict=True)
        ]
        for child in self.children:
            child.start()
        self.new_mesh(1)

    def _settings(self, node: int) -> Settings:
        config = {"job": "j", "store": str(self.where / "store"), "keep": "latest:1"}
        return resolve(
            {
                **config,
                "arena_dir": self.where / f"arena{node}",
                "state_dir": self.where / f"state{node}",
            },
            {},
            "j",
        )

    def new_mesh(self, number: int) -> None:
        for node, checkpointing in enumerate(self.nodes):
            checkpointing.join_mesh(Mesh(number, node, self.members, "s" * 16), self._order)

    def _order(self, node: int, act: str, stamp: Stamp, attempt: int, is_urgent: bool) -> None:
        def carry() -> None:
            if self.on_order(node, act) is not False:
                self.nodes[node].carry_out(act, stamp, attempt, answer, is_urgent)

        def answer(ok: bool, why: str, hung: bool) -> None:
            self.posted.append(lambda: self.nodes[0].answered(node, act, attempt, ok, why, hung))

        self.posted.append(carry)

    def capture(self, step: int, index: int = 0, nodes: tuple[int, ...] = (0, 1)) -> None:
        """Every rank of these nodes seals a snapshot of the step in its slot `index`."""
        for node in nodes:
            first = sum(RANKS[:node])
            for rank in range(first, first + RANKS[node]):
                state = Protected.of(trained(step, rank), lazy=False).gather()
                path = slot_path(self.settings[node].job_dir, rank, index)
                path.parent.mkdir(parents=True, exist_ok=True)
                slot = Slot.create(MEMORY, path, state.payload_bytes, 64 * KIB)
                slot.begin(job_hash("j", os.getuid()), rank, WORLD, 1, Stamp(step, 1))
                TensorCopy(state, slot).copy_moving()
                manifest = json.dumps(state.layout.to_json()).encode()
                slot.seal(
                    slot.write_table(state.payload_bytes, manifest),
                    state.layout.hash(),
                    0.25,
                    wall_ns=1,
                )
                slot.close()

    def movable(self, rank: int, node: int, index: int = 0) -> bool:
        """Whether the rank could write into its slot."""
        slot = Slot(MEMORY, slot_path(self.settings[node].job_dir, rank, index))
        free = slot.lock(exclusive=True)
        slot.close()
        return free

    def all_movable(self) -> bool:
        return all(self.movable(rank, node) for node, rank in ((0, 0), (1, 1), (1, 2)))

    def step(self, *steps: int) -> None:
        """The leader looks: every rank holds these steps."""
        holding = Holding(frozenset(Stamp(s, 1) for s in steps), None, max(steps))
        self.nodes[0].advance([holding] * WORLD, WORLD, True)

    def run(self, until: Callable[[], bool]) -> None:
        """Persisters answer and words are carried, until it is so."""
        deadline = time.monotonic() + PATIENCE_S
        while not until():
            assert time.monotonic() < deadline, "it does not come about"
            if self.posted:
                self.posted.popleft()()
            else:
                timer = self.loop.after(int(PATIENCE_S * S_NS), lambda: None)
                self.loop.run(lambda: bool(self.posted) or until() or time.monotonic() > deadline)
                timer.cancel()

    def settle(self) -> None:
        self.run(lambda: not self.posted and not any(node.pending for node in self.nodes))

    def persist(self, *steps: int) -> CheckpointDone:
        """Ask for the last of these steps, and the outcome."""
        asker = Asker()
        self.nodes[0].ask(asker, steps[-1], "a test asks", ticket=7)
        self.step(*steps)
        self.run(lambda: bool(asker.heard))
        (heard,) = asker.heard
        assert heard.ticket == 7
        return heard

    def events(self, kind: str) -> list[str]:
        return [e.why for e in read_journal(self.settings[0].journal_path) if e.kind == kind]

    def stored(self) -> list[int]:
        return [m.step for m in Store(self.where / "store").list_checkpoints().checkpoints]

    def prove(self, step: int) -> None:
        """Every rank, and one alone, loads into fresh objects what that step was."""
        for rank, world in [*((rank, WORLD) for rank in range(WORLD)), (0, 1)]:
            fresh = Protected.of(trained(99, 9), lazy=False)
            checkpoint.load(Store(self.where / "store"), step, rank, world, fresh)
            assert state_of(fresh) == state_of(Protected.of(trained(step, rank), lazy=False))

    def close(self) -> None:
        for child in self.children:
            child.close()
        self.loop.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def test_two_nodes_write_one_checkpoint_that_every_rank_and_one_alone_load(
    cluster: Cluster,
) -> None:
    seen: list[tuple[int, str, bool]] = []
    cluster.on_order = lambda node, act: seen.append((node, act, cluster.movable(0, 0)))
    cluster.capture(4)
    assert cluster.persist(4).ok is True
    cluster.settle()
    assert seen == [(1, "survey", False), (1, "part", False)], (
        "the leader's slots stand still while it writes"
    )
    assert cluster.all_movable() and cluster.stored() == [4]
    cluster.prove(4)
    manifest = Store(cluster.where / "store").read_manifest(4)
    assert (manifest.world_size, manifest.metrics, manifest.job) == (WORLD, {"loss": 0.25}, "j")
    assert len(manifest.files) == WORLD + 1

    cluster.capture(6)
    heard = cluster.persist(6)
    assert heard.ok and "removed steps [4]" in heard.why and cluster.stored() == [6]
    heard = cluster.persist(6)
    assert heard == CheckpointDone(7, True, 6, "step 6 is already in the store")

    cluster.nodes[0]._newest = None  # a keeper that knows nothing of it, as after a restart
    heard = cluster.persist(6)
    assert heard.ok and heard.why == "step 6 is in the store already, and intact"
    cluster.settle()
    assert cluster.all_movable() and cluster.stored() == [6]


def test_an_older_step_is_written_and_is_not_what_was_asked_for(cluster: Cluster) -> None:
    """Some rank has skipped the step: nobody will ever have it."""
    cluster.capture(4)
    asker = Asker()
    cluster.nodes[0].ask(asker, 6, "a test asks")
    holding = Holding(frozenset({Stamp(4, 1)}), None, 6)
    cluster.nodes[0].advance([holding] * WORLD, WORLD, True)
    cluster.run(lambda: bool(asker.heard))
    assert [(heard.ok, heard.step) for heard in asker.heard] == [(False, 4)]
    assert cluster.stored() == [4]


def test_a_slot_that_is_overwritten_before_the_order_comes_means_a_newer_step(
    cluster: Cluster,
) -> None:
    cluster.capture(4)
    asker = Asker()

    def overwrite(node: int, act: str) -> None:
        if act == "survey":
            cluster.on_order = lambda node, act: True
            cluster.capture(5, nodes=(1,))

    cluster.on_order = overwrite
    cluster.nodes[0].ask(asker, 4, "a test asks")
    cluster.step(4)
    cluster.run(lambda: bool(cluster.events("persist-failed")))
    cluster.step(4)  # the leader has not seen the newer one yet
    cluster.run(lambda: not cluster.posted)
    assert asker.heard == [] and len(cluster.events("persist-started")) == 1
    assert (
        f"node 1: {OVERWRITTEN}: a rank of it does not hold step 4 any more"
        in cluster.events("persist-failed")[0]
    )
    cluster.capture(5, nodes=(0,))
    cluster.step(5)
    cluster.run(lambda: bool(asker.heard))
    assert (asker.heard[0].ok, asker.heard[0].step) == (True, 5)
    cluster.settle()
    assert cluster.stored() == [5] and cluster.all_movable()
    cluster.prove(5)


def test_what_dies_in_an_attempt_fails_it_and_the_next_one_is_none_the_worse(
    cluster: Cluster,
) -> None:
    cluster.capture(4)

    def kill_persister(node: int, act: str) -> None:
        if act == "part":
            pid = cluster.children[node].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    cluster.on_order = kill_persister
    heard = cluster.persist(4)
    assert not heard.ok and heard.why.startswith("node 1: ")
    cluster.settle()
    assert cluster.stored() == [] and cluster.all_movable()

    def lose(node: int, act: str) -> bool:
        if act == "part":  # the order never arrives; the link is found dead, on both sides
            cluster.posted.append(lambda: cluster.nodes[0].node_gone(1, "its link is dead"))
            cluster.nodes[1].node_gone(0, "its link is dead")
        return act != "part"

    cluster.on_order = lose
    heard = cluster.persist(4)
    assert heard.why == "node 1: its link is dead" and not heard.ok
    cluster.settle()
    assert cluster.stored() == [] and cluster.all_movable()

    def next_round(node: int, act: str) -> bool:
        if act == "part":
            cluster.posted.append(lambda: cluster.new_mesh(2))
        return act != "part"

    cluster.on_order = next_round
    heard = cluster.persist(4)
    assert heard.why == "mesh 2 begins" and not heard.ok
    cluster.settle()
    assert cluster.stored() == [] and cluster.all_movable()

    late: list[int] = []

    def answer_for_others(node: int, act: str) -> None:
        leader = cluster.nodes[0]
        assert leader._running is not None
        number = leader._running.number
        leader.answered(1, act, number - 1, False, "another attempt's")
        leader.answered(1, "publish", number, False, "another act's")
        leader.answered(5, act, number, False, "nobody's")
        late.append(number)

    cluster.on_order = answer_for_others
    assert cluster.persist(4).ok
    cluster.nodes[0].answered(1, "part", late[-1], False, "too late")
    cluster.settle()
    assert cluster.stored() == [4] and cluster.all_movable()
    assert len(cluster.events("persist-failed")) == 3 and len(late) == 2
    cluster.prove(4)
    left = {path.name for path in Path(Store(cluster.where / "store").url(4)).iterdir()}
    assert left == {*Store(cluster.where / "store").read_manifest(4).files, "keepstep.json"}


def test_a_node_that_does_not_lead_says_so(cluster: Cluster) -> None:
    asker, waiting = Asker(), Asker()
    cluster.nodes[1].ask(asker, 4, "a test asks")
    cluster.nodes[0].ask(waiting, 4, "a test asks")
    cluster.nodes[0].join_mesh(Mesh(2, 1, cluster.members, "s" * 16), cluster._order)
    for heard, node in ((asker.heard, 1), (waiting.heard, 1)):
        assert [(h.ok, h.why) for h in heard] == [
            (False, f"expected to be asked on the node that leads, 0, found node {node}")
        ]
    assert not any(node.pending for node in cluster.nodes)


def test_a_store_that_cannot_be_written_is_answered_and_leaves_the_slots(cluster: Cluster) -> None:
    cluster.capture(4)
    (cluster.where / "store").write_text("in the way")
    heard = cluster.persist(4)
    assert not heard.ok
    # whichever node says so first: the one that lists what is there, or one that creates its place
    assert "ConfigError" in heard.why or "StoreError" in heard.why
    cluster.settle()
    assert cluster.all_movable()
    (cluster.where / "store").unlink()
    assert cluster.persist(4).ok
    cluster.settle()
    cluster.prove(4)


def test_a_skipped_step_is_refused_or_served_by_the_next_that_is_captured(
    cluster: Cluster,
) -> None:
    def decided(held: int, by: int) -> None:
        holding = Holding(frozenset([Stamp(held, 1)]), None, by)
        cluster.nodes[0].advance([holding] * WORLD, WORLD, True)

    cluster.capture(4)
    waits, goes_on = Asker(), Asker()
    cluster.nodes[0].ask(waits, 5, "the trainer waits", 1)
    cluster.nodes[0].ask(goes_on, 5, "the trainer goes on", 2, steps_follow=True)
    decided(4, by=4)  # step 5 is not over
    assert waits.heard == goes_on.heard == []
    decided(4, by=5)  # it was skipped
    cluster.run(lambda: bool(waits.heard))
    [refused] = waits.heard
    assert (refused.ok, refused.step) == (False, 4) and goes_on.heard == []
    cluster.run(cluster.all_movable)
    cluster.capture(6)
    decided(6, by=6)
    cluster.run(lambda: bool(goes_on.heard))
    [done] = goes_on.heard
    assert (done.ok, done.step) == (True, 6) and waits.heard == [refused]
