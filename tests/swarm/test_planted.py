"""Bugs planted on purpose: the swarm finds each of them within a minute, or it would not find ours
either.

They are planted by patching, here and nowhere else, in what the keepers and ranks of the simulation
run.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import pytest

from keepstep.core.resume.slots import Skip, Take, choose
from keepstep.core.resume.vote import Action, Go, Vote
from keepstep.model.messages.peers import CopyOffer
from keepstep.model.snapshot import SlotState, SlotView, Stamp
from keepstep.runtime.replication import slot_room
from keepstep.runtime.replication.copy_holder import CopyHolder
from keepstep.runtime.replication.receive import IncomingSnapshot
from keepstep.sim.protocol import trainer
from keepstep.sim.protocol.swarm import run

WITHIN_S = 60.0


def overwrites(
    step: int,
    slots: Sequence[SlotView],
    horizon: Stamp | None,
    is_hopeless: Callable[[Stamp], bool],
) -> Take | Skip:
    """The oldest slot, whether or not anybody has a newer one."""
    found = choose(step, slots, horizon, is_hopeless)
    whole = [
        (v.stamp, i) for i, v in enumerate(slots) if v.state is SlotState.SEALED and not v.pinned
    ]
    writing = any(v.state is SlotState.WRITING for v in slots)
    return (
        Take(min(whole)[1], "planted")
        if isinstance(found, Skip) and whole and not writing
        else found
    )


def plant_overwriting_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "choose", overwrites)


def plant_overwriting_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        slot_room, "choose", lambda step, slots, horizon, is_hopeless: Take(0, "planted")
    )


def plant_early_acknowledgement(monkeypatch: pytest.MonkeyPatch) -> None:
    compare = CopyHolder._compare

    def and_acknowledge(self: CopyHolder, offer: CopyOffer, incoming: IncomingSnapshot) -> None:
        self._replies.acknowledge(offer)
        compare(self, offer, incoming)

    monkeypatch.setattr(CopyHolder, "_compare", and_acknowledge)


def plant_stale_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """All train on in the epoch in which they trained before."""
    has_loaded = Vote.has_loaded

    def in_the_old_one(self: Vote, rank: int, offer: int) -> list[Action]:
        actions = has_loaded(self, rank, offer)
        self.epoch = max(1, self.epoch - len(actions))
        return [Go(self.epoch, a.offer) if isinstance(a, Go) else a for a in actions]

    monkeypatch.setattr(Vote, "has_loaded", in_the_old_one)


PLANTED = [
    plant_overwriting_owner,
    plant_overwriting_holder,
    plant_early_acknowledgement,
    plant_stale_epoch,
]


@pytest.mark.parametrize("plant", PLANTED)
def test_the_swarm_finds_what_was_planted(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    until_s = time.monotonic() + WITHIN_S
    found = next(
        o
        for seed in itertools.count()
        if (o := run(seed)).wrong is not None or time.monotonic() > until_s
    )
    assert found.wrong is not None
