"""The dashboard of a real training: a rank is killed while the page is open, and the page shows it
within a second; the training goes on and ends as it would have."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from keepstep.config import job_dir_of
from keepstep.dashboard.delta import changed
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import read_status
from tests.dashboard.browser import Visit, chromium
from tests.processes.script_runs import ScriptRun
from tests.processes.test_run import until

WITHIN_S = 10.0  # a second on a machine that has time for it: docs/dashboard.md
KILLED = "rank 1 was killed by SIGKILL"
SCRIPT = """
import os, time, torch, keepstep
keepstep.init_process_group()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
job = keepstep.protect(model=model, optimizer=optimizer)
for step in job.steps(10_000):
    with step:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        time.sleep(0.05)
    if os.path.exists(os.environ["RESULTS"] + "/enough"):
        break
"""


@pytest.fixture
def training(tmp_path: Path) -> Iterator[ScriptRun]:
    run = ScriptRun(
        tmp_path, SCRIPT, "model.state_dict()", 2, -1, environ={"KEEPSTEP_DASHBOARD": "1"}
    )
    yield run
    run.stop()


def address(run: ScriptRun) -> str:
    run.wait_for("dashboard-served", 1)
    run.wait_for("slots-made", 2)
    why = run.events("dashboard-served")[0].why
    return next(word.rstrip(",") for word in why.split() if word.startswith("http"))


def kill(run: ScriptRun, rank: int) -> float:
    """When it was killed, by the wall clock: once there is something to resume from."""
    job_dir = job_dir_of(run.arena, "j")
    until(lambda: all(_captured(job_dir, each) >= 3 for each in range(run.ranks)), "three captures")
    status = read_status(MEMORY, job_dir, rank)
    assert status is not None
    killed_s = time.time()
    os.kill(status.pid, signal.SIGKILL)
    return killed_s


def _captured(job_dir: Path, rank: int) -> int:
    status = read_status(MEMORY, job_dir, rank)
    return 0 if status is None else status.captured_steps


def documents(url: str) -> Iterator[dict[str, Any]]:
    """What a page would show, look by look."""
    port = int(url.rstrip("/").rpartition(":")[2])
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/live")
    document: dict[str, Any] = {}
    with closing(connection.getresponse()) as answer:
        while line := answer.readline():
            if line.startswith(b"data: "):
                said = json.loads(line.removeprefix(b"data: "))
                document = said.get("whole") or changed(document, said.get("change", {}))
                yield document


def shows(document: dict[str, Any], why: str) -> bool:
    run = document.get("run") or {}
    return any(why in line["why"] for line in run.get("log", {}).values())


@pytest.mark.everyday
@pytest.mark.timeout(400)
def test_a_kill_is_told_at_once(training: ScriptRun) -> None:
    """As a page hears it, without a browser."""
    told = documents(address(training))
    first = next(document for document in told if document["state"] == "training")
    assert list(first["ranks"]) == ["0", "1"]
    killed_s = kill(training, 1)
    seen = next(document for document in told if shows(document, KILLED))
    took_s = time.time() - killed_s
    assert took_s < WITHIN_S
    assert seen["run"]["recoveries"]["1"]["stages"], "and begins its waterfall"
    over = next(d for d in told if d["run"]["recoveries"]["1"]["outcome"] == "resumed")
    assert over["run"]["recoveries"]["1"]["title"].startswith("Recovery 1: resumed with step ")
    (training.results / "enough").touch()
    training.end()


@pytest.mark.timeout(400)
def test_a_kill_is_on_the_page_at_once(training: ScriptRun) -> None:
    with chromium() as browser:
        visit = Visit(browser, address(training))
        assert "2 ranks: 2 as they should be" in visit.text("#ranks-count")
        visit.page.evaluate(
            """(words) => {
              const look = () => {
                const marks = document.documentElement.dataset;
                if (document.body.textContent.includes(words)) marks.shownAt ??= Date.now();
              };
              new MutationObserver(look).observe(document.body,
                { subtree: true, childList: true, characterData: true });
            }""",
            KILLED,
        )
        killed_s = kill(training, 1)
        visit.page.wait_for_selector("html[data-shown-at]", state="attached", timeout=60_000)
        shown_s = int(visit.page.get_attribute("html", "data-shown-at")) / 1000
        assert shown_s - killed_s < WITHIN_S
        visit.until("#recoveries-list", "resumed with step")
        assert all(url.startswith(address(training)) for url in visit.asked)
        assert visit.complaints == []
        visit.close()
    (training.results / "enough").touch()
    training.end()
