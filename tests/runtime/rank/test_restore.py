"""Restorer: what is offered is loaded and proven, or refused with what this rank still holds; what
has another shape changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm.slot import slot_path
from keepstep.errors import DamageError, KeeperError, LayoutError, StoreError
from keepstep.model.messages.keeper_rank import StateOffered
from keepstep.model.snapshot import Stamp
from keepstep.model.units import PAGE_BYTES
from keepstep.runtime.rank.restore import Restored, Restorer, Unusable
from tests.runtime.rank.test_capture import Trainee, state_after


def trained(home: Path, steps: int = 3) -> Trainee:
    """The next life of a rank that has done so many steps: its state is another one's."""
    trainee = Trainee(home).prepare()
    for step in range(steps):
        trainee.step(step)
    trainee.close()
    again = Trainee(home)
    again.room.live.state = b"?" * 64
    return again


@pytest.fixture
def trainee(tmp_path: Path) -> Iterator[Trainee]:
    found = trained(tmp_path)
    yield found
    found.close()


def restorer(trainee: Trainee, in_midst: bool = False) -> Restorer:
    return Restorer(trainee.room.world, trainee.capture, trainee.held, in_midst)


def memory(step: int, epoch: int = 1) -> StateOffered:
    return StateOffered(1, "memory", step, epoch, "all hold it")


def load(trainee: Trainee, offer: StateOffered, in_midst: bool = False) -> Restored | Unusable:
    return run_acts(restorer(trainee, in_midst).load(offer))


def flip(trainee: Trainee, stamp: Stamp) -> None:
    """One byte of that snapshot."""
    index = trainee.held.slot_of[stamp]
    with open(slot_path(trainee.room.options.job_dir, 0, index), "r+b") as file:
        file.seek(PAGE_BYTES + 5)
        file.write(b"\xff")


@settings(max_examples=20, deadline=None)
@given(steps=st.integers(1, 6), offered=st.integers(-1, 7))
def test_what_is_loaded_is_the_state_of_that_step_and_nothing_newer_is_left(
    tmp_path_factory: pytest.TempPathFactory, steps: int, offered: int
) -> None:
    trainee = trained(tmp_path_factory.mktemp("r"), steps)
    held = set(trainee.held.slot_of)
    found = load(trainee, memory(offered))
    if Stamp(offered, 1) in held:
        assert found == Restored(Stamp(offered, 1))
        assert trainee.room.live.state == state_after(offered)
        assert set(trainee.snapshots()) == {s for s in held if s.step <= offered}
    else:
        assert isinstance(found, Unusable) and found.holds is None, "it never had it"
        assert found.brought
        assert trainee.room.live.state == b"?" * 64
        assert set(trainee.snapshots()) == held
    trainee.close()


def test_what_is_newer_stays_where_it_may_be_wanted_again(trainee: Trainee) -> None:
    """Its bytes are whole, and some rank had no room for it (seed 923370)."""
    held = set(trainee.held.slot_of)
    older = min(held)
    offer = replace(memory(older.step), keeps_newer=True)
    assert load(trainee, offer) == Restored(older)
    assert trainee.room.live.state == state_after(older.step)
    assert set(trainee.snapshots()) == held and len(held) > 1


def test_a_snapshot_that_proves_no_more_is_told_with_what_is_left(trainee: Trainee) -> None:
    flip(trainee, Stamp(2, 1))
    found = load(trainee, memory(2))
    assert isinstance(found, Unusable)
    assert found.holds == tuple(sorted(set(trainee.held.slot_of) - {Stamp(2, 1)}))
    assert trainee.room.live.state == b"?" * 64, "nothing that does not prove is loaded"


def test_what_did_not_prove_is_not_offered_after_the_next_restart(tmp_path: Path) -> None:
    """Nobody has gone on meanwhile: the other ranks had to be started anew as well."""
    trainee = trained(tmp_path)
    held = set(trainee.held.slot_of)
    flip(trainee, Stamp(2, 1))
    assert isinstance(load(trainee, memory(2)), Unusable)
    trainee.close()
    again = Trainee(tmp_path)
    assert set(again.held.slot_of) == held - {Stamp(2, 1)}, "the others stay until all go"
    assert again.room.journal.kinds.count("slot-voided") == 0
    again.close()


