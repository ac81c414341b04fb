"""The vote: joins, deaths and failed sources in any order end with one state on every rank, or with
nobody moving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from keepstep.core.detection.replicas import MARKS
from keepstep.core.resume.vote import (
    CUT_OFF_LOADS,
    Action,
    Ballot,
    Go,
    ListStore,
    Offer,
    Refuse,
    Trust,
    Vote,
)
from keepstep.model.checkpoint import StoreListing
from keepstep.model.shares import Share
from keepstep.model.snapshot import Stamp

holdings = st.frozensets(st.builds(Stamp, st.integers(0, 3), st.integers(1, 2)), max_size=4)


class Ballots(RuleBasedStateMachine):
    """Ranks do what the session does with what they hear. `proven[r]` is a ghost: the number and
    state r has loaded in this life."""

    vote_type: type[Vote] = Vote

    @initialize(
        world=st.integers(1, 3),
        store=st.none() | st.frozensets(st.integers(0, 3), max_size=3),
        epoch=st.integers(0, 5),
    )
    def begin(self, world: int, store: frozenset[int] | None, epoch: int) -> None:
        self.world, self.store = world, store
        self.vote = self.vote_type(world, has_store=store is not None, epoch=epoch)
        self.joined: dict[int, frozenset[Stamp]] = {}
        self.doubts: dict[int, int] = {}  # by rank: the first step whose state it doubts
        self.proven: dict[int, Offer] = {}
        self.failed: set[tuple[str, Stamp]] = set()
        self.brought: set[tuple[int, Stamp]] = set()
        self.offer: Offer | None = None
        self.asked = False
        self.epoch = epoch
        self.numbers: list[int] = []

    def carry_out(self, actions: Sequence[Any]) -> None:
        for action in actions:
            if isinstance(action, Offer):
                self.check_offer(action)
                self.offer, self.proven = action, {}
            elif isinstance(action, ListStore):
                assert self.store is not None
                self.asked = True
            elif isinstance(action, Go):
                assert set(self.proven) == set(range(self.world)), "somebody has not loaded"
                assert {id(o) for o in self.proven.values()} == {id(action.offer)}, (
                    "not all have loaded the same offer"
                )
                assert action.epoch > self.epoch, "an epoch was used twice"
                self.epoch, self.joined, self.proven = action.epoch, {}, {}
                self.doubts = {}
                self.failed, self.brought, self.offer, self.asked = set(), set(), None, False
            else:
                assert isinstance(action, Refuse)
                assert self.store or not self.has_lost(), "nothing is given up by starting afresh"
                assert self.sources() == [("fresh", Stamp(-1, 0))], "something was left to try"
                self.failed, self.brought, self.offer, self.asked = set(), set(), None, False

    def check_offer(self, offer: Offer) -> None:
        assert set(self.joined) == set(range(self.world)), "offered before all ranks had joined"
        assert offer.number not in self.numbers
        self.numbers.append(offer.number)
        assert (offer.source, offer.stamp) not in self.failed, "a failed source was offered again"
        assert (offer.source, offer.stamp) == self.sources()[0], (
            "memory first, newest first; then checkpoints, newest first; then afresh"
        )
        assert offer.source != "fresh" or not self.doubts or self.has_lost(), "afresh, for a doubt"
        assert offer.why

    def sources(self) -> list[tuple[str, Stamp]]:
        """What has not failed."""
        common = frozenset.intersection(*self.joined.values())
        memory = [("memory", s) for s in sorted(common, reverse=True)]
        store = [("store", Stamp(s, 0)) for s in sorted(self.store or (), reverse=True)]
        memory, store = (
            [(source, stamp) for source, stamp in found if not self.is_doubted(stamp.step)]
            for found in (memory, store)
        )
        return [s for s in [*memory, *store, ("fresh", Stamp(-1, 0))] if s not in self.failed]

    def has_lost(self) -> bool:
        """Whether memory has nothing for all, doubted or not: a doubt is never why."""
        common = frozenset.intersection(*self.joined.values())
        return all(("memory", stamp) in self.failed for stamp in common)

    def is_doubted(self, step: int) -> bool:
        return any(step >= first for first in self.doubts.values())

    @rule(
        rank=st.integers(0, 2),
        holds=holdings,
        doubted=st.none() | st.none() | st.integers(0, 4),
    )
    def join(self, rank: int, holds: frozenset[Stamp], doubted: int | None) -> None:
        rank %= self.world
        self.joined[rank] = holds
        self.doubts.pop(rank, None)
        if doubted is not None:
            self.doubts[rank] = doubted
        self.epoch = max([self.epoch, *(s.epoch for s in holds)])
        self.offer = None
        ballot = Ballot(rank, self.world, holds, doubted_from=doubted)
        self.carry_out(self.vote.joined(ballot))

    @rule(rank=st.integers(0, 2))
    def die(self, rank: int) -> None:
        rank %= self.world
        self.vote.left(rank)
        self.doubts.pop(rank, None)
        if self.joined.pop(rank, None) is not None:
            self.offer = None

    @rule()
    @precondition(lambda self: self.asked)
    def store_answers(self) -> None:
        self.asked = False
        self.carry_out(self.vote.listed(StoreListing(sorted(self.store))))

    @rule(rank=st.integers(0, 2))
    @precondition(lambda self: self.offer is not None)
    def load(self, rank: int) -> None:
        rank %= self.world
        assert self.offer is not None
        self.proven[rank] = self.offer
        self.carry_out(self.vote.has_loaded(rank, self.offer.number))

    @rule(rank=st.integers(0, 2), brought=st.booleans())
    @precondition(lambda self: self.offer is not None and self.offer.source != "fresh")
    def fail(self, rank: int, brought: bool) -> None:
        """What was brought to a rank is offered once more, and not a third time."""
        offer, self.offer = self.offer, None
        assert offer is not None
        once = (rank % self.world, offer.stamp)
        again = brought and offer.source == "memory" and once not in self.brought
        if again:
            self.brought.add(once)
        else:
            self.failed.add((offer.source, offer.stamp))
        why = "block 0 has another checksum"
        told_brought = brought and offer.source == "memory"
        self.carry_out(self.vote.has_failed(once[0], offer.number, why, brought=told_brought))
        if again:
            assert self.offer is not None and self.offer.stamp == offer.stamp

    @rule(rank=st.integers(0, 2), loaded=st.booleans())
    @precondition(lambda self: self.numbers)
    def answer_an_old_offer(self, rank: int, loaded: bool) -> None:
        old = self.numbers[-1] - (self.offer is not None)
        permitted = self.vote.permitted
        if permitted is not None and permitted.offer.number == old:
            return  # nobody says so who has not loaded it
        answer = (
            self.vote.has_loaded(rank % self.world, old)
            if loaded
            else self.vote.has_failed(rank % self.world, old, "late")
        )
        assert answer == []

    def teardown(self) -> None:
        """Whatever happened, ranks that join again and can load anything get to go."""
        if not hasattr(self, "vote"):
            return
        for rank in range(self.world):
            self.join(rank, frozenset(), None)
        if self.asked:
            self.store_answers()
        for rank in range(self.world):
            self.load(rank)
        assert self.offer is None and not self.joined, "everybody has loaded and nobody may go"


TestBallots = Ballots.TestCase
TestBallots.settings = settings(
    max_examples=300, stateful_step_count=30, deadline=None, derandomize=True
)


class Hasty(Vote):
    def has_loaded(self, rank: int, round_: int) -> list[Any]:
        self.loaded.update(dict.fromkeys(range(self.world_size), round_))
        return super().has_loaded(rank, round_)


class Stubborn(Vote):
    def has_failed(self, rank: int, round_: int, why: str, **more: bool) -> list[Any]:
        actions = super().has_failed(rank, round_, why, **more)
        self.failed.clear()
        return actions


class Timeless(Vote):
    def has_loaded(self, rank: int, round_: int) -> list[Any]:
        self.epoch -= 1
        return super().has_loaded(rank, round_)


@pytest.mark.parametrize("bug", [Hasty, Stubborn, Timeless])
def test_the_search_finds_a_planted_bug(bug: type[Vote]) -> None:
    machine = type("Planted", (Ballots,), {"vote_type": bug})
    search = settings(
        Ballots.TestCase.settings, phases=[hypothesis.Phase.generate], report_multiple_bugs=False
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=search)


# ----------------------------------------------------------------------------------------------
# examples


def everybody(vote: Vote, *holds: set[Stamp], foreign: int | None = None) -> list[Any]:
    actions: list[Any] = []
    for rank, stamps in enumerate(holds):
        assert actions == []
        actions = vote.joined(Ballot(rank, vote.world_size, frozenset(stamps), foreign))
    return actions


def test_the_newest_common_step_and_why() -> None:
    [offer] = everybody(
        Vote(2, has_store=True), {Stamp(7, 1), Stamp(8, 1)}, {Stamp(7, 1), Stamp(6, 1)}
    )
    assert (offer.source, offer.stamp) == ("memory", Stamp(7, 1))
    assert offer.why == "step 7 is the newest state all 2 ranks hold in memory"


def test_what_one_rank_doubts_is_offered_to_nobody() -> None:
    vote = Vote(2, has_store=True)
    holds = frozenset({Stamp(5, 1), Stamp(6, 1), Stamp(7, 1)})
    assert vote.joined(Ballot(0, 2, holds)) == []
    [offer] = vote.joined(Ballot(1, 2, holds, doubted_from=6))
    assert isinstance(offer, Offer) and offer.stamp == Stamp(5, 1)
    assert "states from step 6 on are in doubt" in offer.why


def test_checkpoints_in_doubt_are_passed_over_as_well() -> None:
    vote = Vote(1, has_store=True)
    [question] = vote.joined(Ballot(0, 1, frozenset({Stamp(9, 1)}), doubted_from=8))
    assert isinstance(question, ListStore)
    [offer] = vote.listed(StoreListing((5, 8, 9)))
    assert isinstance(offer, Offer) and (offer.source, offer.stamp.step) == ("store", 5)


def test_nobody_goes_on_from_checkpoints_that_are_all_in_doubt() -> None:
    vote = Vote(1, has_store=True)
    assert vote.joined(Ballot(0, 1, frozenset(), doubted_from=4)) == [ListStore()]
    [refusal] = vote.listed(StoreListing((5, 8)))
    assert isinstance(refusal, Refuse) and refusal.is_final
    assert "none of the checkpoints (steps 8, 5) can be used" in refusal.why
    assert "states from step 4 on are in doubt" in refusal.why


@pytest.mark.parametrize("has_store", [True, False])
def test_nobody_starts_afresh_for_a_doubt(has_store: bool) -> None:
    """What memory holds is kept for a person to look at."""
    vote = Vote(2, has_store)
    holds = frozenset({Stamp(6, 1), Stamp(7, 1)})
    vote.joined(Ballot(0, 2, holds))
    found = vote.joined(Ballot(1, 2, holds, doubted_from=6))
    [refusal] = vote.listed(StoreListing(())) if has_store else found
    assert isinstance(refusal, Refuse) and refusal.is_final
    assert "before step 6" in refusal.why and "--fresh" in refusal.why


def test_where_a_rank_has_lost_its_memory_a_doubt_of_another_one_does_not_end_the_job() -> None:
    """There is nothing that all could go on from, doubted or not: found by the swarm."""
    for doubted_from in (None, 6):  # by the one that has lost it
        vote = Vote(2, has_store=False)
        vote.joined(Ballot(0, 2, frozenset(), doubted_from=doubted_from))
        [offer] = vote.joined(Ballot(1, 2, frozenset({Stamp(7, 1)}), doubted_from=6))
        assert isinstance(offer, Offer) and offer.source == "fresh"


def test_where_memory_has_no_step_of_all_a_doubt_does_not_end_the_job() -> None:
    """A node was lost with the newest state of one rank, while the others had overwritten the step
    before in their only slots: what is left of it is nobody's to go back to. Found by the swarm."""
    vote = Vote(2, has_store=False)
    vote.restorable(frozenset(), {0: frozenset({Stamp(1, 1)})})
    vote.joined(Ballot(0, 2, frozenset()))
    [offer] = vote.joined(Ballot(1, 2, frozenset({Stamp(2, 1)}), doubted_from=4))
    assert isinstance(offer, Offer) and offer.source == "fresh"
    assert "no step in memory is usable on every rank" in offer.why


