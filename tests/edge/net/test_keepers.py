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
from keepstep.edge.os.keeper_settings import write_keeper_settings
from keepstep.edge.os.loop import Loop
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


def test_what_comes_after_a_keeper_that_was_met_is_somebody_elses(tmp_path: Path) -> None:
    """Two runs with different settings would else end each other's keepers for ever."""
    told: list[str] = []
    with stopped_keeper(tmp_path) as (settings, loop, keeper):
        write_keeper_settings(settings)
        door = KeeperSocket(loop, settings, RANK_WITH_KEEPER, lambda kind, why: told.append(why))
        first = door.connect(Ear())
        write_keeper_settings(replace(settings, scrub_every_s=settings.scrub_every_s + 1))
        second = door.connect(Ear())
        assert first is not None and second is not None and told == []
        assert keeper.poll() is None
