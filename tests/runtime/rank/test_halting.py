"""Halting: whatever comes late, whoever stands nowhere, and whoever leads: of one place all ranks
that hear its end hear the same, and nobody waits without end."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from keepstep.core.numbers.halt import BEFORE, BEHIND, SEEN_CHARACTERS, Halts, KeptWords
from keepstep.model.messages.keeper_rank import HaltOrder, HaltWord
from keepstep.runtime.rank.halting import Halting

STEPS = 40


@dataclass
class Rank:
    """One that trains: `line`: what its keeper has said and it has not heard. `last_step`: of its
    loop. `is_voting`: all have agreed to go back, and it waits for the others."""

    number: int
    world: int
    town: Town
    last_step: int
    step: int = -1
    stands_at: tuple[int, int] | None = None
    is_voting: bool = False
    is_over: bool = False
    word: HaltWord | None = None
    kept: KeptWords = field(default_factory=KeptWords)  # by the keeper of its node
    to_keeper: deque[HaltWord] = field(default_factory=deque)
    to_leader: deque[HaltWord] = field(default_factory=deque)
    to_node: deque[HaltOrder] = field(default_factory=deque)
    line: deque[HaltOrder] = field(default_factory=deque)
    ends: dict[tuple[int, int], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.halting = Halting(self, self.number, self.world)  # type: ignore[arg-type]
        self.halting.train(1)
        self.halting.step_begins()

    def say_of_halt(self, word: HaltWord, is_kept: bool) -> None:
        """As the keeper's client has it."""
        self.word = word if is_kept else self.word
        self.to_keeper.append(word)

    def forget_halt(self) -> None:
        self.word = None

    def carry(self, what: int) -> None:
        """One message, one part of its way."""
        if what == 0 and self.line:
            self.halting.ordered(self.line.popleft(), self.step)
        elif what == 1 and self.to_node:
            order = self.to_node.popleft()
            self.kept.ordered(order)
            self.line.append(order)
        elif what == 2 and self.to_keeper:
            word = self.to_keeper.popleft()
            self.kept.said(word)
            self.to_leader.append(word)
        elif what == 3 and self.to_leader:
            self.town.lead(self.to_leader.popleft())

    @property
    def is_quiet(self) -> bool:
        return not (self.line or self.to_node or self.to_keeper or self.to_leader)

    def advance(self, stands: bool) -> None:
        """To the end of the next body, or out of the place where it stands."""
        halting = self.halting
        if self.stands_at is not None:
            if not halting.is_decided:
                return
            place, self.stands_at = self.stands_at, None
            self.ends[place] = "go" if halting.found is not None else "void"
            halting.go_on()
            if self.ends[place] == "go" and self.town.goes_back(place):
                self.is_voting = True
                return
            self.count()
        elif self.is_voting or self.is_over:
            return
        elif halting.at == self.step + 1 or stands:
            self.stands_at = (self.step + 1, BEHIND)
            halting.stand(*self.stands_at, f"seen by {self.number}")
        else:
            self.count()

    def count(self) -> None:
        self.step += 1
        self.halting.counts(self.step)
        if self.step == self.last_step:
            self.is_over = True
            self.halting.loop_over()


