"""The commit protocol under every interleaving: nodes, holders, words of any age, torn captures,
keepers that restart, nodes that vanish.

The model is protocol_model.py. Three searches: every instant of a tiny world; every schedule of a
longer run that departs at most so often from the prompt one; hypothesis through larger worlds, with
messages that lie on their wires. Then examples with names, and planted bugs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from keepstep.core.detection.replicas import CONDEMNS, MARKS
from keepstep.core.resume.commit import Commit, RankFacts, first_horizon, newer
from keepstep.core.resume.cut import Holding
from keepstep.core.resume.slots import Skip, Take, choose
from keepstep.model.horizon import Horizon
from keepstep.model.mesh import LEADER
from keepstep.model.replicas import ReplicaDifference
from keepstep.model.shares import Share
from keepstep.model.snapshot import SlotState, SlotView, Stamp
from keepstep.model.topology import Copies, NoRedundancy, Parity, ReedSolomon, Scheme
from tests.core.protocol_model import (
    BLANK,
    EMPTY,
    Ack,
    Move,
    Offer,
    Protocol,
    Report,
    Stuck,
    Unsafe,
    World,
    put,
    sealed,
    writing,
)

# ----------------------------------------------------------------------------------------------
# every instant of small worlds


class Known:
    """Instants seen. Parts of worlds are shared between them, so each is numbered once and an
    instant is a tuple of numbers."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._by_id: dict[int, tuple[Any, int]] = {}

    def key(self, world: World) -> tuple[int, ...]:
        return tuple(map(self._number, world))

    def _number(self, part: Any) -> int:
        found = self._by_id.get(id(part))
        if found is None:
            found = self._by_id[id(part)] = (
                part,
                self._numbers.setdefault(part, len(self._numbers)),
            )  # the part is kept: its id stays its own
        return found[1]


def looked(protocol: Protocol, world: World) -> World:
    """Every rank has read its page: the words' own delays are enough for a small world."""
    return world._replace(seen=tuple(world.words[node] for node in protocol.home))


def explore(protocol: Protocol, max_step: int, max_kills: int, max_restarts: int) -> int:
    """Every reachable instant, breadth first; returns how many. Raises Unsafe or Stuck."""
    known = Known()
    queue = deque([(protocol.first(), max_kills, max_restarts)])
    seen = {(known.key(protocol.first()), max_kills, max_restarts)}
    while queue:
        world, kills, restarts = queue.popleft()
        protocol.check_safety(world)
        ahead = list(protocol.useful(world))
        if not ahead:
            protocol.check_liveness(world)
        moves = [
            (m, kills, restarts)
            for m in (*ahead, *protocol.harmful(world), *protocol.steps(world, max_step))
        ]
        moves += [(("recover", lost), kills - 1, restarts) for lost in protocol.losses if kills]
        moves += [
            (("restart", node), kills, restarts - 1) for node in range(protocol.nodes) if restarts
        ]
        for move, kills_left, restarts_left in moves:
            following = looked(protocol, protocol.apply(world, move))
            key = known.key(following), kills_left, restarts_left
            if key not in seen:
                seen.add(key)
                queue.append((following, kills_left, restarts_left))
    return len(seen)


def explore_departures(protocol: Protocol, max_step: int, departures: int) -> int:
    """Every schedule that departs at most so often from the prompt one, in which whatever can
    happen does and only then the next step comes. A departure: something is late (for as long as
    one likes), torn or skipped, a keeper restarts, ranks die, nodes are lost."""
    known = Known()
    queue: deque[tuple[World, frozenset[Move], int]] = deque(
        [(protocol.first(), frozenset(), departures)]
    )
    best = {(known.key(protocol.first()), frozenset[Move]()): departures}
    while queue:
        world, late, left = queue.popleft()
        if best[known.key(world), late] > left:
            continue
        protocol.check_safety(world)
        ahead = list(protocol.useful(world))
        if not ahead:
            protocol.check_liveness(world)
        steps = list(protocol.steps(world, max_step))
        late = late & {*ahead, *steps}
        now = next((m for m in (*ahead, *steps) if m not in late), None)
        following = [
            (protocol.apply(world, m), late - {m}, 0) for m in (*late, *([now] if now else []))
        ]
        if left:
            following += [(world, late | {now}, 1)] if now else []
            following += [
                (protocol.apply(world, m), late, 1)
                for m in (*protocol.harmful(world), *(("skip", rank) for _, rank in steps))
            ]
            following += [
                (protocol.restart(world, node), late, 1) for node in range(protocol.nodes)
            ]
            following += [
                (protocol.recover(world, lost), frozenset(), 1) for lost in protocol.losses
            ]
        for world_after, late_after, cost in following:
            world_after = looked(protocol, world_after)
            key = known.key(world_after), late_after
            if best.get(key, -1) < left - cost:
                best[key] = left - cost
                (queue.append if cost else queue.appendleft)((world_after, late_after, left - cost))
    return len(best)


