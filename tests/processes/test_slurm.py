"""Slurm: the examples, as they are, on a cluster of this test's own: one munged, one slurmctld,
three slurmd on this machine. Each of the "nodes" has memory of its own. Skipped where Slurm is not
installed."""

from __future__ import annotations

import getpass
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
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
from tests.processes import waiting

SBIN = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
MISSING = [
    name
    for name in ("munged", "slurmctld", "slurmd", "srun", "sbatch")
    if not shutil.which(name, path=SBIN)
]
pytestmark = [
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"no {', '.join(MISSING)} on this machine: apt-get install slurm-wlm munge",
    ),
    pytest.mark.timeout(400),
]

ROOT = Path(__file__).parents[2]
NODES = ("n1", "n2", "n3")
PATIENCE_S = 180.0
# How often a node is lost; the promise is tried with SLURM_LOSSES=10.
LOSSES = int(os.environ.get("SLURM_LOSSES", "1"))
REQUEUES = "SLURM_REQUEUES" in os.environ
GPT = ("--steps", "160", "--width", "96", "--layers", "3", "--heads", "3", "--batch", "4")

CONF = """
ClusterName=t
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={room}/munge.sock{expires}
StateSaveLocation={room}/state
SlurmdSpoolDir={room}/%n
SlurmctldPidFile={room}/slurmctld.pid
SlurmdPidFile={room}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={room}/prolog
MpiDefault=none
SelectType=select/linear
ReturnToService=2
SlurmdTimeout=6
KillWait=2
MessageTimeout=10
SlurmdParameters=config_overrides
"""
# What differs between machines, on one: their memory. And a node's name is not an address here.
PROLOG = """#!/bin/sh
echo export KEEPSTEP_ARENA_DIR={arenas}/$SLURMD_NODENAME
echo export KEEPSTEP_STATE_DIR={room}/state-$SLURMD_NODENAME
"""


def free_ports(count: int) -> list[int]:
    socks = [socket.socket() for _ in range(count)]
    for sock in socks:
        sock.bind(("127.0.0.1", 0))
    ports = [int(sock.getsockname()[1]) for sock in socks]
    for sock in socks:
        sock.close()
    return ports


def until(look: Callable[[], Any], story: Callable[[], str]) -> Any:
    return waiting.until(look, lambda: f"what was waited for ({story()})", PATIENCE_S)


class Slurm:
    """The cluster. Its processes know its configuration file by its path; that is how they are
    found."""

    def __init__(self, room: Path, arenas: Path, more_conf: str = "") -> None:
        self.room, self.arenas, self._more_conf = room, arenas, more_conf
        self.environ = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{SBIN}",
            "SLURM_CONF": str(room / "slurm.conf"),
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        ports = free_ports(1 + len(NODES))
        # A requeued job waits until its credential has expired, 120 s by default.
        expires = ",cred_expire=10" if REQUEUES else ""
        conf = CONF.format(room=self.room, user=getpass.getuser(), ports=ports, expires=expires)
        for node, port in zip(NODES, ports[1:], strict=True):
            conf += (
                f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=2\n"
            )
            (self.arenas / node).mkdir()
        conf += self._more_conf
        conf += f"PartitionName=all Nodes={','.join(NODES)} Default=YES State=UP\n"
        (self.room / "slurm.conf").write_text(conf)
        (self.room / "prolog").write_text(PROLOG.format(room=self.room, arenas=self.arenas))
        (self.room / "prolog").chmod(0o755)
        (self.room / "state").mkdir()
        (self.room / "key").write_bytes(secrets.token_bytes(1024))
        (self.room / "key").chmod(0o600)
        munge = [f"--{what}-file={self.room / what}" for what in ("key", "pid", "log", "seed")]
        self._run("munged", "--foreground", "--force", f"--socket={self.room}/munge.sock", *munge)
        until((self.room / "munge.sock").exists, self.story)
        self._run("slurmctld", "-D")
        for node in NODES:
            self.start_node(node)
        until(lambda: self.states() == dict.fromkeys(NODES, "idle"), self.story)

    def start_node(self, node: str) -> None:
        self._run(node, "-D", "-N", node, program="slurmd")

    def _run(self, name: str, *words: str, program: str = "") -> None:
        command = [str(shutil.which(program or name, path=SBIN)), *words]
        with open(self.room / f"{name}.log", "ab") as log:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def ask(self, *words: str) -> str:
        return subprocess.run(
            words, env=self.environ, cwd=ROOT, capture_output=True, text=True, timeout=60
        ).stdout.strip()

    def states(self) -> dict[str, str]:
        lines = self.ask("sinfo", "--Node", "--noheader", "--format=%N %t").splitlines()
        return {line.split()[0]: line.split()[1] for line in lines}

    def submit(self, script: str) -> Batch:
        log, port = self.room / f"job-{secrets.token_hex(4)}.log", str(free_ports(1)[0])
        environ = {
            **self.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "KEEPSTEP_LINK_DEAD_S": "4",
            "KEEPSTEP_GRACE_S": "120",
            "SBATCH_OUTPUT": f"{log}.of-%j",  # of a job that this one submits
        }
        command = ["sbatch", "--parsable", f"--output={log}", f"examples/slurm/{script}", *GPT]
        said = subprocess.run(
            command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert said.returncode == 0, said.stderr
        return Batch(self, int(said.stdout), log)

    def pids(self, node: str | None = None) -> list[int]:
        """Processes that the cluster has started, on one node or anywhere."""
        wanted = {"SLURM_CONF": str(self.room / "slurm.conf")} | (
            {"SLURMD_NODENAME": node} if node else {}
        )
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.pid != os.getpid() and wanted.items() <= process.environ().items():
                    found.append(process.pid)
        return found

    def lose(self, node: str) -> None:
        """The machine is gone: its daemons, tasks, keeper and memory."""
        self._daemons[node].kill()
        self._daemons[node].wait()
        self._kill_tasks(node)
        shutil.rmtree(self.arenas / node)

    def end(self) -> None:
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait()
        self._kill_tasks()

    def _kill_tasks(self, node: str | None = None) -> None:
        """And the daemons that stand over them, which overwrite their environment."""
        while tasks := self.pids(node):
            stewards = {
                parent.pid
                for pid in tasks
                for parent in _parents(pid)
                if parent.name() == "slurmstepd"
            }
            for pid in [*stewards, *tasks]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def story(self) -> str:
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-1500:]}"
            for path in sorted(self.room.glob("*.log"))
        )


