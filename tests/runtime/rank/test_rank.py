"""Rank: from its beginning to its end over ports alone: it trains only when permitted, resumes bit
for bit, stays when a peer is lost, and says goodbye."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot, slot_paths
from keepstep.edge.shm.status_page import StatusPages
from keepstep.errors import KeeperError, KeepstepError, PeerLost
from keepstep.model.messages.agent_rank import (
    CannotStay,
    CanStay,
    PeerLostNotice,
    RegroupAt,
    Regrouped,
    TrainingEnded,
)
from keepstep.model.messages.keeper_rank import (
    CheckpointDone,
    Goodbye,
    JoinVote,
    Released,
    StateLoaded,
    StateOffered,
    TrainingPermitted,
    VoteRefused,
    WantCheckpoint,
)
from keepstep.model.snapshot import Phase, Stamp
from keepstep.model.units import S_NS
from keepstep.runtime.rank.joining import Joined, Joining
from keepstep.runtime.rank.rank import ENDED_WITHIN_NS, RELEASE_WITHIN_NS, Rank, Stage
from keepstep.runtime.rank.regroup import ORDER_WITHIN_NS
from keepstep.runtime.rank.wanted_checkpoint import AGAIN_NS, TOLD_NS, TRIES
from tests.runtime.fakes import RankRoom
from tests.runtime.rank.test_bootstrap import FACTS
from tests.runtime.rank.test_capture import state_after

PLACE = RegroupAt(1, "h", 5)


def go(epoch: int, offer: int) -> TrainingPermitted:
    return TrainingPermitted(epoch, offer, "memory", Stamp(0, 0), 0, "why")


class Trainee:
    """A rank and its program, which it drives."""

    def __init__(self, room: RankRoom) -> None:
        self.room = room
        self.changes = 0
        self.announced: list[tuple[Phase, int]] = []
        self._offers = 0
        joined: list[Joined] = []
        failed: list[KeepstepError] = []
        Joining(room.world, room.options, room.who, FACTS, joined.append, failed.append).begin()
        assert failed == []
        self.rank = Rank(room.world, room.options, room.who, joined[0], self)
        self.rank.begin()
        room.settle()

    def announce(self, phase: Phase, step: int) -> None:
        self.announced.append((phase, step))

    def changed(self) -> None:
        self.changes += 1

    @property
    def asked(self) -> JoinVote:
        asked: JoinVote = self.room.keepers.box.of(JoinVote)[-1]
        return asked

    def offer(self, source: str, step: int, epoch: int = 1, keeps_newer: bool = False) -> None:
        """The keeper offers that, it is loaded, and all may go."""
        self._offers += 1
        box = self.room.keepers.box
        why = "so it was decided"
        box.says(StateOffered(self._offers, source, step, epoch, why, keeps_newer))  # type: ignore[arg-type]
        self.room.settle()
        assert box.sent[-1] == StateLoaded(self.room.who.rank, self._offers)

    def permit(self, epoch: int) -> None:
        self.room.keepers.box.says(go(epoch, self._offers))
        self.room.settle()

    def start(self, source: str = "fresh", step: int = -1, epoch: int = 1) -> Trainee:
        self.offer(source, step, epoch if source != "fresh" else 0)
        self.permit(epoch + (source != "fresh"))
        assert self.rank.stage is Stage.READY
        return self

    def step(self, body: Callable[[], None] = lambda: None) -> bool:
        """One step whose body is inside `with step:`; whether it counts."""
        assert self.rank.may_begin_step()
        number = self.rank.begin_step()
        self.rank.body_entered(number)
        body()
        self.room.live.state = state_after(number)
        self.rank.body_left()
        counts = self.rank.end_step(True, True, 1000, None)
        self.room.settle()
        return counts

    def find_together_again(self) -> None:
        """In a step a peer is lost, and the agent says where to meet."""
        self.step(self.lose_peer)
        self.rank.may_begin_step()
        self.room.settle()
        self.room.agents.box.says(PLACE)
        self.room.settle()

    def lose_peer(self) -> None:
        self.room.agents.box.says(PeerLostNotice("rank 1 was killed"))

    def end(self, ok: bool = True) -> list[str]:
        over: list[str] = []
        self.rank.close(ok, "well", lambda: over.append("over"))
        self.room.settle()
        return over


@pytest.fixture
def trainee(tmp_path: Path) -> Iterator[Trainee]:
    found = Trainee(RankRoom(tmp_path, ranks=2))
    yield found
    found.rank.abandon()


@settings(max_examples=15, deadline=None)
@given(steps=st.integers(1, 8), lives=st.integers(1, 3))
def test_every_life_goes_on_where_the_one_before_was_with_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory, steps: int, lives: int
) -> None:
    home = tmp_path_factory.mktemp("r")
    done = -1
    for life in range(lives):
        trainee = Trainee(RankRoom(home))
        if life:
            assert max(trainee.asked.holds) == Stamp(done, life), "all that was sealed"
            trainee.start("memory", done, life)
            assert trainee.room.live.state == state_after(done)
        else:
            trainee.start()
        assert trainee.rank.step == done
        for _ in range(steps):
            assert trainee.step()
        done += steps
        trainee.rank.abandon()


def test_what_was_shared_is_shared_again_by_who_resumes_from_memory_alone(tmp_path: Path) -> None:
    seen: list[list[Stamp | None]] = []
    for source, step in (("fresh", -1), ("memory", 0)):
        trainee = Trainee(RankRoom(tmp_path))
        capture, stamps = trainee.rank._capture, []
        resumed = capture.resumed
        capture.resumed = lambda *at, s=stamps, r=resumed: s.append(at[0]) or r(*at)  # type: ignore[method-assign, misc]
        trainee.start(source, step)
        trainee.step()
        trainee.rank.abandon()
        seen.append(stamps)
    assert seen == [[], [Stamp(0, 1)]]


def test_nobody_trains_before_all_may(trainee: Trainee) -> None:
    assert trainee.asked.holds == () and trainee.rank.stage is Stage.STARTING
    trainee.offer("fresh", -1, 0)
    assert trainee.rank.stage is Stage.STARTING and not trainee.rank.may_begin_step()
    changes = trainee.changes
    trainee.permit(1)
    assert trainee.rank.may_begin_step() and trainee.changes > changes
    assert "slots-made" in trainee.room.journal.kinds


def held_by(trainee: Trainee) -> set[Stamp]:
    """What proves in its slots' files."""
    found = set()
    for path in slot_paths(MEMORY, trainee.room.options.job_dir, 0):
        slot = Slot(MEMORY, path)
        with suppress(LookupError):
            found.add(slot.verify()[0].stamp)
        slot.close()
    return found


