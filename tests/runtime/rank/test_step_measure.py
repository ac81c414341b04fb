"""StepMeasure: what a rank enters in its groups stands in its page when its step has ended."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.step_work_page import StepWorkReader, work_path
from keepstep.edge.torch.membership import Membership
from keepstep.model.step_work import GroupEntries
from keepstep.runtime.rank.step_measure import StepMeasure


def test_collectives_are_written_by_group(tmp_path: Path) -> None:
    work_path(tmp_path, 0).parent.mkdir()
    members, loaders, journal = Membership(), SimpleNamespace(), SimpleNamespace()
    untyped: Any = (loaders, journal)
    measure = StepMeasure(MEMORY, tmp_path, 0, members, *untyped, lambda: True, lambda: False)
    measure.begin()
    for step in range(2):
        members.enter(7)
        members.enter(9, is_message=True)
        members.enter()
        measure.step_ended(step, 1)
    page = StepWorkReader(MEMORY, work_path(tmp_path, 0))
    found = page.newest()
    measure.end()
    page.close()
    assert found is not None and found.collectives == 6
    assert found.groups == (GroupEntries(7, 2), GroupEntries(9, 0, 2))