@pytest.mark.parametrize(
    ("policy", "nodes", "max_step", "max_kills", "max_restarts"),
    [(Copies(2), 2, 1, 0, 0), (Copies(2), 2, 0, 1, 1), (Parity(2), 2, 0, 1, 1)],
)
def test_every_instant_of_a_tiny_world(
    policy: Scheme, nodes: int, max_step: int, max_kills: int, max_restarts: int
) -> None:
    assert explore(Protocol(policy, nodes, prompt=True), max_step, max_kills, max_restarts) > 1000


@pytest.mark.parametrize(
    ("policy", "nodes", "own_slots", "max_step", "departures"),
    [
        (Copies(2), 2, 2, 2, 2),
        (Copies(2), 2, 3, 3, 1),
        (Copies(2), 3, 2, 2, 1),
        (Parity(3), 3, 2, 2, 1),
    ],
)
def test_every_schedule_near_the_prompt_one(
    policy: Scheme, nodes: int, own_slots: int, max_step: int, departures: int
) -> None:
    assert (
        explore_departures(
            Protocol(policy, nodes, own_slots=own_slots, prompt=True), max_step, departures
        )
        > 1000
    )


@pytest.mark.parametrize(
    ("policy", "nodes", "max_step", "departures"),
    [(Copies(2), 2, 3, 2), (Copies(3), 3, 2, 1), (Copies(3), 4, 2, 1)],
)
def test_with_one_slot_copies_survive_one_node_less_at_every_instant(
    policy: Scheme, nodes: int, max_step: int, departures: int
) -> None:
    """With `copies:2` that all ranks die, with `copies:3` one node."""
    protocol = Protocol(policy, nodes, own_slots=1, prompt=True)
    assert explore_departures(protocol, max_step, departures) > 500


def test_every_instant_of_a_tiny_world_with_one_slot() -> None:
    assert explore(Protocol(Copies(2), 2, own_slots=1, prompt=True), 1, 1, 0) > 1000


@pytest.mark.parametrize(("policy", "nodes"), [(Copies(2), 2), (Copies(3), 3)])
def test_with_one_slot_they_do_not_survive_as_many_as_with_two(policy: Scheme, nodes: int) -> None:
    """While it is overwritten: that is the price."""

    class AsWithTwo(Protocol):
        @cached_property
        def losses(self) -> tuple[tuple[int, ...], ...]:
            return Protocol(policy, nodes).losses

    with pytest.raises(Unsafe):
        explore_departures(AsWithTwo(policy, nodes, own_slots=1, prompt=True), 2, 1)


# ----------------------------------------------------------------------------------------------
# larger worlds


WORLDS: list[tuple[Scheme, int]] = [
    (Copies(2), 4),
    (Copies(3), 4),
    (Parity(4), 4),
    (Parity(2), 4),
    (ReedSolomon(2, 2), 4),
    (Copies(2), 2),
    (Copies(2), 3),
    (Parity(3), 3),
]
PICKS = st.lists(st.integers(0, 255), min_size=6, max_size=24)


