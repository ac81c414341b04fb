"""Witness: where ranks live, when copies are on their way, and what it does and sees when nodes are
lost."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from keepstep.config import job_dir_of
from keepstep.edge.os.journal import FileJournal
from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import StatusPage
from keepstep.model.horizon import Horizon
from keepstep.model.snapshot import Phase, SlotState, SlotView, Stamp
from keepstep.testing import witness as witness_module
from keepstep.testing.crew import CrewPlace
from keepstep.testing.faults import HARMED_BITS_PER_S, parse
from keepstep.testing.injector import note
from keepstep.testing.network import LinkShape
from keepstep.testing.rough_store import BUCKET, RoughStore
from keepstep.testing.witness import DrillFacts, Witness


class Lost:
    """Stands for the lab: memory goes, and a process that has ended is called the node's."""

    def __init__(self, places: Sequence[CrewPlace]) -> None:
        self.places, self.lost, self.links = places, [], []  # type: ignore[var-annotated]
        self.shapes: list[tuple[tuple[int, ...], LinkShape | None]] = []
        with subprocess.Popen(["true"]) as ended:
            self.pid = ended.pid

    def lose(self, nodes: Sequence[int]) -> list[int]:
        self.lost.append(tuple(nodes))
        for node in nodes:
            self.places[node].job_dir.parents[1].rename(
                self.places[node].job_dir.parents[2] / f"wiped-{len(self.lost)}-{node}"
            )
        return [self.pid]

    def set_links(self, nodes: Sequence[int], up: bool) -> None:
        self.links.append((tuple(nodes), up))

    def shape_links(self, nodes: Sequence[int], shape: LinkShape | None) -> None:
        self.shapes.append((tuple(nodes), shape))


class World:
    """Four nodes with a rank each, and a witness of some faults."""

    def __init__(self, tmp_path: Path, *faults: str, store: RoughStore | None = None) -> None:
        self.places = [
            CrewPlace(job_dir_of(tmp_path / f"node-{n}", "job"), tmp_path / f"journal-{n}")
            for n in range(4)
        ]
        self.attempts, self.facts = tmp_path / "attempts.jsonl", DrillFacts("job", nodes=4)
        self.nodes = Lost(self.places)
        self.pages: dict[tuple[int, int], StatusPage] = {}
        self.witness = Witness(
            tuple(parse(f) for f in faults),
            1,
            self.facts,
            self.places,
            self.attempts,
            self.nodes,
            store,
        )

    def says(self, rank: int, node: int | None = None, **fields: Any) -> None:
        node = rank if node is None else node
        if (node, rank) not in self.pages:
            page = StatusPage.own(MEMORY, self.places[node].job_dir, rank)
            assert page is not None
            self.pages[node, rank] = page
        self.pages[node, rank].publish(
            **{"pid": os.getpid(), "phase": Phase.FORWARD, "epoch": 1, **fields}
        )

    def commits(self, node: int, stamp: Stamp) -> None:
        page = HorizonPage(MEMORY, self.places[node].job_dir)
        page.write(Horizon(stamp.epoch, stamp))
        page.close()

    def told(self) -> list[str]:
        return (
            [n["what"] for n in map(json.loads, self.attempts.read_text().splitlines())]
            if self.attempts.exists()
            else []
        )

    def close(self) -> None:
        self.witness.close()
        for page in self.pages.values():
            page.close()


@pytest.fixture
def worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(witness_module, "SEARCH_S", 0.0)
    made: list[World] = []

    def make(*faults: str, store: RoughStore | None = None) -> World:
        made.append(World(tmp_path, *faults, store=store))
        for place in made[0].places:
            place.job_dir.mkdir(parents=True)
        return made[0]

    yield make
    made[0].close()


def sealed(step: int, epoch: int = 1) -> tuple[SlotView, ...]:
    return (
        SlotView(SlotState.SEALED, Stamp(step, epoch)),
        SlotView(SlotState.WRITING, Stamp(step + 1, epoch)),
    )


