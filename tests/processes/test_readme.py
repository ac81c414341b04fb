"""What the pages say that a user may run, as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes.script_runs import killed_and_undisturbed

pytestmark = pytest.mark.timeout(600)

README = Path(__file__).parents[2] / "README.md"
QUICKSTART = README.parent / "docs" / "quickstart.md"


def program(page: Path = README, which: int = 0) -> str:
    """One of the blocks of Python that are whole programs, by its place on the page."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    return [block for block in blocks if "keepstep.protect(" in block][which]


def shell_lines(page: Path) -> list[str]:
    """What a person may paste into a shell: the indented lines, without their remarks."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("    ")]
    inside = [
        line
        for block in re.findall(r"```.*?```", page.read_text(), re.DOTALL)
        for line in block.splitlines()
    ]
    return [line.partition("#")[0].strip() for line in lines if line not in inside]


# Commands whose work other tests do: what is looked at here is that they are there.
MAKE = {"make demo", "make test"}
INSTALLS = {"pip install ."}  # `.ci/wheel` does, in a fresh environment


DEMO = "keepstep demo"
KILLED = "timeout -s KILL 8 python train.py"


def few_slow_steps(source: str) -> str:
    """The README's program in steps of which 8 s hold some, and not all; it tells of step 20."""
    last = "optimizer.zero_grad(); loss.backward(); optimizer.step()"
    assert "job.steps(3000)" in source and last in source
    slow = f"{last}; time.sleep(0.02); step == 20 and open('held', 'w').close()"
    return f"import time\n{source.replace(last, slow).replace('steps(3000)', 'steps(400)')}"


@pytest.mark.everyday
def test_every_command_runs_as_it_is_printed(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """From the first to the last, as a new user would."""
    lines = shell_lines(README)
    assert {*MAKE, *INSTALLS, KILLED, DEMO} < {*lines} and len(lines) >= 7
    (tmp_path / "train.py").write_text(few_slow_steps(program()))
    arena = tmp_path_factory.mktemp("a")  # a short path: the names of the demo's jobs are long
    environ = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "KEEPSTEP_ARENA_DIR": str(arena),
        "KEEPSTEP_STATE_DIR": str(tmp_path / "state"),
    }

    def run(words: str, place: Path) -> tuple[int, str]:
        done = subprocess.run(
            words, shell=True, env=environ, cwd=place, capture_output=True, text=True, timeout=500
        )
        return done.returncode, done.stdout + done.stderr

    ended: dict[str, tuple[int, str]] = {}
    for line in lines:
        if line in MAKE:
            ended[line] = run(line.replace("make", "make -n"), README.parent)
        elif line == DEMO:
            ended[line] = run(f"{line} --steps 20", tmp_path)
        elif line not in INSTALLS:
            ended[line] = run(line, tmp_path)
        for seconds in range(14, 120, 6):  # on a busy machine importing torch may take longer
            if line == KILLED and not (tmp_path / "held").exists():
                ended[line] = run(line.replace(" 8 ", f" {seconds} "), tmp_path)
    killed, again = ended[KILLED], ended["python train.py"]
    assert killed[0] in (137, -9), killed
    assert again[0] == 0 and "from memory" in again[1] and "step 399 was the last" in again[1]
    assert ended[DEMO][0] == 0 and "equal, bit for bit" in ended[DEMO][1], ended[DEMO]
    assert ended["keepstep explain"][0] == 0 and "resumed" in ended["keepstep explain"][1]
    assert ended["keepstep doctor"][0] in (0, 1), "1: this machine is not fit, and it says why"
    assert all(ended[line][0] == 0 for line in MAKE), ended


@pytest.mark.everyday
def test_it_ends_with_the_same_bits_when_it_is_killed(tmp_path: Path) -> None:
    ends_with = "model.state_dict(), optimizer.state_dict(), data.batch"
    few_steps = program().replace("job.steps(3000)", "job.steps(60)")
    killed_and_undisturbed(tmp_path, few_steps, ends_with, 1, 20)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_whole_program_ends_with_the_same_bits_when_it_is_killed(
    tmp_path: Path, ranks: int
) -> None:
    ends_with = "model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), data.batch"
    held_step = 37  # in the second epoch
    whole = program(QUICKSTART, 1)
    killed, undisturbed = killed_and_undisturbed(tmp_path, whole, ends_with, ranks, held_step)
    if ranks > 1:
        assert killed.events("regrouped"), "the other rank stays in its process"
    assert not [e for run in (killed, undisturbed) for e in run.events("caveat")]


def test_the_quickstart_ends_with_the_same_bits_when_it_is_killed(tmp_path: Path) -> None:
    ends_with = "model.state_dict(), optimizer.state_dict()"
    killed_and_undisturbed(tmp_path, program(QUICKSTART), ends_with, 1, 20)


MAKES_A_STORE = """
import sys, torch, keepstep

torch.manual_seed(3)
model = torch.nn.Linear(5, 2)
optimizer = torch.optim.AdamW(model.parameters(), 0.1)
job = keepstep.protect(model=model, optimizer=optimizer)
for step in job.steps(12):
    optimizer.zero_grad()
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
print([p.tolist() for p in model.parameters()])
"""
READS_IT = """
import sys, torch
sys.modules["keepstep"] = None  # it cannot be imported
store, model = sys.argv[1], torch.nn.Linear(5, 2)
BLOCK
assert state["model"]["weight"].equal(model.weight) and state["optimizer"]["state"]
print([p.tolist() for p in model.parameters()])
"""


@pytest.mark.everyday
def test_a_checkpoint_is_read_without_keepstep(tmp_path: Path) -> None:
    operations = README.parent / "docs" / "operations.md"
    blocks = re.findall(r"```python\n(.*?)```", operations.read_text(), re.DOTALL)
    block, one_file = (one for one in blocks if "torch.distributed.checkpoint" in one)
    assert "dcp.load(" in block and "torch.load(" in one_file
    arena = tmp_path / "arena"
    arena.mkdir()
    places = {"KEEPSTEP_ARENA_DIR": str(arena), "KEEPSTEP_STATE_DIR": str(tmp_path / "state")}
    places |= {"KEEPSTEP_STORE": str(tmp_path / "store"), "KEEPSTEP_JOB": "reads"}
    made = _run(MAKES_A_STORE, tmp_path / "makes.py", **places)
    source = READS_IT.replace("BLOCK", block + one_file)
    assert _run(source, tmp_path / "reads.py", str(tmp_path / "store")) == made


def _run(source: str, path: Path, *words: str, **environ: str) -> str:
    path.write_text(source)
    done = subprocess.run(
        [sys.executable, str(path), *words],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=200,
        cwd=path.parent,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