def test_nobody_starts_afresh_where_what_is_older_than_a_doubt_cannot_be_used() -> None:
    """All could go on from what is in doubt: a person looks at that."""
    vote = Vote(1, has_store=False)
    holds = frozenset({Stamp(3, 1), Stamp(7, 1)})
    [offer] = vote.joined(Ballot(0, 1, holds, doubted_from=6))
    assert isinstance(offer, Offer) and offer.stamp == Stamp(3, 1)
    [refusal] = vote.has_failed(0, offer.number, "it does not prove")
    assert isinstance(refusal, Refuse) and "before step 6" in refusal.why


def test_the_store_is_asked_only_when_memory_has_nothing_for_all() -> None:
    vote = Vote(2, has_store=True)
    assert everybody(vote, {Stamp(8, 1)}, set()) == [ListStore()]
    [offer] = vote.listed(StoreListing([3, 5]))
    assert (offer.source, offer.stamp) == ("store", Stamp(5, 0))
    assert (
        offer.why
        == "memory of rank 1 holds nothing (1 of 2 ranks); the newest usable checkpoint is of "
        "step 5"
    )


def test_whom_no_memory_has_anything_of_is_named() -> None:
    """Not the one of whom another node has something."""
    vote = Vote(3, has_store=False)
    assert vote.restorable(frozenset(), {1: frozenset({Stamp(6, 1)})}) == []
    [offer] = everybody(vote, {Stamp(8, 1)}, set(), set())
    assert offer.source == "fresh"
    assert offer.why.startswith("no node's memory has anything of rank 2, ")


