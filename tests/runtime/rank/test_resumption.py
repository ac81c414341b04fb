"""Resumption: the question tells what is proven, an answer is about the offer that was tried, and
what is over brings nothing any more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.edge.shm.slot import slot_path
from keepstep.errors import KeepstepError
from keepstep.model.messages.keeper_rank import (
    JoinVote,
    StateLoaded,
    StateOffered,
    StateUnusable,
)
from keepstep.model.snapshot import Phase, Stamp
from keepstep.model.units import PAGE_BYTES
from keepstep.runtime.rank.keeper_client import KeeperClient
from keepstep.runtime.rank.resumption import IMPATIENT_NS, Resumption
from tests.runtime.rank.test_capture import Trainee, state_after
from tests.runtime.rank.test_restore import memory, trained


class Voter:
    def __init__(self, trainee: Trainee, in_midst: bool = False) -> None:
        self.trainee = trainee
        self.room = trainee.room
        self.errors: list[KeepstepError] = []
        self.announced: list[tuple[Phase, int]] = []
        keeper = KeeperClient(self.room.world, 0, 1)
        keeper.connect(lambda: None, self.errors.append)
        self.resumption = Resumption(
            self.room.world,
            self.room.who,
            trainee.capture,
            keeper,
            in_midst,
            False,
            True,
            None,
            lambda phase, step: self.announced.append((phase, step)),
            self.errors.append,
        )
        self.resumption.begin()

    def offer(self, offer: StateOffered) -> None:
        self.resumption.offered(offer)
        self.room.settle()

    @property
    def sent(self) -> list[object]:
        return self.room.keepers.box.sent


@pytest.fixture
def voter(tmp_path: Path) -> Iterator[Voter]:
    trainee = trained(tmp_path)
    yield Voter(trainee)
    trainee.close()


def test_the_question_tells_what_is_proven(voter: Voter) -> None:
    assert voter.sent == [], "not before it is proven"
    voter.room.settle()
    [asked] = voter.sent
    assert isinstance(asked, JoinVote)
    assert asked.holds == tuple(sorted(voter.trainee.held.slot_of)) and asked.world_size == 1


def test_an_offer_is_loaded_told_and_permitted_by_its_number(voter: Voter) -> None:
    voter.room.settle()
    voter.offer(memory(2))
    assert voter.sent[-1] == StateLoaded(0, 1) and voter.announced == [(Phase.RESTORE, 2)]
    assert voter.resumption.permitted(7) is None, "another vote's"
    assert voter.resumption.permitted(1) == memory(2)
    assert voter.room.live.state == state_after(2)


def test_permission_without_a_loaded_state_means_nothing(voter: Voter) -> None:
    voter.room.settle()
    assert voter.resumption.permitted(1) is None


def test_what_it_never_had_is_unusable_and_the_next_offer_is_tried(voter: Voter) -> None:
    voter.room.settle()
    voter.offer(memory(40))
    answer = voter.sent[-1]
    assert isinstance(answer, StateUnusable) and answer.brought, "it may be brought anew"
    voter.offer(StateOffered(2, "memory", 1, 1, "older"))
    assert voter.sent[-1] == StateLoaded(0, 2)


def test_what_proves_no_more_is_asked_for_anew(voter: Voter) -> None:
    voter.room.settle()
    index = voter.trainee.held.slot_of[Stamp(2, 1)]
    with open(slot_path(voter.room.options.job_dir, 0, index), "r+b") as file:
        file.seek(PAGE_BYTES + 5)
        file.write(b"\xff")
    voter.offer(memory(2))
    asked = voter.sent[-1]
    assert isinstance(asked, JoinVote) and Stamp(2, 1) not in asked.holds
    assert voter.room.journal.kinds[-1] == "damaged"


def test_who_waits_says_so_until_the_vote_is_over(voter: Voter) -> None:
    voter.room.settle()
    voter.room.time.pass_ns(2 * IMPATIENT_NS)
    assert len(voter.room.journal.of("waiting")) == 2
    voter.resumption.end()
    voter.room.time.pass_ns(2 * IMPATIENT_NS)
    assert len(voter.room.journal.of("waiting")) == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_that_all_wait_is_told_by_one_of_them(voter: Voter, rank: int) -> None:
    voter.room.who = replace(voter.room.who, rank=rank)
    waiting = Voter(voter.trainee).resumption
    waiting.delayed("the store does not answer")
    told = [event.why for event in voter.room.journal.of("waiting")]
    assert told == ["the store does not answer"] * (rank == 0)


def test_work_of_a_vote_that_was_given_up_brings_nothing(voter: Voter) -> None:
    voter.room.settle()
    voter.resumption.offered(memory(2))
    voter.resumption.end()
    voter.room.settle()
    assert len(voter.sent) == 1 and voter.errors == []


def test_there_is_no_fresh_start_in_the_middle_of_a_job(tmp_path: Path) -> None:
    trainee = trained(tmp_path)
    voter = Voter(trainee, in_midst=True)
    voter.room.settle()
    voter.offer(StateOffered(3, "fresh", -1, 0, "nothing is there"))
    assert len(voter.errors) == 1
    trainee.close()