class Job(RuleBasedStateMachine):
    """Up to 4 nodes of 1 or 2 ranks. Messages lie on their wires as long as the search likes; ranks
    decide by pages of any age."""

    protocol_type: type[Protocol] = Protocol
    world: World

    @initialize(
        which=st.sampled_from(WORLDS),
        ranks_per_node=st.sampled_from([1, 1, 2]),
        own_slots=st.integers(2, 4),
    )
    def begin(self, which: tuple[Scheme, int], ranks_per_node: int, own_slots: int) -> None:
        self.protocol = self.protocol_type(
            *which, ranks_per_node=ranks_per_node, own_slots=own_slots
        )
        self.world = self.protocol.first()

    def happens(self, moves: Sequence[Move], pick: int) -> None:
        if moves:
            self.world = self.protocol.apply(self.world, moves[pick % len(moves)])
            self.protocol.check_safety(self.world)

    @rule(picks=PICKS)
    def goes_on(self, picks: list[int]) -> None:
        for pick in picks:
            self.happens(
                [*self.protocol.useful(self.world), *self.protocol.steps(self.world, apart=1)], pick
            )

    @rule(picks=PICKS)
    def communicates(self, picks: list[int]) -> None:
        for pick in picks:
            self.happens(list(self.protocol.useful(self.world)), pick)

    @rule(
        steps=st.integers(1, 3),
        late=st.sampled_from(["nothing", "report", "say", "offer", "piece", "look", "seal"]),
    )
    def has_time(self, steps: int, late: str) -> None:
        """Boundaries pass and all that is under way ends, but for one kind of happening."""
        for _ in range(steps):
            self.happens(list(self.protocol.steps(self.world)), 0)
            while moves := [m for m in self.protocol.useful(self.world) if m[0] != late]:
                self.happens(moves, 0)

    @rule(
        what=st.sampled_from(
            ["goes wrong", "goes wrong", "restarts", "restarts", "lost", "resuming"]
        ),
        pick=st.integers(0, 255),
        picks=PICKS,
    )
    def fails(self, what: str, pick: int, picks: list[int]) -> None:
        """A capture is torn or skipped, pieces do not arrive; keepers restart; ranks die, perhaps
        with nodes, perhaps while resuming."""
        p = self.protocol
        match what:
            case "goes wrong":
                self.happens(
                    [*p.harmful(self.world), *(("skip", rank) for _, rank in p.steps(self.world))],
                    pick,
                )
            case "restarts":
                self.happens([("restart", node) for node in range(p.nodes)], pick)
            case "lost":
                self.happens([("recover", lost) for lost in p.losses], pick)
            case _:
                self.all_die_while_resuming(
                    p.losses[pick % len(p.losses)],
                    frozenset(pick % p.nodes for pick in picks[:2]),
                    picks[2:6],
                )

    def all_die_while_resuming(
        self, lost: tuple[int, ...], hearing: frozenset[int], picks: list[int]
    ) -> None:
        """Only some nodes hear that they may go, and their ranks train a little; then ranks die
        again."""
        p, before = self.protocol, self.world
        self.happens([("recover", lost)], 0)
        for node in set(range(p.nodes)) - hearing:
            self.world = self.world._replace(
                words=put(self.world.words, node, BLANK if node in lost else before.words[node])
            )
        going = [rank for rank in p.ranks if p.home[rank] in hearing]
        for pick in picks:
            rank = going[pick % len(going)]
            self.happens(
                [("boundary" if writing(self.world.own[rank]) is None else "seal", rank)], 0
            )
        self.happens([("recover", ())], 0)

    @invariant()
    def whatever_is_promised_may_be_lost(self) -> None:
        if hasattr(self, "world"):
            self.protocol.check_safety(self.world)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.protocol.check_liveness(self.world)


SEARCH = settings(max_examples=40, stateful_step_count=25, derandomize=True, deadline=None)


def test_larger_worlds() -> None:
    run_state_machine_as_test(Job, settings=SEARCH)


# ---------------------------------------------------------------------------------------------- the
# searches find planted bugs


def overwrites_the_horizon(
    slots: Sequence[SlotView],
    horizon: Stamp | None,
    is_hopeless: Callable[[Stamp], bool],
) -> Take | Skip:
    return choose(slots, horizon and horizon._replace(epoch=horizon.epoch + 1), is_hopeless)


def overwrites_the_newest(
    slots: Sequence[SlotView],
    horizon: Stamp | None,
    is_hopeless: Callable[[Stamp], bool],
) -> Take | Skip:
    """A holder's slot: what nobody else may have any more, where ranks have one slot."""
    newest = max(range(len(slots)), key=lambda index: slots[index].stamp)
    return Take(newest, "planted")


def gives_up_too_early(
    slots: Sequence[SlotView],
    horizon: Stamp | None,
    is_hopeless: Callable[[Stamp], bool],
) -> Take | Skip:
    return choose(slots, horizon, lambda stamp: True)


def never_gives_up(
    slots: Sequence[SlotView],
    horizon: Stamp | None,
    is_hopeless: Callable[[Stamp], bool],
) -> Take | Skip:
    return choose(slots, horizon, lambda stamp: False)


class OneRankIsEnough(Commit):
    """Commits what is proven for one rank."""

    def _decide(self) -> Horizon:
        anybody = frozenset[Stamp]().union(*(f.protected for f in self.facts.values()))
        for fact in list(self.facts.values()):
            self._take(fact._replace(protected=anybody))
        return super()._decide()


class SpeaksEarly(Commit):
    """Decides before all ranks were reported."""

    def report(self, facts: Iterable[RankFacts], heard: Horizon) -> Horizon | None:
        facts, world_size = list(facts), self.world_size
        self.world_size = len({*self.facts, *(f.rank for f in facts)})
        try:
            return super().report(facts, heard)
        finally:
            self.world_size = world_size


class HearsNothing(Commit):
    """A new leader begins as if nothing had been said before it."""

    def report(self, facts: Iterable[RankFacts], heard: Horizon) -> Horizon | None:
        return super().report(facts, BLANK)


