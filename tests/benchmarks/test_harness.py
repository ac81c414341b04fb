"""Every benchmark tells how quiet the machine was, and why its figures are no verdict."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import Noise, tell, watch

HERE = Path(harness.__file__).parent
# each tells the noise of each of its turns itself, beside a verdict that knows it
BY_ITSELF = {"defaults.py": "tell", "peers/__main__.py": "why_no_verdict"}
# it measures nothing: what it says of a recorded drill is the same on a busy machine
NO_FIGURES = {"prediction/__main__.py"}
# programs that a test or a benchmark starts, which tell it their figures
WORKERS = {"gpu/sharing.py", "gpu/two_ranks.py"}
BUSY = Noise(2.5, 2.8, 0.02)
QUIET = Noise(0.1, 0.9, 0.02)


def scripts() -> list[str]:
    """Those that can be started."""
    paths = (path for path in HERE.rglob("*.py") if path.parent.name != "contenders")
    found = [path for path in paths if '__name__ == "__main__"' in path.read_text()]
    inner = {f"peers/{each}.py" for each in ("contender", "environments", "pair", "saver")}
    return sorted({str(path.relative_to(HERE)) for path in found} - inner)


def calls(name: str) -> list[str]:
    """Which of the harness's functions it calls."""
    nodes = ast.walk(ast.parse((HERE / name).read_text()))
    functions = [node.func for node in nodes if isinstance(node, ast.Call)]
    return [ast.unparse(each).removeprefix("harness.") for each in functions]


@pytest.mark.parametrize("name", scripts())
def test_each_benchmark_asks_whether_the_machine_was_quiet(name: str) -> None:
    if name in NO_FIGURES | WORKERS:
        return
    wanted = {BY_ITSELF[name]} if name in BY_ITSELF else {"watch", "tell"}
    assert wanted <= set(calls(name)), f"{name}: expected calls of {wanted} of the harness"


def test_the_reason_stands_behind_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    tell(BUSY, {"figure": 7}, False, lambda told: print(told["figure"], told["no_verdict"]))
    first, noise, why = capsys.readouterr().out.splitlines()
    assert first == f"7 {why}" and why.startswith("no verdict: the load was 2.5")
    assert "load 2.5 before, 2.8 after" in noise and "0.02 cores" in noise


def test_of_a_quiet_machine_there_is_no_reason(capsys: pytest.CaptureFixture[str]) -> None:
    tell(QUIET)
    assert "no verdict" not in capsys.readouterr().out


def test_programs_read_it_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    tell(BUSY, {"figure": 7}, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["figure"] == 7 and told["noise"]["load_before"] == 2.5
    assert told["no_verdict"].startswith("no verdict")


def test_what_a_benchmark_starts_is_not_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(harness.MARK, "of another run")
    ours = watch()
    own_before_s = harness.cpu_s([os.getpid()])
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    try:
        assert ours._own() - own_before_s >= 0.25, "a living child of it counts as its own"
    finally:
        child.communicate(b"\n")


def test_a_benchmark_as_it_is_started() -> None:
    command = [sys.executable, "benchmarks/leader.py", "--nodes", "8", "--steps", "1"]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=True)
    assert "64 ranks" in done.stdout and "other processes took" in done.stdout
