"""Vote leader: all may go only when each rank has loaded the newest offer, and what is said about
an older one counts for nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.resume.vote import ListStore, Trust
from keepstep.model.checkpoint import StoreListing, StoreRefusal
from keepstep.model.loss import loss_words
from keepstep.model.messages.keeper_rank import (
    StateLoaded,
    StateUnusable,
    TrainingPermitted,
    VoteRefused,
)
from keepstep.model.messages.peers import (
    OfferWord,
    RankGone,
    RankJoined,
    RanksTrain,
    VoteToAll,
)
from keepstep.model.restore_sources import RestoreSource
from keepstep.model.shares import Share
from keepstep.model.snapshot import Stamp
from keepstep.runtime.keeper.vote_leader import VoteLeader
from tests.runtime.fakes import FakeJournal, FakeTime

RANKS = 3
OLD, NEW = Stamp(4, 2), Stamp(8, 2)


class FakeVoteNodes:
    """See `VoteNodes`. `silent`, `elsewhere`: what nodes have told."""

    def __init__(self) -> None:
        self.said: list[VoteToAll] = []
        self.silent: frozenset[int] = frozenset()
        self.elsewhere: Mapping[int, frozenset[Stamp]] = {}
        self.shared: dict[tuple[int, Stamp], Share] = {}

    def to_all(self, body: VoteToAll) -> None:
        self.said.append(body)

    def silent_nodes(self) -> frozenset[int]:
        return self.silent

    def restorable(self, proven: Mapping[int, frozenset[Stamp]]) -> Mapping[int, frozenset[Stamp]]:
        return self.elsewhere

    def shares(self) -> Mapping[tuple[int, Stamp], Share]:
        return self.shared

    def are_on_one(self, ranks: Sequence[int]) -> bool:
        return set(ranks) <= {0, 1}

    def sources(
        self, wanted: list[int], stamp: Stamp, proven: Mapping[int, frozenset[Stamp]]
    ) -> Mapping[int, RestoreSource]:
        return {rank: RestoreSource(rank, copies=(1,)) for rank in wanted}


class Election:
    """A leader, and everything that it says. See `VoteHost`."""

    def __init__(self, has_store: bool = False, trust: Trust | None = None) -> None:
        self.time = FakeTime()
        self.journal = FakeJournal()
        self.nodes = FakeVoteNodes()
        self.listings = 0
        self.doubted: list[tuple[int, int]] = []
        self.epoch = 5
        self.lives = [1] * RANKS
        self.leader = VoteLeader(
            self.time, self.journal, has_store, trust or Trust(), self.nodes, self
        )

    def list_store(self, question: ListStore) -> None:
        self.listings += 1

    def doubt_checkpoints(self, first: int, before_epoch: int) -> None:
        self.doubted.append((first, before_epoch))

    def newest_epoch(self) -> int:
        return self.epoch

    def join(self, rank: int, *holds: Stamp, **about: Any) -> None:
        facts = {"foreign_world": None, "completed_step": None, "epoch": 0, "failed": False}
        self.leader.receive(
            RankJoined(
                rank=rank,
                world_size=RANKS,
                incarnation=self.lives[rank],
                holds=holds,
                **{**facts, **about},
            )
        )

    def join_all(self, *holds: Stamp, **about: Any) -> None:
        for rank in range(RANKS):
            self.join(rank, *holds, **about)

    def load_all(self, offer: int) -> None:
        for rank in range(RANKS):
            self.leader.receive(StateLoaded(rank, offer))

    def of(self, kind: type[Any]) -> list[Any]:
        return [body for body in self.nodes.said if isinstance(body, kind)]

    @property
    def offer(self) -> OfferWord:
        """The newest."""
        newest: OfferWord = self.of(OfferWord)[-1]
        return newest


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["join", "again", "gone", "loaded", "loaded", "loaded", "failed"]),
        st.integers(0, RANKS - 1),
        st.integers(0, 2),  # how old the offer is that an answer is about
    ),
    max_size=60,
)


@given(ACTS)
def test_all_go_only_when_each_has_loaded_the_newest_offer(
    acts: list[tuple[str, int, int]],
) -> None:
    election = Election()
    said = election.nodes.said
    loaded: dict[int, int] = {}  # by rank: the offer that its present life has loaded
    numbers: list[int] = []
    epochs = [election.epoch]
    permitted = 0  # the number of that offer
    for act, rank, age in [*(("join", r, 0) for r in range(RANKS)), *acts]:
        before = len(said)
        newest = numbers[-1] if numbers else 0
        about = numbers[max(0, len(numbers) - 1 - age)] if numbers else 0
        match act:
            case "join":  # another life
                election.lives[rank] += 1
                loaded.pop(rank, None)
                election.join(rank, OLD, NEW)
            case "again":  # as it says to another keeper
                election.join(rank, OLD, NEW)
                if rank in loaded:
                    election.leader.receive(StateLoaded(rank, loaded[rank]))
            case "gone":
                loaded.pop(rank, None)
                election.leader.receive(RankGone(rank))
            case "loaded" if about == permitted and loaded.get(rank) != about:
                pass  # that life was not offered it
            case "loaded":
                if about == newest:
                    loaded[rank] = about
                election.leader.receive(StateLoaded(rank, about))
            case "failed":
                election.leader.receive(StateUnusable(rank, about, "why"))
        for body in said[before:]:
            if isinstance(body, OfferWord) and body.offer not in numbers:
                assert not numbers or body.offer > numbers[-1]
                numbers.append(body.offer)
            elif isinstance(body, TrainingPermitted) and act == "loaded":
                assert loaded == dict.fromkeys(range(RANKS), body.offer)
                assert body.offer == numbers[-1]
                assert body.epoch > epochs[-1]
                epochs.append(body.epoch)
                permitted = body.offer
            elif isinstance(body, TrainingPermitted):  # said again to who has not heard it
                assert (act, body.epoch) == ("again", epochs[-1])
        if act in ("loaded", "failed") and about != newest:
            assert said[before:] == []


@given(
    holds=st.lists(
        st.sets(st.builds(Stamp, st.integers(0, 3), st.integers(1, 2))),
        min_size=RANKS,
        max_size=RANKS,
    )
)
def test_the_newest_that_all_hold_is_offered(holds: list[set[Stamp]]) -> None:
    election = Election()
    for rank, stamps in enumerate(holds):
        assert not election.nodes.said
        election.join(rank, *stamps)
    shared = set.intersection(*holds)
    expected = ("memory", max(shared)) if shared else ("fresh", Stamp(-1, 0))
    assert (election.offer.source, election.offer.stamp) == expected
    election.load_all(election.offer.offer)
    [go] = election.of(TrainingPermitted)
    assert (go.source, go.stamp, go.offer) == (*expected, election.offer.offer)
    assert go.epoch > max([election.epoch, *(s.epoch for stamps in holds for s in stamps)])


def test_what_was_damaged_after_it_was_brought_is_brought_once_more() -> None:
    election = Election()
    election.join_all(OLD, NEW)
    first = election.offer
    election.leader.receive(StateUnusable(1, first.offer, "damaged", brought=True))
    again = election.offer
    assert (again.stamp, again.sources) == (NEW, first.sources) and again.offer > first.offer
    election.leader.receive(StateUnusable(1, again.offer, "damaged", brought=True))
    assert election.offer.stamp == OLD
    election.load_all(election.offer.offer)
    assert [go.stamp for go in election.of(TrainingPermitted)] == [OLD]


def test_what_a_rank_cannot_load_is_not_offered_again() -> None:
    election = Election()
    election.join_all(OLD, NEW)
    first = election.offer
    election.leader.receive(StateUnusable(1, first.offer, "damaged"))
    assert (first.stamp, election.offer.stamp) == (NEW, OLD)
    assert election.offer.offer > first.offer
    election.load_all(first.offer)
    assert not election.of(TrainingPermitted)
    election.load_all(election.offer.offer)
    assert [go.stamp for go in election.of(TrainingPermitted)] == [OLD]


def test_nothing_is_offered_before_all_nodes_have_told_what_they_hold() -> None:
    election = Election()
    election.nodes.silent = frozenset({1})
    election.join(0, NEW)
    election.join(1)
    election.join(2, NEW)
    assert not election.nodes.said
    election.nodes.silent, election.nodes.elsewhere = frozenset(), {1: frozenset({NEW})}
    election.leader.inventories_changed()
    assert (election.offer.stamp, election.offer.source) == (NEW, "memory")
    assert election.offer.sources == (RestoreSource(1, copies=(1,)),)


def test_without_memory_the_store_is_asked() -> None:
    election = Election(has_store=True)
    election.join_all()
    assert (election.listings, election.nodes.said) == (1, [])
    election.leader.store_listed(StoreListing([3, 7]))
    assert (election.offer.source, election.offer.stamp.step) == ("store", 7)


def test_a_store_that_cannot_be_read_is_a_refusal() -> None:
    election = Election(has_store=True)
    election.join_all()
    election.leader.store_listed(StoreRefusal("it is away"))
    [refused] = election.nodes.said
    assert isinstance(refused, VoteRefused) and not refused.is_final
    assert election.journal.kinds == ["restore-refused"]
    election.leader.store_listed(StoreRefusal("another job's", is_final=True))
    last = election.nodes.said[-1]
    assert isinstance(last, VoteRefused) and last.is_final


def test_ranks_of_a_lost_node_have_to_ask_again() -> None:
    election = Election()
    election.join_all(NEW)
    lost = election.offer.offer
    election.leader.ranks_are_gone([1, 2])
    election.load_all(lost)
    assert not election.of(TrainingPermitted)
    election.lives[1] = election.lives[2] = 2
    election.join(1, NEW)
    election.join(2, NEW)
    assert election.offer.offer > lost


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_lost_steps_are_counted_from_what_all_had_completed(lost: int) -> None:
    election = Election()
    for rank in range(RANKS):
        election.join(rank, OLD, completed_step=OLD.step + lost + rank)
    election.load_all(election.offer.offer)
    assert [go.lost_steps for go in election.of(TrainingPermitted)] == [lost]
    assert election.journal.of("resumed")[0].data["lost_steps"] == lost


@pytest.mark.parametrize(
    ("listing", "at_least"),
    [
        (StoreListing([4]), 0),
        (StoreListing([4], damaged={9: "torn"}), 5),
        (StoreListing([4], unfinished={12: "no manifest"}), 8),
    ],
)
def test_where_nobody_remembers_how_far_the_job_was_nobody_knows_what_is_lost(
    listing: StoreListing, at_least: int
) -> None:
    election = Election(has_store=True)
    election.join_all()
    election.leader.store_listed(listing)
    election.load_all(election.offer.offer)
    [go] = election.of(TrainingPermitted)
    assert (go.lost_steps, go.lost_at_least) == (None, at_least)
    assert f"{loss_words(None, at_least)}, epoch" in go.why
    [told] = election.journal.of("resumed")
    assert (told.data["lost_steps"], told.data["lost_at_least"]) == (None, at_least)


@pytest.mark.parametrize(("completed", "lost"), [(4, 0), (11, 7), (3, None)])
def test_ranks_that_have_seen_no_later_step_than_the_store_do_not_know(
    completed: int, lost: int | None
) -> None:
    election = Election(has_store=True)
    election.join_all(completed_step=completed)
    election.leader.store_listed(StoreListing([4]))
    election.load_all(election.offer.offer)
    assert [go.lost_steps for go in election.of(TrainingPermitted)] == [lost]


@pytest.mark.parametrize("begun", [{}, {3: "no manifest"}])
def test_a_first_start_has_lost_nothing(begun: dict[int, str]) -> None:
    election = Election(has_store=True)
    election.join_all()
    election.leader.store_listed(StoreListing((), unfinished=begun))
    election.load_all(election.offer.offer)
    [go] = election.of(TrainingPermitted)
    assert go.source == "fresh"
    assert (go.lost_steps, go.lost_at_least) == ((None, 4) if begun else (0, 0))
    assert ("every rank starts afresh" in go.why) is not bool(begun)


def test_a_stamp_after_which_the_program_fails_twice_is_condemned() -> None:
    election = Election()
    for life in (1, 2, 3):
        election.lives = [life] * RANKS
        election.join_all(OLD, NEW, completed_step=NEW.step, failed=life > 1)
        election.load_all(election.offer.offer)
    assert [go.stamp for go in election.of(TrainingPermitted)] == [NEW, NEW, OLD]
    assert [event.data["step"] for event in election.journal.of("condemned")] == [NEW.step]


def test_who_leads_next_offers_under_a_higher_number() -> None:
    before = Election()
    before.join_all(NEW)
    after = Election()
    after.time.pass_ns(10**9)
    after.join_all(NEW)
    assert after.offer.offer > before.offer.offer


def test_what_the_leader_before_permitted_reaches_who_has_not_heard_it() -> None:
    before, after = Election(), Election()
    before.join_all(NEW)
    before.load_all(before.offer.offer)
    [go] = before.of(TrainingPermitted)
    after.join(1, NEW)
    after.leader.receive(StateLoaded(1, go.offer))
    assert not after.nodes.said
    for _ in range(2):
        after.leader.receive(RanksTrain(go))
    assert after.nodes.said == [go]
    after.join(2, NEW)
    after.leader.receive(StateLoaded(2, go.offer))
    assert after.nodes.said == [go, go]
    assert after.journal.kinds == ["permitted-again"] * 2
    after.leader.receive(StateLoaded(2, go.offer))
    assert after.nodes.said == [go, go]


def test_before_anybody_asks_nothing_is_said() -> None:
    election = Election(has_store=True)
    election.leader.receive(StateLoaded(0, 1))
    election.leader.receive(RankGone(0))
    election.leader.ranks_are_gone([0])
    election.leader.inventories_changed()
    election.leader.store_listed(StoreListing([1]))
    assert not election.nodes.said


@pytest.mark.parametrize("has_store", [False, True])
def test_what_is_left_out_for_a_doubt_is_named_and_the_store_hears_of_it_once(
    has_store: bool,
) -> None:
    election = Election(has_store)
    election.nodes.elsewhere = {1: frozenset({OLD, NEW}), 2: frozenset({NEW})}
    election.join_all(OLD, NEW, doubted_from=6)
    assert election.offer.stamp == OLD and election.doubted == []
    election.load_all(election.offer.offer)
    [event] = election.journal.of("condemned")
    assert event.data == {"step": NEW.step, "ranks": [1, 2]} and "from step 6 on" in event.why
    [go] = election.of(TrainingPermitted)
    assert election.doubted == ([(6, go.epoch)] if has_store else [])
    election.join_all(OLD)  # the next vote, which doubts nothing
    election.load_all(election.offer.offer)
    assert len(election.of(TrainingPermitted)) == 2
    assert len(election.doubted) == has_store and len(election.journal.of("condemned")) == 1


PART = Share(7, 2)


def test_all_are_told_where_the_parts_of_what_nodes_share_come_from() -> None:
    """Rank 2, of another node, is lost: its holder tells what it shared with rank 0."""
    election = Election()
    election.nodes.elsewhere = {2: frozenset({NEW})}
    election.nodes.shared = {(2, NEW): PART}
    election.join(0, NEW, shares=((NEW, PART),))
    election.join(1, NEW, shares=((NEW, Share(8, 0)),))
    election.join(2)
    [shared] = election.offer.shared
    assert [part.rank for part in shared.parts] == [0, 2] and not election.offer.had_differed
    assert [source.rank for source in election.offer.sources] == [2]


def test_ranks_of_one_node_need_no_parts_brought() -> None:
    election = Election()
    election.join(0, NEW, shares=((NEW, PART),))
    election.join(1, NEW, shares=((NEW, PART),))
    election.join(2, NEW)
    assert election.offer.stamp == NEW and election.offer.shared == ()


def test_who_had_differed_at_a_later_step_is_told_so() -> None:
    election = Election()
    for rank in range(RANKS):
        share = Share(rank, 2)
        election.join(rank, OLD, NEW, shares=((OLD, Share(9, 3)), (NEW, share)))
    assert election.offer.stamp == OLD and election.offer.had_differed
    assert [part.rank for part in election.offer.shared[0].parts] == [0, 1, 2]