def test_a_failure_is_in_the_next_reason() -> None:
    vote = Vote(1, has_store=False)
    [first] = everybody(vote, {Stamp(4, 1), Stamp(5, 1)})
    [second] = vote.has_failed(0, first.number, "block 2 has another checksum")
    assert (second.stamp, second.number) == (Stamp(4, 1), first.number + 1)
    assert second.why.endswith(" after rank 0: block 2 has another checksum")


def test_a_state_that_some_rank_could_not_use_stays_until_all_may_go() -> None:
    """The older one may fail, too (seed 923370)."""
    vote = Vote(1, has_store=True)
    [first] = everybody(vote, {Stamp(3, 1), Stamp(4, 1), Stamp(5, 1)})
    [second] = vote.has_failed(0, first.number, "no room for it")
    [third] = vote.has_failed(0, second.number, "no room for it")
    assert [offer.keeps_newer for offer in (first, second, third)] == [False, True, True]
    [list_store] = vote.has_failed(0, third.number, "no room for it")
    assert isinstance(list_store, ListStore)
    [store] = vote.listed(StoreListing((2,)))
    assert (store.source, store.keeps_newer) == ("store", False)


def test_after_go_a_failed_source_has_its_chance_again() -> None:
    vote = Vote(1, has_store=False)
    [first] = everybody(vote, {Stamp(5, 1)})
    [second] = vote.has_failed(0, first.number, "no memory")
    assert vote.has_loaded(0, second.number) == [Go(2, second)]
    [third] = everybody(vote, {Stamp(5, 1)})
    assert third.stamp == Stamp(5, 1)


