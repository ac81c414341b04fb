"""keepstep.ray on a real Ray cluster of several raylets on this machine, each a node with memory of
its own: one is lost, Ray places its agent on another, and the end is the undisturbed run's, bit for
bit. Skipped where Ray is not installed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from keepstep.config import job_dir_of
from keepstep.edge.os.journal import read_journal
from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import read_status
from keepstep.model.events import Event
from keepstep.ray.node_agent import NODE_ID_DIGITS
from tests.processes import waiting

ray = pytest.importorskip("ray", reason="no Ray: pip install 'keepstep[ray]'")

# One after the other; the promise is tried with RAY_LOSSES=10. Not KEEPSTEP_*: those are options.
LOSSES = int(os.environ.get("RAY_LOSSES", "1"))

pytestmark = pytest.mark.timeout(300 + 300 * LOSSES)

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
SIZE = ("--width", "96", "--layers", "3", "--heads", "3", "--batch", "4")
PATIENCE_S = 240.0


def short(node: Any) -> str:
    return str(node.node_id)[:NODE_ID_DIGITS]


class RayRoom:
    """The cluster, and where each of its nodes keeps what."""

    def __init__(self, room: Path, arenas: Path) -> None:
        from ray.cluster_utils import Cluster

        self.room, self.arenas = room, arenas
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "object_store_memory": 80 << 20,
                # Ray takes 15 s to call a node lost; here 4.
                "_system_config": {"health_check_period_ms": 1000},
            },
        )
        self._nodes: list[Any] = []
        for _ in range(2):
            self.add_node()
        self._cluster.connect()

    def add_node(self) -> None:
        node = self._cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        self._nodes.append(node)
        for base in (self.arenas, self.room):
            (base / short(node)).mkdir()

    def train(self, job: str, steps: int, codes: list[int]) -> None:
        import keepstep.ray

        codes.append(
            keepstep.ray.run(
                [str(GPT), "--steps", str(steps), *SIZE, "--out", str(self.room / f"{job}.json")],
                nodes=2,
                nproc_per_node=1,
                options=["--job", job, "--redundancy", "copies:2", "--standby", "0"],
                environ={
                    "KEEPSTEP_ARENA_DIR": f"{self.arenas}/{{node_id}}",
                    "KEEPSTEP_STATE_DIR": f"{self.room}/{{node_id}}",
                    "KEEPSTEP_LINK_DEAD_S": "4",
                },
            )
        )

    def lose(self, node_id: str) -> None:
        """The machine is gone: its raylet, all that ran on it, and its memory."""
        [node] = [node for node in self._nodes if short(node) == node_id]
        self._nodes.remove(node)
        raylet = node.all_processes["raylet"][0].process
        for process in [*psutil.Process(raylet.pid).children(recursive=True)]:
            with suppress(psutil.Error):
                process.kill()
        os.kill(raylet.pid, signal.SIGKILL)
        while pids := self._of_node(node_id):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        shutil.rmtree(self.arenas / node_id)
        self._cluster.remove_node(node, allow_graceful=False)

    def _of_node(self, node_id: str) -> list[int]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("KEEPSTEP_ARENA_DIR", "").endswith(node_id):
                    found.append(process.pid)
        return found

    def events(self, job: str, kind: str) -> list[Event]:
        paths = self.room.glob(f"*/{job}/journal.jsonl")
        return sorted(
            (e for path in paths for e in read_journal(path) if e.kind == kind),
            key=lambda e: e.mono_ns,
        )

    def committed(self, job: str) -> int:
        """The step that both nodes' pages call committed; -1 before the first."""
        found = []
        for arena in self.arenas.iterdir():
            job_dir = job_dir_of(arena, job)
            statuses = [read_status(MEMORY, job_dir, rank) for rank in (0, 1)]
            status = next(filter(None, statuses), None)
            if status is None or not (job_dir / "horizon").exists():
                continue
            page = HorizonPage(MEMORY, job_dir)
            stamp = page.read(status.epoch).committed
            page.close()
            found.append(-1 if stamp is None else stamp.step)
        return min(found) if len(found) == 2 else -1

    def node_of(self, job: str, rank: int) -> str:
        for path in self.room.glob(f"*/{job}/journal.jsonl"):
            if any(e.who == f"rank {rank}" for e in read_journal(path)):
                return path.parent.parent.name
        return ""

    def end(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()
        for node in self._nodes:
            for pid in self._of_node(short(node)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayRoom]:
    with (
        tempfile.TemporaryDirectory(prefix="ks-ray-") as room,
        tempfile.TemporaryDirectory(prefix="ks-ray-", dir="/dev/shm") as arenas,
    ):
        made = RayRoom(Path(room), Path(arenas))
        try:
            yield made
        finally:
            made.end()


def digest(cluster: RayRoom, job: str) -> str:
    return str(json.loads((cluster.room / f"{job}.json").read_text())["sha256"])


STEPS = 60


def test_ray_replaces_a_lost_node_and_the_end_is_the_same(cluster: RayRoom) -> None:
    codes: list[int] = []
    cluster.train("calm", STEPS, codes)
    assert codes == [0]
    for number in range(LOSSES):
        job = f"struck{number}"
        ended: list[int] = []
        training = threading.Thread(target=cluster.train, args=(job, STEPS, ended))
        training.start()
        try:
            waiting.until(
                lambda job=job: cluster.committed(job) >= 5, f"step 5 of {job}", PATIENCE_S
            )
            committed = cluster.committed(job)
            # either may be lost: the agents meet in the driver
            cluster.lose(cluster.node_of(job, number % 2))
            cluster.add_node()
        finally:
            training.join(PATIENCE_S)
        assert ended == [0], job
        back = cluster.events(job, "resumed")[-1]
        assert back.data["source"] == "memory" and cluster.events(job, "fetched"), back.why
        assert back.data["step"] >= committed, back.why
        assert digest(cluster, job) == digest(cluster, "calm"), job
