"""Leadership in virtual time: agents whose clocks drift, that stand still and die, over a register
whose answers come late or never.

The world is one heap of instants. An agent asks; its question takes effect at some instant of its
own, once, or late, or not at all; the answer comes back later or is lost. Nothing here knows what
the agents believe, but for `may_order`, which is asked at every instant.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.recovery.leader_lease import (
    BYSTANDER_LEASES,
    Action,
    LeaderKnown,
    Leadership,
    Lease,
    LookDue,
    OrderGranted,
    OrderRefused,
    OrderWanted,
    ReadRegister,
    RegisterFound,
    Role,
    SwapRegister,
)
from keepstep.model.units import MS_NS, S_NS

LEASE_NS = 6 * S_NS
DRIFT = 0.05


@dataclass
class Agent:
    name: str
    rate: float  # of its clock
    offset_ns: int
    leadership: Leadership
    seated: bool = True
    alive: bool = True
    stopped_until_ns: int = 0
    asking: int = 0  # the question that an answer is awaited to
    acted: list[tuple[int, Action]] = field(default_factory=list)


class World:
    """`loss`: how likely an answer, or the question itself, does not arrive. `wild`: agents look at
    odd times and wish for orders."""

    def __init__(
        self,
        seed: int,
        count: int,
        loss: float = 0.0,
        delay_ns: int = 20 * MS_NS,
        wild: bool = False,
    ) -> None:
        self.random, self.loss, self.delay_ns, self.wild = random.Random(seed), loss, delay_ns, wild
        self.now_ns = 0
        self.register: Lease | None = None
        self.history: list[Lease] = []
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._counter = 0
        self.agents: list[Agent] = []
        for number in range(count):
            rate = 1 + self.random.choice([-DRIFT, self.random.uniform(-DRIFT, DRIFT), DRIFT])
            offset_ns = self.random.randrange(10**15)
            self.agents.append(
                Agent(f"a{number}", rate, offset_ns, Leadership(f"a{number}", LEASE_NS))
            )
            self.at(self.random.randrange(S_NS), lambda a=self.agents[-1]: self.beat(a))  # type: ignore[misc]

    def at(self, in_ns: float, what: Callable[[], None]) -> None:
        self._counter += 1
        heapq.heappush(self._heap, (self.now_ns + int(in_ns), self._counter, what))

    def clock(self, agent: Agent) -> int:
        return agent.offset_ns + int(self.now_ns * agent.rate)

    def run(self, for_ns: int, look: Callable[[], None] = lambda: None) -> None:
        end_ns = self.now_ns + for_ns
        while self._heap and self._heap[0][0] <= end_ns:
            self.now_ns, _, what = heapq.heappop(self._heap)
            what()
            look()
        self.now_ns = end_ns

    # -- an agent's loop: beat, ask, be answered; while it stands still nothing of it happens

    def beat(self, agent: Agent) -> None:
        if not agent.alive or self._put_off(agent, lambda: self.beat(agent)):
            return
        self.carry_out(
            agent, agent.leadership.handle(LookDue(agent.name, agent.seated), self.clock(agent))
        )
        share = self.random.uniform(0.02, 1) if self.wild else 1
        self.at(agent.leadership.renew_ns * share / agent.rate, lambda: self.beat(agent))

    def wish(self, agent: Agent, order: str) -> None:
        self.carry_out(agent, agent.leadership.handle(OrderWanted(order), self.clock(agent)))

    def carry_out(self, agent: Agent, actions: list[Action]) -> None:
        for action in actions:
            agent.acted.append((self.now_ns, action))
            if isinstance(action, (ReadRegister, SwapRegister)):
                self._ask(agent, action)

    def _ask(self, agent: Agent, question: ReadRegister | SwapRegister) -> None:
        self._counter += 1
        agent.asking = self._counter
        asking, asked_ns = agent.asking, self.clock(agent)
        answered = self.random.random() >= self.loss

        def take_effect() -> None:
            if isinstance(question, SwapRegister) and self.register == question.expected:
                self.register = question.lease
                self.history.append(question.lease)
            if answered:
                found = self.register
                self.at(self._delay(), lambda: be_answered(found))

        def be_answered(found: Lease | None) -> None:
            if (
                not agent.alive
                or self._put_off(agent, lambda: be_answered(found))
                or agent.asking != asking
            ):
                return
            agent.asking = -1
            self.carry_out(
                agent, agent.leadership.handle(RegisterFound(found, asked_ns), self.clock(agent))
            )
            if self.wild and agent.leadership.leads and self.random.random() < 0.3:
                self.wish(agent, "again")

        if answered or self.random.random() < 0.5:
            late_ns = 0 if answered else self.random.randrange(3 * LEASE_NS)
            self.at(self._delay() + late_ns, take_effect)

    def _delay(self) -> int:
        return self.random.randrange(1, self.delay_ns)

    def _put_off(self, agent: Agent, what: Callable[[], None]) -> bool:
        if self.now_ns >= agent.stopped_until_ns:
            return False
        self.at(agent.stopped_until_ns - self.now_ns, what)
        return True

    # -- what is looked at

    def leaders(self) -> list[Agent]:
        """Who would give an order at this instant, if it were awake."""
        return [a for a in self.agents if a.alive and a.leadership.may_order(self.clock(a))]

    def at_most_one(self) -> None:
        assert len(leaders := self.leaders()) <= 1, [(a.name, a.leadership.term) for a in leaders]

    def check_epochs(self) -> None:
        """In the register: a new coordinator has a larger term, the same one keeps it and only
        renews."""
        for before, after in zip(self.history, self.history[1:], strict=False):
            assert (after.term, after.beat) == (
                (before.term, before.beat + 1)
                if after.holder == before.holder
                else (before.term + 1, 0)
            )
        led = [
            (a.term, agent.name)
            for agent in self.agents
            for _, a in agent.acted
            if isinstance(a, LeaderKnown) and a.role is Role.LEADS
        ]
        assert len({term for term, _ in led}) == len(led), "one coordinator an term"


seeds = st.integers(0, 2**32)


@given(
    seeds, st.integers(2, 5), st.sampled_from([0.0, 0.1, 0.5]), st.sampled_from([20 * MS_NS, S_NS])
)
def test_never_two_at_one_instant(seed: int, count: int, loss: float, delay_ns: int) -> None:
    world = World(seed, count, loss, delay_ns, wild=True)
    for _ in range(8):
        world.run(LEASE_NS + world.random.randrange(LEASE_NS), world.at_most_one)
        one = world.random.choice(world.leaders() or world.agents)
        one.stopped_until_ns = world.now_ns + world.random.randrange(3 * LEASE_NS)
        other = world.random.choice(world.agents)
        other.alive, other.seated = world.random.random() < 0.9, world.random.random() < 0.7
    world.check_epochs()


@given(seeds, st.integers(2, 6))
def test_when_the_leader_dies_another_leads_within_two_leases(seed: int, count: int) -> None:
    world = World(seed, count)
    world.run(2 * LEASE_NS)
    for left in range(count - 1, 0, -1):
        (leader,) = world.leaders()
        leader.alive = False
        died_ns, term = world.now_ns, leader.leadership.term
        world.run(2 * LEASE_NS, world.at_most_one)
        (successor,) = world.leaders()
        assert successor.leadership.term == term + 1
        led_ns = next(
            at
            for at, a in successor.acted
            if isinstance(a, LeaderKnown) and a.role is Role.LEADS and at > died_ns
        )
        assert led_ns - died_ns <= 2 * LEASE_NS, left


@given(seeds, st.sampled_from([0.0, 0.2]))
def test_who_leads_goes_on_leading_while_answers_come(seed: int, loss: float) -> None:
    """A lost answer in a lease costs nothing; and nobody is pushed aside."""
    world = World(seed, 3, loss)
    world.run(60 * LEASE_NS, world.at_most_one)
    if loss == 0:
        assert {word.term for word in world.history} == {1}
        assert len(world.leaders()) == 1


def test_bystanders_let_those_in_the_round_go_first() -> None:
    for seed in range(30):
        world = World(seed, 3)
        world.agents[2].seated = False
        world.run(2 * LEASE_NS)
        leader = world.leaders()[0]
        leader.alive = False
        world.run(2 * LEASE_NS)
        second = world.leaders()[0]
        assert {leader.name, second.name} == {"a0", "a1"}
        second.alive = False
        world.run((BYSTANDER_LEASES - 1) * LEASE_NS)
        assert world.leaders() == [], "not yet: somebody of the round may still come"
        world.run(2 * LEASE_NS)
        assert [a.name for a in world.leaders()] == ["a2"]


def test_a_coordinator_that_stood_still_gives_no_order() -> None:
    """It does not know that time has passed; the register does."""
    world = World(1, 2)
    world.run(2 * LEASE_NS)
    (old,) = world.leaders()
    old.stopped_until_ns = world.now_ns + 3 * LEASE_NS
    world.run(3 * LEASE_NS - 1)
    (new,) = world.leaders()
    assert new is not old
    old.leadership._until_ns = 10**30  # a clock that slept with its machine: the lease looks good
    assert old.leadership.may_order(world.clock(old))
    old.stopped_until_ns = 0
    world.wish(old, "start round 7")
    world.run(S_NS)
    refused = [action for _, action in old.acted if isinstance(action, OrderRefused)]
    assert refused == [
        OrderRefused(
            1,
            "start round 7",
            f"refused: it is of term 1, and the newest is 2, which is {new.name}'s",
        )
    ]
    assert not [action for _, action in old.acted if isinstance(action, OrderGranted)]


def test_an_order_goes_out_after_a_renewal_made_for_it() -> None:
    world = World(2, 2)
    world.run(2 * LEASE_NS)
    (leader,) = world.leaders()
    beats = len(world.history)
    world.wish(leader, "again")
    world.run(100 * MS_NS)
    assert OrderGranted(1, "again") in [action for _, action in leader.acted]
    assert len(world.history) > beats
    other = next(a for a in world.agents if a is not leader)
    world.wish(other, "stop")
    assert other.acted[-1][1] == OrderRefused(
        1, "stop", "refused: this agent does not coordinate in term 1"
    )


def test_an_order_whose_renewal_was_answered_too_late_does_not_go_out() -> None:
    agent = Leadership("a", LEASE_NS)
    agent.handle(RegisterFound(None, 0), 0)
    agent.handle(LookDue("node 0", True), 0)
    agent.handle(RegisterFound(Lease(1, "a", "node 0"), 0), 1)
    (swap,) = agent.handle(OrderWanted("again"), S_NS)
    assert isinstance(swap, SwapRegister)
    why = "refused: the lease had run out when its renewal was answered"
    assert agent.handle(RegisterFound(swap.lease, S_NS), S_NS + LEASE_NS) == [
        OrderRefused(1, "again", why)
    ]


@pytest.mark.parametrize(("term", "counts"), [(1, False), (2, True), (3, True)])
def test_orders_of_old_epochs_are_refused(term: int, counts: bool) -> None:
    follower = Leadership("b", LEASE_NS)
    assert follower.handle(LookDue("b", True), 0) == [ReadRegister()]
    (now,) = follower.handle(RegisterFound(Lease(2, "a", "node 0"), 0), 1)
    assert now == LeaderKnown(Role.FOLLOWS, 2, "node 0 coordinates, term 2")
    assert (follower.refusal(term) is None) is counts
    assert follower.refusal(1) == "refused: it is of term 1, and the newest is 2, which is node 0's"


def test_an_outage_of_the_register_is_nobodys_fault() -> None:
    """The first answer after it says nothing about the coordinator, who could not renew either."""
    follower = Leadership("b", LEASE_NS)
    word = Lease(1, "a", "node 0")
    follower.handle(RegisterFound(word, 0), 0)
    asked_ns, back_ns = LEASE_NS // 3, 5 * LEASE_NS
    follower.handle(RegisterFound(word, asked_ns), back_ns)
    assert follower.handle(LookDue("b", True), back_ns + LEASE_NS // 3) == [ReadRegister()]
    follower.handle(RegisterFound(word, back_ns), back_ns + MS_NS)
    assert follower.handle(LookDue("b", True), back_ns + LEASE_NS) == [
        SwapRegister(word, Lease(2, "b", "b"))
    ]


def test_a_register_that_was_emptied_does_not_bring_old_epochs_back() -> None:
    agent = Leadership("b", LEASE_NS)
    agent.handle(RegisterFound(Lease(7, "a", "node 0"), 0), 0)
    agent.handle(RegisterFound(None, 1), 1)
    assert agent.handle(LookDue("b", True), 2) == [SwapRegister(None, Lease(8, "b", "b"))]


def test_the_sentences() -> None:
    agent = Leadership("b", LEASE_NS)
    agent.handle(RegisterFound(Lease(6, "a", "node 0"), 0), 0)
    (swap,) = agent.handle(LookDue("node 1", True), LEASE_NS)
    assert swap == SwapRegister(Lease(6, "a", "node 0"), Lease(7, "b", "node 1"))
    why = "node 1 coordinates, term 7: node 0 had not renewed its lease for 6.00 s"
    assert agent.handle(RegisterFound(Lease(7, "b", "node 1"), LEASE_NS), LEASE_NS) == [
        LeaderKnown(Role.LEADS, 7, why)
    ]
    assert agent.may_order(LEASE_NS) and not agent.may_order(2 * LEASE_NS - LEASE_NS // 10)
    (lost,) = agent.handle(RegisterFound(Lease(8, "a", "node 0"), LEASE_NS), LEASE_NS)
    assert lost == LeaderKnown(
        Role.FOLLOWS, 8, "node 0 coordinates, term 8; this agent did until now"
    )