def test_a_snapshot_that_proves_the_second_time_stays(
    trainee: Trainee, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not the slot that was at fault."""
    held = set(trainee.held.slot_of)

    def fails(*what: object) -> list[str]:
        raise DamageError("read wrongly")

    monkeypatch.setattr(trainee.room.live, "load", fails)
    found = load(trainee, memory(2))
    assert isinstance(found, Unusable) and Stamp(2, 1) not in (found.holds or ())
    assert set(trainee.snapshots()) == held


def test_what_was_brought_and_does_not_load_may_be_brought_anew(
    trainee: Trainee, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*what: object) -> list[str]:
        raise DamageError("read wrongly")

    monkeypatch.setattr(trainee.room.live, "load", fails)
    vote = restorer(trainee)
    mine = run_acts(vote.load(memory(2)))
    assert isinstance(mine, Unusable) and not mine.brought and mine.holds is not None
    del trainee.held.slot_of[Stamp(1, 1)]  # when this rank said what it holds, it was not there
    brought = run_acts(restorer(trainee).load(memory(1)))
    assert isinstance(brought, Unusable) and "read wrongly" in brought.why
    assert brought.brought and brought.holds is None


def test_an_intact_snapshot_that_does_not_stay_as_loaded_is_the_program_s_fault(
    trainee: Trainee,
) -> None:
    """No other source would do better, and a fresh start would train on what was loaded."""
    trainee.room.live.differs = ["model.weight: 3 of 8 values differ"]
    held = set(trainee.snapshots())
    vote = restorer(trainee)
    with pytest.raises(LayoutError, match=r"model\.weight: 3 of 8 values differ"):
        run_acts(vote.load(memory(2)))
    assert set(trainee.snapshots()) == held, "everything is kept"
    with pytest.raises(KeeperError, match="has to be started anew"):
        run_acts(vote.load(StateOffered(3, "fresh", -1, 0, "nothing is left")))


def test_a_checkpoint_that_is_loaded_leaves_what_memory_holds_until_all_may_go(
    trainee: Trainee,
) -> None:
    held = set(trainee.snapshots())
    trainee.room.live.checkpoints[9] = b"9" * 64
    assert load(trainee, StateOffered(2, "store", 9, 0, "newest")) == Restored(Stamp(9, 0))
    assert trainee.room.live.state == b"9" * 64
    assert set(trainee.snapshots()) == held != set()
    assert trainee.room.journal.kinds == ["restore-remark", "loaded"]


def test_a_checkpoint_that_cannot_be_read_is_refused_and_nothing_is_forgotten(
    trainee: Trainee,
) -> None:
    trainee.room.live.checkpoint_error = StoreError("away")
    held = set(trainee.snapshots())
    assert load(trainee, StateOffered(2, "store", 9, 0, "newest")) == Unusable(
        "away [KS3100]", unread=True
    )
    assert set(trainee.snapshots()) == held


def test_a_checkpoint_that_is_damaged_is_refused_for_good(trainee: Trainee) -> None:
    trainee.room.live.checkpoint_error = DamageError("torn")
    assert load(trainee, StateOffered(2, "store", 9, 0, "newest")) == Unusable("torn [KS2300]")


def test_a_process_that_has_loaded_a_state_does_not_start_afresh(trainee: Trainee) -> None:
    """Others could not load it; what is live here is not what a program begins with."""
    vote = restorer(trainee)
    assert run_acts(vote.load(memory(2))) == Restored(Stamp(2, 1))
    with pytest.raises(KeeperError, match="has to be started anew"):
        run_acts(vote.load(StateOffered(3, "fresh", -1, 0, "another rank could not")))
    assert trainee.snapshots() != {}


def test_a_fresh_start_forgets_nothing_before_all_may_go(trainee: Trainee) -> None:
    held = set(trainee.snapshots())
    fresh = StateOffered(3, "fresh", -1, 0, "nothing is there")
    with pytest.raises(KeeperError, match="in the middle of a job"):
        load(trainee, fresh, in_midst=True)
    assert load(trainee, fresh) == Restored(Stamp(-1, 0))
    assert set(trainee.snapshots()) == held != set()
