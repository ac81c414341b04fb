"""Several nodes under torchrun, which knows nothing of keepstep: no agent, a node's ranks start its
keeper, and the ranks' process group tells the keepers of each other. The launcher restarts; the
state comes from memory, and ends equal to that of an undisturbed run."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from keepstep.edge.os.journal import read_journal
from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import read_status
from keepstep.model.events import Event
from keepstep.model.snapshot import Phase, RankStatus
from keepstep.testing.crew import Several
from keepstep.testing.lab import Lab
from tests.processes.quick_steps import FEW_STEPS

pytestmark = pytest.mark.timeout(280)

NODES, STEPS, PATIENCE_S = 2, 60, 200.0
QUICK_LEAVE = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1,is_host=0"


class Training:
    """A job of two nodes under torchrun. Nodes meet outside of both, so either may be lost; one
    that is lost is replaced."""

    def __init__(
        self,
        lab: Lab,
        room: Path,
        log: Any,
        launcher: str = "torchrun",
        more: Mapping[str, str] | None = None,
    ) -> None:
        """more: variables of all processes."""
        self.results = room / "results"
        self.results.mkdir()
        options = [
            "--nnodes",
            NODES,
            "--nproc-per-node",
            1,
            "--max-restarts",
            3,
            "--monitor-interval",
            0.1,
        ]
        options += [
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            lab.endpoint(),
            "--rdzv-id",
            "t",
            "--rdzv-conf",
            QUICK_LEAVE,
        ]
        job = [
            "-m",
            "keepstep.testing.job",
            "--steps",
            STEPS,
            "--step-ms",
            60,
            "--results",
            self.results,
        ]
        words = shlex.join(map(str, [*options, *job]))
        # Ranks go to nodes in the order of their addresses.
        starts = {
            "torchrun": 'torch.distributed.run --local-addr "$KEEPSTEP_HOST"',
            "run": "keepstep.cli.main run",
        }
        command = ["sh", "-c", f"exec {sys.executable} -m {starts[launcher]} {words}"]
        own = {
            "KEEPSTEP_JOB": "t",
            "KEEPSTEP_REDUNDANCY": "copies:2",
            "KEEPSTEP_LINK_DEAD_S": "4",
            "KEEPSTEP_GRACE_S": "60",
        }
        environ = {
            **os.environ,
            **own,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "PYTHONUNBUFFERED": "1",
            **(more or {}),
        }
        self.log = Path(log.name)
        self.crew = Several("t", lab, command, environ, log)
        self.crew.start()

    def events(self, kind: str) -> list[Event]:
        found = [
            e for place in self.crew.places for e in read_journal(place.journal) if e.kind == kind
        ]
        return sorted(found, key=lambda e: e.mono_ns)

    def fetched_ranks(self) -> list[int]:
        return [e.data["rank"] for e in self.events("fetched")]

    def node_of(self, rank: int) -> int:
        """The node whose memory has that rank's living page."""
        found = {
            node: status.incarnation
            for node, place in enumerate(self.crew.places)
            if (status := read_status(MEMORY, place.job_dir, rank))
        }
        return max(found, key=lambda node: found[node])

    def status(self, rank: int) -> RankStatus | None:
        return next(
            (s for place in self.crew.places if (s := read_status(MEMORY, place.job_dir, rank))),
            None,
        )

    def committed_step(self, node: int) -> int:
        status = self.status(0)
        path = self.crew.places[node].job_dir
        if status is None or not (path / "horizon").exists():
            return -1
        page = HorizonPage(MEMORY, path)
        committed = page.read(status.epoch).committed
        page.close()
        return -1 if committed is None else committed.step

    def wait(self, what: Callable[[], Any], why: str) -> Any:
        until = time.monotonic() + PATIENCE_S
        while not (found := what()):
            code = self.crew.poll()
            assert code is None, f"{why}: the job ended with {code}: {self.story()}"
            assert time.monotonic() < until, f"{why}: not within {PATIENCE_S} s: {self.story()}"
            time.sleep(0.02)
        return found

    def train_until(self, step: int) -> None:
        self.wait(
            lambda: self.committed_step(0) >= step and self.committed_step(1) >= step,
            f"step {step} committed on both nodes",
        )

    def digests(self) -> list[str]:
        """At the end, by rank."""
        until = time.monotonic() + PATIENCE_S
        while (code := self.crew.poll()) is None:
            assert time.monotonic() < until, f"not over within {PATIENCE_S} s: {self.story()}"
            time.sleep(0.02)
        assert code == 0, self.story()
        while self.crew.remains():
            assert time.monotonic() < until, (
                f"the keepers keep {self.crew.remains()}: {self.story()}"
            )
            time.sleep(0.02)
        assert all(e.data["ok"] for e in self.events("job-over")), self.story()
        return [
            json.loads((self.results / f"rank-{rank}.json").read_text())["digest"]
            for rank in range(NODES)
        ]

    def story(self) -> str:
        told = [e for place in self.crew.places for e in read_journal(place.journal)]
        lines = [f"{e.who} {e.kind}: {e.why}" for e in sorted(told, key=lambda e: e.mono_ns)[-40:]]
        return "\n".join(["", *lines, self.log.read_text()[-6000:]])


@contextmanager
def training(room: Path) -> Iterator[Training]:
    room.mkdir()
    with Lab(NODES, room) as lab, open(room / "log", "wb") as log:
        job = Training(lab, room, log)
        try:
            yield job
        finally:
            job.crew.end()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    with training(tmp_path_factory.mktemp("undisturbed") / "run") as job:
        job.train_until(5)
        first = job.committed_step(0)
        job.train_until(first + 1)  # the horizon moves
        digests = job.digests()
        assert [e.data["policy"] for e in job.events("policy")] == ["copies:2"]
        assert job.events("fetched") == [] and {
            e.data["source"] for e in job.events("resumed")
        } == {"fresh"}
        return digests


def test_a_killed_rank_costs_its_launchers_restart_and_no_byte_on_the_wire(
    undisturbed: list[str], tmp_path: Path
) -> None:
    with training(tmp_path / "run") as job:
        job.train_until(10)
        status = job.status(1)
        assert status is not None and status.phase is not Phase.DONE
        os.kill(status.pid, signal.SIGKILL)
        assert job.digests() == undisturbed
        last = job.events("resumed")[-1]
        assert (
            last.data["source"] == "memory"
            and last.data["lost_steps"] <= FEW_STEPS
            and last.data["step"] >= 10
        ), last.why
        assert job.events("fetched") == []


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_is_replaced_and_fetches(
    undisturbed: list[str], tmp_path: Path, lost: int
) -> None:
    """The replacement's address is the last in order: when node 0 is lost ranks change nodes, and
    each needs its state brought."""
    with training(tmp_path / "run") as job:
        job.train_until(10)
        assert job.crew.lose([lost])
        assert job.digests() == undisturbed
        last = job.events("resumed")[-1]
        assert (
            last.data["source"] == "memory"
            and last.data["lost_steps"] <= FEW_STEPS
            and last.data["step"] >= 10
        ), last.why
        assert sorted(job.fetched_ranks()) == ([1] if lost == 1 else [0, 1])