class OneHolderIsEnough(Protocol):
    def facts_of(self, world: World, rank: int) -> RankFacts:
        return (
            super()
            .facts_of(world, rank)
            ._replace(protected=frozenset(stamp for _, stamp in world.acked[rank]))
        )


class AcksWhenBegun(Protocol):
    """A holder answers when it has found a slot, not when its part is whole."""

    def _offered(self, world: World, holder: int, offer: Offer) -> World:
        world = super()._offered(world, holder, offer)
        slots = world.held[self.place_for[offer.rank, holder]]
        begun = any(view == SlotView(SlotState.WRITING, offer.stamp) for view in slots)
        return (
            self.send(world, holder, self.home[offer.rank], Ack(offer.rank, offer.stamp))
            if begun
            else world
        )


class AcksOutliveTheirEpoch(Protocol):
    """What a holder had acknowledged before it was replaced still counts."""

    def recover(self, world: World, lost: Sequence[int] = ()) -> World:
        return super().recover(world, lost)._replace(acked=world.acked)


class LeaderHearsItselfLast(Protocol):
    """The leader's own page tells a word no sooner than others do."""

    def _reported_to_leader(self, world: World, report: Report) -> World:
        page = world.words[LEADER]
        world = super()._reported_to_leader(world, report)
        return world._replace(words=put(world.words, LEADER, page))


def overwrites_nothing(slots: Sequence[SlotView], word: Horizon) -> Take | Skip:
    """A rank's only slot waits for a newer one, as one of two does."""
    return choose(slots, word.floor, word.is_hopeless)


TWO: dict[str, Any] = {"policy": Copies(2), "nodes": 2, "prompt": True}
ONE: dict[str, Any] = {"policy": Copies(2), "nodes": 2, "own_slots": 1, "prompt": True}


@pytest.mark.parametrize(
    ("planted", "shown_by", "max_step", "departures"),
    [
        (Protocol(**TWO, chooser=overwrites_the_horizon), Unsafe, 2, 1),
        (Protocol(**TWO, chooser=gives_up_too_early), Unsafe, 2, 1),
        (Protocol(**TWO, chooser=never_gives_up), Stuck, 2, 1),
        (
            Protocol(Copies(3), 3, own_slots=1, prompt=True, chooser=overwrites_the_newest),
            Unsafe,
            1,
            1,
        ),
        (Protocol(**ONE, only_chooser=overwrites_nothing), Stuck, 2, 1),
        (Protocol(**ONE, commit_type=OneRankIsEnough), Unsafe, 2, 1),
        (Protocol(**TWO, commit_type=OneRankIsEnough), Unsafe, 2, 1),
        (Protocol(**TWO, commit_type=SpeaksEarly), Unsafe, 2, 1),
        (Protocol(**TWO, commit_type=HearsNothing), Stuck, 2, 1),
        (AcksWhenBegun(**TWO), Unsafe, 2, 1),
        (AcksOutliveTheirEpoch(**TWO), Unsafe, 2, 1),
        (OneHolderIsEnough(Copies(3), 3, own_slots=1, prompt=True), Unsafe, 2, 1),
        (OneHolderIsEnough(Parity(3), 3, prompt=True), Unsafe, 1, 1),
    ],
    ids=lambda planted: getattr(planted, "__name__", None),
)
def test_the_search_finds_a_planted_bug(
    planted: Protocol, shown_by: type[AssertionError], max_step: int, departures: int
) -> None:
    with pytest.raises(shown_by):
        explore_departures(planted, max_step, departures)


class HastyJob(Job):
    protocol_type = AcksOutliveTheirEpoch


def test_the_machine_finds_a_planted_bug() -> None:
    with pytest.raises(Unsafe):
        run_state_machine_as_test(
            HastyJob,
            settings=settings(
                SEARCH,
                # what is drawn depends on which modules are loaded: this must not be a close call
                max_examples=2_000,
                phases=[hypothesis.Phase.generate],
                report_multiple_bugs=False,
            ),
        )


# ----------------------------------------------------------------------------------------------
# examples with names


class Story:
    """One schedule, told step by step."""

    def __init__(self, protocol: Protocol) -> None:
        self.protocol, self.world = protocol, protocol.first()

    def go(self, *moves: Move) -> None:
        for move in moves:
            self.world = self.protocol.apply(self.world, move)
            self.protocol.check_safety(self.world)

    def step(self, but: Callable[[Move], bool] = lambda move: False) -> None:
        """Every rank completes a step; whatever can happen then does, but for some moves."""
        self.go(*(("boundary", rank) for rank in self.protocol.ranks))
        while moves := [m for m in self.protocol.useful(self.world) if not but(m)]:
            self.go(moves[0])

    def restorable_stamps(self, *lost: int) -> Stamp | None:
        left = self.protocol.inventories(self.world.own, self.world.held, lost)
        return max(self.protocol.reachable(left), default=None)


