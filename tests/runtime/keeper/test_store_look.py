"""A store that does not answer: asked again, told of, never taken for an empty one."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.core.resume.patience import IN_ALL_NS
from keepstep.edge.store.draft import MANIFEST
from keepstep.edge.store.manifest import Manifest
from keepstep.edge.store.store import Store
from keepstep.model.checkpoint import CheckpointName
from keepstep.model.messages.keeper_rank import JoinVote, StateOffered, VoteDelayed, VoteRefused
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
