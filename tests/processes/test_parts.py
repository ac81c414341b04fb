"""Parts of a real machine under a real job: they are on `status`, and what watches them may be
stopped without anything being called well that nobody sees, and without training noticing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keepstep.config import job_dir_of
from keepstep.core.parts.judgement import as_of
from keepstep.edge.os.clock import CLOCK
from keepstep.edge.os.journal import read_journal
from keepstep.edge.parts.prober_process import MODULE
from keepstep.edge.parts.traces import TRACES
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.parts_file import read_parts
from tests.processes.test_run import until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(180)]
KEEPSTEP = (sys.executable, "-m", "keepstep.cli.main")
UNKNOWN_WITHIN_S = 30.0


def test_a_stopped_prober_is_unknown_within_30_s_and_comes_back(tmp_path: Path) -> None:
    traces = tmp_path / "state" / "parts" / TRACES
    traces.mkdir(parents=True)
    hot = '[["GpuReading",{"bus":"0000:3b:00","temperature_c":91,"margin_c":1,"reasons":64}]]\n'
    environ = {
        **os.environ,
        "KEEPSTEP_JOB": "parts",
        "KEEPSTEP_ARENA_DIR": str(tmp_path / "arena"),
        "KEEPSTEP_STATE_DIR": str(tmp_path / "state"),
        "KEEPSTEP_GRACE_S": "0",
    }
    (tmp_path / "arena").mkdir()
    command = [*KEEPSTEP, "run", "--nproc-per-node", "1", "-m", "keepstep.testing.uneven_job"]
    job = subprocess.Popen([*command, "--pin", "--steps", "100000"], env=environ)

    def parts() -> dict[str, str]:
        report = read_parts(MEMORY, job_dir_of(tmp_path / "arena", "parts"))
        found = () if report is None else as_of(report, time.monotonic_ns(), CLOCK.boot()).parts
        return {part.part: part.health for part in found}

    try:
        until(lambda: parts().get("clock") == "ok", "a clock that is well")
        assert parts()["disk " + str(tmp_path / "state")] == "ok"
        (traces / "nvml.jsonl").write_text(hot)
        until(lambda: "gpu 0000:3b:00" in parts(), "a GPU")
        prober = _prober_below(job.pid)
        os.kill(prober, signal.SIGSTOP)
        until(lambda: set(parts().values()) == {"unknown"}, "ignorance", UNKNOWN_WITHIN_S)
        until(lambda: parts().get("clock") == "ok", "a clock that is well")
        assert not Path(f"/proc/{prober}").exists()
        until(lambda: parts().get("gpu 0000:3b:00") == "bad", "a hot GPU", 60)
        shown = subprocess.run([*KEEPSTEP, "status"], env=environ, capture_output=True, text=True)
        assert "Sick: gpu 0000:3b:00: 1 degrees are left" in " ".join(shown.stdout.split())
    finally:
        job.terminate()
        job.wait(60)
    kinds = [event.kind for event in read_journal(tmp_path / "state" / "parts" / "journal.jsonl")]
    assert "probes-lost" in kinds and "part-sick" in kinds
    assert not {"diagnosis", "rank-exited", "recovered"} & set(kinds[: kinds.index("stopping")])


def _prober_below(pid: int) -> int:
    """Of that job's agent."""
    found = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True).stdout
    rows = [line.split(None, 2) for line in found.splitlines()[1:]]
    below = {pid}
    for _ in range(4):
        below |= {int(child) for child, parent, _ in rows if int(parent) in below}
    [prober] = [
        int(child)
        for child, parent, command in rows
        if MODULE in command
        and int(child) in below
        and int(parent) in below
        and not any(int(c) == int(parent) and MODULE in words for c, _, words in rows)
    ]
    return prober