@given(st.permutations(range(6)), st.lists(st.booleans(), min_size=3, max_size=3))
def test_whoever_has_loaded_what_others_train_by_may_train(
    order: list[int], trains: list[bool]
) -> None:
    """The vote that permitted it ended before all had heard."""
    vote = Vote(3, has_store=False)
    go = Go(4, Offer(17, "memory", Stamp(5, 3), "why"))
    waits = [rank for rank in range(3) if not trains[rank]]
    said: list[Any] = []
    for act in order:
        rank = act % 3
        if trains[rank] and act < 3:
            said += vote.ranks_train(go)
        elif (rank in waits and act < 3) or rank in waits:
            said += vote.joined(Ballot(rank, 3, frozenset({Stamp(5, 3)}), incarnation=1))
            said += vote.has_loaded(rank, 17)
    if any(trains):
        assert all(one == go for one in said) and bool(said) == bool(waits)
        assert not vote.ballots
    else:
        assert [type(one) for one in said] == [Offer] * len(said)


def test_another_life_of_a_rank_has_not_loaded_what_was_permitted() -> None:
    vote = Vote(2, has_store=False)
    go = Go(4, Offer(17, "memory", Stamp(5, 3), "why"))
    assert vote.ranks_train(go) == []
    assert vote.joined(Ballot(0, 2, frozenset({Stamp(5, 3)}), incarnation=1)) == []
    assert vote.has_loaded(0, 17) == [go]
    assert vote.joined(Ballot(0, 2, frozenset({Stamp(5, 3)}), incarnation=2)) == []
    [offer] = vote.joined(Ballot(1, 2, frozenset({Stamp(5, 3)}), incarnation=2))
    assert vote.has_loaded(0, offer.number) == []
    assert vote.has_loaded(1, offer.number) == [Go(5, offer)]


def test_a_foreign_world_is_refused_when_nothing_can_bridge_it() -> None:
    [refusal] = everybody(Vote(2, has_store=False), set(), set(), foreign=4)
    assert isinstance(refusal, Refuse)
    for part in (
        "for 4 ranks",
        "the job has 2 now",
        "Run with 4 ranks, give a store, or start over with KEEPSTEP_FRESH=1 (keepstep run "
        "--fresh)",
    ):
        assert part in refusal.why


def test_a_foreign_world_is_bridged_by_a_checkpoint() -> None:
    vote = Vote(2, has_store=True)
    assert everybody(vote, set(), set(), foreign=4) == [ListStore()]
    [offer] = vote.listed(StoreListing([9]))
    assert (offer.source, offer.stamp) == ("store", Stamp(9, 0))
    assert offer.why.startswith("memory holds snapshots of another world size than 2")


def test_a_foreign_world_and_an_empty_store_is_refused() -> None:
    vote = Vote(1, has_store=True)
    everybody(vote, set(), foreign=4)
    [refusal] = vote.listed(StoreListing([]))
    assert isinstance(refusal, Refuse)
    assert "there is no checkpoint in the store that could bridge that" in refusal.why
    assert "give a store" not in refusal.why


def test_a_rank_of_another_world_is_refused() -> None:
    [refusal] = Vote(2, has_store=False).joined(Ballot(0, 3, frozenset()))
    assert refusal == Refuse("rank 0 says the world has 3 ranks, the job has 2")


