"""Keeper search: a keeper is found whenever one comes in time, and seldom started."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import KeeperError, KeepstepError
from keepstep.model.units import MS_NS, S_NS
from keepstep.ports import Box, Hearer
from keepstep.runtime.keeper_search import (
    FIND_WITHIN_NS,
    LOOK_AGAIN_NS,
    START_AGAIN_NS,
    KeeperSearches,
)
from tests.runtime.fakes import FakeBox, FakeTime

LATE_NS = FIND_WITHIN_NS + START_AGAIN_NS + S_NS
TIMES = st.integers(0, LATE_NS // MS_NS).map(lambda ms: ms * MS_NS)


class FakeDoor:
    """See `ports.KeeperDoor`. A keeper answers between `from_ns` and `until_ns`. `boot_ns`: how
    long it takes to start one; `error`: why that cannot be."""

    def __init__(self, time: FakeTime) -> None:
        self.time = time
        self.from_ns: int | None = None
        self.boot_ns = 0
        self.error: KeepstepError | None = None
        self.starts: list[int] = []
        self.hearers: list[Any] = []

    def connect(self, hearer: Hearer) -> Box | None:
        if self.from_ns is None or self.time.now_ns < self.from_ns:
            return None
        self.hearers.append(hearer)
        return FakeBox()

    def start(self, then: Callable[[KeepstepError | None], None]) -> None:
        self.starts.append(self.time.now_ns)
        self.time.after(self.boot_ns, lambda: then(self.error))

    def end(self, box: Box) -> None:
        """It never hangs."""

    def in_vain(self, within_ns: int) -> KeepstepError:
        return KeeperError(f"none in {within_ns}")


class Searcher:
    """Who searches, and what became of that."""

    def __init__(self, time: FakeTime, door: FakeDoor) -> None:
        self.time = time
        self.ended: list[tuple[int, Box | KeepstepError]] = []
        KeeperSearches(door, time, time).find(self, self._ended, self._ended)  # type: ignore[arg-type]

    def _ended(self, what: Box | KeepstepError) -> None:
        self.ended.append((self.time.now_ns, what))


@given(alive_after_ns=st.none() | TIMES, boot_ns=st.integers(0, 200).map(lambda ms: ms * MS_NS))
def test_a_search_ends_once_and_starts_seldom(alive_after_ns: int | None, boot_ns: int) -> None:
    time = FakeTime()
    door = FakeDoor(time)
    door.boot_ns = boot_ns
    began_ns = time.now_ns
    if alive_after_ns is not None:
        door.from_ns = began_ns + alive_after_ns
    searcher = Searcher(time, door)
    time.pass_ns(2 * LATE_NS)
    [(at_ns, what)] = searcher.ended
    took_ns = at_ns - began_ns
    slack_ns = LOOK_AGAIN_NS + boot_ns
    if alive_after_ns is not None and alive_after_ns <= FIND_WITHIN_NS:
        assert isinstance(what, FakeBox)
        assert alive_after_ns <= took_ns <= alive_after_ns + slack_ns
        assert door.hearers == [searcher]
    elif alive_after_ns is None or alive_after_ns > FIND_WITHIN_NS + slack_ns:
        assert isinstance(what, KeeperError)
        assert FIND_WITHIN_NS < took_ns <= FIND_WITHIN_NS + slack_ns
    assert all(later - earlier > START_AGAIN_NS for earlier, later in pairwise(door.starts))


def test_one_that_lives_is_found_and_none_is_started() -> None:
    time = FakeTime()
    door = FakeDoor(time)
    door.from_ns = 0
    searcher = Searcher(time, door)
    assert not searcher.ended, "who asks is not called before it has asked"
    time.pass_ns()
    assert len(searcher.ended) == 1
    assert not door.starts


def test_one_that_is_lost_again_is_started_again() -> None:
    time = FakeTime()
    door = FakeDoor(time)
    Searcher(time, door)
    time.pass_ns(START_AGAIN_NS)
    assert len(door.starts) == 1
    time.pass_ns(2 * LOOK_AGAIN_NS)
    assert len(door.starts) == 2


def test_each_search_finds_for_itself() -> None:
    time = FakeTime()
    door = FakeDoor(time)
    door.from_ns = time.now_ns
    first, second = Searcher(time, door), Searcher(time, door)
    time.pass_ns()
    assert len(first.ended) == len(second.ended) == 1
    assert door.hearers == [first, second]


def test_why_none_can_be_started_ends_the_search() -> None:
    time = FakeTime()
    door = FakeDoor(time)
    door.error = KeeperError("no memory")
    searcher = Searcher(time, door)
    time.pass_ns(LATE_NS)
    assert [what for _, what in searcher.ended] == [door.error]
    assert len(door.starts) == 1