@pytest.mark.parametrize("source", ["store", "fresh"])
def test_what_memory_holds_stays_until_all_do_without_it(trainee: Trainee, source: str) -> None:
    trainee.start()
    for _ in range(3):
        trainee.step()
    trainee.rank.abandon()
    again = Trainee(RankRoom(trainee.room.options.arena_dir, ranks=2))
    again.room.live.checkpoints[1] = again.room.live.state
    again.offer(source, 1 if source == "store" else -1, 0)
    assert Stamp(2, 1) in held_by(again)
    again.permit(2)
    assert held_by(again) == set()
    again.rank.abandon()


@pytest.mark.parametrize("keeps_newer", [True, False])
def test_what_is_newer_and_was_kept_goes_when_all_may_train(
    trainee: Trainee, keeps_newer: bool
) -> None:
    """Where an older state is taken because some rank had no room for the newest."""
    trainee.start()
    for _ in range(3):
        trainee.step()
    trainee.rank.abandon()
    again = Trainee(RankRoom(trainee.room.options.arena_dir, ranks=2))
    held = held_by(again)
    older, newest = sorted(held)[-2:]
    again.offer("memory", older.step, older.epoch, keeps_newer)
    assert held_by(again) == (held if keeps_newer else held - {newest})
    again.permit(2)
    assert held_by(again) == held - {newest}
    again.rank.abandon()