def is_offer(move: Move) -> bool:
    return bool(move[0] == "offer")


def is_offer_of_rank_0(move: Move) -> bool:
    return move[:2] == ("offer", 0)


def test_every_step_is_committed_when_nothing_is_late() -> None:
    for policy, nodes in WORLDS:
        story = Story(Protocol(policy, nodes))
        for step in range(4):
            story.step()
            assert story.world.led.committed == Stamp(step, 1)
            assert all(
                story.restorable_stamps(*lost) == Stamp(step, 1) for lost in story.protocol.losses
            )


def test_ranks_die_after_they_sealed_a_step_that_nobody_had_copied() -> None:
    """Holders keep the two steps before. Did the new epoch not inherit the horizon, they would have
    no slot for the one resumed from."""
    story = Story(Protocol(Copies(2), 2))
    story.step()
    story.step()
    story.step(but=is_offer)
    assert (
        story.world.led.committed == Stamp(1, 1)
        and [sealed(slots) for slots in story.world.held] == [{Stamp(0, 1), Stamp(1, 1)}] * 2
    )
    story.go(("recover", ()))
    assert [sealed(slots) for slots in story.world.own] == [{Stamp(1, 1), Stamp(2, 1)}] * 2
    assert {word.inherited for word in story.world.words} == {Stamp(1, 1)}
    story.step()
    assert story.world.led.committed == Stamp(2, 1), (
        "what all resumed from is proven again, and then what comes next"
    )
    story.step()
    assert story.world.led.committed == Stamp(4, 2)


def test_a_node_is_lost_between_data_and_parity() -> None:
    """The write hole: one parity of step 1 is written, the others not yet. Step 1 may not be
    decoded, step 0 must be."""
    story = Story(Protocol(Parity(3), 3))
    story.step()
    story.step(but=lambda move: move[0] == "piece" and move[1] != 0)
    assert Stamp(1, 1) in sealed(story.world.held[0]) and Stamp(1, 1) not in sealed(
        story.world.held[1]
    )
    assert (
        story.restorable_stamps() == Stamp(1, 1)
        and [story.restorable_stamps(node) for node in range(3)] == [Stamp(0, 1)] * 3
    )
    story.go(("recover", (2,)))
    assert {slots for place in story.world.held for slots in sealed(place)} == {Stamp(0, 1)}, (
        "the half of step 1 is gone everywhere"
    )
    story.step()
    story.step()
    assert story.world.led.committed == Stamp(2, 2)


def test_a_node_is_lost_after_it_sealed_the_last_parity_and_before_anybody_hears() -> None:
    story = Story(Protocol(Parity(3), 3))
    story.step()
    story.step(
        but=lambda move: (
            move[0] == "report" and any(Stamp(1, 1) in sealed(slots) for slots in story.world.held)
        )
    )
    assert story.world.led.committed == Stamp(0, 1)
    assert [story.restorable_stamps(node) for node in range(3)] == [Stamp(1, 1)] * 3, (
        "newer than the horizon, and whole"
    )
    story.go(("recover", (1,)))
    assert set(story.world.decided) == {1}


def test_a_node_is_lost_between_two_members_commits() -> None:
    """Node 1 has heard that step 1 is committed and has given step 0 up, at home and for node 0;
    node 0 leads and is lost."""
    story = Story(Protocol(Copies(2), 2))
    story.step()
    story.step(but=lambda move: move == ("look", 0))
    story.go(("boundary", 1))
    assert Stamp(0, 1) not in sealed(story.world.own[1]) and Stamp(0, 1) in sealed(
        story.world.own[0]
    )
    assert [story.restorable_stamps(node) for node in range(2)] == [Stamp(1, 1)] * 2
    story.go(("recover", (0,)))
    assert set(story.world.decided) == {1} and story.world.promised is None
    story.step()
    assert story.world.promised == story.world.led.committed == Stamp(2, 2)


def test_the_leader_restarts_when_only_one_node_has_heard_of_a_commit() -> None:
    """The next leader knows nothing but the reports, and node 1 has already acted upon the last
    word."""
    story = Story(Protocol(Copies(2), 2, own_slots=3))
    story.step()
    story.step()
    story.go(("boundary", 1), ("seal", 1), ("restart", 0), ("report", 0))
    assert story.world.words[0].committed == Stamp(1, 1) and None in story.world.facts
    story.go(("report", 1))
    while any(story.world.wires):
        story.go(("deliver", next(i for i, wire in enumerate(story.world.wires) if wire)))
    assert story.world.led.committed == Stamp(1, 1)


