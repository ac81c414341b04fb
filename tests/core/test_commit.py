"""The commit protocol under every interleaving: nodes, holders, words of any age, torn captures, keepers that restart, nodes that vanish.

The model is protocol_model.py. Three searches: every instant of a tiny world; every schedule of a longer run that departs at most so often
from the prompt one; hypothesis through larger worlds, with messages that lie on their wires. Then examples with names, and planted bugs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from keepstep.core.commit import Commit, RankFacts, first_word, newer
from keepstep.core.cut import Holding
from keepstep.core.slots import Skip, Take, choose
from keepstep.model.horizon import Horizon
from keepstep.model.snapshot import SlotState, SlotView, Stamp
from keepstep.model.topology import Copies, NoRedundancy, Parity, ReedSolomon, Scheme
from tests.core.protocol_model import BLANK, Ack, Move, Offer, Protocol, Stuck, Unsafe, World, put, sealed, writing

# ---------------------------------------------------------------------------------------------- every instant of small worlds


class Known:
    """Instants seen. Parts of worlds are shared between them, so each is numbered once and an instant is a tuple of numbers."""

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
        moves = [(m, kills, restarts) for m in (*ahead, *protocol.harmful(world), *protocol.steps(world, max_step))]
        moves += [(("recover", lost), kills - 1, restarts) for lost in protocol.losses if kills]
        moves += [(("restart", node), kills, restarts - 1) for node in range(protocol.nodes) if restarts]
        for move, kills_left, restarts_left in moves:
            following = looked(protocol, protocol.apply(world, move))
            key = known.key(following), kills_left, restarts_left
            if key not in seen:
                seen.add(key)
                queue.append((following, kills_left, restarts_left))
    return len(seen)


def explore_departures(protocol: Protocol, max_step: int, departures: int) -> int:
    """Every schedule that departs at most so often from the prompt one, in which whatever can happen does and only then the next step
    comes. A departure: something is late (for as long as one likes), torn or skipped, a keeper restarts, ranks die, nodes are lost."""
    known = Known()
    queue: deque[tuple[World, frozenset[Move], int]] = deque([(protocol.first(), frozenset(), departures)])
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
        following = [(protocol.apply(world, m), late - {m}, 0) for m in (*late, *([now] if now else []))]
        if left:
            following += [(world, late | {now}, 1)] if now else []
            following += [(protocol.apply(world, m), late, 1) for m in (*protocol.harmful(world), *(("skip", rank) for _, rank in steps))]
            following += [(protocol.restart(world, node), late, 1) for node in range(protocol.nodes)]
            following += [(protocol.recover(world, lost), frozenset(), 1) for lost in protocol.losses]
        for world_after, late_after, cost in following:
            world_after = looked(protocol, world_after)
            key = known.key(world_after), late_after
            if best.get(key, -1) < left - cost:
                best[key] = left - cost
                (queue.append if cost else queue.appendleft)((world_after, late_after, left - cost))
    return len(best)


@pytest.mark.parametrize(
    ("policy", "nodes", "max_step", "max_kills", "max_restarts"),
    [(Copies(2), 2, 1, 0, 0), (Copies(2), 2, 0, 2, 1), (Parity(2), 2, 0, 1, 1)],
)
def test_every_instant_of_a_tiny_world(policy: Scheme, nodes: int, max_step: int, max_kills: int, max_restarts: int) -> None:
    assert explore(Protocol(policy, nodes, prompt=True), max_step, max_kills, max_restarts) > 1000


@pytest.mark.parametrize(
    ("policy", "nodes", "own_slots", "max_step", "departures"),
    [(Copies(2), 2, 2, 2, 2), (Copies(2), 2, 3, 3, 1), (Copies(2), 3, 2, 2, 1), (Parity(3), 3, 2, 2, 1)],
)
def test_every_schedule_near_the_prompt_one(policy: Scheme, nodes: int, own_slots: int, max_step: int, departures: int) -> None:
    assert explore_departures(Protocol(policy, nodes, own_slots=own_slots, prompt=True), max_step, departures) > 1000


# ---------------------------------------------------------------------------------------------- larger worlds


WORLDS = [
    (Copies(2), 4),
    (Copies(3), 4),
    (Parity(4), 4),
    (Parity(2), 4),
    (ReedSolomon(2, 2), 4),
    (Copies(2), 2),
    (Copies(2), 3),
    (Parity(3), 3),
]
PICKS = st.lists(st.integers(0, 255), min_size=1, max_size=24)


class Job(RuleBasedStateMachine):
    """Up to 4 nodes of 1 or 2 ranks. Messages lie on their wires as long as the search likes; ranks decide by pages of any age."""

    protocol_type: type[Protocol] = Protocol
    world: World

    @initialize(which=st.sampled_from(WORLDS), ranks_per_node=st.sampled_from([1, 1, 2]), own_slots=st.integers(2, 3))
    def begin(self, which: tuple[Scheme, int], ranks_per_node: int, own_slots: int) -> None:
        self.protocol = self.protocol_type(*which, ranks_per_node=ranks_per_node, own_slots=own_slots)
        self.world = self.protocol.first()

    def happens(self, moves: Sequence[Move], pick: int) -> None:
        if moves:
            self.world = self.protocol.apply(self.world, moves[pick % len(moves)])
            self.protocol.check_safety(self.world)

    @rule(picks=PICKS)
    def goes_on(self, picks: list[int]) -> None:
        for pick in picks:
            self.happens([*self.protocol.useful(self.world), *self.protocol.steps(self.world, apart=1)], pick)

    @rule(picks=PICKS)
    def communicates(self, picks: list[int]) -> None:
        for pick in picks:
            self.happens(list(self.protocol.useful(self.world)), pick)

    @rule(pick=st.integers(0, 255))
    def goes_wrong(self, pick: int) -> None:
        self.happens([*self.protocol.harmful(self.world), *(("skip", rank) for _, rank in self.protocol.steps(self.world))], pick)

    @rule(node=st.integers(0, 3))
    def keeper_restarts(self, node: int) -> None:
        self.happens([("restart", node % self.protocol.nodes)], 0)

    @rule(pick=st.integers(0, 255))
    def nodes_are_lost(self, pick: int) -> None:
        """Or none: then only ranks died."""
        self.happens([("recover", lost) for lost in self.protocol.losses], pick)

    @rule(pick=st.integers(0, 255), hearing=st.frozensets(st.integers(0, 3), max_size=3), picks=PICKS)
    def all_die_while_resuming(self, pick: int, hearing: frozenset[int], picks: list[int]) -> None:
        """Only some nodes hear that they may go, and their ranks train a little; then ranks die again."""
        before, p = self.world, self.protocol
        self.happens([("recover", lost) for lost in p.losses], pick)
        for node in set(range(p.nodes)) - hearing:
            lost = p.losses[pick % len(p.losses)]
            self.world = self.world._replace(words=put(self.world.words, node, BLANK if node in lost else before.words[node]))
        for step in picks[:4]:
            going = [r for r in p.ranks if p.home[r] in hearing]
            self.happens([("boundary", r) for r in going if writing(self.world.own[r]) is None], step)
            self.happens([("seal", r) for r in going if writing(self.world.own[r]) is not None], step)
        self.happens([("recover", ())], 0)

    @rule()
    def has_time(self) -> None:
        """Everything under way ends, and a boundary passes in which nothing is late."""
        self.protocol.check_liveness(self.world)
        for rank in self.protocol.ranks:
            if self.world.decided[rank] == min(self.world.decided):
                self.happens([("boundary", rank)], 0)
        self.world = self.protocol.settled(self.world)

    @invariant()
    def whatever_is_promised_may_be_lost(self) -> None:
        if hasattr(self, "world"):
            self.protocol.check_safety(self.world)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.protocol.check_liveness(self.world)


SEARCH = settings(max_examples=60, stateful_step_count=30, derandomize=True, deadline=None)


def test_larger_worlds() -> None:
    run_state_machine_as_test(Job, settings=SEARCH)


def test_on_a_slow_link_a_killed_process_still_loses_one_step() -> None:
    """Step 2 is on its way to the holders for long; with four slots every later step is captured all the same."""
    leader = Commit(2, 1)
    slots = [SlotView(SlotState.SEALED, Stamp(1, 1)), SlotView(SlotState.SEALED, Stamp(2, 1)), BLANK, BLANK]
    for step in range(3, 20):
        own = Holding(frozenset(v.stamp for v in slots if v.state is SlotState.SEALED), None, step - 1)
        word = leader.report([RankFacts(r, own, frozenset({Stamp(1, 1)})) for r in range(2)], Horizon(1))
        assert word is not None and (word.committed, word.target) == (Stamp(1, 1), Stamp(2, 1))
        taken = choose(step, slots, word.floor, word.is_hopeless)
        assert isinstance(taken, Take), taken
        slots[taken.slot] = SlotView(SlotState.SEALED, Stamp(step, 1))
        assert {Stamp(1, 1), Stamp(2, 1), Stamp(step, 1)} <= {v.stamp for v in slots}