def test_a_refused_vote_is_an_error(trainee: Trainee) -> None:
    trainee.room.keepers.box.says(VoteRefused("another world size"))
    assert trainee.rank.stage is Stage.FAILED and isinstance(trainee.rank.error, KeeperError)
    assert trainee.room.groups.is_closed


def test_where_nobody_may_train_a_rank_leaves_the_word_to_its_agent(trainee: Trainee) -> None:
    trainee.room.keepers.box.says(VoteRefused("another world size", is_final=True))
    assert trainee.rank.stage is Stage.STARTING
    trainee.room.time.pass_ns(ENDED_WITHIN_NS)
    assert trainee.rank.stage is Stage.FAILED, "nobody has ended it"


def test_where_nobody_may_train_and_no_agent_is_there_it_is_an_error_at_once(
    tmp_path: Path,
) -> None:
    trainee = Trainee(RankRoom(tmp_path, has_agent=False))
    trainee.room.keepers.box.says(VoteRefused("another world size", is_final=True))
    assert trainee.rank.stage is Stage.FAILED and isinstance(trainee.rank.error, KeeperError)


def test_the_first_step_after_a_restore_is_told(trainee: Trainee) -> None:
    trainee.start()
    for _ in range(3):
        trainee.step()
    assert trainee.room.journal.of("next-step") == [], "nothing was restored"
    trainee.rank.abandon()
    again = Trainee(RankRoom(trainee.room.options.arena_dir, ranks=2)).start("memory", 2)
    again.step()
    again.step()
    assert [e.data["step"] for e in again.room.journal.of("next-step")] == [3]
    again.rank.abandon()


def test_who_stays_rolls_back_and_goes_on_in_its_process(trainee: Trainee) -> None:
    trainee.start()
    for _ in range(3):
        trainee.step()
    assert trainee.room.agents.box.of(CanStay) == [CanStay(0)]

    def lost() -> None:
        trainee.lose_peer()
        trainee.room.groups.is_worthless = True

    assert not trainee.step(lost), "what it has computed is worthless"
    assert not trainee.rank.may_begin_step() and trainee.rank.stage is Stage.REGROUPING
    trainee.room.settle()
    trainee.room.agents.box.says(PLACE)
    trainee.room.settle()
    assert max(trainee.asked.holds) == Stamp(2, 1)
    trainee.offer("memory", 2)
    trainee.permit(2)
    assert trainee.rank.stage is Stage.REGROUPING, "the groups are not there yet"
    [(place, then)] = trainee.room.groups.rebuilding
    then(None)
    assert place == PLACE and trainee.rank.may_begin_step()
    assert trainee.room.agents.box.of(Regrouped) == [Regrouped(0)]
    assert trainee.rank.begin_step() == 3 and trainee.rank.epoch == 2


def test_a_body_that_had_all_it_needed_is_captured_though_a_peer_is_lost(trainee: Trainee) -> None:
    trainee.start()
    trainee.step()
    assert trainee.step(trainee.lose_peer) and trainee.rank.step == 1
    assert not trainee.rank.may_begin_step()
    trainee.room.settle()
    trainee.room.agents.box.says(PLACE)
    trainee.room.settle()
    assert max(trainee.asked.holds) == Stamp(1, 1)


def test_one_more_loss_while_all_find_together_begins_anew(trainee: Trainee) -> None:
    trainee.start()
    trainee.step()
    trainee.find_together_again()
    votes = len(trainee.room.keepers.box.of(JoinVote))
    trainee.lose_peer()
    trainee.room.keepers.box.says(StateOffered(9, "memory", 1, 1, "of the vote before"))
    trainee.room.settle()
    assert StateLoaded(0, 9) not in trainee.room.keepers.box.sent
    trainee.room.agents.box.says(replace(PLACE, attempt=2))
    trainee.room.settle()
    assert len(trainee.room.keepers.box.of(JoinVote)) == votes + 1