@pytest.mark.parametrize("has_store", [False, True])
def test_memory_of_another_world_size_is_a_refusal_for_good(has_store: bool) -> None:
    vote = Vote(1, has_store)
    actions = vote.joined(Ballot(0, 1, frozenset(), foreign_world=2))
    if has_store:
        actions = vote.listed(StoreListing([]))
    [refusal] = actions
    assert isinstance(refusal, Refuse) and refusal.is_final


def test_a_store_of_damaged_checkpoints_is_a_refusal_for_good_a_silent_one_is_not() -> None:
    vote = Vote(1, has_store=True)
    everybody(vote, set())
    [offer] = vote.listed(StoreListing([3]))
    assert isinstance(offer, Offer)
    [refusal] = vote.has_failed(0, offer.number, "does not prove")
    assert isinstance(refusal, Refuse) and refusal.is_final
    everybody(vote, set())
    [refusal] = vote.listed(StoreListing([], unreachable={3: "time-out"}))
    assert isinstance(refusal, Refuse) and not refusal.is_final


def test_memory_that_proves_nothing_is_not_called_empty() -> None:
    vote = Vote(1, has_store=False)
    [offer] = vote.joined(Ballot(0, 1, frozenset({Stamp(3, 1)}), incarnation=1))
    assert isinstance(offer, Offer) and offer.source == "memory"
    [offer] = vote.joined(Ballot(0, 1, frozenset(), incarnation=1))
    assert isinstance(offer, Offer) and offer.source == "fresh"
    assert offer.why.startswith("no snapshot in memory proves")
    [offer] = vote.joined(Ballot(0, 1, frozenset(), incarnation=2))
    assert isinstance(offer, Offer) and offer.why.startswith("memory holds nothing")


def test_all_are_waited_for() -> None:
    vote = Vote(3, has_store=False)
    for rank in (1, 1, 0):
        assert not vote.joined(Ballot(rank, 3, frozenset())) and not vote.has_all
    assert vote.joined(Ballot(2, 3, frozenset())) and vote.has_all


def test_a_store_that_does_not_answer_is_no_empty_store() -> None:
    vote = Vote(1, has_store=True)
    assert everybody(vote, set()) == [ListStore()]
    [refusal] = vote.unlistable("expected a directory, found a file")
    assert refusal == Refuse(
        "memory holds nothing, and the store cannot be read: expected a directory, found a file"
    )


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (StoreListing([], damaged={7: "torn"}), "torn"),
        (StoreListing([], unreachable={7: "time-out"}), "time-out"),
        (StoreListing([], unfinished={3: "no manifest"}, unreachable={7: "time-out"}), "time-out"),
    ],
)
def test_what_is_damaged_or_was_not_seen_is_not_absent(found: StoreListing, words: str) -> None:
    vote = Vote(1, has_store=True)
    everybody(vote, set())
    [refusal] = vote.listed(found)
    assert isinstance(refusal, Refuse) and words in refusal.why
    assert everybody(vote, set()) == [ListStore()], "it is looked at anew"


def test_who_goes_on_from_an_older_checkpoint_hears_what_is_wrong_with_the_newest() -> None:
    vote = Vote(1, has_store=True)
    everybody(vote, set())
    [offer] = vote.listed(StoreListing([3], damaged={7: "forged", 5: "torn"}))
    assert isinstance(offer, Offer) and offer.stamp.step == 3
    assert "for steps 7, 5 cannot be used (forged)" in offer.why
    vote = Vote(1, has_store=True)
    everybody(vote, set())
    [offer] = vote.listed(StoreListing([3], unfinished={7: "no manifest"}))
    assert isinstance(offer, Offer) and "(`keepstep inspect` says why)" in offer.why


def test_what_was_never_published_is_absent() -> None:
    vote = Vote(1, has_store=True)
    everybody(vote, set())
    [offer] = vote.listed(StoreListing([], unfinished={3: "no manifest"}))
    assert isinstance(offer, Offer) and offer.source == "fresh"


def test_a_list_that_comes_when_nobody_asks_any_more_counts_for_nothing() -> None:
    vote = Vote(1, has_store=True)
    everybody(vote, set())
    vote.left(0)
    assert vote.listed(StoreListing([3])) == []
    assert everybody(vote, set()) == [ListStore()]


