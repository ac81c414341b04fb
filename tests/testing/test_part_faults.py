"""Parts that a drill makes look sick: what is laid down is what the probes play and the judges
call sick."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep.core.parts.gpus import Gpus
from keepstep.core.parts.judge import Judge
from keepstep.core.parts.places import Places
from keepstep.edge.parts import traces
from keepstep.edge.parts.probe import Targets
from keepstep.edge.parts.prober_process import MODULE
from keepstep.model.units import S_NS
from keepstep.testing.faults import parse
from keepstep.testing.part_faults import prober_of, strike


@pytest.mark.parametrize(
    ("kind", "probe", "judge", "looks"),
    [("hot", "nvml", Gpus(), 3), ("disk-slow", "disk", Places("disk"), 5)],
)
def test_what_is_laid_down_is_called_sick(
    tmp_path: Path, kind: str, probe: str, judge: Judge, looks: int
) -> None:
    journal = tmp_path / "journal.jsonl"
    strike(parse(f"{kind}:step=5"), journal)
    targets = Targets(tmp_path, tmp_path, 1, tmp_path / traces.TRACES)
    assert traces.is_there(probe, targets)
    healths, cursor = [], -1
    for number in range(looks):
        look = traces.play(probe, targets, cursor)
        assert look is not None and not look.blind
        cursor = look.cursor
        healths += [part.health for part in judge.add(look.readings, number * 10 * S_NS)]
    assert healths == ["ok"] * (looks - 1) + ["bad"]


def test_who_is_made_blind_is_that_nodes_prober(tmp_path: Path) -> None:
    with pytest.raises(ProcessLookupError, match="no prober"):
        prober_of(tmp_path / "mine" / "journal.jsonl")
    children = {}
    for node in ("mine", "other"):
        words = f'{{"traces": "{tmp_path / node / traces.TRACES}"}}'
        program = "import sys; print(flush=True); sys.stdin.read()"
        command = [sys.executable, "-c", program, MODULE, words]
        pipe = subprocess.PIPE
        children[node] = subprocess.Popen(command, stdin=pipe, stdout=pipe)
    try:
        for child in children.values():
            assert child.stdout is not None and child.stdout.readline()  # its arguments are there
        said = strike(parse("blind:step=5"), tmp_path / "mine" / "journal.jsonl")
        assert said == {"prober_pid": children["mine"].pid}
        os.waitid(os.P_PID, children["mine"].pid, os.WSTOPPED | os.WNOWAIT)
        status = Path(f"/proc/{children['other'].pid}/stat").read_text()
        assert status.rpartition(")")[2].split()[0] != "T"
    finally:
        for child in children.values():
            child.send_signal(signal.SIGKILL)
            child.communicate()
