"""Standby: it becomes the program it is told to be, as the interpreter would run it, and ends with
its agent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.core.wire.conversations import AGENT_WITH_PROCESS
from keepstep.edge.net import boxes
from keepstep.edge.os.loop import Loop
from keepstep.model.launch import AGENT_SOCKET
from keepstep.model.messages.agent_rank import BecomeRank, PeerLostNotice, StandbyReady
from keepstep.model.units import S_NS
from keepstep.ports import Box
from keepstep.runtime.rank import standby
from tests.runtime.fakes import FakeBox

PROGRAM = """
import json, os, pathlib, sys
found = [__name__, sys.argv, sys.path[0], os.environ.get("RANK")]
pathlib.Path("found.json").write_text(json.dumps(found))
"""


@pytest.mark.parametrize("as_module", [True, False])
def test_it_is_the_program_as_the_interpreter_would_run_it(tmp_path: Path, as_module: bool) -> None:
    """Both run in a process of their own: what they find is the same."""
    (tmp_path / "trainee.py").write_text(PROGRAM)
    program = ["-m", "trainee"] if as_module else [str(tmp_path / "trainee.py")]
    words = ["-u", *program, "--lr", "1"]
    order = f"BecomeRank(({sys.executable!r}, *{words!r}), {{'RANK': '3'}})"
    code = (
        "from keepstep.model.messages.agent_rank import BecomeRank\n"
        f"from keepstep.runtime.rank.standby import become\nbecome({order})"
    )
    found = []
    for command, environ in (
        ([sys.executable, *words], {**os.environ, "RANK": "3"}),
        ([sys.executable, "-c", code], dict(os.environ)),
    ):
        subprocess.run(command, cwd=tmp_path, env=environ, check=True, timeout=60)
        found.append((tmp_path / "found.json").read_text())
        (tmp_path / "found.json").unlink()
    assert found[0] == found[1] and '"__main__"' in found[0] and '"3"' in found[0]


def test_only_its_order_or_its_agents_end_ends_the_waiting() -> None:
    waiting = standby.Waiting()
    waiting.hear(FakeBox(), PeerLostNotice("not its business"))
    assert not waiting.is_over
    order = BecomeRank(("python", "x.py"), {})
    waiting.hear(FakeBox(), order)
    assert waiting.is_over and waiting.order == order
    left = standby.Waiting()
    left.gone(FakeBox())
    assert left.is_over and left.order is None


class Agent:
    """Has whoever says that it is ready become a rank."""

    def __init__(self) -> None:
        self.ready: list[int] = []
        self.unbuilt = ""
        self.is_gone = False

    def hear(self, box: Box, message: object) -> None:
        assert isinstance(message, StandbyReady)
        self.ready.append(message.pid)
        self.unbuilt = message.unbuilt
        box.send(BecomeRank((sys.executable, "-c"), {"RANK": "1"}))

    def gone(self, box: Box) -> None:
        self.is_gone = True


def test_it_says_that_it_is_ready_and_gets_its_order(tmp_path: Path) -> None:
    loop, agent = Loop(), Agent()
    path = tmp_path / "agent.sock"
    server = boxes.listen(loop, path, AGENT_WITH_PROCESS, lambda box: agent, lambda kind, why: None)
    code = (
        "from keepstep.runtime.rank.standby import wait_for_order\n"
        "import sys; sys.exit(wait_for_order('m:f (no m)').environ['RANK'] != '1')"
    )
    environ = {**os.environ, AGENT_SOCKET: str(path)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environ)
    late = loop.after(60 * S_NS, lambda: pytest.fail("it does not come"))
    loop.run(lambda: agent.is_gone)
    late.cancel()
    assert agent.ready == [process.pid] and process.wait(30) == 0
    assert agent.unbuilt == "m:f (no m)"
    server.close()
    loop.close()


def test_without_an_agent_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(AGENT_SOCKET, raising=False)
    assert standby.wait_for_order() is None


@pytest.mark.parametrize("order", [None, BecomeRank(("python", "x.py"), {"RANK": "1"})])
def test_it_becomes_what_it_is_told_to_be_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, order: BecomeRank | None
) -> None:
    became: list[BecomeRank] = []
    monkeypatch.setattr(standby, "wait_for_order", lambda unbuilt: order)
    monkeypatch.setattr(standby, "become", became.append)
    standby.main()
    assert became == [order] * (order is not None)


def test_what_cannot_be_built_ahead_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "ahead.py").write_text("def good(): return 1\ndef bad(): return 1 / 0\n")
    monkeypatch.setenv("KEEPSTEP_PREBUILD", "ahead:good,ahead:bad,ahead:gone")
    told = standby._build_ahead(["-u", str(tmp_path / "train.py")])
    bad, gone = told.split(", ahead:gone")
    assert bad == "ahead:bad (ZeroDivisionError: division by zero)"
    assert gone.startswith(" (ConfigError: prebuilt: expected a function")
