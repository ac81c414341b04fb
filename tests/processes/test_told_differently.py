"""Ranks of one training that are told different things hear which, and where: none waits for the
others until it is called hung, and none decides alone for all of them. What the program says in
code stays so when the keeper dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.config import job_dir_of
from keepstep.edge.os.journal import read_journal
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import read_status
from keepstep.edge.store.signer import Signer
from keepstep.edge.store.store import Store
from keepstep.model.events import Event
from tests.processes import waiting

pytestmark = pytest.mark.timeout(300)

PATIENCE_S = 120.0
RUN = (sys.executable, "-m", "keepstep.cli.main", "run", "--nproc-per-node", "2")
SECRET = "correct-horse-battery-staple"
# Each rank's settings in code; it waits in a step until it is let go on.
PROGRAM = """
import json, os, pathlib, time, torch, keepstep
rank, room = int(os.environ["RANK"]), pathlib.Path(os.environ["ROOM"])
torch.set_num_threads(1)
weights = torch.zeros(1000)
job = keepstep.protect(json.loads(os.environ["SAID"])[rank], weights=weights)
for step in job.steps(40):
    weights += 1
    time.sleep(0.01)
    while step == 20 and not (room / "go-on").exists():
        (room / f"held-{rank}").touch()
        time.sleep(0.01)
assert weights.eq(40).all()
"""


def until(look: Callable[[], Any], what: str) -> Any:
    return waiting.until(look, what, PATIENCE_S)


class Training:
    """Of two ranks under `keepstep run`."""

    def __init__(self, room: Path, *said: dict[str, Any]) -> None:
        self.room = room
        (room / "arena").mkdir()
        (room / "train.py").write_text(PROGRAM)
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "ROOM": str(room),
            "SAID": json.dumps(said),
            "KEEPSTEP_JOB": "t",
            "KEEPSTEP_ARENA_DIR": str(room / "arena"),
            "KEEPSTEP_STATE_DIR": str(room / "state"),
            "KEEPSTEP_PERSIST_EVERY_STEPS": "0",
            "KEEPSTEP_GRACE_S": "0",
        }
        self.process = subprocess.Popen(
            [*RUN, str(room / "train.py")],
            env=environ,
            cwd=room,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self) -> tuple[int, str]:
        (self.room / "go-on").touch()
        _, said = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, said

    def hold(self) -> None:
        held = [self.room / f"held-{rank}" for rank in range(2)]
        until(lambda: all(path.exists() for path in held), "the step in which they wait")

    def ranks(self) -> list[int]:
        job_dir = job_dir_of(self.room / "arena", "t")
        pages = [read_status(MEMORY, job_dir, rank) for rank in range(2)]
        return [page.pid for page in pages if page is not None]

    def keepers(self) -> list[Event]:
        journal = self.room / "state" / "t" / "journal.jsonl"
        return [event for event in read_journal(journal) if event.kind == "keeper-started"]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.communicate(timeout=60)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    started: list[Training] = []

    def start(*said: dict[str, Any]) -> Training:
        started.append(Training(tmp_path, *said))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.mark.everyday
def test_two_stores_are_an_error_that_names_them_and_the_ranks(
    training: Callable[..., Training], tmp_path: Path
) -> None:
    stores = [str(tmp_path / name) for name in ("one", "other")]
    code, said = training(*({"store": store} for store in stores)).end()
    assert code == 2, said
    assert "ConfigError: ranks " in said and "are told different things" in said, said
    assert all(store in said for store in stores), said
    assert "store: expected" in said


@pytest.mark.parametrize("option", ["job", "arena_dir"])
def test_ranks_that_wait_in_different_places_are_told_where_the_others_are(
    option: str, training: Callable[..., Training], tmp_path: Path
) -> None:
    """As by a name with the time in it. They waited for each other until one was called hung, half
    an hour later, without a word about the name."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = {"job": "t-10-31-07", "arena_dir": str(elsewhere)}[option]
    began = time.monotonic()
    code, said = training({}, {option: other}).end()
    assert code == 2 and time.monotonic() - began < PATIENCE_S, said
    assert "give all of them the same job and arena_dir" in said, said
    assert other in said, said


def test_what_the_program_says_in_code_outlives_the_keeper(
    training: Callable[..., Training], tmp_path: Path
) -> None:
    """The ranks are slow when their keeper dies, and the agent is the first to start another one:
    it knows neither their store nor their secret. Nothing was stored from then on."""
    said = {"store": str(tmp_path / "store"), "secret": SECRET}
    run = training(said, said)
    run.hold()
    for pid in run.ranks():
        os.kill(pid, signal.SIGSTOP)
    before = len(run.keepers())
    os.kill(run.keepers()[-1].data["pid"], signal.SIGKILL)
    until(lambda: len(run.keepers()) > before, "the agent's keeper")
    for pid in run.ranks():
        os.kill(pid, signal.SIGCONT)
    until(lambda: len(run.keepers()) > before + 1, "the ranks' keeper")
    code, words = run.end()
    assert code == 0, words
    store = Store(tmp_path / "store", signer=Signer(SECRET))
    assert [manifest.step for manifest in store.list_checkpoints().checkpoints] == [39]


def test_what_agents_do_not_hear_is_told_once_with_the_place_where_to_say_it(
    training: Callable[..., Training], tmp_path: Path
) -> None:
    """Whoever set hang_after_s in code had a job without that limit, and nothing said so."""
    said = {"hang_after_s": 900, "persist_every_steps": 0, "grace_s": 0}
    code, words = training(said, said).end()
    assert code == 0, words
    events = read_journal(tmp_path / "state" / "t" / "journal.jsonl")
    [event] = [event for event in events if event.kind == "option-unheard"]
    assert event.why.startswith("hang_after_s: ") and "--hang-after-s" in event.why
    assert words.count("--hang-after-s or KEEPSTEP_HANG_AFTER_S") == 1, words
    assert "KS5230" in words