def test_nobody_starts_afresh_over_a_checkpoint_that_could_not_be_read() -> None:
    vote = Vote(2, has_store=True)
    assert everybody(vote, set(), set()) == [ListStore()]
    [first] = vote.listed(StoreListing([3, 5]))
    assert isinstance(first, Offer) and first.stamp.step == 5
    for again in range(1, CUT_OFF_LOADS + 1):  # an answer that is lost costs no steps
        assert vote.has_failed(1, first.number, "no answer", unread=True) == [
            ListStore(cut_off=again)
        ]
        [first] = vote.listed(StoreListing([3, 5]))
        assert isinstance(first, Offer) and first.stamp.step == 5
    [second] = vote.has_failed(1, first.number, "no answer", unread=True)
    assert isinstance(second, Offer) and second.stamp.step == 3
    [refusal] = vote.has_failed(0, second.number, "block 0 is damaged")
    assert isinstance(refusal, Refuse) and "no answer" in refusal.why
    # all ask again, and the store is looked at anew
    vote.left(0)
    vote.left(1)
    assert everybody(vote, set(), set()) == [ListStore()]
    [third] = vote.listed(StoreListing([3, 5]))
    assert isinstance(third, Offer) and third.stamp.step == 5
    [last] = vote.has_failed(1, third.number, "block 0 is damaged")
    assert isinstance(last, Offer) and last.source == "store"
    [refusal] = vote.has_failed(1, last.number, "block 0 is damaged")
    assert isinstance(refusal, Refuse), "checkpoints that are all damaged are no empty store"


def test_a_refusal_over_damaged_checkpoints_names_them_and_looks_anew_when_asked_again() -> None:
    vote = Vote(1, has_store=True)
    everybody(vote, set())
    [first] = vote.listed(StoreListing([4, 11]))
    assert isinstance(first, Offer) and first.stamp.step == 11
    [second] = vote.has_failed(0, first.number, "block 3 of rank-0.distcp")
    assert isinstance(second, Offer) and second.stamp.step == 4
    [refusal] = vote.has_failed(0, second.number, "block 0 of rank-0.distcp")
    assert isinstance(refusal, Refuse)
    for fact in ("11", "4", "block 0 of rank-0.distcp", "name another one"):
        assert fact in refusal.why
    vote.left(0)
    assert everybody(vote, set()) == [ListStore()], "it may have been mended"


def test_what_the_store_tells_counts_as_completed() -> None:
    """From step 11 to step 4 is a loss of 7 steps, whoever remembers step 11."""
    vote = Vote(1, has_store=True)
    everybody(vote, set())
    [first] = vote.listed(StoreListing([4, 11]))
    assert isinstance(first, Offer)
    [second] = vote.has_failed(0, first.number, "block 3 is damaged")
    assert isinstance(second, Offer)
    [go] = vote.has_loaded(0, second.number)
    assert isinstance(go, Go) and (go.offer.stamp.step, go.reached) == (4, 11)


def test_a_newer_checkpoint_that_cannot_be_used_is_named_and_counts_as_completed() -> None:
    vote = Vote(1, has_store=True)
    everybody(vote, set())
    [offer] = vote.listed(StoreListing([4, 11], dict.fromkeys([19, 2], "torn")))
    assert isinstance(offer, Offer) and offer.stamp.step == 11
    assert "19" in offer.why and "2," not in offer.why
    [go] = vote.has_loaded(0, offer.number)
    assert isinstance(go, Go) and go.reached == 19


def test_a_directory_that_was_never_published_invents_no_completed_steps() -> None:
    vote = Vote(1, has_store=True)
    everybody(vote, set())
    [offer] = vote.listed(StoreListing([4], unfinished={500: "no manifest"}))
    assert isinstance(offer, Offer) and "500" in offer.why, "it is named all the same"
    [go] = vote.has_loaded(0, offer.number)
    assert isinstance(go, Go) and (go.reached, go.begun) == (4, 500)


# -- stamps that are condemned


def test_a_stamp_is_condemned_by_two_failures_that_completed_nothing() -> None:
    trust, stamp = Trust(), Stamp(5, 2)
    trust.resumed_from(stamp)
    assert not trust.is_back(5, failed=True) and not trust.is_back(5, failed=True), (
        "two ranks of one failure are one failure"
    )
    trust.resumed_from(stamp)
    assert not trust.is_back(5, failed=False), "a killed process says nothing against the state"
    trust.resumed_from(stamp)
    assert trust.condemned == frozenset()
    assert trust.is_back(None, failed=True) and trust.condemned == {stamp}


def test_a_stamp_that_led_to_another_step_is_not_condemned() -> None:
    trust, stamp = Trust(), Stamp(5, 2)
    for _ in range(3):
        trust.resumed_from(stamp)
        assert not trust.is_back(6, failed=True)
    assert trust.condemned == frozenset()


@pytest.mark.parametrize(
    ("holds", "checkpoints", "source", "step"),
    [
        ((4, 5), (), "memory", 4),
        ((4, 5), (3,), "memory", 4),
        ((5,), (3,), "store", 3),
        ((5,), (), "memory", 5),  # rather that than all of it once more
    ],
)
def test_what_is_taken_instead_of_a_condemned_stamp(
    holds: Sequence[int], checkpoints: Sequence[int], source: str, step: int
) -> None:
    vote = Vote(1, has_store=True, condemned=frozenset({Stamp(5, 2)}))
    actions = vote.joined(Ballot(0, 1, frozenset(Stamp(s, 2) for s in holds)))
    if actions == [ListStore()]:
        actions = vote.listed(StoreListing(checkpoints))
    (offer,) = actions
    assert isinstance(offer, Offer) and (offer.source, offer.stamp.step) == (source, step)
    assert ("condemned" in offer.why) is (step != 5)


