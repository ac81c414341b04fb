"""Membership: which collectives end when, and whether what a body of the loop has computed
counts."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from keepstep.edge.torch import membership as module
from keepstep.edge.torch.membership import Membership
from keepstep.model.step_work import MOST_GROUPS, GroupEntries


class Sum:
    """A collective under way."""

    def __init__(self) -> None:
        self.is_over = False

    def finish(self) -> None:
        self.is_over = True


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> Iterator[Membership]:
    monkeypatch.setattr(module, "NOTICE_WITHIN_S", 0.01)
    found = Membership()
    found.watched = True
    found.begin_body()
    yield found


def regroup(members: Membership) -> None:
    assert members.regroup(None, 1, threading.Event())


def timers_have_gone_off() -> None:
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(20)


def test_a_collective_that_failed_and_that_nobody_speaks_of_ends_as_if_a_peer_were_lost(
    members: Membership,
) -> None:
    suspected: list[str] = []
    members.on_error = suspected.append
    work = Sum()
    assert members.begin(work) and members.failed(work, "connection reset")
    timers_have_gone_off()
    assert work.is_over and members.is_lost and suspected == ["connection reset"]
    assert members.why.startswith("connection reset; nobody said within")


def test_one_that_was_spoken_of_in_time_harms_nobody_after_the_regroup(members: Membership) -> None:
    work = Sum()
    assert members.begin(work) and members.failed(work, "connection reset")
    members.lose("rank 1 was killed")
    regroup(members)
    timers_have_gone_off()
    assert work.is_over and not members.is_lost


def test_one_that_was_abandoned_may_fail_whenever_it_likes(members: Membership) -> None:
    suspected: list[str] = []
    members.on_error = suspected.append
    work = Sum()
    assert members.begin(work)
    members.lose("rank 1 was killed")
    assert members.failed(work, "while its peers are being forgotten")
    regroup(members)
    assert members.failed(work, "the transport has been dropped")
    timers_have_gone_off()
    assert not members.is_lost and suspected == []


def test_without_a_watch_a_failure_is_the_callers(members: Membership) -> None:
    members.watched = False
    work = Sum()
    assert members.begin(work) and not members.failed(work, "connection reset")
    assert not members.is_lost


@pytest.mark.parametrize(
    ("before", "under_way", "after", "worthless"),
    [
        (True, False, False, False),
        (True, True, False, True),
        (True, False, True, True),
        (False, False, False, False),
    ],
    ids=["all were done", "one was under way", "one came later", "there were none"],
)
def test_a_body_counts_when_every_collective_of_it_was_done_before_the_notice(
    members: Membership, before: bool, under_way: bool, after: bool, worthless: bool
) -> None:
    if before:
        done = Sum()
        assert members.begin(done)
        members.end(done)
    if under_way:
        assert members.begin(Sum())
    members.lose("rank 1 was killed")
    if after:
        assert not members.begin(Sum())
        members.spoil()
    assert members.is_worthless == worthless
    members.begin_body()
    assert members.is_worthless, "a body that begins without all peers"
    regroup(members)
    members.begin_body()
    assert not members.is_worthless


def test_every_collective_that_used_the_network_is_told_to_have_ended_once(
    members: Membership,
) -> None:
    told: list[int] = []
    members.on_begin, members.on_end = lambda: told.append(1), lambda count: told.append(-count)
    works = [Sum() for _ in range(4)]
    for work in works:
        assert members.begin(work)
    members.end(works[0])
    members.end(works[0])
    assert told == [1, 1, 1, 1, -1]
    members.lose("rank 1 was killed")
    members.end(works[1])  # it ends all the same, later
    assert not members.begin(Sum())
    assert told == [1, 1, 1, 1, -1, -3]


def test_it_is_told_when_some_collective_is_under_way_and_when_none_is_any_more(
    members: Membership,
) -> None:
    told: list[bool] = []
    members.on_busy = told.append
    works = [Sum() for _ in range(3)]
    assert members.begin(works[0]) and members.begin(works[1])
    members.end(works[0])
    assert told == [True]
    members.end(works[1])
    members.end(works[1])
    assert told == [True, False]
    assert members.begin(works[2])
    members.lose("rank 1 was killed")
    members.end(works[2])
    assert told == [True, False, True, False]
    members.enter()
    assert members.entered == 1


def test_what_is_entered_is_counted_by_group_and_anew_after_a_regroup(members: Membership) -> None:
    for group, is_message in [(7, False), (9, True), (7, False), (7, True), (0, False)]:
        members.enter(group, is_message)
    assert members.entered_by_group == (GroupEntries(7, 2, 1), GroupEntries(9, 0, 1))
    assert members.entered == 5, "with what is of no group that is known"
    members.lose("rank 1 was killed")
    regroup(members)
    assert (members.entered, members.entered_by_group) == (0, ())


def test_of_many_groups_the_first_are_counted_and_the_others_only_in_the_sum(
    members: Membership,
) -> None:
    for group in [*range(1, 50), 1]:
        members.enter(group)
    firsts = (GroupEntries(group, 1) for group in range(2, MOST_GROUPS + 1))
    assert members.entered_by_group == (GroupEntries(1, 2), *firsts) and members.entered == 50
