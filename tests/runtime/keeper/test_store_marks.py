"""Checkpoints in doubt: once the vote that left them out is over, no later one offers them."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.edge.store.manifest import Manifest
from keepstep.edge.store.store import Store
from keepstep.model.checkpoint import CheckpointName
from keepstep.model.events import Event
from keepstep.model.messages.keeper_rank import JoinVote, StateLoaded, StateOffered
from keepstep.model.snapshot import Stamp
from keepstep.model.units import S_NS
from keepstep.runtime.keeper.store_marks import TRIES
from keepstep.sim.protocol.job.persisters import open_store
from tests.runtime.simulated import FakeBox, SimKeeper, Town

URL = "/store"


class Room:
    """One keeper; its only rank's memory holds step 4, and the store steps 3, 5 and 7."""

    def __init__(self) -> None:
        self.town = Town()
        self.keeper: SimKeeper = self.town.keeper(store=URL)
        writer = self.keeper.machine.start("writer")
        self.store: Store = open_store(URL, self.town.disk, writer)
        for step in (3, 5, 7):
            with self.store.draft(CheckpointName(step, 1, 1)) as draft:
                with draft.open("a") as file:
                    file.write(b"state")
                draft.publish(Manifest("j", step, 1, {}, 1, {}, dict(draft.files), 1, 1))

    def resume(self, *holds: Stamp, **about: Any) -> StateOffered:
        """A rank asks, and loads what it is offered."""
        rank = FakeBox(7)
        self.keeper.hear(rank, JoinVote(0, 1, 1, holds, None, **about))
        self.town.pass_time()
        [offer] = [message for message in rank.heard if isinstance(message, StateOffered)]
        self.keeper.hear(rank, StateLoaded(0, offer.offer))
        self.town.pass_time()
        return offer

    def told(self) -> list[Event]:
        """In the journal, of condemned states."""
        return self.keeper.events("condemned")


@pytest.mark.parametrize("doubted", [5, 6])
def test_a_job_that_has_lost_its_memory_does_not_take_them(doubted: int) -> None:
    room = Room()
    assert room.resume(Stamp(4, 1), doubted_from=doubted).source == "memory"
    left_out = [step for step in (5, 7) if step >= doubted]
    assert [e.data["checkpoint"] for e in room.told()] == [
        CheckpointName(step, 1, 1).directory for step in left_out
    ]
    offer = room.resume()  # without any memory, and without a doubt
    assert (offer.source, offer.step) == ("store", 3 if doubted == 5 else 5)


def test_a_store_that_does_not_answer_is_told_when_it_does() -> None:
    room = Room()
    room.town.disk.away = 1.0
    room.resume(Stamp(4, 1), doubted_from=5)
    assert room.told() == []
    room.town.disk.heal()
    room.town.pass_time(20 * S_NS)
    assert len(room.told()) == 2 and list(room.store.look().usable) == [3]


def test_a_store_that_stays_away_is_told_to_a_person() -> None:
    room = Room()
    room.town.disk.away = 1.0
    room.resume(Stamp(4, 1), doubted_from=5)
    room.town.pass_time(600 * S_NS)
    [event] = room.told()
    assert f"{TRIES} tries" in event.why and "may take" in event.why


def test_what_was_computed_since_is_not_marked() -> None:
    """The store may hear of the doubt late."""
    room = Room()
    room.store.doubt(5, 1)
    assert list(room.store.look().usable) == [7, 5, 3]
