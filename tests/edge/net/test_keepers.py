"""KeeperSocket: who does not answer is ended, however it hangs, and that is heard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from keepstep.config import resolve
from keepstep.core.wire.conversations import RANK_WITH_KEEPER
from keepstep.edge.net.keepers import KeeperSocket
from keepstep.edge.os.job_directory import claim_job_dir
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


def test_a_stopped_keeper_is_ended_and_is_heard_to_be_gone(tmp_path: Path) -> None:
    settings = resolve({"arena_dir": str(tmp_path), "state_dir": str(tmp_path)}, {}, "j")
    claim_job_dir(settings.job_dir)
    path = settings.job_dir / "keeper.sock"
    command = [sys.executable, "-c", STOPPED, str(path)]
    keeper = subprocess.Popen(command, stdout=subprocess.PIPE)
    loop, ear = Loop(), Ear()
    try:
        assert keeper.stdout is not None and keeper.stdout.readline()
        _, status = os.waitpid(keeper.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        door = KeeperSocket(loop, settings, RANK_WITH_KEEPER, lambda kind, why: None)
        box = door.connect(ear)
        assert box is not None and box.pid == keeper.pid, "it cannot be told from one that lives"
        door.end(box)
        loop.after(60 * S_NS, _out_of_patience)
        loop.run(lambda: ear.is_gone)
        assert keeper.wait() == -signal.SIGKILL
    finally:
        keeper.kill()
        keeper.communicate()
        loop.close()
