"""The rhythm of a real group: a rank of its own, over gloo, shows its collectives in its page."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from keepstep.edge.shm.collective_profile_page import (
    CollectiveProfileReader,
    CollectiveProfileWriter,
    profile_path,
)
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.torch.groups import init_process_group
from keepstep.edge.torch.membership import membership


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    init_process_group(init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield
    membership.on_begin, membership.on_end = lambda: None, lambda count: None
    dist.destroy_process_group()


def test_each_step_shows_its_collectives_and_the_gaps_between_them(
    tmp_path: Path, group: None
) -> None:
    page = CollectiveProfileWriter(MEMORY, profile_path(tmp_path, 0), time.monotonic_ns)
    reader = CollectiveProfileReader(MEMORY, profile_path(tmp_path, 0))
    membership.on_begin, membership.on_end = page.began, page.ended
    tensor = torch.ones(1000)
    for step in range(3):
        page.step(step)
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(step)]
        for work in works:
            work.wait()
        dist.barrier()
        pulse = reader.pulse(time.monotonic_ns())
        assert pulse is not None and (pulse.step, pulse.entered, pulse.pending) == (
            step,
            step + 1,
            0,
        )
    page.step(3)
    seen = reader.steps()
    assert [(s.step, s.collectives) for s in seen] == [(0, 1), (1, 2), (2, 3)]
    assert all(
        s.gaps[0].index == 0 and s.gaps[-1].index == s.collectives and 0 < s.idle_ns < s.step_ns
        for s in seen
    )
    reader.close()
    page.close()
