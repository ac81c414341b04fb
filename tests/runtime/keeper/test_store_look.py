"""A store that does not answer: asked again, told of, never taken for an empty one."""

from __future__ import annotations

import re
from typing import Any

import pytest

from keepstep.core.resume.patience import IN_ALL_NS
from keepstep.edge.store.draft import MANIFEST
from keepstep.edge.store.manifest import Manifest
from keepstep.edge.store.store import Store
from keepstep.model.checkpoint import CheckpointName
from keepstep.model.messages.keeper_rank import JoinVote, StateOffered, VoteDelayed, VoteRefused
from keepstep.model.snapshot import Stamp
from keepstep.model.units import S_NS
from keepstep.sim.protocol.job.persisters import open_store
from tests.runtime.simulated import FakeBox, SimKeeper, Town

URL = "/store"


class Room:
    """One keeper, whose only rank comes without memory."""

    def __init__(self, *steps: int, job: str = "j") -> None:
        self.town = Town()
        self.keeper: SimKeeper = self.town.keeper(store=URL)
        writer = self.keeper.machine.start("writer")
        self.store: Store = open_store(URL, self.town.disk, writer)
        for step in steps:
            with self.store.draft(CheckpointName(step)) as draft:
                with draft.open("a") as file:
                    file.write(b"state")
                draft.publish(Manifest(job, step, 1, {}, 1, {}, dict(draft.files)))
        self.rank = FakeBox(7)

    def ask(self) -> None:
        self.keeper.hear(self.rank, JoinVote(0, 1, 1, (), None))
        self.town.pass_time()

    def ask_with_memory(self, *holds: Stamp) -> None:
        """As a rank does whose memory is of a launch before."""
        self.keeper.hear(self.rank, JoinVote(0, 1, 1, holds, goes_on=False))
        self.town.pass_time()

    def heard(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.rank.heard if isinstance(message, kind)]

    def offers(self) -> list[tuple[str, int]]:
        return [(offer.source, offer.step) for offer in self.heard(StateOffered)]


@pytest.mark.parametrize("steps", [(), (3, 5)])
def test_a_store_that_is_back_in_time_is_taken_as_it_is(steps: tuple[int, ...]) -> None:
    room = Room(*steps)
    room.town.disk.away = 1.0
    room.ask()
    room.town.pass_time(40 * S_NS)
    assert room.offers() == []
    told = room.heard(VoteDelayed)
    assert len(told) == 2 and "does not answer" in told[-1].why
    waited = [re.search(r"has not answered for (\d+)\.\d+ s, ", each.why) for each in told]
    assert [found and round(int(found[1]), -1) for found in waited] == [20, 30], told
    room.town.disk.heal()
    room.town.pass_time(20 * S_NS)
    assert room.offers() == [("store", 5) if steps else ("fresh", -1)]
    room.town.pass_time(60 * S_NS)
    assert len(room.heard(VoteDelayed)) <= 3, "it is told as long as all wait"


@pytest.mark.parametrize("steps", [(), (3, 5)])
def test_a_store_that_stays_away_ends_in_an_error(steps: tuple[int, ...]) -> None:
    room = Room(*steps)
    room.town.disk.away = 1.0
    room.ask()
    room.town.pass_time(IN_ALL_NS - 20 * S_NS)
    assert room.heard(VoteRefused) == []
    room.town.pass_time(40 * S_NS)
    [refused] = room.heard(VoteRefused)
    assert not refused.is_final and room.offers() == []
    room.town.disk.heal()
    room.ask()
    assert len(room.offers()) == 1, "who asks again is answered anew"


