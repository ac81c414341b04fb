"""Left behind: whatever lies here of the job at another world size is seen, and nothing else."""

from __future__ import annotations

import pytest

from keepstep.edge.shm.slot_store import SHELVES
from keepstep.model.snapshot import Stamp
from keepstep.runtime.keeper.left_behind import LeftBehind, left_behind
from tests.runtime.replication.room import JOB_DIR, JOB_HASH, a_memory, a_page, flip, seal

STAMP = Stamp(7, 1)
PAYLOAD = b"x" * 100
ROOTS = {"own": JOB_DIR, **{name: JOB_DIR / below for name, below in SHELVES.items()}}


@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS)
def test_a_snapshot_of_a_rank_that_is_no_more(root: object) -> None:
    memory = a_memory()
    slot = seal(memory, root, 1, STAMP, PAYLOAD, world_size=3)  # type: ignore[arg-type]
    assert left_behind(memory, JOB_DIR, JOB_HASH, 2, []) == LeftBehind(3, None)
    assert left_behind(memory, JOB_DIR, JOB_HASH, 3, []) == LeftBehind()
    assert left_behind(memory, JOB_DIR, b"another job" + bytes(5), 2, []) == LeftBehind()
    flip(memory, slot.path, 40)
    assert left_behind(memory, JOB_DIR, JOB_HASH, 2, []) == LeftBehind()


def test_what_is_half_written_is_nothing() -> None:
    memory = a_memory()
    seal(memory, JOB_DIR, 1, STAMP, PAYLOAD, world_size=3).begin(JOB_HASH, 1, 3, 1, STAMP)
    assert left_behind(memory, JOB_DIR, JOB_HASH, 2, []) == LeftBehind()


def test_how_far_its_ranks_here_had_come() -> None:
    memory = a_memory()
    seal(memory, JOB_DIR, 1, STAMP, PAYLOAD, world_size=3)
    pages = [a_page(rank, {0: Stamp(step, 1)}, ranks=3) for rank, step in ((1, 9), (2, 8))]
    here = a_page(0, {0: Stamp(2, 1)}, ranks=2)
    found = left_behind(memory, JOB_DIR, JOB_HASH, 2, [*pages, here])
    assert found == LeftBehind(3, 8)
