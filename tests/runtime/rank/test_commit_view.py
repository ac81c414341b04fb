"""Commit views: on one node the cut of the pages, with many nodes the leader's word; an old look is
safe, a missing page says nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import StatusPage
from keepstep.model.horizon import Horizon
from keepstep.model.snapshot import SlotState, SlotView, Stamp
from keepstep.runtime.rank.commit_view import LeadersWord, PagesOfOneNode


def publish(job_dir: Path, rank: int, ranks: int, steps: list[int], decided: int) -> StatusPage:
    page = StatusPage.own(MEMORY, job_dir, rank)
    assert page is not None
    page.publish(
        rank=rank,
        world_size=ranks,
        epoch=1,
        decided_step=decided,
        slots=tuple(SlotView(SlotState.SEALED, Stamp(step, 1)) for step in steps),
    )
    return page


@given(st.lists(st.sets(st.integers(0, 6), min_size=1, max_size=3), min_size=1, max_size=4))
def test_the_horizon_is_the_newest_step_that_all_ranks_hold(
    tmp_path_factory: pytest.TempPathFactory, held: list[set[int]]
) -> None:
    job_dir = tmp_path_factory.mktemp("j")
    pages = [publish(job_dir, r, len(held), sorted(s), max(s)) for r, s in enumerate(held)]
    view = PagesOfOneNode(MEMORY, job_dir, len(held))
    seen = view.look(1)
    horizon, is_hopeless, told = seen.horizon, seen.is_hopeless, seen.pages
    assert seen.released is None, "nobody else has it"
    assert [page.rank for page in told] == list(range(len(held)))
    common = set.intersection(*held)
    assert horizon == (Stamp(max(common), 1) if common else None)
    for step in set.union(*held):
        # who has decided about a step and does not hold it will never hold it
        passed_over = any(step not in steps and step <= max(steps) for steps in held)
        assert is_hopeless(Stamp(step, 1)) == passed_over
    view.close()
    for page in pages:
        page.close()


def test_without_all_pages_there_is_no_horizon(tmp_path: Path) -> None:
    page = publish(tmp_path, 0, 2, [3], 3)
    view = PagesOfOneNode(MEMORY, tmp_path, 2)
    assert view.look(1)[0] is None
    other = publish(tmp_path, 1, 2, [3], 3)
    assert view.look(1)[0] == Stamp(3, 1)
    for each in (view, page, other):
        each.close()


def test_with_many_nodes_the_leaders_word_counts_in_its_epoch(tmp_path: Path) -> None:
    view = LeadersWord(MEMORY, tmp_path)
    assert view.look(1)[0] is None
    page = HorizonPage(MEMORY, tmp_path)
    page.write(Horizon(1, committed=Stamp(4, 1)))
    assert view.look(1)[0] == Stamp(4, 1)
    assert view.look(2)[0] is None, "another epoch's"
    page.close()
    view.close()


def test_with_many_nodes_those_who_share_see_their_nodes_pages_besides(tmp_path: Path) -> None:
    pages = [publish(tmp_path, rank, 4, [5], 5) for rank in (2, 3)]
    alone, view = LeadersWord(MEMORY, tmp_path), LeadersWord(MEMORY, tmp_path, range(2, 4))
    assert [page.rank for page in view.look(1).pages] == [2, 3] and not alone.look(1).pages
    assert view.look(1).horizon is None, "what they hold is no word of the leader's"
    for each in (alone, view, *pages):
        each.close()


def test_the_slowest_rank_sets_the_period_and_nobody_agrees_with_himself(tmp_path: Path) -> None:
    first, second = (publish(tmp_path, rank, 2, [0], 0) for rank in range(2))
    view = PagesOfOneNode(MEMORY, tmp_path, 2)
    assert view.look(1).period_steps == 1
    second.publish(span_steps=3)
    assert view.look(1).period_steps == 3
    alone = PagesOfOneNode(MEMORY, tmp_path, 1)
    first.publish(span_steps=5)
    assert (view.look(1).period_steps, alone.look(1).period_steps) == (5, 1)
    for each in (view, alone, first, second):
        each.close()


def test_with_many_nodes_the_leader_tells_the_period(tmp_path: Path) -> None:
    view, page = LeadersWord(MEMORY, tmp_path), HorizonPage(MEMORY, tmp_path)
    page.write(Horizon(1, period_steps=4))
    assert view.look(1).period_steps == 4
    assert view.look(2).period_steps == 1, "another epoch's"
    page.close()
    view.close()