RIGHT, WRONG = 1000 | MARKS, 2000 | MARKS


def told(rank: int, digests: dict[Stamp, int], *also: Stamp) -> Ballot:
    return Ballot(
        rank,
        3,
        frozenset({*digests, *also}),
        group=7,
        digests=tuple(sorted(digests.items())),
    )


@pytest.mark.parametrize("agrees_again", [False, True])
def test_a_stamp_at_which_replicas_differ_and_what_follows_is_never_offered(
    agrees_again: bool,
) -> None:
    stamps = [Stamp(step, 2) for step in (4, 5, 6)]
    vote = Vote(3, has_store=False)
    actions: list[Action] = []
    for rank in range(3):
        last = RIGHT if agrees_again or rank != 1 else WRONG
        digests = [RIGHT, WRONG if rank == 1 else RIGHT, last]
        actions = vote.joined(told(rank, dict(zip(stamps, digests, strict=True))))
    [offer] = actions
    assert isinstance(offer, Offer) and offer.stamp == stamps[0]
    assert "replicas differ since step 5" in offer.why


def test_nobody_starts_afresh_because_replicas_differ_everywhere() -> None:
    vote = Vote(3, has_store=False)
    actions: list[Action] = []
    for rank in range(3):
        actions = vote.joined(told(rank, {Stamp(5, 2): WRONG if rank == 1 else RIGHT}))
    [refusal] = actions
    assert isinstance(refusal, Refuse) and refusal.is_final
    assert "replicas differ at all that memory holds" in refusal.why


def test_a_checkpoint_is_taken_where_memory_has_nothing_that_agrees() -> None:
    vote = Vote(3, has_store=True)
    for rank in range(3):
        asked = vote.joined(told(rank, {Stamp(5, 2): WRONG if rank == 1 else RIGHT}))
    assert asked == [ListStore()]
    [offer] = vote.listed(StoreListing([3]))
    assert isinstance(offer, Offer) and (offer.source, offer.stamp.step) == ("store", 3)


def asked_afresh(*fresh: bool, has_store: bool = False) -> tuple[Vote, list[Action]]:
    vote = Vote(len(fresh), has_store)
    actions: list[Action] = []
    for rank, wants in enumerate(fresh):
        actions = vote.joined(Ballot(rank, len(fresh), frozenset({Stamp(7, 1)}), fresh=wants))
    return vote, actions


def test_all_who_ask_for_it_start_over_whatever_memory_holds() -> None:
    _, [offer] = asked_afresh(True, True)
    assert isinstance(offer, Offer) and (offer.source, offer.stamp) == ("fresh", Stamp(-1, 0))


def test_one_who_has_begun_already_does_not_let_the_others_start_over() -> None:
    _, [offer] = asked_afresh(True, False)
    assert isinstance(offer, Offer) and (offer.source, offer.stamp) == ("memory", Stamp(7, 1))


def test_checkpoints_of_another_run_are_left_behind_before_anybody_starts_over() -> None:
    vote, actions = asked_afresh(True, has_store=True)
    assert actions == [ListStore(begins_run=True)]
    # an answer to an older question
    assert vote.listed(StoreListing([3, 11])) == [ListStore(begins_run=True)]
    assert vote.listed(StoreListing([], dict.fromkeys([5], "torn"))) == [ListStore(begins_run=True)]
    [offer] = vote.listed(StoreListing([]))
    assert isinstance(offer, Offer) and offer.source == "fresh"


def test_nobody_starts_over_beside_a_store_that_does_not_answer() -> None:
    vote, _ = asked_afresh(True, has_store=True)
    [refusal] = vote.unlistable("it hangs")
    assert isinstance(refusal, Refuse) and "it hangs" in refusal.why


# -- memory that the job may have left behind

A_STEP = Stamp(11, 1)


def cold(*holds: Stamp) -> Vote:
    """A job with a store, started anew over what memory holds."""
    vote = Vote(1, has_store=True)
    [asked] = vote.joined(Ballot(0, 1, frozenset(holds or [A_STEP]), goes_on=False))
    assert asked == ListStore(memory_waits=True)
    return vote