class Town:
    """Ranks, their keepers, and a leader that may die."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        world = self.random.randint(2, 5)
        self.halts = Halts()
        lasts = [STEPS if self.random.random() < 0.8 else self.random.randrange(STEPS)] * world
        if self.random.random() < 0.3:
            lasts[0] = self.random.randrange(STEPS)
        self.ranks = [Rank(n, world, self, last) for n, last in enumerate(lasts)]
        self.together = self.random.random() < 0.7  # no rank is a step ahead of another
        self.deaths = 0
        self.is_one_node = self.random.random() < 0.5
        self.salt = self.random.random()

    def goes_back(self, place: tuple[int, int]) -> bool:
        """All ranks decide alike."""
        return random.Random(f"{self.salt} {place}").random() < 0.5

    def lead(self, word: HaltWord) -> None:
        """The leader hears one word, and what it says is on its way to all."""
        for order in self.halts.hear(word):
            for rank in self.ranks:
                rank.to_node.append(order)

    def die(self, with_nodes: bool) -> None:
        """The leader, with all that is on its way to it and from it; the next one hears what each
        node has kept. `with_nodes`: those are the same process, and ranks say it again."""
        self.deaths += 1
        self.halts = Halts()
        for rank in self.ranks:
            for line in (rank.to_node, rank.line) if with_nodes else (rank.to_node,):
                keep = self.random.randint(0, len(line))
                while len(line) > keep:
                    line.pop()
            if with_nodes:
                while rank.to_node:
                    rank.line.append(rank.to_node.popleft())
                rank.kept = KeptWords()
                rank.to_keeper.clear()
                if rank.word is not None:
                    rank.to_keeper.append(rank.word)
            rank.to_leader.clear()
            rank.to_leader.extend(rank.kept.all())

    def act(self) -> None:
        rank = self.random.choice(self.ranks)
        what = self.random.random()
        if what < 0.85:
            rank.carry(self.random.randrange(4))
        elif what < 0.87:
            self.die(self.is_one_node)
        elif what < 0.89:
            rank.halting.leave()  # it has stood for too long
        elif what < 0.905 and rank.stands_at is None and not (rank.is_voting or rank.is_over):
            rank.halting.ask(rank.step + self.random.randint(1, 6))
        elif not self.together or rank.step <= min(
            (r.step for r in self.ranks if not r.is_over), default=STEPS
        ):
            rank.advance(stands=self.random.random() < 0.1)

    def come_to_an_end(self) -> None:
        """Nobody asks any more; who stands leaves after a while; all words are heard."""
        for _ in range(3 * STEPS):
            for rank in self.ranks:
                rank.halting.leave()
                rank.advance(stands=False)
            while not all(rank.is_quiet for rank in self.ranks):
                for rank in self.ranks:
                    for what in range(4):
                        rank.carry(what)


@pytest.mark.parametrize("first", range(0, 1500, 100))
def test_of_one_place_all_hear_the_same_and_nobody_waits_without_end(first: int) -> None:
    went = 0
    for seed in range(first, first + 100):
        town = Town(seed)
        for _ in range(town.random.randint(50, 4000)):
            town.act()
        town.come_to_an_end()
        for rank in town.ranks:
            assert rank.stands_at is None, (seed, rank.number)
            assert rank.is_over or any(r.is_voting for r in town.ranks), (seed, rank.number)
        for place in {place for rank in town.ranks for place in rank.ends}:
            ends = [rank.ends.get(place) for rank in town.ranks]
            if "go" not in ends:
                continue
            went += 1
            if town.goes_back(place) or not town.deaths:
                assert set(ends) == {"go"}, (seed, place, ends)
        voting = [rank.is_voting for rank in town.ranks]
        assert all(voting) or not any(voting), (seed, voting)
    assert went > 3


def word(rank: int, says: str, step: int = 5, seen: str = "", world: int = 2) -> HaltWord:
    return HaltWord(rank, world, 1, step, BEHIND, says, seen)  # type: ignore[arg-type]


def test_who_has_left_is_not_waited_for() -> None:
    halts = Halts()
    halts.gone(1)
    [order] = halts.hear(word(0, "asks"))
    assert order.orders == "void" and "left" in order.why
    assert halts.hear(word(1, "asks", 6))[0].orders == "halt", "it is there again"


def test_who_ends_while_others_stand_lets_them_go_on() -> None:
    halts = Halts()
    halts.hear(word(0, "stands"))
    assert [order.orders for order in halts.gone(1)] == ["void"]
    assert halts.hear(word(0, "stands"))[0].orders == "void"


def test_an_earlier_step_is_taken_as_long_as_nobody_stands() -> None:
    """What is wrong with a sum is seen by all, where they are."""
    halts = Halts()
    assert halts.hear(word(0, "asks", 8))[0].step == 8
    assert [o.orders for o in halts.hear(word(1, "stands", 5))] == ["halt"]
    assert [o.orders for o in halts.hear(word(0, "stands", 5))] == ["tell"]
    assert halts.hear(word(0, "stands", 8))[0].orders == "void"


def test_what_many_have_seen_crosses_in_many_orders() -> None:
    world, seen = 40, "x" * 3000
    halts = Halts()
    orders = [o for rank in range(world) for o in halts.hear(word(rank, "stands", 5, seen, world))]
    told = [order for order in orders if order.orders == "tell"]
    assert all(sum(map(len, order.seen)) <= SEEN_CHARACTERS for order in told)
    assert [order.first + n for order in told for n in range(len(order.seen))] == list(range(world))


def test_in_front_of_a_body_is_another_place_than_behind_it() -> None:
    halts = Halts()
    before = HaltWord(0, 1, 1, 5, BEFORE, "stands", "a")
    assert [o.orders for o in halts.hear(before)] == ["halt", "tell"]
    agreed = HaltWord(0, 1, 1, 5, BEFORE, "agrees", "a")
    assert [o.orders for o in halts.hear(agreed)] == ["go"]
    assert [o.orders for o in halts.hear(word(0, "stands", world=1))] == ["halt", "tell"]


def test_another_epochs_words_are_about_nothing() -> None:
    halts = Halts()
    newer = HaltWord(0, 2, 2, 5, BEHIND, "asks")
    assert halts.hear(newer)[0].epoch == 2
    assert halts.hear(word(1, "stands")) == []


class Kept:
    """A keeper's client. `word`: what each that follows is told."""

    def __init__(self) -> None:
        self.word: HaltWord | None = None
        self.said: list[str] = []

    def say_of_halt(self, word: HaltWord, is_kept: bool) -> None:
        self.said.append(word.says)
        self.word = word if is_kept else self.word

    def forget_halt(self) -> None:
        self.word = None