def test_a_node_is_lost_when_its_rank_asks(worlds: Any) -> None:
    world: World = worlds("kill-node:node=1+2,step=5")
    for rank in range(4):
        world.says(rank)
    world.witness.look()
    assert world.nodes.lost == []
    note(world.attempts, 0, "asks", phase="forward", step=5)
    world.witness.look()
    world.witness.look()
    assert world.nodes.lost == [(1, 2)] and world.told() == ["asks", "about to", "did"]
    assert world.facts.notes[0]["nodes"] == [1, 2]
    assert world.facts.sightings[0] == [
        "1 processes of node 1, 2 are gone",
        "the memory of node 1, 2 is gone",
    ]
    # a second rank asked at the same moment
    note(world.attempts, 0, "asks", phase="forward", step=6)
    world.witness.look()
    world.witness.look()
    assert len(world.nodes.lost) == 1


def test_the_jobs_own_numbers_of_nodes(worlds: Any) -> None:
    """Rank 3, hence the job's node 3, lives on the lab's node 0: its page there is newer than the
    one it left on node 3."""
    world: World = worlds("kill-node:node=3,step=5")
    for rank in (1, 2, 3):
        world.says(rank)
    world.says(3, node=0)
    world.witness.look()
    note(world.attempts, 0, "asks", phase="forward", step=5)
    world.witness.look()
    world.witness.look()
    assert world.facts.notes[0]["nodes"] == [3] and world.nodes.lost == [(0,)]


def test_protect_is_between_seal_and_commit(worlds: Any) -> None:
    world: World = worlds("kill-node:node=2,step=5,phase=protect")
    world.says(2, slots=sealed(4))
    world.commits(2, Stamp(3, 1))
    world.witness.look()
    world.says(2, slots=sealed(5))
    world.commits(2, Stamp(5, 1))
    world.witness.look()
    assert world.nodes.lost == []
    world.says(2, slots=sealed(6))
    world.witness.look()
    world.witness.look()
    assert world.nodes.lost == [(2,)]
    assert [n.get("step") for n in world.facts.notes] == [6, None] and world.facts.notes[0][
        "phase"
    ] == "protect"


def test_when_everything_was_protected(worlds: Any) -> None:
    world: World = worlds("kill-node:node=0,step=5")
    world.says(0, epoch=1)
    world.says(1, epoch=1)
    world.witness.look()
    assert world.facts.protected_ns == {}
    world.commits(1, Stamp(4, 1))
    world.witness.look()
    assert list(world.facts.protected_ns) == [1]
    world.says(1, epoch=2)
    world.witness.look()
    assert list(world.facts.protected_ns) == [1]  # epoch 2 has committed nothing
    note(world.attempts, 0, "asks", phase="forward", step=5)
    world.witness.look()
    world.witness.look()
    world.commits(1, Stamp(5, 2))  # an old word, found after the loss
    world.witness.look()
    assert list(world.facts.protected_ns) == [1]
    world.says(1, epoch=3)
    world.commits(1, Stamp(5, 3))
    world.witness.look()
    assert list(world.facts.protected_ns) == [1, 3]


def test_what_was_committed_is_told_once(worlds: Any) -> None:
    world: World = worlds()
    for step, looks in ((4, 2), (5, 1), (7, 3)):
        world.says(0, epoch=1)
        world.commits(0, Stamp(step, 1))
        for _ in range(looks):
            world.witness.look()
    assert [(epoch, step) for epoch, step, _ in world.facts.committed] == [(1, 4), (1, 5), (1, 7)]
    assert [at_ns for *_, at_ns in world.facts.committed] == sorted(
        at_ns for *_, at_ns in world.facts.committed
    )


def test_a_link_goes_down_and_up(worlds: Any) -> None:
    world: World = worlds("link-down:node=3,step=5,for=0")
    note(world.attempts, 0, "asks", phase="forward", step=5)
    for _ in range(3):
        world.witness.look()
    assert world.nodes.links == [((3,), False), ((3,), True)]
    assert world.facts.sightings[0][0].startswith("the link of node 3 was down for")


