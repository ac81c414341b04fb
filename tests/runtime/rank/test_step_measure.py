"""StepMeasure: what a rank enters in its groups stands in its page when its step has ended."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.step_work_page import StepWorkReader, work_path
from keepstep.edge.torch.device_marks import CudaMarks
from keepstep.edge.torch.membership import Membership
from keepstep.model.step_work import GroupEntries, Section, Timing
from keepstep.model.units import S_NS
from keepstep.runtime.rank.step_measure import StepMeasure
from tests.edge.torch.fake_device import FakeDevice


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


def measure_on(tmp_path: Path, device: FakeDevice, sees: bool, entered: int | None) -> StepMeasure:
    work_path(tmp_path, 0).parent.mkdir()
    untyped: Any = (SimpleNamespace(), SimpleNamespace())
    return StepMeasure(
        *(MEMORY, tmp_path, 0, Membership(), *untyped, lambda: sees, lambda: True),
        marks_of_device=lambda: CudaMarks(device),
        entered=lambda: entered,
    )


@pytest.mark.parametrize(
    ("sees", "entered", "timing"),
    [(True, None, Timing.DEVICE), (False, 3, Timing.PASSES), (False, None, Timing.UNSEEN)],
)
def test_what_a_device_s_time_tells_is_said_on_the_page(
    tmp_path: Path, sees: bool, entered: int | None, timing: Timing
) -> None:
    device = FakeDevice(random.Random(0).randrange)

    def kernel() -> None:
        device.now_ns += S_NS

    measure = measure_on(tmp_path, device, sees, entered)
    measure.begin()
    for step in range(2):
        measure.step_begun()
        before = measure.forward_begun()
        device.current.order(kernel)
        measure.forward_ended(before)
        measure.backward_begun()
        device.current.order(kernel)
        device.current.order(kernel)
        measure.backward_ended()
        device.synchronize()
        measure.step_ended(step, 1)
    page = StepWorkReader(MEMORY, work_path(tmp_path, 0))
    found = page.newest()
    assert found is not None and page.timing is timing
    passes = [round(found.device_ns[s] / S_NS) for s in (Section.FORWARD, Section.BACKWARD)]
    assert passes == ([0, 0] if timing is Timing.UNSEEN else [1, 2])
    measure.end()
    page.close()
