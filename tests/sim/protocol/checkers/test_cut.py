"""A cut exists: a node may act on a commit that it alone has read of, if it is true."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.model.horizon import Horizon
from keepstep.sim.protocol import swarm

SEED = 200164  # the leader is killed between its page and its word


def test_what_is_committed_may_be_read_before_it_is_said() -> None:
    assert swarm.run(SEED).wrong is None


def test_a_page_that_tells_of_a_commit_too_early_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = HorizonPage.write

    def too_early(page: HorizonPage, horizon: Horizon) -> None:
        committed = horizon.target or horizon.committed
        write(page, replace(horizon, committed=committed, target=None))

    monkeypatch.setattr(HorizonPage, "write", too_early)
    found = {swarm.run(seed).wrong or "" for seed in range(200164, 200176)}
    assert any("overwrites" in wrong for wrong in found), found


def test_a_step_at_which_replicas_differ_is_nobodys() -> None:
    """A rank whose tensors no longer stand still has other bytes at step 6 than its replica, which
    keeps its own part of them: each could be put together, and no page calls it common."""
    assert swarm.run(811504).wrong is None


def test_who_still_trains_acts_on_what_was_told_before_another_mesh_formed() -> None:
    """A rank that was stopped goes on, and its page tells of the commit; no leader has told a
    policy in the newest mesh yet."""
    assert swarm.run(9304073).wrong is None


def test_what_the_next_leader_has_inherited_need_not_have_been_said_before() -> None:
    """A leader's own page tells of a commit, and its keeper is killed as it says so to the other
    node, whose rank hears of it from the leader of the next mesh."""
    assert swarm.run(10108969).wrong is None
