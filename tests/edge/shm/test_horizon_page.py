"""The horizon page: what it has no room for does not look hopeless."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.edge.shm.horizon_page import MAX_ALIVE, HorizonPage
from keepstep.edge.shm.memory import MEMORY
from keepstep.model.horizon import Horizon
from keepstep.model.shares import RankRun, ShareClass
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


def a_class(first: int, number: int = 2**64 - 1, is_over: bool = False) -> ShareClass:
    return ShareClass((RankRun(first, 128, 8),), 2**63 + 1, number, is_over)


def test_classes_of_this_nodes_ranks_in_their_epoch_alone(tmp_path: Path) -> None:
    page = HorizonPage(MEMORY, tmp_path)
    seen = HorizonPage(MEMORY, tmp_path)
    assert seen.classes(3) is None
    told = [a_class(first, is_over=first == 3) for first in (*range(8), *range(1000, 1008))]
    page.write_classes(3, told, range(8, 16))
    assert seen.classes(2) is None
    assert seen.classes(3) == tuple(told[:8]), "ranks 8 to 15 are the second of each"
    page.write_classes(4, [], range(8))
    assert seen.classes(4) == () and seen.classes(3) is None
    page.close()
    seen.close()


def test_classes_that_have_no_room_are_nobodys(tmp_path: Path) -> None:
    page = HorizonPage(MEMORY, tmp_path)
    told = [a_class(first) for first in range(100)]
    page.write_classes(1, told, range(200))
    found = page.classes(1)
    assert found is not None and 16 <= len(found) < 100 and found == tuple(told[: len(found)])
    page.close()
