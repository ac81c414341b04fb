"""What a Ray actor does on its node, without Ray: an agent that ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import keepstep.ray
from keepstep.edge.os.processes import RANK_MARKS, RAY_MARK
from keepstep.errors import ConfigError
from keepstep.ray.node_agent import NodeAgent


class Actor(NodeAgent):
    """One whose agent is a program of the test's."""

    def __init__(self, program: str, **environ: str) -> None:
        # a mark of its own: tests side by side do not end what others have started
        super().__init__([program], environ, lambda: "node-1")
        self._command = [sys.executable, "-c", program]


def test_it_gives_the_agents_exit_code() -> None:
    assert Actor("raise SystemExit(70)").serve() == 70
    assert Actor("").serve() == 0


def test_variables_know_the_node() -> None:
    told = "import os; raise SystemExit(os.environ['PLACE'] != '/m/node-1/x')"
    assert Actor(told, PLACE="/m/{node_id}/x").serve() == 0


def test_what_it_starts_is_marked_and_a_keeper_is_not() -> None:
    told = f"import os; raise SystemExit(not os.environ.get('{RAY_MARK}'))"
    assert Actor(told).serve() == 0
    assert RAY_MARK in RANK_MARKS, "by which a keeper's environment is cleaned"


def test_each_node_and_each_command_has_its_own_mark() -> None:
    marks = [
        NodeAgent(command, {}, lambda node=node: node)._mark[RAY_MARK]
        for node in ("a", "b")
        for command in (["train.py"], ["other.py"])
    ]
    assert len(set(marks)) == 4
    assert NodeAgent(["train.py"], {}, lambda: "a")._mark[RAY_MARK] == marks[0]


LEAVES = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
"""


def test_what_its_agent_leaves_behind_ends_with_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert Actor(LEAVES).serve() == 0
    assert not is_alive(int(capfd.readouterr().out))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


KILLED = """
import os, sys
from tests.ray.test_node_agent import Actor
Actor("import os, time; print(os.getpid(), flush=True); time.sleep(600)").serve()
"""


def test_a_killed_actor_takes_all_along() -> None:
    actor = subprocess.Popen(
        [sys.executable, "-c", KILLED], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert actor.stdout is not None
    agent = int(actor.stdout.readline())
    assert is_alive(agent)
    os.kill(actor.pid, signal.SIGKILL)
    actor.wait()
    deadline = time.monotonic() + 20
    while is_alive(agent) and time.monotonic() < deadline:
        os.sched_yield()
    assert not is_alive(agent)


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepstep.ray, "has_package", lambda name: False)
    with pytest.raises(ConfigError, match=r"pip install 'keepstep\[ray\]'"):
        keepstep.ray.run(["train.py"], nodes=1, nproc_per_node=1)