def test_one_more_loss_while_copies_end_is_no_second_wait(trainee: Trainee) -> None:
    """What waited twice was answered once, and ended the rank two minutes later."""
    trainee.start()
    trainee.step()
    trainee.step(trainee.lose_peer)
    trainee.rank.may_begin_step()
    trainee.lose_peer()  # what is being copied is not sealed yet
    trainee.room.agents.box.says(PLACE)
    trainee.room.settle()
    trainee.offer("memory", 1)
    trainee.permit(2)
    [(_, then)] = trainee.room.groups.rebuilding
    then(None)
    assert trainee.rank.may_begin_step()
    trainee.room.time.pass_ns(2 * ORDER_WITHIN_NS)
    assert trainee.rank.stage is Stage.READY


def test_nothing_is_drained_or_loaded_before_the_device_is_free(trainee: Trainee) -> None:
    """What is ordered before stands behind a collective that waits for the lost peer."""
    trainee.room.groups.has_device = True
    trainee.start()
    trainee.step()
    trainee.rank.begin_step()
    trainee.rank.body_entered(1)
    trainee.lose_peer()
    trainee.room.groups.is_worthless = True
    trainee.rank.body_left()
    assert not trainee.rank.end_step(True, True, 1000, None)
    assert not trainee.rank.may_begin_step() and trainee.rank.stage is Stage.REGROUPING
    trainee.room.agents.box.says(PLACE)
    trainee.room.trainer.run(), trainee.room.background.run()
    votes = len(trainee.room.keepers.box.of(JoinVote))
    assert votes == 1, "it does not vote while its device is held"
    trainee.room.settle()
    assert trainee.room.groups.aborts == 1
    assert len(trainee.room.keepers.box.of(JoinVote)) == 2


def test_a_device_that_does_not_come_free_ends_this_process(trainee: Trainee) -> None:
    trainee.room.groups.has_device = True
    trainee.room.groups.cannot_abort = ["group tp has not ended within 15.0 s"]
    trainee.start()
    trainee.step()
    trainee.step(trainee.lose_peer)
    trainee.rank.may_begin_step()
    trainee.room.settle()
    assert trainee.rank.stage is Stage.FAILED
    assert "this process cannot stay: a communicator could not" in str(trainee.rank.error)
    assert trainee.room.agents.box.of(CannotStay) == [CannotStay(0)]


def test_a_loss_while_the_groups_are_built_aborts_these_as_well(trainee: Trainee) -> None:
    trainee.room.groups.has_device = True
    trainee.start()
    trainee.step()
    trainee.find_together_again()
    trainee.offer("memory", 1)
    trainee.permit(2)
    assert len(trainee.room.groups.rebuilding) == 1 and trainee.room.groups.aborts == 1
    trainee.lose_peer()
    trainee.room.settle()
    assert trainee.room.groups.aborts == 2
    trainee.room.agents.box.says(replace(PLACE, attempt=2))
    trainee.room.settle()
    trainee.offer("memory", 1)
    trainee.permit(3)
    [_, (place, then)] = trainee.room.groups.rebuilding
    then(None)
    assert place.attempt == 2 and trainee.rank.may_begin_step()


def test_where_to_meet_is_notice_enough(trainee: Trainee) -> None:
    """The notice of the loss may get lost."""
    trainee.start()
    trainee.step()

    def ordered() -> None:
        trainee.room.agents.box.says(PLACE)
        trainee.room.groups.is_worthless = True

    assert not trainee.step(ordered) and len(trainee.room.groups.lost) == 1
    assert not trainee.rank.may_begin_step() and trainee.rank.stage is Stage.REGROUPING
    trainee.room.settle()
    assert max(trainee.asked.holds) == Stamp(0, 1), "it asks without another word"


def test_where_to_meet_is_notice_enough_while_all_find_together(trainee: Trainee) -> None:
    trainee.start()
    trainee.step()
    trainee.find_together_again()
    votes = len(trainee.room.keepers.box.of(JoinVote))
    trainee.room.agents.box.says(replace(PLACE, attempt=2))
    trainee.room.settle()
    assert len(trainee.room.keepers.box.of(JoinVote)) == votes + 1
    assert len(trainee.room.groups.lost) == 2, "collectives of the attempt before end"


