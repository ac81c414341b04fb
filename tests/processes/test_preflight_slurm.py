"""A preflight as Slurm's prolog: a node with a defect is drained, and gets no job."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.test_slurm import Slurm, pytestmark, until

__all__ = ["pytestmark"]  # skipped where that is

BAD = "n2"
PLANTS = Path(__file__).parent / "plants"
# As in docs/preflight.md, with a defect on one of the nodes.
PROLOG = f"""#!/bin/sh
export HOME={{room}} KEEPSTEP_STATE_DIR={{room}}/state-$SLURMD_NODENAME
export PYTHONPATH={PLANTS}
test $SLURMD_NODENAME = {BAD} && export PLANT=memory
exec >{{room}}/$SLURMD_NODENAME.out 2>&1
{sys.executable} -m keepstep.cli.main preflight --only memory,disk
test $? -ne 1
"""


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    with (
        tempfile.TemporaryDirectory(prefix="ks-slurm-") as room,
        tempfile.TemporaryDirectory(prefix="ks-slurm-", dir="/dev/shm") as arenas,
    ):
        prolog = Path(room) / "preflight.sh"
        prolog.write_text(PROLOG.format(room=room))
        prolog.chmod(0o755)
        conf = f"Prolog={prolog}\nPrologFlags=Alloc\nBatchStartTimeout=120\n"
        cluster = Slurm(Path(room), Path(arenas), conf)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.end()


def test_a_node_that_fails_its_prolog_is_drained(slurm: Slurm) -> None:
    assert slurm.ask("srun", "-w", "n1", "echo", "ran") == "ran"
    said = (slurm.room / "n1.out").read_text()
    assert "This machine is fit: 2 checks" in said
    slurm.ask("sbatch", "-w", BAD, "--wrap", "echo ran")
    until(lambda: slurm.states()[BAD].startswith("dr"), slurm.story)
    assert "bad      memory: memory gave back 0x" in (slurm.room / f"{BAD}.out").read_text()
    assert slurm.states()["n1"] == "idle"