@pytest.mark.parametrize(
    ("kind", "loses", "words"),
    [("link-slow", False, "was slow for"), ("link-loss", True, "lost packets for")],
)
def test_a_link_is_slow_for_a_while(worlds: Any, kind: str, loses: bool, words: str) -> None:
    world: World = worlds(f"{kind}:node=3,step=5,for=0")
    note(world.attempts, 0, "asks", phase="forward", step=5)
    for _ in range(3):
        world.witness.look()
    harmed = LinkShape(HARMED_BITS_PER_S, loses)
    assert world.nodes.shapes == [((3,), harmed), ((3,), None)] and world.nodes.links == []
    assert world.facts.sightings[0][0].startswith(f"the link of node 3 {words}")


def test_a_store_is_rough_until_it_is_met_and_training_went_on(
    worlds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RoughStore(tmp_path / "store") as store:
        faults = (f"store-{how}:step=5,for=0" for how in ("refuses", "slow"))
        world: World = worlds(*faults, store=store)

        def trains(step: int) -> None:
            world.says(0, step=step + 1, completed_step=step)
            for _ in range(3):
                world.witness.look()

        trains(5)
        assert world.told() == ["about to", "did"], "one after the other"
        trains(7)
        assert len(world.told()) == 2, "nobody has met with it"
        journal = FileJournal(world.places[0].journal, "keeper")
        journal.record("persist-failed", "[Errno 111] Connection refused")
        trains(7)
        assert world.told() == ["about to", "did", "ended", "about to", "did"]
        assert store.meet(1, f"GET {BUCKET}/a") == "done"
        trains(8)
        assert len(world.told()) == 5, "one step may have been under way"
        monkeypatch.setattr(witness_module, "ROUGH_S", 0.0)
        trains(9)
        assert world.told()[5:] == ["ended"] and world.facts.half == []
        met, went_on = world.facts.sightings[0]
        assert "1 requests or acts met with it" in met
        assert went_on == "training went on from step 5 to 7 meanwhile"
        journal.close()


def test_a_training_that_waits_for_the_store_is_seen(
    worlds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(witness_module, "ROUGH_S", 0.0)
    with RoughStore(tmp_path / "store") as store:
        world: World = worlds("store-slow:step=5,for=0", store=store)
        world.says(0, step=5, completed_step=4)
        for _ in range(5):
            world.witness.look()
        assert world.told() == ["about to", "did", "ended"] and world.facts.sightings == {}


def test_faults_of_one_rank_in_one_step_come_in_their_order(worlds: Any) -> None:
    """The one before may have to wait for what it needs: the next keeper, say."""
    world: World = worlds("keeper-kill:rank=0,step=5", "kill:rank=0,step=5,after=0")
    child = subprocess.Popen(["sleep", "60"])
    world.says(0, pid=child.pid, step=5, completed_step=4)
    note(world.attempts, 0, "about to")
    for _ in range(3):
        world.witness.look()
    assert world.told() == ["about to"] and child.poll() is None
    note(world.attempts, 0, "cannot", why="nobody comes")
    for _ in range(3):
        world.witness.look()
    assert world.told()[2:] == ["about to", "did"] and child.wait(30) == -9


def test_a_restore_that_nobody_saw_is_met_when_it_is_over(worlds: Any) -> None:
    """A busy machine looks too seldom for a restore of some milliseconds."""
    world: World = worlds("torn:rank=0,step=5", "kill:rank=0,step=5,phase=restore,after=0")
    journal = FileJournal(world.places[0].journal, "rank 0")
    journal.record("restored", "from the life before")
    child = subprocess.Popen(["sleep", "60"])
    world.says(0, pid=child.pid, step=5, completed_step=4)
    note(world.attempts, 0, "about to")
    world.witness.look()
    note(world.attempts, 0, "did", pid=child.pid)
    for _ in range(3):
        world.witness.look()
    assert world.told() == ["about to", "did"] and child.poll() is None, "it has not restored"
    journal.record("restored", "step 4 from memory")
    for _ in range(3):
        world.witness.look()
    assert world.told()[2:] == ["about to", "did"] and child.wait(30) == -9
    journal.close()
