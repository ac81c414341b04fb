"""KeeperSocket: who does not answer is ended, however it hangs, and that is heard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from keepstep.config import Settings, resolve
from keepstep.core.wire.conversations import RANK_WITH_KEEPER
from keepstep.edge.net.keepers import KeeperSocket
from keepstep.edge.os.job_directory import claim_job_dir
from keepstep.edge.os.keeper_settings import Teller, write_keeper_settings
from keepstep.edge.os.loop import Loop
from keepstep.errors import ConfigError
from keepstep.model.units import S_NS
from keepstep.ports import Box

STOPPED = """
import os, signal, socket, sys
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.bind(sys.argv[1])
server.listen()
print("listens", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


class Ear:
    def __init__(self) -> None:
        self.is_gone = False

    def hear(self, box: Box, message: Any, /) -> None: ...

    def gone(self, box: Box, /) -> None:
        self.is_gone = True


def _out_of_patience() -> None:
    raise AssertionError("it does not come about")


@contextmanager
def stopped_keeper(
    tmp_path: Path,
) -> Iterator[tuple[Settings, Loop, subprocess.Popen[bytes]]]:
    """A process that listens where a keeper with these settings does, and stands still."""
    settings = resolve({"arena_dir": str(tmp_path), "state_dir": str(tmp_path)}, {}, "j")
    claim_job_dir(settings.job_dir)
    command = [sys.executable, "-c", STOPPED, str(settings.job_dir / "keeper.sock")]
    keeper = subprocess.Popen(command, stdout=subprocess.PIPE)
    loop = Loop()
    try:
        assert keeper.stdout is not None and keeper.stdout.readline()
        _, status = os.waitpid(keeper.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        yield settings, loop, keeper
    finally:
        keeper.kill()
        keeper.communicate()
        loop.close()


def test_a_stopped_keeper_is_ended_and_is_heard_to_be_gone(tmp_path: Path) -> None:
    with stopped_keeper(tmp_path) as (settings, loop, keeper):
        ear = Ear()
        door = KeeperSocket(loop, settings, RANK_WITH_KEEPER, lambda kind, why: None)
        box = door.connect(ear)
        assert box is not None and box.pid == keeper.pid, "it cannot be told from one that lives"
        door.end(box)
        loop.after(60 * S_NS, _out_of_patience)
        loop.run(lambda: ear.is_gone)
        assert keeper.wait() == -signal.SIGKILL


def test_a_keeper_with_other_settings_is_ended_and_not_met(tmp_path: Path) -> None:
    told: list[str] = []
    with stopped_keeper(tmp_path) as (settings, loop, keeper):
        write_keeper_settings(settings)
        other = replace(settings, scrub_every_s=settings.scrub_every_s + 1)
        door = KeeperSocket(loop, other, RANK_WITH_KEEPER, lambda kind, why: told.append(why))
        assert door.connect(Ear()) is None
        assert keeper.wait() == -signal.SIGKILL
    [why] = told
    assert f"process {keeper.pid}" in why and "scrub_every_s: expected" in why


def other_than(settings: Settings) -> Settings:
    return replace(settings, scrub_every_s=settings.scrub_every_s + 1)


@contextmanager
def another_rank() -> Iterator[Teller]:
    """A process that lives, as one that has started a keeper."""
    with subprocess.Popen(["sleep", "100"]) as process:
        yield replace_pid(Teller.here(1), process.pid)
        process.kill()


def replace_pid(teller: Teller, pid: int) -> Teller:
    began = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return teller._replace(pid=pid, began=began)


def test_a_keeper_that_a_living_rank_has_told_something_else_is_no_keeper_of_this_one(
    tmp_path: Path,
) -> None:
    """Two ranks would else end each other's keepers in turn, and the last one's store would count
    for all."""
    with stopped_keeper(tmp_path) as (settings, loop, keeper), another_rank() as other:
        write_keeper_settings(other_than(settings), other.to_text())
        door = KeeperSocket(loop, settings, RANK_WITH_KEEPER, lambda kind, why: None, rank=0)
        assert door.connect(Ear()) is None
        found: list[Any] = []
        door.start(found.append)
        loop.after(60 * S_NS, _out_of_patience)
        loop.run(lambda: bool(found))
        assert keeper.poll() is None, "it is the other rank's"
    [error] = found
    assert isinstance(error, ConfigError) and "ranks 1 and 0 of job j" in str(error)
    assert f"process {other.pid}" in str(error) and "scrub_every_s: expected 30" in str(error)


def test_a_keeper_that_a_rank_which_has_ended_told_something_else_is_replaced(
    tmp_path: Path,
) -> None:
    with stopped_keeper(tmp_path) as (settings, loop, keeper):
        with another_rank() as other:
            pass
        write_keeper_settings(other_than(settings), other.to_text())
        door = KeeperSocket(loop, settings, RANK_WITH_KEEPER, lambda kind, why: None, rank=0)
        assert door.connect(Ear()) is None
        assert keeper.wait() == -signal.SIGKILL


def test_a_rank_replaces_the_keeper_that_an_agent_started_when_its_own_was_lost(
    tmp_path: Path,
) -> None:
    """The agent knows nothing of what the program says in code: its store, what it keeps."""
    with stopped_keeper(tmp_path) as (settings, loop, keeper):
        write_keeper_settings(settings, Teller.here(0).to_text())
        door = KeeperSocket(loop, settings, RANK_WITH_KEEPER, lambda kind, why: None, rank=0)
        assert door.connect(Ear()) is not None
        write_keeper_settings(other_than(settings))
        assert door.connect(Ear()) is None
        assert keeper.wait() == -signal.SIGKILL


def test_an_agent_leaves_the_keeper_that_ranks_have_started(tmp_path: Path) -> None:
    """Whether it is the first that it meets or not: they would else end each other's for ever."""
    with stopped_keeper(tmp_path) as (settings, loop, keeper), another_rank() as other:
        door = KeeperSocket(loop, settings, RANK_WITH_KEEPER, lambda kind, why: None)
        write_keeper_settings(other_than(settings), other.to_text())
        assert door.connect(Ear()) is not None
        write_keeper_settings(other_than(settings))
        assert door.connect(Ear()) is not None
        assert keeper.poll() is None


def test_another_secret_is_another_setting_and_is_not_shown(tmp_path: Path) -> None:
    """A keeper without the program's secret would write what no rank takes."""
    told: list[str] = []
    with stopped_keeper(tmp_path) as (settings, loop, keeper):
        write_keeper_settings(settings)
        wanted = replace(settings, secret="correct-horse-battery-staple")
        door = KeeperSocket(loop, wanted, RANK_WITH_KEEPER, lambda kind, why: told.append(why), 0)
        assert door.connect(Ear()) is None
        assert keeper.wait() == -signal.SIGKILL
        write_keeper_settings(wanted)
        assert "staple" not in (settings.job_dir / "keeper.json").read_text()
    [why] = told
    assert "secret: expected one, found another or none" in why and "staple" not in why
