"""Joining: page, agent, keeper, and under a foreign launcher the mesh; whoever cannot be a rank
says why and leaves nothing open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import StatusPage
from keepstep.errors import IdentityError, KeeperError, KeepstepError
from keepstep.runtime.rank.joining import OWN_WITHIN_NS, Joined, Joining
from tests.runtime.fakes import RankRoom
from tests.runtime.rank.test_bootstrap import FACTS


class Entrant:
    def __init__(self, room: RankRoom) -> None:
        self.room = room
        self.joined: list[Joined] = []
        self.errors: list[KeepstepError] = []
        done, failed = self.joined.append, self.errors.append
        self.joining = Joining(room.world, room.options, room.who, FACTS, done, failed)
        self.joining.begin()


def is_owned(room: RankRoom) -> bool:
    page = StatusPage.own(MEMORY, room.options.job_dir, 0)
    if page is not None:
        page.close()
    return page is None


def test_a_rank_has_its_page_its_agent_and_its_keeper(tmp_path: Path) -> None:
    entrant = Entrant(RankRoom(tmp_path))
    [joined] = entrant.joined
    assert is_owned(entrant.room) and joined.agent.is_connected
    assert len(entrant.room.keepers.boxes) == 1
    joined.close()
    assert not is_owned(entrant.room) and not entrant.room.keepers.box.is_open


def test_a_page_whose_owner_is_just_dying_is_waited_for(tmp_path: Path) -> None:
    room = RankRoom(tmp_path)
    owner = StatusPage.own(MEMORY, room.options.job_dir, 0)
    assert owner is not None
    entrant = Entrant(room)
    room.time.pass_ns(OWN_WITHIN_NS // 2)
    assert entrant.joined == [] and entrant.errors == []
    owner.close()
    room.time.pass_ns(OWN_WITHIN_NS // 2)
    [joined] = entrant.joined
    joined.close()


def test_a_page_that_an_ending_keeper_removes_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = RankRoom(tmp_path)
    find = room.keepers.find

    def ends_first(*asked: Any) -> None:
        MEMORY.remove(room.options.job_dir)
        find(*asked)

    monkeypatch.setattr(room.keepers, "find", ends_first)
    entrant = Entrant(room)
    [joined] = entrant.joined
    assert joined.page.is_there() and is_owned(room)
    assert joined.keeper.is_connected and joined.agent.is_connected
    joined.close()


def test_a_living_duplicate_is_refused(tmp_path: Path) -> None:
    room = RankRoom(tmp_path)
    owner = StatusPage.own(MEMORY, room.options.job_dir, 0)
    assert owner is not None
    entrant = Entrant(room)
    room.time.pass_ns(2 * OWN_WITHIN_NS)
    [error] = entrant.errors
    assert isinstance(error, IdentityError) and room.keepers.searches == 0
    owner.close()


def test_without_a_keeper_nothing_stays_open(tmp_path: Path) -> None:
    room = RankRoom(tmp_path)
    room.keepers.error = KeeperError("none")
    entrant = Entrant(room)
    assert entrant.errors == [room.keepers.error] and not is_owned(room)
    assert not room.agents.box.is_open


@pytest.mark.parametrize("has_agent", [True, False])
def test_the_keepers_are_introduced_where_no_agent_does_it(tmp_path: Path, has_agent: bool) -> None:
    room = RankRoom(tmp_path, has_agent=has_agent, ranks=2, nodes=2)
    entrant = Entrant(room)
    assert bool(entrant.joined) == has_agent
    assert bool(room.groups.gathering) != has_agent
    for joined in entrant.joined:
        joined.close()


def test_a_forked_child_lets_go(tmp_path: Path) -> None:
    entrant = Entrant(RankRoom(tmp_path))
    [joined] = entrant.joined
    joined.release()
    assert entrant.room.keepers.box.is_released and entrant.room.agents.box.is_released
    assert entrant.room.keepers.box.is_open, "the parent has it"