def agreed() -> tuple[Halting, Kept]:
    """Rank 0 of two, that stands behind step 5 and has agreed."""
    keeper = Kept()
    halting = Halting(keeper, 0, 2)  # type: ignore[arg-type]
    halting.train(1)
    halting.step_begins()
    halting.stand(5, BEHIND, "a")
    halting.ordered(HaltOrder(1, 5, BEHIND, "tell", ("a", "b")), 4)
    assert keeper.said == ["stands", "agrees"]
    return halting, keeper


def test_who_has_agreed_stays_and_says_so_to_each_keeper_whatever_else_is_asked() -> None:
    halting, keeper = agreed()
    halting.leave()
    halting.ordered(HaltOrder(1, 3, BEHIND, "halt"), 4)  # it is past that
    assert keeper.said[2:] == ["leaves"] and not halting.is_decided
    assert keeper.word is not None and (keeper.word.says, keeper.word.step) == ("agrees", 5)
    halting.ordered(HaltOrder(1, 5, BEHIND, "go"), 4)
    halting.go_on()
    assert halting.found == ("a", "b")
    assert keeper.word.says == "agrees", "until all train anew"
    halting.train(2)
    assert keeper.word is None


def test_who_hears_that_it_is_void_agrees_with_no_later_leader() -> None:
    halting, keeper = agreed()
    halting.ordered(HaltOrder(1, 5, BEHIND, "void"), 4)
    assert keeper.word is not None and keeper.word.says == "leaves"
    halting.ordered(HaltOrder(1, 5, BEHIND, "go"), 4)
    assert halting.found is None and halting.why_void


def test_who_has_left_agrees_no_more() -> None:
    keeper = Kept()
    halting = Halting(keeper, 0, 2)  # type: ignore[arg-type]
    halting.train(1)
    halting.stand(5, BEHIND, "a")
    halting.leave()
    assert halting.is_decided and halting.found is None
    halting.ordered(HaltOrder(1, 5, BEHIND, "tell", ("a", "b")), 4)
    assert keeper.said == ["stands", "leaves"]