@pytest.mark.parametrize(
    ("step", "epoch", "source"),
    [(53, 2, "store"), (8, 2, "store"), (12, 1, "store"), (11, 1, "memory"), (10, 1, "memory")],
)
def test_memory_of_a_launch_before_is_taken_when_the_job_has_not_gone_on_elsewhere(
    step: int, epoch: int, source: str
) -> None:
    vote = cold()
    listing = StoreListing([step, 3], epoch=epoch, epochs={step: epoch, 3: 1})
    [offer] = vote.listed(listing)
    assert isinstance(offer, Offer) and offer.source == source
    assert offer.stamp.step == (step if source == "store" else A_STEP.step)
    [go] = vote.has_loaded(0, offer.number)
    assert isinstance(go, Go)
    assert go.epoch == (1000 if source == "store" else epoch + 1), "after all there were"


@pytest.mark.parametrize(("newest", "begun"), [(0, 1000), (7, 1000), (999, 1000), (1000, 2000)])
def test_who_goes_on_from_the_store_is_ahead_of_all_that_live_on_from_their_memory(
    newest: int, begun: int
) -> None:
    """Of the run that wrote the checkpoint something may be left, and begin its next epochs."""
    vote = Vote(1, has_store=True)
    vote.joined(Ballot(0, 1, frozenset()))
    [offer] = vote.listed(StoreListing([5], epoch=newest, epochs={5: newest}))
    assert isinstance(offer, Offer) and offer.source == "store"
    [go] = vote.has_loaded(0, offer.number)
    assert isinstance(go, Go) and go.epoch == begun
    vote.joined(Ballot(0, 1, frozenset({Stamp(6, begun)})))
    assert vote.offer is not None and vote.offer.source == "memory"
    [go] = vote.has_loaded(0, vote.offer.number)
    assert isinstance(go, Go) and go.epoch == begun + 1


def test_memory_is_next_when_what_is_newer_cannot_be_loaded() -> None:
    vote = cold()
    [offer] = vote.listed(StoreListing([53, 9], epoch=2, epochs={53: 2, 9: 1}))
    assert isinstance(offer, Offer)
    [offer] = vote.has_failed(0, offer.number, "a block is damaged")
    assert isinstance(offer, Offer) and (offer.source, offer.stamp) == ("memory", A_STEP)


def test_a_store_that_does_not_answer_keeps_nobody_from_the_memory() -> None:
    vote = cold()
    [offer] = vote.unlistable("it hangs")
    assert isinstance(offer, Offer) and offer.source == "memory"
    assert "nobody knows: it hangs" in offer.why
    assert vote.has_failed(0, offer.number, "damaged") == [ListStore()]
    [refusal] = vote.unlistable("it hangs")
    assert isinstance(refusal, Refuse)


def test_one_rank_whose_launch_has_trained_speaks_for_all() -> None:
    vote = Vote(2, has_store=True)
    assert vote.joined(Ballot(0, 2, frozenset([A_STEP]), goes_on=False)) == []
    [offer] = vote.joined(Ballot(1, 2, frozenset([A_STEP])))
    assert isinstance(offer, Offer) and offer.source == "memory"


# -- what ranks share


def sharing(rank: int, *told: tuple[Stamp, Share], holds: Sequence[Stamp] = ()) -> Ballot:
    stamps = frozenset([*(stamp for stamp, _ in told), *holds])
    return Ballot(rank, 2, stamps, shares=told)


OLD, NEW = Stamp(3, 1), Stamp(4, 1)
PART = Share(7, 2)


@pytest.mark.parametrize("other", [Share(8, 2), Share(7, 3), None])
def test_what_is_shared_and_not_of_one_snapshot_is_passed_over(other: Share | None) -> None:
    vote = Vote(2, has_store=False, epoch=1)
    vote.joined(sharing(0, (OLD, PART), (NEW, PART)))
    told = [(OLD, PART), *([(NEW, other)] if other else [])]
    [offer] = vote.joined(sharing(1, *told, holds=[NEW]))
    assert isinstance(offer, Offer) and offer.stamp == OLD
    assert f"what ranks share of {NEW} is not of one snapshot" in offer.why
    assert vote.had_differed(OLD) and not vote.had_differed(NEW)


def test_the_part_of_a_lost_rank_counts_by_what_its_holders_tell() -> None:
    for share, taken in ((PART, NEW), (Share(8, 2), OLD), (None, OLD)):
        vote = Vote(2, has_store=False, epoch=1)
        vote.joined(sharing(0, (NEW, PART), holds=[OLD]))
        held = {1: frozenset({OLD, NEW})}
        vote.restorable(frozenset(), held, {(1, NEW): share} if share else {})
        [offer] = vote.joined(sharing(1))
        assert isinstance(offer, Offer) and offer.stamp == taken
        assert vote.shares_of(NEW) == {0: PART} | ({1: share} if share else {})


def test_who_keeps_all_of_its_own_needs_nobody() -> None:
    vote = Vote(2, has_store=False, epoch=1)
    vote.joined(sharing(0, (NEW, Share(7, 0))))
    [offer] = vote.joined(sharing(1, (NEW, Share(9, 1))))
    assert isinstance(offer, Offer) and offer.stamp == NEW
