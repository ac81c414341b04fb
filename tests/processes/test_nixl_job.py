"""A job of two nodes whose copies cross by NIXL, over UCX's TCP on loopback."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.config import job_dir_of
from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.memory import MEMORY
from keepstep.model.buffers import BUFFER_BYTES, BUFFERS
from tests.edge.net.nixl import needs_nixl
from tests.processes.test_run_nodes import Begin, machines, until
from tests.security.two_nodes import PROGRAM, SECRET, Job

__all__ = ["machines"]  # a fixture
pytestmark = [needs_nixl, pytest.mark.everyday, pytest.mark.timeout(200)]
# what is equal on both nodes does not cross
LARGE = PROGRAM.replace(
    "job = keepstep.protect(weights=weights)",
    """torch.manual_seed(int(os.environ["RANK"]))
own = torch.rand(4_000_000)
job = keepstep.protect(weights=weights, own=own)""",
).replace("    weights += total", "    weights += total\n    own *= 1.5")
assert LARGE.count("own") == 4


def read_from_others(arena: Path) -> list[bool]:
    """Of each NIXL process below keepers in that directory: whether something was read into its
    buffers."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if b"keepstep.edge.net.nixl_process" not in (place / "cmdline").read_bytes():
                continue
            parent = (place / "stat").read_text().rpartition(")")[2].split()[1]
            if str(arena).encode() not in Path("/proc", parent, "cmdline").read_bytes():
                continue
            memory = next(
                each
                for each in (place / "fd").iterdir()
                if "keepstep-buffers" in str(each.readlink())
            )
            with memory.open("rb") as file:
                file.seek(BUFFERS * BUFFER_BYTES)
                found.append(any(file.read()))
        except OSError:
            continue  # it has just ended
    return found


def test_copies_of_a_job_cross_by_nixl(machines: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPSTEP_SECRET", SECRET)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    job = Job(machines('exec "$PYTHON" "$PROGRAM"', program=LARGE))
    for _ in range(2):
        job.start("--transport", "nixl")
    job.hold()
    for node in job.nodes:
        page = HorizonPage(MEMORY, job_dir_of(node.arena_dir, "t"), make=False)
        until(lambda page=page: page.last().committed, "a step of which each has the other's copy")
        page.close()
    assert read_from_others(job.machines.arena) == [True, True]
    job.end()
    assert not [why for node in job.nodes for why in node.events("node-lost")]
    until(lambda: read_from_others(job.machines.arena) == [], "the end of both processes")
