"""The README's program, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes.script_runs import killed_and_undisturbed

pytestmark = pytest.mark.timeout(600)

README = Path(__file__).parents[2] / "README.md"


def program() -> str:
    """The first block of Python that is a whole program."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return next(block for block in blocks if "keepstep.protect(" in block)


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_ends_with_the_same_bits_when_it_is_killed(tmp_path: Path, ranks: int) -> None:
    ends_with = "model.state_dict(), optimizer.state_dict(), scheduler.state_dict(), data.batch"
    held_step = 37  # in the second epoch
    killed, undisturbed = killed_and_undisturbed(tmp_path, program(), ends_with, ranks, held_step)
    if ranks > 1:
        assert killed.events("regrouped"), "the other rank stays in its process"
    assert not [e for run in (killed, undisturbed) for e in run.events("caveat")]
