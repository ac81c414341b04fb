"""A training that is started in a directory in which others may write runs nothing of theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import keepstep

# What agent, prober and standby import, of Python's own and of packages.
WANTED = ("json", "random", "queue", "select", "signal", "rich", "typer", "torch", "xxhash")
# As the script `keepstep` does it: Python looks for modules beside that script, not here.
COMMAND = "import sys; del sys.path[0]; from keepstep.cli.main import app; app()"
PROGRAM = "import sys; print(sys.path[0], flush=True)"


@pytest.mark.timeout(400)
def test_a_module_in_the_working_directory_is_not_taken_for_pythons_own(tmp_path: Path) -> None:
    anybodys, own, state = tmp_path / "anybodys", tmp_path / "own", tmp_path / "state"
    for directory in (anybodys, own, state):
        directory.mkdir()
    ran = tmp_path / "ran"
    for name in WANTED:
        (anybodys / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write(__name__ + ' ')")
    program = own / "train.py"
    program.write_text(PROGRAM)
    package = str(Path(keepstep.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "run", "--job", "j", str(program)],
        cwd=anybodys,
        env={**os.environ, "PYTHONPATH": package, "KEEPSTEP_STATE_DIR": str(state)},
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert not ran.exists(), ran.read_text()
    assert done.returncode == 0, done.stderr
    assert str(own) in done.stdout
