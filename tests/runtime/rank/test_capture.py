"""Capture: whatever happens, what is sealed is what the state was at a boundary, the page tells of
nothing else, and a failure costs a snapshot and nothing more."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.redundancy.memory_budget import SMALL_BLOCKS
from keepstep.core.resume.slot_growth import FULL_STEPS
from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot, slot_path, slot_paths
from keepstep.edge.shm.status_page import StatusPage
from keepstep.edge.torch.page_locks import PageLocks
from keepstep.errors import IdentityError, MemoryBudgetError
from keepstep.model.events import DEBUG, WARNING
from keepstep.model.numbers import NotFinite
from keepstep.model.snapshot import Phase, RankStatus, SlotState, Stamp
from keepstep.model.units import GIB, MIB, PAGE_BYTES
from keepstep.model.wire import Part
from keepstep.runtime.rank.capture import GROW_INLINE_BYTES, Capture
from keepstep.runtime.rank.commit_view import CommitLook, CommitView, PagesOfOneNode
from keepstep.runtime.rank.holdings import Holdings
from tests.edge.torch.fake_locker import FakeLocker
from tests.runtime.fakes import RankRoom


class Trainee:
    """A rank that trains alone: its state after a step is a function of the step."""

    def __init__(
        self, home: Path, room: RankRoom | None = None, view: CommitView | None = None
    ) -> None:
        self.room = RankRoom(home) if room is None else room
        page = StatusPage.own(MEMORY, self.room.options.job_dir, 0)
        assert page is not None
        self.page = page
        self.announced: list[tuple[Phase, int]] = []
        self.changes = 0
        self.capture = Capture(
            self.room.world,
            self.room.options,
            self.room.who,
            self.page,
            view or PagesOfOneNode(MEMORY, self.room.options.job_dir, self.room.who.world_size),
            lambda phase, step: self.announced.append((phase, step)),
            self._changed,
        )
        self.page.publish(rank=0, world_size=1, epoch=1)
        self.held: Holdings = run_acts(self.capture.prove())

    def _changed(self) -> None:
        self.changes += 1

    def prepare(self) -> Trainee:
        run_acts(self.capture.prepare())
        return self

    def step(self, step: int, seals: bool = True) -> None:
        self.room.live.state = state_after(step)
        self.capture.boundary(Stamp(step, 1), 0.5 * step)
        self.room.trainer.run()
        if seals:
            self.room.settle()

    @property
    def told(self) -> RankStatus:
        status = self.page.read()
        assert status is not None
        return status

    def snapshots(self) -> dict[Stamp, bytes]:
        """Proven, from the files."""
        found = {}
        for path in slot_paths(MEMORY, self.room.options.job_dir, 0):
            slot = Slot(MEMORY, path)
            try:
                header, _ = slot.verify()
                found[header.stamp] = bytes(slot.payload[:64])
            except LookupError:
                pass
            slot.close()
        return found

    def close(self) -> None:
        self.capture.close()
        self.page.close()


def state_after(step: int) -> bytes:
    return bytes([step % 256]) * 64


def sealed(status: RankStatus) -> set[Stamp]:
    return {view.stamp for view in status.slots if view.state is SlotState.SEALED}


@pytest.fixture
def trainee(tmp_path: Path) -> Any:
    found = Trainee(tmp_path).prepare()
    yield found
    found.close()


WHAT = st.lists(st.sampled_from(["step", "slow", "torn", "error", "settle"]), max_size=25)


@settings(max_examples=40, deadline=None)
@given(WHAT)
def test_whatever_happens_a_snapshot_is_the_state_of_its_step_and_the_page_tells_the_truth(
    tmp_path_factory: pytest.TempPathFactory, story: list[str]
) -> None:
    trainee = Trainee(tmp_path_factory.mktemp("c")).prepare()
    live, step = trainee.room.live, -1
    for what in story:
        if what == "settle":
            trainee.room.settle()
            continue
        if what != "slow":  # whoever copies is through before the state changes: the fence
            trainee.room.settle()
        step += 1
        live.moves = ("state",) if what == "torn" else ()
        live.error = OSError("the disk") if what == "error" else None
        trainee.step(step, seals=what != "slow")
        if what == "slow":
            trainee.room.background.run()
    trainee.room.settle()
    found = trainee.snapshots()
    assert found == {stamp: state_after(stamp.step) for stamp in found}
    assert sealed(trainee.told) == set(found)
    captured, skipped, torn = trainee.capture.counts
    failed = len(trainee.room.journal.of("capture-failed"))
    assert captured + skipped + torn + failed == step + 1
    trainee.close()


def test_that_snapshots_are_lost_is_a_warning_once_and_again_after_one_that_was_sealed(
    trainee: Trainee,
) -> None:
    """Memory that takes nothing any more is told with the first step, not with each."""
    journal = trainee.room.journal
    for step, error in enumerate([OSError("a"), OSError("b"), OSError("c"), None, OSError("d")]):
        trainee.room.live.error = error
        trainee.step(step)
        trainee.room.settle()
    levels = [
        level
        for event, level in zip(journal.events, journal.levels, strict=True)
        if event.kind == "capture-failed"
    ]
    assert levels == [WARNING, DEBUG, DEBUG, WARNING]


def test_what_rests_on_a_collective_that_never_ended_is_not_sealed(trainee: Trainee) -> None:
    """The trainer may be a step ahead of its device when a peer is lost."""
    trainee.step(0)
    trainee.step(1, seals=False)
    trainee.room.groups.stood = False
    trainee.room.settle()
    assert set(trainee.snapshots()) == {Stamp(0, 1)}
    [lost] = trainee.room.journal.of("capture-failed")
    assert "a collective before step 1 had not ended as a peer was lost" in lost.why


def test_the_newest_snapshots_stay_and_a_new_life_finds_them(tmp_path: Path) -> None:
    trainee = Trainee(tmp_path).prepare()
    for step in range(6):
        trainee.step(step)
    assert max(sealed(trainee.told)) == Stamp(5, 1)
    before = trainee.snapshots()
    trainee.close()
    again = Trainee(tmp_path)
    assert set(again.held.slot_of) == set(before) and again.held.foreign_world is None
    assert again.snapshots() == before
    again.close()


def test_what_has_moved_while_it_was_copied_is_dropped_and_copied_eagerly(trainee: Trainee) -> None:
    trainee.room.live.moves = ("state",)
    trainee.step(0)
    assert trainee.snapshots() == {} and trainee.room.live.eager == ["state"]
    assert trainee.capture.counts == (0, 0, 1) and trainee.room.journal.kinds == ["torn"]


def test_a_state_that_is_not_finite_is_never_sealed_and_the_first_is_remembered(
    trainee: Trainee,
) -> None:
    trainee.step(0)
    trainee.room.live.bad = ("weight",)
    trainee.step(1)
    trainee.step(2)
    assert set(trainee.snapshots()) == sealed(trainee.told) == {Stamp(0, 1)}
    assert trainee.capture.finite.first == (1, NotFinite(("weight",)))
    told = [(e.data["step"], e.data["bad"]) for e in trainee.room.journal.of("condemned")]
    assert told == [(1, ["weight"])], "told once until a restore"
    trainee.room.live.bad = ()
    trainee.step(3)
    assert Stamp(3, 1) in trainee.snapshots()
    run_acts(trainee.capture.prove())  # another vote: what was before counts no more
    assert trainee.capture.finite.first is None


def test_infinities_that_may_be_meant_are_held_back_until_that_is_known(trainee: Trainee) -> None:
    trainee.step(0)
    trainee.room.live.bad, trainee.room.live.is_meant = ("gate",), True
    trainee.step(1)
    assert set(trainee.snapshots()) == {Stamp(0, 1)}
    assert trainee.room.journal.kinds == ["held-back"]
    trainee.room.live.is_meant = False  # NaN has come to it
    trainee.step(2)
    assert trainee.capture.finite.first == (1, NotFinite(("gate",)))
    trainee.capture.finite.forget()
    trainee.room.live.bad = ()
    trainee.step(3)
    assert Stamp(3, 1) in trainee.snapshots()


@pytest.mark.parametrize("oldest_is_good", [True, False])
def test_what_is_in_doubt_stays_where_there_is_nothing_else(
    trainee: Trainee, oldest_is_good: bool
) -> None:
    for step in (0, 1):
        trainee.step(step)
    trainee.capture.condemn_from(1 if oldest_is_good else 0)
    left = (0,) if oldest_is_good else (0, 1)
    assert set(trainee.snapshots()) == {Stamp(step, 1) for step in left}


@pytest.mark.parametrize("first", [0, 3, 5, 9])
def test_what_is_in_doubt_is_given_up_by_name(trainee: Trainee, first: int) -> None:
    for step in range(6):
        trainee.step(step)
    held = set(trainee.snapshots())
    trainee.capture.condemn_from(first)
    older = {stamp for stamp in held if stamp.step < first}
    left = older or held  # there is nothing else: a person may want to look at it
    assert set(trainee.snapshots()) == sealed(trainee.told) == left
    assert set(trainee.capture.holds) == set(left)
    told = {e.data["step"] for e in trainee.room.journal.of("condemned")}
    assert told == {stamp.step for stamp in held - left}


def test_what_is_seen_only_behind_the_copy_is_never_sealed(trainee: Trainee) -> None:
    trainee.room.live.moves_late = ("state",)
    trainee.step(0)
    assert trainee.snapshots() == {} and trainee.room.live.eager == ["state"]
    assert trainee.capture.counts == (0, 0, 1)


@pytest.mark.parametrize("seals", [True, False], ids=["sealed", "not sealed yet"])
def test_what_the_trainer_finds_in_passing_is_dropped_and_told_once(
    trainee: Trainee, seals: bool
) -> None:
    trainee.step(0)
    trainee.capture.passed()
    trainee.room.live.moves_unseen = ("state",)
    trainee.step(1, seals=seals)
    trainee.capture.passed()
    trainee.room.settle()
    trainee.capture.passed()
    assert set(trainee.snapshots()) == sealed(trainee.told) == {Stamp(0, 1)}
    assert trainee.room.live.eager == ["state"] and trainee.room.journal.kinds == ["torn"]


def test_an_error_costs_a_snapshot_and_the_slot_serves_again(trainee: Trainee) -> None:
    trainee.room.live.error = ValueError("something of the program's")
    trainee.step(0)
    assert "something of the program's" in trainee.room.journal.of("capture-failed")[0].why
    trainee.room.live.error = None
    trainee.step(1)
    assert sealed(trainee.told) == {Stamp(1, 1)}


def test_while_a_copy_is_under_way_the_update_has_it_to_wait_for(trainee: Trainee) -> None:
    trainee.step(0, seals=False)
    assert trainee.capture.copy_under_way is not None
    over: list[bool] = []
    trainee.capture.drain(lambda: over.append(True))
    assert over == []
    trainee.room.settle()
    assert over == [True]
    trainee.capture.passed()
    assert trainee.capture.copy_under_way is None
    assert trainee.announced == [(Phase.CAPTURE, 0), (Phase.SEAL, 0)]


def test_what_is_to_be_said_of_a_state_is_said_and_it_is_captured(trainee: Trainee) -> None:
    trainee.room.live.remark = "it has taken in a stranger"
    trainee.step(1)
    assert [event.why for event in trainee.room.journal.of("caveat")] == [trainee.room.live.remark]
    assert Stamp(1, 1) in trainee.snapshots()


def test_ranks_whose_captures_take_steps_capture_the_same_ones(tmp_path: Path) -> None:
    trainee = Trainee(tmp_path, RankRoom(tmp_path, ranks=2)).prepare()
    other = StatusPage.own(MEMORY, trainee.room.options.job_dir, 1)
    assert other is not None
    other.publish(rank=1, world_size=2, epoch=1)
    captured = set()
    for step in range(13):
        trainee.step(step, seals=step != 0)
        mine = trainee.told
        captured |= {stamp.step for stamp in sealed(mine)}
        # The other holds the same, and from step 3 on it is the slower one.
        span_steps = 3 if step >= 3 else 1
        other.publish(slots=mine.slots, decided_step=step, span_steps=span_steps)
    assert trainee.told.span_steps == 2, "step 0 was sealed at the boundary of step 2"
    assert captured == {0, 2, 6, 9, 12}
    trainee.close()
    other.close()


def test_a_slot_that_a_reader_has_pinned_is_left_alone(trainee: Trainee) -> None:
    for step in range(3):
        trainee.step(step)
    readers = []
    for path in slot_paths(MEMORY, trainee.room.options.job_dir, 0):
        readers.append(Slot(MEMORY, path))
        assert readers[-1].lock(exclusive=False)
    before = trainee.snapshots()
    trainee.step(3)
    assert trainee.snapshots() == before and trainee.capture.counts == (3, 1, 0)
    assert trainee.told.decided_step == 3
    for reader in readers:
        reader.close()
    trainee.step(4)
    assert Stamp(4, 1) in trainee.snapshots()


def test_the_first_skip_is_told_and_every_hundredth_after_it(trainee: Trainee) -> None:
    for step in range(252):
        trainee.step(step, seals=False)  # one is copied all the while
    told = trainee.room.journal.of("skipped")
    assert [event.data["skipped_steps"] for event in told] == [1, 101, 201]
    assert [event.data["step"] for event in told] == [1, 101, 201]


@pytest.mark.parametrize("size", [1000, GROW_INLINE_BYTES + 1])
def test_a_state_that_grows_gets_larger_slots(trainee: Trainee, size: int) -> None:
    """At once where that is quick, else in the background, and a step is skipped meanwhile."""
    size *= 100 if size == 1000 else 1
    trainee.room.live.state = bytes(size)
    trainee.capture.boundary(Stamp(0, 1), None)
    trainee.room.settle()
    if size > GROW_INLINE_BYTES:
        assert trainee.capture.counts == (0, 1, 0)
        trainee.capture.boundary(Stamp(1, 1), None)
        trainee.room.settle()
    assert trainee.capture.counts[0] == 1


class Behind:
    """See `CommitView`: another rank holds nothing newer than step 0."""

    def look(self, epoch: int) -> CommitLook:
        return CommitLook(Stamp(0, 1), lambda stamp: False, 1)

    def close(self) -> None:
        """Nothing."""


@pytest.mark.parametrize("slots", [0, 2])
def test_a_rank_whose_captures_find_no_slot_free_gets_more_where_that_is_left_to_us(
    tmp_path: Path, slots: int
) -> None:
    room = RankRoom(tmp_path)
    room.options = replace(room.options, slots=slots)
    room.live.state = bytes(SMALL_BLOCKS * MEMORY.block_bytes)  # too large to have them at once
    trainee = Trainee(tmp_path, room, Behind()).prepare()
    assert len(trainee.told.slots) == 2
    for step in range(2 + FULL_STEPS):
        trainee.step(step)
    assert sealed(trainee.told) == {Stamp(0, 1), Stamp(1, 1)}
    trainee.step(9)
    if slots:
        assert len(trainee.told.slots) == 2 and trainee.capture.counts == (2, 4, 0)
    else:
        assert sealed(trainee.told) == {Stamp(0, 1), Stamp(1, 1), Stamp(9, 1)}
        assert "slot-added" in room.journal.kinds
    trainee.close()


def test_what_the_budget_has_no_room_for_is_not_made(tmp_path: Path) -> None:
    room = RankRoom(tmp_path)
    room.options = replace(room.options, slots=0)
    room.live.state = bytes(SMALL_BLOCKS * MEMORY.block_bytes)
    free = [8 * GIB]
    room.world = replace(room.world, available_bytes=lambda: free[0])
    trainee = Trainee(tmp_path, room, Behind()).prepare()
    free[0] = 0
    for step in range(20):
        trainee.step(step)
    assert len(trainee.told.slots) == 2 and room.journal.kinds == ["skipped"]
    trainee.close()


def test_one_more_slot_that_cannot_be_made_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Slot:
        raise MemoryBudgetError("no space is left")

    room = RankRoom(tmp_path)
    room.options = replace(room.options, slots=0)
    room.live.state = bytes(SMALL_BLOCKS * MEMORY.block_bytes)
    trainee = Trainee(tmp_path, room, Behind()).prepare()
    monkeypatch.setattr(Slot, "create", full)
    for step in range(2 + FULL_STEPS):
        trainee.step(step)
    assert "slot-refused" in room.journal.kinds
    assert sealed(trainee.told) == {Stamp(0, 1), Stamp(1, 1)}
    trainee.close()


def test_forgetting_what_is_newer(trainee: Trainee) -> None:
    for step in range(3):
        trainee.step(step)
    trainee.capture.forget_newer(Stamp(1, 1))
    assert set(trainee.snapshots()) == sealed(trainee.told) == {Stamp(0, 1), Stamp(1, 1)}
    trainee.capture.forget_newer(None)
    assert trainee.snapshots() == {} and sealed(trainee.told) == set()


def test_what_was_brought_twice_is_kept_once(trainee: Trainee) -> None:
    """The keeper brought it, the offer failed, and with the next one it brought it again. With the
    horizon in both slots nothing would ever be captured."""
    for step in range(2):
        trainee.step(step)
    stamps = [view.stamp for view in trainee.told.slots]
    older, newer = (
        slot_path(trainee.room.options.job_dir, 0, stamps.index(Stamp(step, 1))) for step in (0, 1)
    )
    with open(older, "r+b") as file:
        file.write(newer.read_bytes())
    held = run_acts(trainee.capture.look_again())
    kept = held.slot_of[Stamp(1, 1)]
    trainee.capture.forget_newer(Stamp(1, 1), at=kept)
    views = trainee.told.slots
    assert [i for i, view in enumerate(views) if view.stamp == Stamp(1, 1)] == [kept]
    assert set(trainee.snapshots()) == {Stamp(1, 1)}


def damage(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_what_the_scrub_found_is_given_up_only_if_it_is_so(trainee: Trainee) -> None:
    trainee.step(0)
    [index] = [i for i, v in enumerate(trainee.told.slots) if v.state is SlotState.SEALED]
    trainee.capture.damaged(index, "block 0")
    trainee.room.settle()
    assert sealed(trainee.told) == {Stamp(0, 1)}, "it has been rewritten since, and is whole"
    with open(slot_path(trainee.room.options.job_dir, 0, index), "r+b") as file:
        file.seek(PAGE_BYTES + 5)
        file.write(b"\xff")
    trainee.capture.damaged(index, "block 0")
    trainee.capture.damaged(99, "there is no such slot")
    trainee.room.settle()
    assert sealed(trainee.told) == set() and trainee.room.journal.kinds == ["slot-voided"]


@pytest.mark.parametrize("part", [Part.HEADER, Part.TABLE, Part.MANIFEST])
def test_a_snapshot_without_its_proof_is_not_among_what_is_held(tmp_path: Path, part: Part) -> None:
    trainee = Trainee(tmp_path).prepare()
    for step in range(2):
        trainee.step(step)
    index = next(i for i, v in enumerate(trainee.told.slots) if v.stamp == Stamp(1, 1))
    slot = trainee.capture.slot(index)
    slot.part(part, slot.header())[5] ^= 1
    trainee.close()
    again = Trainee(tmp_path)
    assert set(again.held.slot_of) == {Stamp(0, 1)} and "damaged" in again.room.journal.kinds
    again.close()


def test_another_worlds_snapshot_is_none_of_this_one_and_another_jobs_is_an_error(
    tmp_path: Path,
) -> None:
    trainee = Trainee(tmp_path).prepare()
    trainee.step(0)
    trainee.close()
    larger = RankRoom(tmp_path, ranks=2)
    found = Trainee(tmp_path, larger)
    assert found.held.slot_of == {} and found.held.foreign_world == 1
    found.close()
    other = RankRoom(tmp_path)
    other.who = type(other.who)("another", 1000, 0, 1, 1)
    with pytest.raises(IdentityError):
        Trainee(tmp_path, other)


# -- slots that a device copies into


class OnDevice(Trainee):
    """A rank whose state is on a device. It asserts that nothing is registered twice, or unmapped
    while it is registered."""

    def __init__(
        self, home: Path, view: CommitView | None = None, refuses: str | None = None
    ) -> None:
        room = RankRoom(home)
        room.options = replace(room.options, slots=0)
        self.locker = FakeLocker(refuses)
        room.live.locks = PageLocks(self.locker)
        super().__init__(home, room, view)

    def are_locked(self) -> bool:
        """Whether just the slots that this rank has now are registered."""
        self.look()
        slots = [self.capture.slot(index) for index in range(len(self.told.slots))]
        return self.locker.registered == {slot.payload_address for slot in slots}

    def look(self) -> None:
        self.locker.look()
        assert self.locker.wrong == []

    def end(self) -> None:
        self.close()
        self.look()
        assert self.locker.registered == set()


def test_slots_are_locked_from_their_making_to_the_end(tmp_path: Path) -> None:
    trainee = OnDevice(tmp_path).prepare()
    assert trainee.are_locked()
    for step in range(5):
        trainee.room.live.moves = ("state",) if step == 3 else ()  # its slot is voided
        trainee.step(step)
    trainee.capture.forget_newer(None)
    assert trainee.are_locked()
    made = len(trainee.told.slots)
    assert [what for what, _ in trainee.locker.calls] == ["register"] * made
    trainee.end()


def test_a_new_life_locks_what_it_adopts(tmp_path: Path) -> None:
    trainee = OnDevice(tmp_path).prepare()
    trainee.step(0)
    trainee.end()
    again = OnDevice(tmp_path)
    paths = slot_paths(MEMORY, again.room.options.job_dir, 0)
    assert len(again.locker.registered) == len(paths) > 0, "before it restores"
    again.prepare()
    assert again.are_locked() and again.held.slot_of.keys() == {Stamp(0, 1)}
    again.step(1)
    assert again.are_locked() and Stamp(1, 1) in again.snapshots()
    again.end()


@pytest.mark.parametrize("size", [100_000, GROW_INLINE_BYTES + 1])
def test_a_slot_that_grows_is_unlocked_before_its_old_map_goes(tmp_path: Path, size: int) -> None:
    trainee = OnDevice(tmp_path).prepare()
    trainee.room.live.state = bytes(size)
    for step in range(2):
        trainee.capture.boundary(Stamp(step, 1), None)
        trainee.room.settle()
    assert trainee.capture.counts[0] >= 1 and trainee.are_locked()
    assert "unregister" in [what for what, _ in trainee.locker.calls]
    trainee.end()


def test_a_slot_that_was_too_small_for_a_new_life_is_replaced(tmp_path: Path) -> None:
    trainee = OnDevice(tmp_path).prepare()
    trainee.end()
    again = OnDevice(tmp_path)
    again.room.live.state = bytes(1 << 20)
    again.prepare()
    assert again.are_locked()
    again.end()


def test_what_the_keeper_has_brought_under_a_slot_s_name_is_locked_instead(tmp_path: Path) -> None:
    """Else the device would write to pages that nobody reads, and an older step would be sealed."""
    trainee = OnDevice(tmp_path).prepare()
    trainee.step(0)
    path = slot_path(trainee.room.options.job_dir, 0, 1)
    old = trainee.capture.slot(1)
    Slot.create(MEMORY, path, old.capacity, old.manifest_capacity).close()
    run_acts(trainee.capture.look_again())
    assert trainee.are_locked()
    for step in range(1, 4):
        trainee.step(step)
    assert trainee.snapshots()[Stamp(3, 1)] == state_after(3)
    trainee.end()


def minor_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_slots_that_are_still_the_same_files_are_not_touched_for_the_first_time_again(
    tmp_path: Path,
) -> None:
    """A map made anew takes a fault a page, at the next capture if not at once."""
    trainee = OnDevice(tmp_path).prepare()
    state = bytes(8 * MIB)
    slot_pages = len(state) // PAGE_BYTES

    def saves(first: int) -> None:
        for step in range(first, first + 6):  # each slot is written, and read for its proof
            trainee.room.live.state = state
            trainee.capture.boundary(Stamp(step, 1), 0.5)
            trainee.room.trainer.run()
            trainee.room.settle()

    saves(0)  # makes the slots for this state
    before = minor_faults()
    saves(6)
    usual = minor_faults() - before
    assert usual < slot_pages / 4, "slots in use are mapped"
    kept = {trainee.capture.slot(n).path: trainee.capture.slot(n) for n in range(2)}
    replaced = kept[slot_path(trainee.room.options.job_dir, 0, 1)]
    trainee.locker.calls.clear()
    path, manifest = replaced.path, replaced.manifest_capacity
    Slot.create(MEMORY, path, replaced.capacity, manifest).close()
    before = minor_faults()
    run_acts(trainee.capture.look_again())
    assert trainee.capture.slot(0) is kept[slot_path(trainee.room.options.job_dir, 0, 0)]
    assert [what for what, _ in trainee.locker.calls] == ["unregister", "register"]
    assert trainee.are_locked()
    saves(12)
    spent = minor_faults() - before
    assert spent < 1.5 * slot_pages + usual, f"{spent} faults, of which one map takes {slot_pages}"
    run_acts(trainee.capture.look_again())  # nothing is another file
    assert [what for what, _ in trainee.locker.calls] == ["unregister", "register"]
    before = minor_faults()
    saves(18)
    assert minor_faults() - before < slot_pages / 4
    trainee.end()


@pytest.mark.parametrize("comes_too_late", [False, True])
def test_one_more_slot_is_locked_and_unlocked_when_nobody_takes_it(
    tmp_path: Path, comes_too_late: bool
) -> None:
    trainee = OnDevice(tmp_path, Behind())
    trainee.room.live.state = bytes(SMALL_BLOCKS * MEMORY.block_bytes)
    trainee.prepare()
    for step in range(2 + FULL_STEPS):
        trainee.step(step, seals=False)
        trainee.room.background.run()
    if comes_too_late:
        trainee.close()
    trainee.room.settle()
    assert [what for what, _ in trainee.locker.calls].count("register") == 3
    if comes_too_late:
        trainee.look()
        assert trainee.locker.registered == set()
    else:
        assert "slot-added" in trainee.room.journal.kinds and trainee.are_locked()
        trainee.end()


def test_a_refusal_is_told_once_and_captures_go_on(tmp_path: Path) -> None:
    trainee = OnDevice(tmp_path, refuses="out of memory (error 2)").prepare()
    for step in range(3):
        trainee.step(step)
    trainee.room.live.state = bytes(100_000)
    trainee.capture.boundary(Stamp(3, 1), None)
    trainee.room.settle()
    [told] = trainee.room.journal.of("slot-unlocked")
    assert "\n" not in told.why and "rank 0: CUDA does not page-lock slot-0" in told.why
    assert trainee.capture.counts == (4, 0, 0)
    assert trainee.snapshots()[Stamp(2, 1)] == state_after(2)
    assert {what for what, _ in trainee.locker.calls} == {"register"}
    trainee.end()


def test_a_rank_that_fails_under_a_capture_leaves_nothing_locked(tmp_path: Path) -> None:
    trainee = OnDevice(tmp_path).prepare()
    trainee.step(0, seals=False)
    trainee.close()
    trainee.room.settle()
    trainee.look()
    assert trainee.locker.registered == set()