@pytest.mark.parametrize("steps", [(), (3, 5)])
def test_a_store_that_never_answers_is_told_of_and_ends_in_an_error(steps: tuple[int, ...]) -> None:
    """As on a dead mount, where no call comes back."""
    room = Room(*steps)
    room.keeper.aside.hangs = True
    room.ask()
    room.town.pass_time(62 * S_NS)
    told = [re.search(r"for (\d+)\.\d+ s", word.why) for word in room.heard(VoteDelayed)]
    assert [found and int(found[1]) for found in told] == [15, 30, 45, 60], told
    assert len(room.keeper.events("store-unreachable")) == 4
    room.town.pass_time(IN_ALL_NS - 63 * S_NS - S_NS)
    assert room.heard(VoteRefused) == []
    room.town.pass_time(2 * S_NS)
    [refused] = room.heard(VoteRefused)
    assert "no answer within 300 s" in refused.why and not refused.is_final
    assert room.offers() == [], "nobody starts over a store that nobody could look at"
    words = len(room.heard(VoteDelayed))
    room.town.pass_time(60 * S_NS)
    assert len(room.heard(VoteDelayed)) == words, "it is told as long as the question stands"
    room.keeper.aside.hangs = False
    room.ask()
    assert room.offers() == [("store", 5) if steps else ("fresh", -1)], "who asks again is answered"


def test_memory_does_not_wait_for_a_store_that_never_answers() -> None:
    room = Room(3)
    room.keeper.aside.hangs = True
    room.ask_with_memory(Stamp(11, 1))
    room.town.pass_time(31 * S_NS)
    assert room.offers() == [("memory", 11)]


def test_what_a_store_showed_before_it_hung_is_taken_in_the_end() -> None:
    """The newest could not be looked at; every look after that hangs."""
    room = Room(3, 5)
    room.town.disk.unreadable.add(room.store.place(5, MANIFEST).path)
    room.ask()
    room.keeper.aside.hangs = True
    room.town.pass_time(IN_ALL_NS - 2 * S_NS)
    assert room.offers() == []
    room.town.pass_time(2 * S_NS)
    assert room.offers() == [("store", 3)] and "step 5" in room.heard(StateOffered)[0].why


def test_one_checkpoint_that_cannot_be_looked_at_is_waited_for() -> None:
    """Its bytes may be the newest there are: an older one is taken when patience has ended."""
    room = Room(3, 5)
    place = room.store.place(5, MANIFEST).path
    room.town.disk.unreadable.add(place)
    room.ask()
    room.town.pass_time(40 * S_NS)
    assert room.offers() == [] and room.heard(VoteDelayed)
    room.town.disk.unreadable.clear()
    room.town.pass_time(20 * S_NS)
    assert room.offers() == [("store", 5)]


def test_one_checkpoint_that_stays_unreadable_is_passed_over_by_name() -> None:
    room = Room(3, 5)
    room.town.disk.unreadable.add(room.store.place(5, MANIFEST).path)
    room.ask()
    room.town.pass_time(IN_ALL_NS + 20 * S_NS)
    assert room.offers() == [("store", 3)] and "step 5" in room.heard(StateOffered)[0].why


def test_a_run_begins_where_it_was_asked_for_and_nowhere_else() -> None:
    room = Room(3)
    room.ask()
    assert room.offers() == [("store", 3)] and room.keeper.events("run-begun") == []


def test_another_jobs_checkpoints_are_refused_at_once_and_by_name() -> None:
    room = Room(3, 5, job="other")
    room.ask()
    [refused] = room.heard(VoteRefused)
    assert room.offers() == [] and "'other'" in refused.why and "--adopt" in refused.why
    assert refused.is_final, "no restart changes it"


def test_memory_waits_for_a_silent_store_and_not_for_long() -> None:
    room = Room(3)
    room.town.disk.away = 1.0
    room.ask_with_memory(Stamp(11, 1))
    room.town.pass_time(29 * S_NS)
    assert room.offers() == []
    room.town.pass_time(2 * S_NS)
    assert room.offers() == [("memory", 11)]
    [offer] = room.heard(StateOffered)
    assert "whether the store has a newer one nobody knows" in offer.why


def test_memory_that_is_behind_gives_way_to_the_store() -> None:
    room = Room(3, 20)
    room.ask_with_memory(Stamp(11, 0))
    assert room.offers() == [("store", 20)]
    ahead = Room(3, 20)
    ahead.ask_with_memory(Stamp(21, 0))
    assert ahead.offers() == [("memory", 21)]