def test_groups_that_cannot_be_built_end_this_process(trainee: Trainee) -> None:
    trainee.start()
    trainee.step()
    trainee.find_together_again()
    trainee.offer("memory", 1)
    trainee.permit(2)
    trainee.room.groups.rebuilding[0][1]("nobody came")
    assert trainee.rank.stage is Stage.FAILED
    assert trainee.room.agents.box.of(CannotStay) == [CannotStay(0)]


def test_without_a_body_a_lost_peer_is_an_error_of_the_program(trainee: Trainee) -> None:
    trainee.start()
    trainee.step()
    trainee.rank.begin_step()
    trainee.lose_peer()
    with pytest.raises(PeerLost):
        trainee.rank.before_update()
    with pytest.raises(PeerLost):
        trainee.rank.end_step(False, True, 1000, None)


def test_a_step_that_is_taken_back_is_done_again_from_before_it(trainee: Trainee) -> None:
    trainee.start()
    for _ in range(3):
        assert trainee.step()
    trainee.rank.take_back(2)
    assert not trainee.rank.may_begin_step()
    trainee.room.settle()
    assert trainee.rank.stage is Stage.GOING_BACK
    assert trainee.asked.doubted_from == 2
    assert max(trainee.asked.holds).step == 1, "what is in doubt is offered"
    trainee.offer("memory", 1)
    trainee.permit(2)
    assert trainee.rank.may_begin_step() and trainee.rank.step == 1
    assert trainee.room.live.state == state_after(1)
    assert trainee.room.groups.rebuilding == [], "all peers are there"
    assert trainee.step() and Stamp(2, 2) in held_by(trainee)


def test_a_vote_behind_one_that_took_steps_back_doubts_nothing(trainee: Trainee) -> None:
    trainee.start()
    for _ in range(3):
        trainee.step()
    trainee.rank.take_back(2)
    trainee.room.settle()
    trainee.offer("memory", 1)
    trainee.permit(2)
    trainee.step()
    trainee.find_together_again()
    assert trainee.asked.doubted_from is None


def test_a_peer_that_is_lost_while_a_step_is_taken_back_is_met_anew(trainee: Trainee) -> None:
    trainee.start()
    for _ in range(3):
        trainee.step()
    trainee.rank.take_back(2)
    trainee.room.settle()
    trainee.lose_peer()
    trainee.room.settle()
    assert trainee.rank.stage is Stage.REGROUPING
    trainee.room.agents.box.says(PLACE)
    trainee.room.settle()
    assert trainee.asked.doubted_from == 2
    trainee.offer("memory", 1)
    trainee.permit(2)
    [(place, then)] = trainee.room.groups.rebuilding
    assert place == PLACE
    then(None)
    assert trainee.rank.stage is Stage.READY and trainee.rank.regroups == 1


def test_no_step_is_taken_back_while_a_peer_is_lost(trainee: Trainee) -> None:
    trainee.start()
    trainee.step()
    trainee.step(trainee.lose_peer)
    trainee.rank.take_back(1)
    assert trainee.rank.stage is Stage.READY and trainee.rank.has_lost_peer


def test_a_newcomer_joins_its_peers_before_it_trains(tmp_path: Path) -> None:
    room = RankRoom(tmp_path, ranks=2)
    room.groups.is_muted = True
    room.world = replace(room.world, takes_place_at=PLACE)
    trainee = Trainee(room)
    box = room.keepers.box
    room.live.checkpoints[4] = b"4" * 64
    box.says(StateOffered(1, "store", 4, 0, "the others stand there"))
    room.settle()
    box.says(go(2, 1))
    room.settle()
    assert trainee.rank.stage is Stage.STARTING
    room.groups.rebuilding[0][1](None)
    assert trainee.rank.stage is Stage.READY and trainee.rank.step == 4
    trainee.rank.abandon()


# -- checkpoints, and the end