def _parents(pid: int) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return list(psutil.Process(pid).parents())
    return []


class Batch:
    """A submitted job: where its ranks keep their memory, and what became of it."""

    def __init__(self, slurm: Slurm, number: int, log: Path) -> None:
        self._slurm, self.number, self._log = slurm, number, log
        self.job = f"gpt-{number}"

    def events(self, kind: str) -> list[Event]:
        journals = [
            self._slurm.room / f"state-{node}" / self.job / "journal.jsonl" for node in NODES
        ]
        return sorted(
            (e for path in journals for e in read_journal(path) if e.kind == kind),
            key=lambda e: e.mono_ns,
        )

    def rank(self, rank: int) -> tuple[str, int, int]:
        """(node, process, committed step) of a rank, while it trains."""

        def look() -> tuple[str, int, int] | None:
            assert not self.is_over(), self.story()
            for node in NODES:
                job_dir = job_dir_of(self._slurm.arenas / node, self.job)
                status = read_status(MEMORY, job_dir, rank)
                if (
                    status is not None
                    and psutil.pid_exists(status.pid)
                    and (job_dir / "horizon").exists()
                ):
                    page = HorizonPage(MEMORY, job_dir)
                    committed = page.read(status.epoch).committed
                    page.close()
                    if committed is not None:
                        return node, status.pid, committed.step
            return None

        found: tuple[str, int, int] = until(look, self.story)
        return found

    def train_until(self, step: int) -> None:
        until(lambda: min(self.rank(0)[2], self.rank(1)[2]) >= step, self.story)

    def is_over(self) -> bool:
        return (
            str(self.number) not in self._slurm.ask("squeue", "--noheader", "--format=%A").split()
        )

    def sha256(self) -> str:
        """Of the final state, once the job has ended well."""
        until(self.is_over, self.story)
        state = self._slurm.ask("scontrol", "show", "job", str(self.number))
        assert "JobState=COMPLETED" in state, f"{state}\n{self.story()}"
        said = "".join(path.read_text() for path in self._logs())
        found = re.findall(r"sha256 of the final state: (\w{64})", said)
        assert len(found) == 1, self.story()
        until(lambda: not self._left(), lambda: f"{self._left()} stay; {self.story()}")
        return str(found[0])

    def _logs(self) -> list[Path]:
        """Its own, and those of the jobs that it has submitted."""
        return sorted(self._log.parent.glob(f"{self._log.name}*"))

    def _left(self) -> list[str]:
        """What there still is of its memory, on any node."""
        found = self._slurm.arenas.glob(f"*/keepstep-*/{self.job}*")
        return [str(path.relative_to(self._slurm.arenas)) for path in found]

    def resumed(self) -> Event:
        return self.events("resumed")[-1]

    def story(self) -> str:
        journals = [
            f"{e.who} {e.kind}: {e.why}" for node in NODES for e in self._journal(node)[-25:]
        ]
        log = "\n".join(path.read_text()[-4000:] for path in self._logs()) or "no output"
        keepers = [
            path.read_text()[-2000:]
            for path in self._slurm.room.glob(f"state-*/{self.job}/keeper.log")
        ]
        return "\n".join([*journals, *keepers, log, self._slurm.story()])

    def _journal(self, node: str) -> list[Event]:
        return list(read_journal(self._slurm.room / f"state-{node}" / self.job / "journal.jsonl"))


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    # Not below pytest's own directory: slurmstepd's sockets need a short path.
    with (
        tempfile.TemporaryDirectory(prefix="ks-slurm-") as room,
        tempfile.TemporaryDirectory(prefix="ks-slurm-", dir="/dev/shm") as arenas,
    ):
        cluster = Slurm(Path(room), Path(arenas))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.end()