@pytest.mark.parametrize("protocol_type", [Protocol, LeaderHearsItselfLast])
def test_all_die_as_the_leader_says_that_a_step_is_committed(
    protocol_type: type[Protocol],
) -> None:
    """Nobody else has heard of step 1, and all resume from step 2, which has no copies. Only the
    leader's page keeps step 1 until step 2 is committed."""
    story = Story(protocol_type(Copies(2), 2, own_slots=3))
    story.step()
    story.step(but=lambda move: move[0] == "say" and story.world.led.committed == Stamp(1, 1))
    story.go(("boundary", 0), ("boundary", 1), ("seal", 0), ("seal", 1), ("recover", ()))
    assert story.world.promised == Stamp(1, 1) and set(story.world.decided) == {2}
    if protocol_type is Protocol:
        story.step()
        assert story.world.led.committed == Stamp(2, 1)
    else:
        with pytest.raises(Unsafe):
            story.step()


def test_both_keepers_restart_and_the_pages_remember() -> None:
    story = Story(Protocol(Copies(2), 2))
    story.step()
    story.step()
    story.step(but=is_offer)
    story.go(("restart", 0), ("restart", 1))
    story.step()
    story.step()
    assert story.world.led.committed == Stamp(4, 1)


def test_an_acknowledgement_of_an_older_round_would_be_believed() -> None:
    """Why every message carries its round: node 1 had the copy, said so, and came back empty before
    the word arrived."""
    story = Story(Protocol(Copies(2), 2))
    story.step()
    story.step(but=is_offer_of_rank_0)
    story.go(("offer", 0, 1), ("deliver", 1), ("piece", story.protocol.place_for[0, 1], 0))
    before = story.world.wires
    assert before == ((), (), (Ack(0, Stamp(1, 1)),), ())
    story.go(("recover", (1,)))
    assert (
        set(story.world.decided) == {1}
        and not any(story.world.wires)
        and story.restorable_stamps(0) is None
    )
    story.step(but=is_offer_of_rank_0)
    story.world = story.world._replace(wires=before)  # as if it were not dropped
    with pytest.raises(Unsafe):
        story.go(("deliver", 2), ("report", 0))


def test_nothing_is_promised_until_a_replaced_node_holds_its_part_again() -> None:
    story = Story(Protocol(Copies(2), 4))
    story.step()
    story.go(("recover", (1,)))
    assert story.world.promised is None and story.restorable_stamps(0) is None, (
        "node 1 came back empty: node 0 must stay"
    )
    assert story.restorable_stamps(2) == story.restorable_stamps(1) == Stamp(0, 1)
    story.step()
    assert story.world.promised is not None


# ---------------------------------------------------------------------------------------------- the
# leader, word by word


def held(*steps: int, decided: int, pending: int | None = None) -> Holding:
    return Holding(
        frozenset(Stamp(s, 1) for s in steps),
        None if pending is None else Stamp(pending, 1),
        decided,
    )


def facts(rank: int, own: Holding, *protected: int) -> RankFacts:
    return RankFacts(rank, own, frozenset(Stamp(s, 1) for s in protected))


def test_nothing_is_said_before_all_ranks_are_known() -> None:
    commit = Commit(2, 1)
    assert commit.report([facts(0, held(3, decided=3), 3)], Horizon(1)) is None
    assert commit.report([facts(1, held(3, decided=3), 3)], Horizon(1)) == Horizon(
        1, Stamp(3, 1), None, frozenset({Stamp(3, 1)}), 3
    )


def test_a_word_is_said_once() -> None:
    commit = Commit(1, 1)
    assert commit.report([facts(0, held(3, decided=3))], Horizon(1)) is not None
    assert commit.report([facts(0, held(3, decided=3))], Horizon(1)) is None


def test_a_new_leader_says_even_what_somebody_has_heard_before() -> None:
    """Another node may have missed it."""
    said = Commit(1, 1).report([facts(0, held(3, decided=3))], Horizon(1))
    assert said is not None and Commit(1, 1).report([facts(0, held(3, decided=3))], said) == said


def test_the_target_stays_until_it_is_committed() -> None:
    commit = Commit(1, 1)
    first = commit.report([facts(0, held(3, decided=3))], Horizon(1))
    assert commit.report([facts(0, held(3, 4, decided=4))], Horizon(1)) is None
    assert first is not None and first.target == commit.horizon.target == Stamp(3, 1)
    third = commit.report([facts(0, held(3, 4, decided=4), 3)], Horizon(1))
    assert third is not None and (third.committed, third.target) == (Stamp(3, 1), Stamp(4, 1))


