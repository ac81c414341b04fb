"""Resume: a node's half of the vote. What ranks say about an older offer counts for nothing, and
another life of the leader hears everything again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.resume.vote import ListStore
from keepstep.model.checkpoint import StoreListing
from keepstep.model.mesh import Member, Mesh
from keepstep.model.messages.keeper_rank import (
    HaltOrder,
    HaltWord,
    JoinVote,
    StateLoaded,
    StateOffered,
    StateSource,
    StateUnusable,
    ToRank,
    TrainingPermitted,
    VoteRefused,
)
from keepstep.model.messages.peers import (
    OfferWord,
    RankGone,
    RankJoined,
    RanksTrain,
    VoteToAll,
    VoteToLeader,
)
from keepstep.model.restore_sources import RestoreSource, SharedSources
from keepstep.model.shares import RankRun, Share
from keepstep.model.snapshot import Stamp
from keepstep.runtime.keeper.left_behind import LeftBehind
from keepstep.runtime.keeper.resume import Resume, Then
from tests.runtime.fakes import FakeJournal, FakeTime

STAMP = Stamp(4, 2)
RANKS = 4  # two on each node
FRESH = Stamp(-1, 0)


class VotingHost:
    """A keeper. See `ResumeHost`."""

    def __init__(self, ranks: list[int], has_store: bool = False) -> None:
        self.journal = FakeJournal()
        self.ranks = ranks
        self.new: set[int] = set()  # who never lived here under that number
        self.told: list[tuple[int, ToRank]] = []
        self.went: list[tuple[str, int]] = []
        self.refusals: list[VoteRefused] = []
        self.resume = Resume(FakeTime(), self.journal, has_store, self)

    def list_store(self, question: ListStore) -> None:
        self.resume.store_listed(StoreListing([]))

    def doubt_checkpoints(self, first: int, before_epoch: int) -> None:
        raise AssertionError("nobody doubts anything here")

    def newest_epoch(self) -> int:
        return 2

    def tell(self, rank: int, message: ToRank) -> None:
        self.told.append((rank, message))

    def refused(self, refusal: VoteRefused) -> None:
        self.refusals.append(refusal)

    def here(self) -> list[int]:
        return self.ranks

    def completed_step(self, rank: int) -> int | None:
        return None if rank in self.new else 5 + rank

    def left_behind(self, world_size: int) -> LeftBehind:
        return LeftBehind(world_size + 1, 3)

    def has_failed(self, rank: int) -> bool:
        return rank == 3

    def resumed(self, permitted: TrainingPermitted) -> None:
        self.went.append((permitted.source, permitted.stamp.step))

    def join(self, *ranks: int, world_size: int = RANKS) -> None:
        for rank in ranks:
            self.resume.joined(JoinVote(rank, world_size, 1, (STAMP,)))

    def of(self, kind: type[Any]) -> list[int]:
        """Ranks that were told such a thing, in order."""
        return [rank for rank, message in self.told if isinstance(message, kind)]


class FakeResumeNodes:
    """See `ResumeNodes`. The leader hears what is in `heard`; fetches wait in `fetching`."""

    def __init__(self, leads: bool = False, refusal: str = "") -> None:
        self.leads = leads
        self.refusal = refusal
        self.heard: list[VoteToLeader] = []
        self.said: list[VoteToAll] = []
        self.linked: list[Mapping[int, RestoreSource]] = []
        self.fetching: list[tuple[int, Stamp, Then]] = []
        self.bringing: list[tuple[Sequence[SharedSources], Stamp, Then]] = []
        self.forgotten: list[Stamp | None] = []
        self.given_up: list[tuple[Stamp | None, int]] = []  # as an epoch began
        self.began = lambda: None
        self.went: list[tuple[int, Stamp | None]] = []
        self.told_inventory_before: list[int] = []  # which of the words in `heard`

    def to_all(self, body: VoteToAll) -> None:
        self.said.append(body)

    def to_leader(self, body: VoteToLeader) -> None:
        self.heard.append(body)

    def tell_inventory(self) -> None:
        self.told_inventory_before.append(len(self.heard))

    def silent_nodes(self) -> frozenset[int]:
        return frozenset()

    def restorable(self, proven: Mapping[int, frozenset[Stamp]]) -> Mapping[int, frozenset[Stamp]]:
        return {}

    def shares(self) -> Mapping[tuple[int, Stamp], Share]:
        return {}

    def are_on_one(self, ranks: Sequence[int]) -> bool:
        return False

    def fetch_parts(self, shared: Sequence[SharedSources], stamp: Stamp, then: Then) -> None:
        self.bringing.append((shared, stamp, then))

    def sources(
        self, wanted: list[int], stamp: Stamp, proven: Mapping[int, frozenset[Stamp]]
    ) -> Mapping[int, RestoreSource]:
        return {}

    def link_with_sources(self, sources: Mapping[int, RestoreSource]) -> None:
        self.linked.append(sources)

    def fetch(self, source: RestoreSource, stamp: Stamp, then: Then) -> None:
        self.fetching.append((source.rank, stamp, then))

    def forget_newer(self, stamp: Stamp | None, before_epoch: int | None = None) -> None:
        if before_epoch is None:
            self.forgotten.append(stamp)
        else:
            self.given_up.append((stamp, before_epoch))
            self.began()

    def resumed(self, epoch: int, stamp: Stamp | None) -> None:
        self.went.append((epoch, stamp))


def mesh(node: int) -> Mesh:
    members = tuple(Member(n, "127.0.0.1", 1, 1, 2) for n in (0, 1))
    return Mesh(1, node, members, "a secret of the tests")


def following() -> tuple[VotingHost, FakeResumeNodes]:
    """The keeper of node 1, which ranks 2 and 3 are connected to."""
    host, nodes = VotingHost([2, 3]), FakeResumeNodes()
    host.resume.begin_mesh(nodes, mesh(1))
    return host, nodes


def offer(
    number: int, source: StateSource = "memory", stamp: Stamp = STAMP, lacking: tuple[int, ...] = ()
) -> OfferWord:
    sources = tuple(RestoreSource(rank, copies=(0,)) for rank in lacking)
    return OfferWord(number, source, stamp, "why", sources)


@pytest.mark.parametrize("ranks", [1, 3])
def test_on_one_node_all_load_and_then_all_go(ranks: int) -> None:
    host = VotingHost(list(range(ranks)))
    host.join(*range(ranks), world_size=ranks)
    offers = [message for _, message in host.told if isinstance(message, StateOffered)]
    assert host.of(StateOffered) == host.ranks
    assert {(o.source, o.step, o.epoch) for o in offers} == {("memory", *STAMP)}
    for rank in range(ranks):
        assert not host.of(TrainingPermitted)
        host.resume.loaded(rank, offers[0].offer)
    assert host.of(TrainingPermitted) == host.ranks
    assert host.went == [("memory", STAMP.step)]


def test_the_leader_hears_what_the_node_knows_of_a_rank() -> None:
    host, nodes = following()
    host.join(3)
    assert nodes.heard == [RankJoined(3, RANKS, 1, (STAMP,), None, 8, 2, True)]


def halt(rank: int, says: str, step: int = 16) -> HaltWord:
    return HaltWord(rank, RANKS, 3, step, 1, says)  # type: ignore[arg-type]


def test_the_leader_hears_what_a_node_holds_now_before_a_rank_of_it_asks() -> None:
    """In a vote of a mesh that stands it knew what was held when the mesh began, and a rank with a
    damaged slot went back further than it need (seed 931129)."""
    host, nodes = following()
    host.join(2)
    assert nodes.told_inventory_before == [0] and isinstance(nodes.heard[0], RankJoined)


def test_another_life_of_the_leader_hears_where_ranks_stand() -> None:
    host, nodes = following()
    words = [halt(2, "stands"), halt(3, "asks"), halt(3, "stands"), halt(2, "agrees")]
    for word in words:
        host.resume.halt(word)
    assert nodes.heard == words
    nodes.heard.clear()
    host.resume.leader_is_back()
    assert nodes.heard == [halt(2, "agrees"), halt(3, "stands")]
    host.resume.receive(HaltOrder(3, 16, 1, "void"))
    assert host.of(HaltOrder) == [2, 3]
    nodes.heard.clear()
    host.resume.leader_is_back()
    assert nodes.heard == [], "who hears that it is void stands there no more"


def test_on_one_node_the_ranks_halt_by_its_keeper_alone() -> None:
    host = VotingHost([0, 1])
    for says in ("stands", "agrees"):
        for rank in (0, 1):
            host.resume.halt(HaltWord(rank, 2, 3, 16, 1, says, "seen"))  # type: ignore[arg-type]
    orders = [m for rank, m in host.told if isinstance(m, HaltOrder) and rank == 1]
    assert [order.orders for order in orders] == ["halt", "tell", "go"]
    host.resume.left(1)
    host.resume.halt(halt(0, "asks", 24))
    assert host.told[-1] == (1, HaltOrder(3, 24, 1, "void", why="1 rank has left"))


DEEDS = st.lists(
    st.tuples(
        st.sampled_from(["join", "left", "loaded", "failed", "offer"]),
        st.sampled_from([2, 3]),
        st.integers(0, 2),
    ),
    max_size=30,
)


@given(DEEDS)
def test_another_life_of_the_leader_hears_what_still_counts(
    deeds: list[tuple[str, int, int]],
) -> None:
    host, nodes = following()
    number = 10
    host.resume.receive(offer(number))
    joined: dict[int, VoteToLeader] = {}
    answered: dict[int, StateLoaded | StateUnusable] = {}
    for deed, rank, age in deeds:
        match deed:
            case "join":
                host.join(rank)
                joined[rank] = nodes.heard[-1]
                answered.pop(rank, None)
            case "left":
                host.resume.left(rank)
                joined.pop(rank, None)
                assert nodes.heard[-1] == RankGone(rank)
            case "loaded":
                host.resume.loaded(rank, number - age)
                answered[rank] = StateLoaded(rank, number - age)
            case "failed":
                host.resume.failed(StateUnusable(rank, number - age, "why"))
                answered[rank] = StateUnusable(rank, number - age, "why")
            case "offer":
                number += 1
                host.resume.receive(offer(number))
    nodes.heard.clear()
    host.resume.leader_is_back()
    newest = [answered[r] for r in joined if r in answered and answered[r].offer == number]
    assert [one for one in nodes.heard if isinstance(one, RankJoined)] == list(joined.values())
    assert [one for one in nodes.heard if not isinstance(one, RankJoined)] == newest


def test_an_offer_that_is_said_again_is_not_handed_on_again() -> None:
    host, nodes = following()
    for number in (1, 1, 2, 2):
        host.resume.receive(offer(number))
    assert host.of(StateOffered) == [2, 3, 2, 3]
    assert nodes.forgotten == [STAMP, STAMP]


def test_who_asks_once_more_is_handed_the_same_offer_again() -> None:
    """It gave up the vote in which it had asked first; the leader says to all what it said."""
    host, nodes = following()
    host.join(2, 3)
    host.resume.receive(offer(1, lacking=(3,)))
    host.join(3)
    host.resume.receive(offer(1, lacking=(3,)))
    assert host.of(StateOffered) == [] and len(nodes.fetching) == 2
    nodes.fetching[-1][2](None)
    assert host.of(StateOffered) == [2, 3]


def test_who_has_asked_a_moment_before_the_mesh_is_heard_of_waits_in_it() -> None:
    """A process that stood by asks at once. Before, nobody heard of it, and all waited."""
    host, _ = following()
    host.join(2)
    host.join(3)
    host.resume.left(3)
    nodes = FakeResumeNodes()
    host.resume.begin_mesh(nodes, mesh(1))
    assert [join.rank for join in nodes.heard if isinstance(join, RankJoined)] == [2]


def test_who_has_agreed_a_moment_before_the_mesh_is_heard_of_has_agreed_in_it() -> None:
    """Its keeper is another one's successor, and hears of its ranks first. The others had heard
    that all go back, and waited for these (seed 900582)."""
    host = VotingHost([2, 3])
    for rank in (2, 3):
        host.resume.halt(HaltWord(rank, 4, 3, 16, 1, "agrees", "seen"))
    nodes = FakeResumeNodes()
    host.resume.begin_mesh(nodes, mesh(1))
    agreed = [word.rank for word in nodes.heard if isinstance(word, HaltWord)]
    assert agreed == [2, 3]


def test_who_trains_by_a_permission_does_not_wait_in_the_next_mesh() -> None:
    host, _ = following()
    host.join(2, 3)
    host.resume.receive(TrainingPermitted(3, 1, "memory", STAMP, 0, "why"))
    nodes = FakeResumeNodes()
    host.resume.begin_mesh(nodes, mesh(1))
    assert not [join for join in nodes.heard if isinstance(join, RankJoined)]


def test_all_are_offered_it_once_what_one_of_them_lacks_is_here() -> None:
    """Where they share a snapshot, the others lean on what is being fetched."""
    host, nodes = following()
    host.resume.receive(offer(1, lacking=(3,)))
    assert host.of(StateOffered) == []
    assert [set(sources) for sources in nodes.linked] == [{3}]
    [(rank, stamp, then)] = nodes.fetching
    assert (rank, stamp) == (3, STAMP)
    then(None)
    assert host.of(StateOffered) == [2, 3]


def test_what_cannot_be_fetched_is_a_failure_of_its_rank() -> None:
    host, nodes = following()
    host.resume.receive(offer(1, lacking=(2, 3)))
    nodes.fetching[0][2](None)
    assert host.of(StateOffered) == []
    nodes.fetching[1][2]("nobody has it")
    assert nodes.heard == [StateUnusable(3, 1, "nobody has it")]
    assert host.of(StateOffered) == [2]
    assert [event.data["rank"] for event in host.journal.of("restore-failed")] == [3]


@pytest.mark.parametrize("why", [None, "nobody has it"])
@pytest.mark.parametrize("newer", ["offer", "mesh"])
def test_what_was_fetched_for_an_older_offer_counts_for_nothing(
    why: str | None, newer: str
) -> None:
    host, nodes = following()
    host.resume.receive(offer(1, lacking=(3,)))
    if newer == "offer":
        host.resume.receive(offer(2, lacking=(2, 3)))
    else:
        host.resume.begin_mesh(FakeResumeNodes(), mesh(1))
    told = list(host.told)
    nodes.fetching[0][2](why)
    assert (host.told, nodes.heard) == (told, [])


@pytest.mark.parametrize(
    ("source", "keeps_newer", "at_offer"),
    [
        ("memory", False, [STAMP]),
        ("memory", True, []),
        ("store", False, []),
        ("fresh", False, []),
    ],
)
def test_what_is_held_is_given_up_when_nobody_can_want_it(
    source: StateSource, keeps_newer: bool, at_offer: list[Stamp | None]
) -> None:
    host, nodes = following()
    stamp = FRESH if source == "fresh" else STAMP
    host.resume.receive(replace(offer(1, source, stamp), keeps_newer=keeps_newer))
    assert (nodes.forgotten, nodes.given_up) == (at_offer, [])
    offers = [message for _, message in host.told if isinstance(message, StateOffered)]
    assert [each.keeps_newer for each in offers] == [keeps_newer] * 2

    def nobody_trains() -> None:
        assert not host.of(TrainingPermitted), "else the next keeper holds what was given up"

    nodes.began = nobody_trains
    host.resume.receive(TrainingPermitted(3, 1, source, stamp, 0, "why"))
    assert nodes.forgotten == at_offer
    assert nodes.given_up == [(STAMP if source == "memory" else None, 3)]
    assert nodes.went == [(3, STAMP if source == "memory" else None)]
    assert host.of(TrainingPermitted) == [2, 3]
    assert host.went == [(source, stamp.step)]


def test_after_the_permission_nobody_waits_any_more() -> None:
    host, nodes = following()
    host.join(2, 3)
    host.resume.receive(offer(1))
    go = TrainingPermitted(3, 1, "memory", STAMP, 0, "why")
    host.resume.receive(go)
    nodes.heard.clear()
    host.resume.leader_is_back()
    assert nodes.heard == [RanksTrain(go)]


def test_what_is_permitted_again_reaches_the_ranks_and_begins_nothing() -> None:
    host, nodes = following()
    host.join(2, 3)
    go = TrainingPermitted(3, 1, "memory", STAMP, 0, "why")
    host.resume.receive(go)
    host.join(2)
    host.resume.loaded(2, 1)
    host.join(3)  # another life of it
    host.resume.receive(go)
    assert host.of(TrainingPermitted) == [2, 3, 2, 3]
    assert (nodes.went, len(host.went), host.journal.kinds) == ([(3, STAMP)], 1, ["go"])
    nodes.heard.clear()
    host.resume.leader_is_back()
    assert [one.rank for one in nodes.heard if isinstance(one, RankJoined)] == [3]


def test_a_keeper_hears_of_its_ranks_what_the_one_before_was_told() -> None:
    """Rank 2 trains, rank 3 has loaded the same and not heard that it may."""
    host, nodes = VotingHost([2, 3]), FakeResumeNodes()
    go = TrainingPermitted(3, 1, "memory", STAMP, 0, "why")
    host.resume.attached(go)
    host.join(3)
    host.resume.begin_mesh(nodes, mesh(1))
    host.resume.loaded(3, 1)
    expected = [RanksTrain, RankJoined, StateLoaded]
    assert [type(one) for one in nodes.heard] == expected
    nodes.heard.clear()
    host.resume.leader_is_back()
    assert [type(one) for one in nodes.heard] == expected


def test_on_one_node_the_rest_may_train_when_one_does() -> None:
    host = VotingHost([0, 1])
    host.join(1, world_size=2)
    host.resume.loaded(1, 1)
    assert not host.told
    host.resume.attached(TrainingPermitted(3, 1, "memory", STAMP, 0, "why"))
    assert 1 in host.of(TrainingPermitted)


def test_who_came_before_the_mesh_is_of_it() -> None:
    host, nodes = VotingHost([2, 3]), FakeResumeNodes()
    host.join(0, 2, 3)
    host.join(3, world_size=9)
    host.resume.begin_mesh(nodes, mesh(1))
    assert [one.rank for one in nodes.heard if isinstance(one, RankJoined)] == [2]


def test_where_nobody_may_train_who_asks_is_refused() -> None:
    host, nodes = VotingHost([2]), FakeResumeNodes(refusal="the policy does not fit")
    host.resume.begin_mesh(nodes, mesh(1))
    host.join(2)
    assert (host.of(VoteRefused), nodes.heard) == ([2], [])
    assert host.refusals == [VoteRefused("the policy does not fit", is_final=True)]


def test_a_refusal_reaches_all_ranks_here() -> None:
    host, _ = following()
    refusal = VoteRefused("why")
    host.resume.receive(refusal)
    assert host.of(VoteRefused) == [2, 3] and host.refusals == [refusal]


@pytest.mark.parametrize("leads", [False, True])
def test_only_who_leads_listens_to_other_nodes_ranks(leads: bool) -> None:
    host, nodes = VotingHost([0, 1]), FakeResumeNodes(leads)
    host.resume.begin_mesh(nodes, mesh(0))
    for rank in range(RANKS):
        host.resume.receive(RankJoined(rank, RANKS, 1, (STAMP,), None, None, 2, False))
    assert [type(body) for body in nodes.said] == ([OfferWord] if leads else [])
    host.resume.ranks_are_gone([2, 3])
    host.resume.inventories_changed()
    assert len(nodes.said) == leads


def test_what_another_world_has_left_is_told_for_who_has_nothing_of_its_own() -> None:
    """Under another number: with fewer ranks the survivors are numbered anew."""
    host, nodes = VotingHost([0, 1]), FakeResumeNodes()
    host.resume.begin_mesh(nodes, mesh(0))
    host.new = {1}
    host.resume.joined(JoinVote(0, RANKS, 1, (STAMP,)))
    host.resume.joined(JoinVote(1, RANKS, 1, ()))
    told = [body for body in nodes.heard if isinstance(body, RankJoined)]
    assert [(t.foreign_world, t.completed_step) for t in told] == [(None, 5), (RANKS + 1, 3)]


SHARED = SharedSources((RestoreSource(0, (0,)), RestoreSource(2, (1,))))


def shared_offer(number: int, had_differed: bool = False) -> OfferWord:
    """Ranks 0 and 2 share it, and rank 3 has to be given its own."""
    return replace(offer(number, lacking=(3,)), shared=(SHARED,), had_differed=had_differed)


def offered(host: VotingHost) -> dict[int, tuple[RankRun, ...] | None]:
    """By rank: the replicas that it was told of."""
    return {r: m.replicas for r, m in host.told if isinstance(m, StateOffered)}


@pytest.mark.parametrize("had_differed", [False, True])
def test_parts_are_brought_behind_what_ranks_lack_and_before_anybody_loads(
    had_differed: bool,
) -> None:
    host, nodes = following()
    host.resume.receive(shared_offer(10, had_differed))
    [(_, _, came)] = nodes.fetching
    assert not nodes.bringing and not offered(host)
    came(None)
    [(shared, stamp, here)] = nodes.bringing
    assert shared == (SHARED,) and stamp == STAMP and not offered(host)
    here(None)
    assert offered(host) == (
        {2: None, 3: None} if had_differed else {2: (RankRun(0, 2, 2),), 3: ()}
    )


def test_ranks_that_had_differed_hear_so_where_nobody_shared_what_all_go_back_to() -> None:
    """They would look for replicas at once, and differ again in the next life (swarm)."""
    host, _ = following()
    host.resume.receive(replace(offer(10), had_differed=True))
    assert offered(host) == {2: None, 3: None}


def test_who_lacks_a_part_cannot_use_the_offer_and_says_why() -> None:
    host, nodes = following()
    host.resume.receive(shared_offer(10))
    nodes.fetching[0][2](None)
    nodes.bringing[0][2]("rank 0 keeps a part of it, and it is gone")
    assert list(offered(host)) == [3]
    [answer] = [word for word in nodes.heard if isinstance(word, StateUnusable)]
    assert answer.rank == 2 and "rank 0 keeps a part" in answer.why


def test_parts_of_an_older_offer_count_for_nothing() -> None:
    host, nodes = following()
    host.resume.receive(shared_offer(10))
    nodes.fetching[0][2](None)
    host.resume.receive(offer(11, stamp=Stamp(STAMP.step - 1, STAMP.epoch)))
    before = len(host.told)
    nodes.bringing[0][2](None)
    assert len(host.told) == before
