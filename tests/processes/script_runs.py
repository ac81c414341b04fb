"""A training script as a user writes it, run in processes of its own, and killed.

The script is run as it stands. What the tests need is put around it: in front, steps that are all
captured and a place where it waits to be killed; behind, a digest of what it ends with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from keepstep.config import job_dir_of
from keepstep.edge.os.journal import read_journal
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import read_status
from keepstep.model.events import Event
from tests.processes.waiting import until_it

PATIENCE_S = 240.0
KEEPSTEP_RUN = ("-m", "keepstep.cli.main", "run")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--max-restarts", "3")
BEFORE = """\
import os as _os, random as _random, time as _time
import torch as _torch
import keepstep as _keepstep
_torch.set_num_threads(1)
_random.seed(0)
from keepstep.runtime.rank.job.step_loop import StepLoop as _StepLoop
_end_step = _StepLoop.end

def _step_end(loop, is_last=False):
    if loop._rank.step + 1 == int(_os.environ["HELD_STEP"]):
        open(f"{_os.environ['RESULTS']}/held-{_os.environ.get('RANK', '0')}", "w").close()
        while not _os.path.exists(f"{_os.environ['RESULTS']}/go-on"):
            _time.sleep(0.01)
    counts = _end_step(loop, is_last)
    assert loop.drain(loop._rank.drain, 60), "steps as short as these would be skipped now and then"
    return counts

_StepLoop.end = _step_end
"""
AFTER = """
import ctypes as _ctypes, hashlib as _hashlib, json as _json

def _leaves(state):
    if isinstance(state, dict):
        for key in sorted(state, key=str):
            yield repr(key).encode()
            yield from _leaves(state[key])
    elif isinstance(state, (list, tuple)):
        for part in state:
            yield from _leaves(part)
    elif isinstance(state, _torch.Tensor):
        whole = getattr(state, "_local_tensor", state).detach().contiguous()  # of a DTensor
        yield _ctypes.string_at(whole.data_ptr(), whole.nbytes)
    else:
        yield repr(state).encode()

def _digest(*states):
    digest = _hashlib.sha256()
    for leaf in _leaves([*states, _torch.get_rng_state(), _random.getstate()]):
        digest.update(leaf)
    return digest.hexdigest()

_rank = int(_os.environ.get("RANK", 0))
with open(f"{_os.environ['RESULTS']}/rank-{_rank}", "w") as _file:
    _json.dump({"digest": _digest(ENDS_WITH), "pid": _os.getpid()}, _file)
"""


class ScriptRun:
    """One training; ended by `end` or `stop`."""

    def __init__(
        self,
        room: Path,
        script: str,
        ends_with: str,
        ranks: int,
        held_step: int,
        launcher: tuple[str, ...] = KEEPSTEP_RUN,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """ends_with: Python expressions, of what is compared. held_step: the ranks wait at its end
        until they are let go on; -1 for none. launcher: of several ranks, as Python's arguments.
        environ: more variables."""
        self.ranks = ranks
        self._launcher = launcher
        self.results = room / "results"
        self.arena = room / "arena"
        self.state = room / "state"
        for directory in (self.results, self.arena):
            directory.mkdir(parents=True)
        self.path = room / "train.py"
        future, _, rest = script.partition("from __future__ import annotations\n")
        head, body = (future + _, rest) if _ else ("", script)
        after = AFTER.replace("ENDS_WITH", ends_with)
        self.path.write_text(head + BEFORE + body + after)
        self.log = room / "log"
        self.environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RESULTS": str(self.results),
            "HELD_STEP": str(held_step),
            "KEEPSTEP_JOB": "j",
            "KEEPSTEP_ARENA_DIR": str(self.arena),
            "KEEPSTEP_STATE_DIR": str(self.state),
            "HF_HUB_OFFLINE": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            **(environ or {}),
        }
        self.within: list[str] = []  # what the next command is run by
        self.start()

    def start(self) -> None:
        command = [*self.within, sys.executable]
        if self.ranks > 1:
            command += [*self._launcher, "--nproc-per-node", str(self.ranks)]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [*command, str(self.path)],
                stdout=log,
                stderr=log,
                env=self.environ,
                cwd=self.path.parent,
            )

    def told(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def events(self, kind: str) -> list[Event]:
        journal = self.state / "j" / "journal.jsonl"
        return [event for event in read_journal(journal) if event.kind == kind]

    def _until(self, look: Callable[[], bool]) -> None:
        until_it(self.process, look, self.told, PATIENCE_S)

    def hold(self) -> None:
        """Until all ranks wait in the held step."""
        self._until(lambda: all((self.results / f"held-{r}").exists() for r in range(self.ranks)))

    def kill(self, rank: int) -> None:
        """SIGKILL when all ranks wait in the held step; then the others go on."""
        self.hold()
        status = read_status(MEMORY, job_dir_of(self.arena, "j"), rank)
        assert status is not None
        os.kill(status.pid, 9)
        if self.ranks == 1:
            self.process.wait(PATIENCE_S)
        (self.results / "go-on").touch()
        if self.ranks == 1:
            self.start()

    def wait_for(self, kind: str, count: int) -> None:
        """Until the journal tells that many events of a kind."""
        self._until(lambda: len(self.events(kind)) >= count)

    def end(self) -> list[str]:
        """The ranks' digests."""
        (self.results / "go-on").touch()
        assert self.process.wait(PATIENCE_S) == 0, self.told()
        found = [json.loads((self.results / f"rank-{r}").read_text()) for r in range(self.ranks)]
        return [rank["digest"] for rank in found]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


def killed_and_undisturbed(
    room: Path,
    script: str,
    ends_with: str,
    ranks: int,
    held_step: int,
    launcher: tuple[str, ...] = KEEPSTEP_RUN,
    killed_rank: int | None = None,
) -> tuple[ScriptRun, ScriptRun]:
    """Two runs of a script, the first with one rank, by default the last, killed at the end of
    `held_step`. Their digests are equal, or this fails."""
    runs: list[ScriptRun] = []
    try:
        runs.append(ScriptRun(room / "killed", script, ends_with, ranks, held_step, launcher))
        runs[0].kill(ranks - 1 if killed_rank is None else killed_rank)
        killed = runs[0].end()
        runs.append(ScriptRun(room / "undisturbed", script, ends_with, ranks, -1, launcher))
        undisturbed = runs[1].end()
    finally:
        for run in runs:
            run.stop()
    resumed = [e for e in runs[0].events("restored") if e.data["step"] == held_step - 1]
    assert resumed, f"nothing was restored from step {held_step - 1}: {runs[0].told()}"
    assert killed == undisturbed, runs[0].told()
    return runs[0], runs[1]