def test_what_all_went_back_to_is_the_first_target_of_an_epoch() -> None:
    """All have sealed a newer step when the first reports are in. Did that go first, what they went
    back to would be hopeless, though it may have been committed, and no copy of the newer one is
    there yet."""
    resumed, newer = Stamp(6, 2), Stamp(7, 3)
    both = Holding(frozenset({Stamp(2, 1), resumed, newer}), None, 7)
    commit = Commit(2, 3)
    commit.report([RankFacts(0, both)], Horizon(3, inherited=Stamp(2, 1)))
    word = commit.report([RankFacts(1, both)], Horizon(3, inherited=Stamp(2, 1)))
    assert word is not None and word.target == resumed and word.alive == {resumed, newer}
    assert not word.is_hopeless(resumed) and not word.is_hopeless(newer)
    commit.report([RankFacts(0, both, frozenset({resumed}))], Horizon(3))
    word = commit.report([RankFacts(1, both, frozenset({resumed}))], Horizon(3))
    assert word is not None and (word.committed, word.target) == (resumed, newer)


def test_what_lies_between_the_horizon_and_the_target_is_given_up() -> None:
    word = Commit(1, 1).report([facts(0, held(3, 4, 5, decided=6), 3)], Horizon(1))
    assert word is not None and word.target == Stamp(5, 1)
    assert [word.is_hopeless(Stamp(step, 1)) for step in (3, 4, 5, 6, 7)] == [
        False,
        True,
        False,
        True,
        False,
    ]


def test_on_a_slow_link_a_killed_process_still_loses_one_step() -> None:
    """Step 2 is on its way to the holders for long; with four slots every later step is captured
    all the same."""
    leader = Commit(2, 1)
    slots = [
        SlotView(SlotState.SEALED, Stamp(1, 1)),
        SlotView(SlotState.SEALED, Stamp(2, 1)),
        EMPTY,
        EMPTY,
    ]
    for step in range(3, 20):
        own = Holding(
            frozenset(v.stamp for v in slots if v.state is SlotState.SEALED), None, step - 1
        )
        leader.report([RankFacts(r, own, frozenset({Stamp(1, 1)})) for r in range(2)], Horizon(1))
        word = leader.horizon
        assert (word.committed, word.target) == (Stamp(1, 1), Stamp(2, 1))
        taken = choose(slots, word.floor, word.is_hopeless)
        assert isinstance(taken, Take), taken
        slots[taken.slot] = SlotView(SlotState.SEALED, Stamp(step, 1))
        assert {Stamp(1, 1), Stamp(2, 1), Stamp(step, 1)} <= {v.stamp for v in slots}


def test_a_page_inherits_what_was_committed_as_far_as_it_is_there() -> None:
    last = Horizon(1, committed=Stamp(4, 1), target=Stamp(5, 1))
    stamps = {Stamp(4, 1), Stamp(5, 1)}
    assert first_horizon(2, Stamp(5, 1), last, stamps) == Horizon(2, inherited=Stamp(4, 1))
    assert first_horizon(2, Stamp(4, 1), last, {Stamp(4, 1)}).floor == Stamp(4, 1)
    assert first_horizon(2, Stamp(3, 1), last, {Stamp(3, 1)}) == Horizon(2), (
        "it was lost: all went back further"
    )
    assert first_horizon(2, Stamp(5, 1), last, {Stamp(5, 1)}) == Horizon(2), (
        "it is not here any more"
    )
    assert first_horizon(2, None, last, stamps) == Horizon(2), "all began from the store"
    again = first_horizon(3, Stamp(5, 1), Horizon(2, inherited=Stamp(4, 1)), stamps)
    assert again == Horizon(3, inherited=Stamp(4, 1)), "nothing was committed in between"


def test_of_two_words_the_newer_one_counts() -> None:
    stamps = [None, Stamp(3, 1), Stamp(4, 1)]
    in_order = [
        Horizon(1),
        Horizon(1, inherited=stamps[1]),
        Horizon(1, stamps[1], decided_step=7),
        Horizon(1, stamps[2], decided_step=5),
    ]
    in_order += [Horizon(1, stamps[2], decided_step=6), Horizon(2)]
    for older, later in pairwise(in_order):
        assert newer(older, later) == newer(later, older) == later
    one, other = (
        Horizon(1, stamps[1], stamps[2], decided_step=5),
        Horizon(1, stamps[1], None, decided_step=5),
    )
    assert newer(one, other) is other and newer(other, one) is one, "of one age: what was said last"


def test_without_redundancy_what_all_have_sealed_is_committed() -> None:
    story = Story(Protocol(NoRedundancy(), 2))
    story.step()
    assert story.world.led.committed == Stamp(0, 1)
    story.go(("recover", (1,)))
    assert story.restorable_stamps() is None, "and a lost node is the store's business"


# ----------------------------------------------------------------------------------------------
# replicas that differ