@pytest.mark.parametrize("every", [0, 2])
def test_checkpoints_are_asked_for_by_rank_0_every_so_many_steps(
    tmp_path: Path, every: int
) -> None:
    room = RankRoom(tmp_path)
    room.options = replace(room.options, has_store=True, persist_every_steps=every)
    trainee = Trainee(room).start()
    for _ in range(6):
        trainee.step()
    assert [want.step for want in room.keepers.box.of(WantCheckpoint)] == (
        [1, 3, 5] if every else []
    )
    trainee.rank.abandon()


@pytest.mark.parametrize("ok", [True, False])
def test_a_goodbye_comes_behind_everything_else(trainee: Trainee, ok: bool) -> None:
    trainee.start()
    for _ in range(2):
        trainee.step()
    assert trainee.end(ok) == []
    box = trainee.room.keepers.box
    assert box.sent[-1] == Goodbye(0, ok, "well")
    assert trainee.room.agents.box.of(TrainingEnded) == [TrainingEnded(0)] * ok
    [summary] = trainee.room.journal.of("summary")
    assert summary.data["captured_steps"] == 2
    box.says(Released())
    assert trainee.rank.stage is Stage.OVER and not box.is_open
    assert trainee.end() == ["over"], "twice is once"


def test_the_last_step_goes_to_the_store_first(tmp_path: Path) -> None:
    room = RankRoom(tmp_path)
    room.options = replace(room.options, has_store=True)
    trainee = Trainee(room).start()
    trainee.step()
    trainee.end()
    box = room.keepers.box
    [want] = box.of(WantCheckpoint)
    assert want.step == 0 and box.of(Goodbye) == []
    assert room.agents.box.of(CannotStay) == [CannotStay(0)], "it meets nobody any more"
    room.time.pass_ns(7 * S_NS)
    page = StatusPages(MEMORY, room.options.job_dir).read(0)
    assert page is not None and 6 * S_NS <= page.stall_ns_total <= 7 * S_NS, "as it waits"
    box.says(CheckpointDone(want.ticket, True, 0, "written"))
    assert box.of(Goodbye) == [Goodbye(0, True, "well")] and trainee.rank.unsaved == ""
    [summary] = room.journal.of("summary")
    assert summary.data["waited_ns"] == 7 * S_NS and summary.data["stall_ns_per_step"] == 0
    box.says(Released())


def test_a_last_step_that_cannot_be_written_is_asked_for_again_and_then_no_good_end(
    tmp_path: Path,
) -> None:
    room = RankRoom(tmp_path)
    room.options = replace(room.options, has_store=True)
    trainee = Trainee(room).start()
    trainee.step()
    trainee.end()
    box = room.keepers.box
    for tries in range(1, TRIES + 1):
        assert len(box.of(WantCheckpoint)) == tries and box.of(Goodbye) == []
        want = box.of(WantCheckpoint)[-1]
        box.says(CheckpointDone(want.ticket, False, None, "the disk is full"))
        room.time.pass_ns(AGAIN_NS)
    [bye] = box.of(Goodbye)
    assert not bye.ok and bye.why == trainee.rank.unsaved and "the disk is full" in bye.why
    assert room.agents.box.of(TrainingEnded) == [] and "persist-failed" in room.journal.kinds
    box.says(Released())


def test_a_keeper_that_dies_over_the_last_checkpoint_costs_it_nothing(tmp_path: Path) -> None:
    room = RankRoom(tmp_path)
    room.options = replace(room.options, has_store=True)
    trainee = Trainee(room).start()
    trainee.step()
    over = trainee.end()
    room.keepers.box.dies()
    room.time.pass_ns(AGAIN_NS)
    box = room.keepers.box
    [want] = box.of(WantCheckpoint)
    assert want.step == 0 and box.of(Goodbye) == [] and over == []
    box.says(CheckpointDone(want.ticket, True, 0, "written"))
    assert box.of(Goodbye) == [Goodbye(0, True, "well")]
    box.says(Released())


