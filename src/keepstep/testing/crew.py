"""Crew: the processes of a drill's job, on this machine as it is (`Alone`) or on the nodes of a lab
(`Several`).

Comes in: the job's command and its variables. Goes out: where the job's memory and journals are,
and its exit code. Starts what has to be started again: by hand, as a launcher that restarts nothing
needs it, or on a node that was replaced.

Invariant: after `end` no process of the job lives and nothing of it is in its arena_dir.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from keepstep.config import job_dir_of
from keepstep.edge.os.journal import read_journal
from keepstep.edge.os.own_modules import module_words
from keepstep.edge.shm.memory import MEMORY
from keepstep.testing.etcd import Members
from keepstep.testing.lab import Lab
from keepstep.testing.network import LinkShape

REPLACE_S = 0.3  # how long a lost node stays away


@dataclass(frozen=True, slots=True)
class CrewPlace:
    """A node's."""

    job_dir: Path
    journal: Path


class Crew(Protocol):
    places: tuple[CrewPlace, ...]

    def start(self) -> None: ...

    def poll(self) -> int | None:
        """The job's exit code, when it is over. Called every few milliseconds."""

    def remains(self) -> list[str]:
        """What is in memory of the job."""

    def end(self) -> None: ...


def launch(launcher: str, module: Sequence[str], options: Sequence[str]) -> list[str]:
    """The command of a node. `options` are those `keepstep run` and torchrun share."""
    before = {
        "run": module_words("keepstep.cli.main", "run", *options),
        "torchrun": module_words("torch.distributed.run", *options),
        "plain": [],
    }
    return [sys.executable, *before[launcher], "-m", *module]


def remains_of(places: Sequence[CrewPlace]) -> list[str]:
    """What is left of the job's memory: paths, in order."""
    return sorted(
        str(place.job_dir.with_name(name))
        for place in places
        for name in MEMORY.names(place.job_dir.parent)
        if name.startswith(place.job_dir.name)
    )


class Alone:
    """One launcher on this machine, started again `restarts` times when it fails."""

    def __init__(
        self,
        job: str,
        place: CrewPlace,
        command: Sequence[str],
        environ: Mapping[str, str],
        log: BinaryIO,
        restarts: int,
    ) -> None:
        self.places: tuple[CrewPlace, ...] = (place,)
        self._job, self._command, self._environ, self._log, self._restarts = (
            job,
            list(command),
            dict(environ),
            log,
            restarts,
        )

    def start(self) -> None:
        how = {"stdin": subprocess.DEVNULL, "stdout": self._log, "stderr": subprocess.STDOUT}
        self._child = subprocess.Popen(
            self._command, env=self._environ, start_new_session=True, **how
        )  # type: ignore[call-overload]

    def poll(self) -> int | None:
        code: int | None = self._child.poll()
        if code and self._restarts:
            self._restarts -= 1
            self.start()
            return None
        return code

    def remains(self) -> list[str]:
        return remains_of(self.places)

    def end(self) -> None:
        if self._child.poll() is None:
            self._child.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(5)
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        # Ranks and keeper have sessions of their own; the journal knows their ids, and /proc
        # whether they are still ours.
        for pid in {
            int(e.data["pid"]) for e in read_journal(self.places[0].journal) if "pid" in e.data
        }:
            with suppress(OSError):
                if self._job.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        for path in self.remains():
            shutil.rmtree(path, ignore_errors=True)


class Several:
    """The same command on every node of a lab, which meet over `etcd` or not; whoever made the two
    ends them."""

    def __init__(
        self,
        job: str,
        lab: Lab,
        command: Sequence[str],
        environ: Mapping[str, str],
        log: BinaryIO,
        etcd: Members | None = None,
    ) -> None:
        self._lab, self._command, self._environ, self._log, self._etcd = (
            lab,
            list(command),
            dict(environ),
            log,
            etcd,
        )
        self.places = tuple(
            CrewPlace(
                job_dir_of(lab.arena_dir(node), job), lab.state_dir(node) / job / "journal.jsonl"
            )
            for node in lab.nodes
        )
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._due_s: dict[int, float] = {}

    def start(self) -> None:
        for node in self._lab.nodes:
            self._start(node)

    def _start(self, node: int) -> None:
        how = {"stdin": subprocess.DEVNULL, "stdout": self._log, "stderr": subprocess.STDOUT}
        self._children[node] = self._lab.start(node, self._command, self._environ, **how)

    def poll(self) -> int | None:
        for node in [n for n, at_s in self._due_s.items() if time.monotonic() >= at_s]:
            del self._due_s[node]
            self._lab.replace(node)
            self._start(node)
        codes = [child.poll() for child in self._children.values()]
        if self._due_s or None in codes:
            return None
        return next((code for code in codes if code), 0)

    def lose(self, nodes: Sequence[int]) -> list[int]:
        """These nodes, with processes and memory; others come in their place. The processes that
        are gone. Those lost already stay so."""
        there = [node for node in nodes if node not in self._due_s]
        killed = self._lab.kill(*there)
        for node in there:
            self._children[node].wait()
            self._due_s[node] = time.monotonic() + REPLACE_S
        return killed

    def set_links(self, nodes: Sequence[int], up: bool) -> None:
        """Raises ConfigError without namespaces. The link of a node that is lost meanwhile is left
        alone."""
        for node in nodes:
            if node not in self._due_s:
                self._lab.network.set_link(node, up)

    def shape_links(self, nodes: Sequence[int], shape: LinkShape | None) -> None:
        """The same of how fast they are; None: as at first."""
        for node in nodes:
            if node not in self._due_s:
                self._lab.network.shape(node, shape)

    def set_etcd(self, up: bool) -> None:
        assert self._etcd is not None
        if up:
            self._etcd.start(0)
        else:
            self._etcd.kill(0)

    def remains(self) -> list[str]:
        return remains_of(self.places)

    def end(self) -> None:
        self._lab.kill(*(node for node in self._lab.nodes if node in self._lab.seats))
