"""Which nodes may be lost, as one node knows it: the leader's word, its age, and what makes it
worthless."""

from __future__ import annotations

import fcntl
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from keepstep.config import Settings, resolve
from keepstep.dashboard.finding import FoundJob
from keepstep.dashboard.moment import Moment
from keepstep.dashboard.nodes import NO_REPORT
from keepstep.dashboard.status_screen import status_screen
from keepstep.dashboard.view import JobView, job_view
from keepstep.edge.os.clock import CLOCK
from keepstep.edge.os.journal import FileJournal
from keepstep.edge.shm.beat_files import write_beat
from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.node_safety_file import FILE, write_node_safety
from keepstep.edge.shm.status_page import StatusPage
from keepstep.model.beats import KeeperBeat
from keepstep.model.horizon import Horizon
from keepstep.model.snapshot import Phase, SlotState, SlotView, Stamp
from keepstep.model.units import S_NS

WELL: dict[str, Any] = {
    "safe": [0, 1],
    "critical": {},
    "out_of_reach": [],
    "any_nodes": 1,
    "why": "any one of 2 nodes may be lost",
}
MUST_STAY: dict[str, Any] = {
    **{"safe": [1], "critical": {"0": [0, 1]}, "out_of_reach": [], "any_nodes": 0},
    "why": "node 0 must stay (with node 0 would go the snapshots of nodes 0, 1); "
    "safe to lose: node "
    "1",
}
GONE: dict[str, Any] = {
    **WELL,
    "out_of_reach": [0],
    "any_nodes": -1,
    "why": "memory no longer has the snapshots of node 0: only the store does",
}