@pytest.mark.parametrize("step, asks_again", [(6, False), (7, True), (8, True)])
def test_only_a_step_that_is_in_memory_no_more_is_not_asked_for_again(
    tmp_path: Path, step: int, asks_again: bool
) -> None:
    room = RankRoom(tmp_path)
    room.options = replace(room.options, has_store=True)
    trainee = Trainee(room).start()
    answers: list[CheckpointDone] = []
    trainee.rank.persist(7, "for once", answers.append)
    box = room.keepers.box
    [want] = box.of(WantCheckpoint)
    box.says(CheckpointDone(want.ticket, False, step, "it could not be"))
    room.time.pass_ns(AGAIN_NS)
    assert [answer.step for answer in answers] == ([] if asks_again else [step])
    assert len(box.of(WantCheckpoint)) == 1 + asks_again
    trainee.rank.abandon()


@pytest.mark.parametrize("steps_follow", [False, True])
def test_who_has_no_more_steps_says_what_it_waits_for(tmp_path: Path, steps_follow: bool) -> None:
    room = RankRoom(tmp_path)
    room.options = replace(room.options, has_store=True)
    trainee = Trainee(room).start()
    for step in (7, 8):
        trainee.rank.persist(step, "the end of the job", lambda done: None, steps_follow)
    box = room.keepers.box
    box.says(CheckpointDone(box.of(WantCheckpoint)[0].ticket, True, 7, "written"))
    room.time.pass_ns(TOLD_NS)
    why = "waiting until step 8 is in the store, for 5.00 s so far: the end of the job"
    told = [event.why for event in room.journal.of("persist-awaited")]
    assert told == ([] if steps_follow else [why])
    trainee.rank.abandon()


def test_what_was_asked_for_and_stored_is_in_the_summary(tmp_path: Path) -> None:
    room = RankRoom(tmp_path)
    room.options = replace(room.options, has_store=True)
    trainee = Trainee(room).start()
    trainee.step()
    trainee.rank.persist(0, "for once", lambda done: None)
    [want] = room.keepers.box.of(WantCheckpoint)
    room.keepers.box.says(CheckpointDone(want.ticket, True, 0, "written"))
    trainee.rank.close(False, "interrupted", lambda: None)
    room.settle()
    [summary] = room.journal.of("summary")
    assert "the newest checkpoint is of step 0" in summary.why


def test_the_last_step_waits_for_a_slot(trainee: Trainee) -> None:
    trainee.start()
    trainee.rank.begin_step()
    trainee.rank.end_step(False, True, 1000, None)
    trainee.room.trainer.run()
    trainee.rank.begin_step()
    assert not trainee.rank.may_end_last_step(), "the one before is being sealed"
    trainee.room.settle()
    assert trainee.rank.may_end_last_step()


def test_a_last_step_that_does_not_count_waits_for_no_slot(trainee: Trainee) -> None:
    trainee.start()
    trainee.rank.begin_step()
    trainee.rank.end_step(False, True, 1000, None)
    trainee.room.trainer.run()
    trainee.rank.begin_step()
    trainee.lose_peer()
    assert trainee.rank.may_end_last_step(), "though the one before is being sealed"


def test_a_keeper_that_does_not_release_is_not_waited_for_for_ever(trainee: Trainee) -> None:
    trainee.start()
    over = trainee.end()
    trainee.room.time.pass_ns(RELEASE_WITHIN_NS)
    assert over == ["over"] and trainee.rank.stage is Stage.OVER


def test_the_end_of_the_loop_waits_for_its_last_seal(trainee: Trainee) -> None:
    trainee.start()
    over: list[bool] = []
    trainee.rank.begin_step()
    trainee.rank.end_step(False, True, 1000, None)
    trainee.room.trainer.run()
    trainee.rank.end_steps(lambda: over.append(True))
    assert over == []
    trainee.room.settle()
    assert over == [True] and trainee.announced[-1][0] is Phase.DONE


def test_a_forked_child_lets_go_and_says_nothing(trainee: Trainee) -> None:
    trainee.start()
    said = len(trainee.room.keepers.box.sent)
    trainee.rank.release()
    assert trainee.rank.stage is Stage.OVER and trainee.room.keepers.box.is_released
    assert len(trainee.room.keepers.box.sent) == said and trainee.room.keepers.box.is_open