def replica(rank: int, steps: Iterable[int], wrong: Iterable[int] = ()) -> RankFacts:
    """A rank that holds these steps, protected everywhere; `wrong`: those where it differs."""
    stamps = tuple(Stamp(step, 1) for step in sorted(steps))
    digests = tuple((s, (2000 if s.step in wrong else 1000) + 8 * s.step | MARKS) for s in stamps)
    held = frozenset(stamps)
    own = Holding(held, None, max(steps), 7, digests)
    return RankFacts(rank, own, held)


def test_what_replicas_differ_in_is_never_committed_nor_what_follows() -> None:
    commit = Commit(3, 1)
    horizon = commit.report([replica(r, [4]) for r in range(3)], Horizon(1))
    assert horizon is not None and horizon.committed == Stamp(4, 1) and horizon.agreed_steps == 1
    horizon = commit.report([replica(r, [4, 5], [5] if r == 2 else []) for r in range(3)], horizon)
    assert horizon is not None and horizon.committed == Stamp(4, 1)
    assert horizon.difference == ReplicaDifference(Stamp(5, 1), (2,), 3, True, True)
    assert horizon.target is None and horizon.is_hopeless(Stamp(5, 1))
    # digests agree again: the gradients have mixed what was wrong into everybody's state
    commit.report([replica(r, [4, 6]) for r in range(3)], horizon)
    assert commit.horizon.committed == Stamp(4, 1) and commit.horizon.target is None


def test_whoever_leads_next_finds_the_same() -> None:
    facts = [replica(r, [4, 5], [5] if r == 2 else []) for r in range(3)]
    horizon = Commit(3, 1).report(facts, Horizon(1))
    assert horizon is not None and horizon.committed == Stamp(4, 1)
    assert horizon.difference is not None and horizon.difference.ranks == (2,)


def test_what_is_only_to_be_told_is_committed() -> None:
    commit = Commit(2, 1)
    facts = [replica(r, [5], [5] if r == 1 else []) for r in range(2)]
    told = [
        f._replace(own=f.own._replace(digests=tuple((s, d & ~CONDEMNS) for s, d in f.own.digests)))
        for f in facts
    ]
    horizon = commit.report(told, Horizon(1))
    assert horizon is not None and horizon.committed == Stamp(5, 1)
    assert horizon.difference == ReplicaDifference(Stamp(5, 1), (0, 1), 2, False, False)


# ----------------------------------------------------------------------------------------------
# replicas that share


def sharer(rank: int, steps: Iterable[int], wrong: Iterable[int] = ()) -> RankFacts:
    """A rank that has sealed these steps, of which its node's other one keeps half; `wrong`: those
    at which the two differ."""
    stamps = tuple(Stamp(step, 1) for step in sorted(steps))
    told = [
        (s, Share(100 * (rank // 2) + s.step + (7 if s.step in wrong else 0), 2)) for s in stamps
    ]
    own = Holding(frozenset(stamps), None, max(steps), shares=tuple(told))
    return RankFacts(rank, own, frozenset(stamps[:-1]))


def test_a_step_of_which_a_part_is_with_nobody_is_no_target_and_hopeless() -> None:
    commit = Commit(4, 1)
    alike = [sharer(rank, [4, 5]) for rank in range(4)]
    horizon = commit.report(alike, Horizon(1))
    assert horizon is not None and horizon.committed == Stamp(4, 1)
    assert horizon.target == Stamp(5, 1) and not horizon.is_hopeless(Stamp(5, 1))
    commit = Commit(4, 1)
    astray = [sharer(rank, [4, 5], [5] if rank == 3 else []) for rank in range(4)]
    horizon = commit.report(astray, Horizon(1))
    assert horizon is not None and horizon.committed == Stamp(4, 1)
    assert horizon.target is None and horizon.is_hopeless(Stamp(5, 1))
    assert commit.held() == {Stamp(4, 1)}


def test_nor_is_it_committed_where_what_is_sealed_counts_as_protected() -> None:
    commit = Commit(2, 1)
    facts = [sharer(rank, [4, 5], [5] if rank else []) for rank in range(2)]
    horizon = commit.report([f._replace(protected=f.own.sealed) for f in facts], Horizon(1))
    assert horizon is not None and horizon.committed == Stamp(4, 1)


def test_of_ranks_that_tell_the_same_each_counts() -> None:
    """They are counted as one kind."""
    commit = Commit(3, 1)
    held = Stamp(4, 1)
    own = Holding(frozenset([held]), None, 4, shares=((held, Share(9, 3)),))
    horizon = commit.report([RankFacts(rank, own) for rank in range(3)], Horizon(1))
    assert horizon is not None and horizon.target == held