@pytest.fixture(scope="module")
def undisturbed(slurm: Slurm) -> str:
    batch = slurm.submit("srun.sbatch")
    sha256 = batch.sha256()
    assert [e.data["policy"] for e in batch.events("policy")] == ["copies:2"] and batch.events(
        "fetched"
    ) == []
    return sha256


@pytest.mark.parametrize("number", range(LOSSES))
def test_srun_starts_the_ranks_again_and_a_spare_node_takes_the_place_of_a_lost_one(
    slurm: Slurm, undisturbed: str, number: int
) -> None:
    batch = slurm.submit("srun.sbatch")
    batch.train_until(10)
    os.kill(batch.rank(1)[1], signal.SIGKILL)
    first = until(lambda: batch.events("resumed")[1:], batch.story)[0]
    # committed; how far captures lag is the machine's
    assert first.data["source"] == "memory" and first.data["step"] >= 10, first.why
    assert batch.events("fetched") == []

    batch.train_until(first.data["step"] + 10)
    # the first one runs the script
    lost = next(node for node in (batch.rank(0)[0], batch.rank(1)[0]) if node != NODES[0])
    # how far copies lag behind steps of a few milliseconds depends on the machine
    committed = min(batch.rank(0)[2], batch.rank(1)[2])
    slurm.lose(lost)
    second = until(lambda: batch.events("resumed")[2:], batch.story)[0]
    assert second.data["source"] == "memory" and second.data["step"] >= committed, batch.story()
    assert batch.events("fetched")
    assert batch.sha256() == undisturbed
    _back(slurm, lost)


def _back(slurm: Slurm, lost: str) -> None:
    (slurm.arenas / lost).mkdir()
    slurm.start_node(lost)
    until(lambda: slurm.states()[lost] == "idle", slurm.story)


def _lose_a_node(slurm: Slurm, batch: Batch) -> str:
    """One that trains, and not the one that runs the script: which one. The ranks go on from
    memory."""
    batch.train_until(10)
    lost = next(node for node in (batch.rank(0)[0], batch.rank(1)[0]) if node != NODES[0])
    committed = min(batch.rank(0)[2], batch.rank(1)[2])
    begun = len(batch.events("resumed"))
    slurm.lose(lost)
    resumed = until(lambda: batch.events("resumed")[begun:], batch.story)[0]
    assert resumed.data["source"] == "memory" and resumed.data["step"] >= committed, batch.story()
    assert batch.events("fetched"), batch.story()
    return lost


@pytest.mark.parametrize("number", range(LOSSES))
def test_under_agents_a_spare_node_takes_the_place_of_a_lost_one(
    slurm: Slurm, undisturbed: str, number: int
) -> None:
    batch = slurm.submit("agents.sbatch")
    lost = _lose_a_node(slurm, batch)
    assert batch.sha256() == undisturbed
    _back(slurm, lost)


@pytest.mark.parametrize("number", range(LOSSES))
def test_slurm_is_asked_for_another_node_in_place_of_a_lost_one(
    slurm: Slurm, undisturbed: str, number: int
) -> None:
    """From outside of the allocation, in a job of its own."""
    batch = slurm.submit("replaced.sbatch")
    before = {batch.rank(0)[0], batch.rank(1)[0]}
    lost = _lose_a_node(slurm, batch)
    now = {batch.rank(0)[0], batch.rank(1)[0]}
    assert now - before == set(NODES) - before and lost not in now, batch.story()
    assert batch.sha256() == undisturbed
    until(lambda: not slurm.ask("squeue", "--noheader", "--format=%A"), slurm.story)
    _back(slurm, lost)


def test_agents_start_the_ranks_again(slurm: Slurm, undisturbed: str) -> None:
    batch = slurm.submit("agents.sbatch")
    batch.train_until(10)
    os.kill(batch.rank(1)[1], signal.SIGKILL)
    resumed = until(lambda: batch.events("resumed")[1:], batch.story)[0]
    assert resumed.data["source"] == "memory" and resumed.data["step"] >= 10, resumed.why
    assert batch.sha256() == undisturbed


@pytest.mark.skipif(not REQUEUES, reason="minutes: SLURM_REQUEUES=1 asks for it")
@pytest.mark.parametrize("script", ["srun.sbatch", "agents.sbatch"])
def test_a_requeued_job_goes_on_from_memory(slurm: Slurm, undisturbed: str, script: str) -> None:
    """As an operator or a preemption does it: the whole job ends, and begins again under its id."""
    batch = slurm.submit(script)
    batch.train_until(10)
    committed = min(batch.rank(0)[2], batch.rank(1)[2])
    begun = len(batch.events("resumed"))
    slurm.ask("scontrol", "requeue", str(batch.number))
    resumed = until(lambda: batch.events("resumed")[begun:], batch.story)[0]
    assert resumed.data["source"] == "memory", resumed.why
    # a step that one node had committed may not have reached the other's page yet
    assert resumed.data["step"] >= committed - 1, resumed.why
    assert batch.sha256() == undisturbed
