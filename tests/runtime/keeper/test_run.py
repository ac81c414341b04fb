"""One life of a keeper: who may begin one, and that a keeper that is behind looks once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from keepstep.model.messages.keeper_agent import AgentHere
from keepstep.model.messages.keeper_rank import PageChanged
from keepstep.model.units import MS_NS, S_NS
from keepstep.runtime.keeper.run import LOCK_TRIES, KeeperRun
from tests.runtime.simulated import FakeBox, SimKeeper, Town


class FakeLock:
    """See `KeeperLock`: of the directory that is there."""

    def __init__(self, take: Callable[[], bool]) -> None:
        self.take = take

    def is_of_directory(self) -> bool:
        return True


def second(first: SimKeeper, lock: Callable[[], bool], over: Callable[[], None]) -> KeeperRun:
    """Another one that would be the keeper of the same job directory."""
    return KeeperRun(first.settings, first._surroundings(), FakeLock(lock), over)


def test_while_a_keeper_lives_another_one_ends_and_touches_nothing() -> None:
    town = Town()
    first = town.keeper()
    asked: list[bool] = []
    ended: list[str] = []

    def lock() -> bool:
        asked.append(True)
        return False

    run = second(first, lock, lambda: ended.append("over"))
    run.begin()
    assert ended == [], "not while it is begun"
    town.pass_time(S_NS)
    assert ended == ["over"] and len(asked) == LOCK_TRIES and run.keeper is None
    run.hear(FakeBox(9), AgentHere(9))
    run.close()
    assert first.answers() and len(first.events("keeper-started")) == 1


def test_an_onlooker_that_holds_the_lock_for_a_moment_keeps_no_keeper_away() -> None:
    town = Town()
    first = town.keeper()
    refused = iter([False, False])
    ended: list[str] = []
    run = second(first, lambda: next(refused, True), lambda: ended.append("over"))
    run.begin()
    assert run.keeper is None
    town.pass_time(S_NS)
    assert run.keeper is not None and ended == []


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_keeper_removes_no_directory_but_the_one_it_has_locked(is_removed: bool) -> None:
    """Somebody removes the job's memory while it trains, and another keeper begins there: the first
    one took that one's memory with it when it ended."""
    town = Town()
    first = town.keeper()
    job_dir = first.settings.job_dir
    if is_removed:
        first.memory.remove(job_dir)
        first.memory.ensure(job_dir / "keeper.lock", 1)
        first.memory.ensure(job_dir / "what is another's", 1)
    first.run.close()
    assert ("what is another's" in first.memory.names(job_dir)) == is_removed
    [ended] = first.events("keeper-ended")
    assert ("is not ours" in ended.why) == is_removed


def test_preempted_before_it_is_the_keeper_it_ends() -> None:
    first = Town().keeper()
    ended: list[str] = []
    run = second(first, lambda: False, lambda: ended.append("over"))
    run.begin()
    run.preempted()
    assert ended == ["over"]


def test_what_many_ranks_tell_in_one_turn_is_looked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    town = Town()
    for _ in range(2):
        town.keeper()
    town.begin_mesh(7, ranks=3)
    keeper = town.keepers[0]
    assert keeper.keeper.node is not None
    looks: list[int] = []
    monkeypatch.setattr(
        keeper.keeper.node.state, "ranks_changed", lambda ranks: looks.append(town.world.now_ns)
    )
    for _ in range(3):
        for rank in range(3):
            keeper.hear(FakeBox(20 + rank), PageChanged(rank))
        assert looks == [], "not in the middle of a turn"
        town.pass_time(10 * MS_NS)
        assert len(looks) == 1
        looks.clear()
    town.pass_time(S_NS)
    assert looks == [], "nothing has changed since"
