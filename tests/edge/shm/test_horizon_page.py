"""The horizon page: what it has no room for does not look hopeless."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.edge.shm.horizon_page import MAX_ALIVE, HorizonPage
from keepstep.edge.shm.memory import MEMORY
from keepstep.model.horizon import Horizon
from keepstep.model.snapshot import Stamp


@pytest.mark.parametrize("more", [0, 1, 30])
def test_as_far_as_it_goes_it_says_what_is_hopeless(tmp_path: Path, more: int) -> None:
    written = Horizon(1, alive=frozenset(Stamp(2 * n, 1) for n in range(MAX_ALIVE + more)))
    written = replace(written, decided_step=2 * len(written.alive))
    page = HorizonPage(MEMORY, tmp_path)
    page.write(written)
    last = page.last()
    assert last.alive == frozenset(sorted(written.alive)[:MAX_ALIVE])
    for step in range(written.decided_step + 2):
        known = not more or step < 2 * MAX_ALIVE - 1
        stamp = Stamp(step, 1)
        assert last.is_hopeless(stamp) == (written.is_hopeless(stamp) and known)
    page.close()