class Scene:
    """Node 1 of two with two ranks each: 2 and 3 live here."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pages: list[StatusPage] = []
        for rank in (2, 3):
            page = StatusPage.own(MEMORY, settings.job_dir, rank)
            assert page is not None
            page.publish(
                **{
                    "rank": rank,
                    "world_size": 4,
                    "pid": 100 + rank,
                    "epoch": 2,
                    "phase": Phase.STEP,
                    "completed_step": 43,
                },
                slots=tuple(SlotView(SlotState.SEALED, Stamp(step, 2)) for step in (42, 43)),
            )
            self.pages.append(page)
        self.horizon = HorizonPage(MEMORY, settings.job_dir)
        self.horizon.write(Horizon(2, committed=Stamp(41, 2)))
        self.journal = FileJournal(settings.journal_path, "keeper")
        self.lock_fd = os.open(settings.job_dir / "keeper.lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(self.lock_fd, fcntl.LOCK_EX)
        beat = KeeperBeat(CLOCK.monotonic_ns(), CLOCK.boot(), 7)
        write_beat(MEMORY, settings.job_dir, beat)

    def tell(
        self,
        verdict: dict[str, Any],
        step: int | None = 41,
        is_committed: bool = True,
        linked: bool = True,
    ) -> None:
        members = [
            {
                "node": n,
                "host": f"10.0.0.{n}",
                "rack": None,
                "ranks": 2,
                "incarnation": 7,
                "linked": linked or n == 1,
            }
            for n in (0, 1)
        ]
        about = {
            "policy": "copies:2",
            "policy_why": "it was asked for",
            "step": step,
            "is_committed": is_committed,
            "nodes": members,
        }
        write_node_safety(MEMORY, self.settings.job_dir, {**about, **verdict})

    def told_ago(self, seconds: float) -> None:
        then_ns = Moment.now().wall_ns - int(seconds * S_NS)
        os.utime(self.settings.job_dir / FILE, ns=(then_ns, then_ns))

    def look(self) -> JobView:
        return job_view(
            FoundJob("demo", self.settings.job_dir, self.settings.journal_path, True, 0),
            Moment.now(),
        )

    def text(self) -> str:
        console = Console(file=io.StringIO(), width=300)
        console.print(status_screen(self.look()))
        assert isinstance(console.file, io.StringIO)
        return " ".join(console.file.getvalue().split())

    def close(self) -> None:
        for page in self.pages:
            page.close()
        self.horizon.close()
        self.journal.close()
        os.close(self.lock_fd)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(
        resolve(
            {"job": "demo", "arena_dir": str(tmp_path), "state_dir": str(tmp_path / "journals")},
            {},
            "demo",
        )
    )
    yield made
    made.close()


def survived(view: JobView) -> dict[str, tuple[int | None, bool]]:
    return {p.against: (p.step, p.is_known) for p in view.protection}


def test_any_node_may_be_lost(scene: Scene) -> None:
    scene.tell(WELL)
    view = scene.look()
    assert view.nodes is not None
    assert (view.nodes.here, view.nodes.any_nodes, view.nodes.doubt) == (1, 1, "")
    assert [(n.node, n.ranks) for n in view.nodes.nodes] == [(0, (0, 1)), (1, (2, 3))]
    assert view.horizon == Stamp(41, 2)  # the leader's word, and not what the ranks here hold
    assert survived(view) == {
        **{
            "a killed process": (41, True),
            "a damaged snapshot": (41, True),
            "a lost node": (41, True),
            "all nodes lost": (None, True),
        },
    }
    assert (
        "2 nodes (this is node 1), copies:2: step 41 is committed. Any one of 2 nodes may be lost."
        in scene.text()
    )


@pytest.mark.parametrize("verdict", [MUST_STAY, GONE])
def test_what_may_not_be_lost_falls_to_the_store(scene: Scene, verdict: dict[str, Any]) -> None:
    scene.tell(verdict, linked=False)
    assert survived(scene.look())["a lost node"] == (None, True)
    scene.journal.record("persisted", "step 30", step=30)
    found = survived(scene.look())
    assert (found["a lost node"], found["a damaged snapshot"], found["a killed process"]) == (
        (30, True),
        (30, True),
        (41, True),
    )
    text = scene.text()
    assert f"{verdict['why'][:1].upper()}{verdict['why'][1:]}." in text
    assert "Node 0 (10.0.0.0, ranks 0 to 1) has no open link to the leading keeper." in text


def test_a_step_that_is_held_and_not_yet_protected(scene: Scene) -> None:
    scene.horizon.write(Horizon(2))
    scene.tell(MUST_STAY, step=40, is_committed=False)
    assert survived(scene.look())["a killed process"] == (40, True)
    assert "step 40 is not yet committed. Node 0 must stay" in scene.text()


def test_what_an_older_epoch_committed_counts_until_this_one_has(scene: Scene) -> None:
    scene.horizon.write(Horizon(2, inherited=Stamp(39, 1)))
    assert scene.look().horizon == Stamp(39, 1)
    assert survived(scene.look())["a killed process"] == (39, True)


def test_before_the_first_step(scene: Scene) -> None:
    scene.horizon.write(Horizon(2))
    scene.tell(GONE, step=None, is_committed=False)
    view = scene.look()
    assert survived(view)["a lost node"] == (None, True) and view.horizon is None
    assert (
        "no step is held by every rank yet." in scene.text()
        and "memory no longer has" not in scene.text()
    )


def test_an_old_word_is_shown_with_its_age(scene: Scene) -> None:
    scene.tell(WELL)
    assert "unchanged since" not in scene.text()
    scene.told_ago(40)
    assert "Reported 40 s ago and unchanged since" in scene.text()
    assert survived(scene.look())["a lost node"] == (41, True)  # it speaks when something changes


def test_a_leader_that_does_not_answer_makes_its_word_worthless(scene: Scene) -> None:
    scene.tell(WELL)
    scene.told_ago(30)
    # the leader would tell of that one
    scene.journal.record("node-lost", "node 1 does not answer: away for 10 s", node=1)
    assert survived(scene.look())["a lost node"] == (41, True)
    scene.journal.record("node-lost", "node 0 does not answer: away for 10 s", node=0)
    view = scene.look()
    assert survived(view) == {
        **{
            "a killed process": (41, True),
            "a damaged snapshot": (None, False),
            "a lost node": (None, False),
        },
        "all nodes lost": (None, True),
    }
    text = scene.text()
    assert (
        "which may be lost is unknown: node 0 does not answer: away for 10 s; it is the leading"
        in text
    )
    assert (
        "30 s ago: step 41 is committed; any one of 2 nodes may be lost." in text
        and "a lost node unknown" in text
    )


def test_another_round_or_no_keeper_makes_it_worthless_too(scene: Scene) -> None:
    scene.tell(WELL)
    scene.told_ago(1)
    scene.journal.record("mesh", "mesh 3: node 1 of 2, ranks [2, 3]", mesh_version=3)
    nodes = scene.look().nodes
    assert nodes is not None and nodes.doubt
    scene.tell(WELL)
    nodes = scene.look().nodes
    assert nodes is not None and nodes.doubt == ""
    fcntl.flock(scene.lock_fd, fcntl.LOCK_UN)
    assert survived(scene.look())["a lost node"] == (None, False)


@pytest.mark.parametrize("raw", [None, "", "{", "[]", "{}", '{"nodes": [{"node": 0}]}'])
def test_nothing_readable_is_unknown(scene: Scene, raw: str | None) -> None:
    if raw is not None:
        (scene.settings.job_dir / FILE).write_text(raw)
    view = scene.look()
    assert view.nodes is not None and (view.nodes.policy, view.nodes.doubt) == (None, NO_REPORT)
    assert survived(view)["a lost node"] == (None, False)
    assert f"Several nodes: {NO_REPORT}." in scene.text()


def test_all_ranks_of_a_job_here_is_one_node(scene: Scene) -> None:
    scene.tell(WELL)
    for page in scene.pages:
        page.publish(world_size=2)
    view = scene.look()
    assert view.nodes is None and view.horizon == Stamp(43, 2)
    assert "a lost machine" in survived(view)
