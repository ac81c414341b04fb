"""The cut under every interleaving: ranks, slots, steps, views of the past, captures that are late,
torn or skipped, deaths.

One model and two searches: breadth first over every state of small worlds, and hypothesis through
larger ones that vote for real. The model does what the session does (runtime/rank/capture.py) and
calls the real `choose`, `cut`, `hopeless`.

Safety: once all ranks hold a stamp they do at every later instant, and it never goes back; equal
    stamps are one computation.
Liveness: from every state, one step in which nothing is late moves the cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from keepstep.core.resume.cut import Holding, common, cut, holding_of, hopeless
from keepstep.core.resume.slots import Skip, Take, choose
from keepstep.core.resume.vote import Ballot, Go, Offer, Vote
from keepstep.model.snapshot import Phase, RankStatus, SlotState, SlotView, Stamp

EMPTY = SlotView(SlotState.EMPTY, Stamp(-1, 0))
Slots = tuple[SlotView, ...]
Chooser = Callable[[Sequence[SlotView], Stamp | None, Callable[[Stamp], bool]], Take | Skip]


class Unsafe(AssertionError):
    """The model broke a promise."""


@dataclass(frozen=True, eq=False)
class Page:
    """What a status page tells. Made by `page_of`, one object a value, so that comparing two is
    comparing addresses."""

    slots: Slots
    holding: Holding

    @property
    def decided(self) -> int:
        return self.holding.decided_step

    @property
    def writing(self) -> bool:
        return self.holding.pending is not None


@cache
def page_of(slots: Slots, decided: int) -> Page:
    sealed = frozenset(v.stamp for v in slots if v.state is SlotState.SEALED)
    pending = next((v.stamp for v in slots if v.state is SlotState.WRITING), None)
    return Page(slots, Holding(sealed, pending, decided))


class World(NamedTuple):
    """All ranks at one instant. `seen[r][p]`: the page of p that r will use when it decides next,
    any since the vote."""

    pages: tuple[Page, ...]
    seen: tuple[tuple[Page, ...], ...]
    epoch: int = 1
    # during a vote: who has loaded and forgotten; None while training
    loaded: frozenset[int] | None = None
    deaths: int = 0


def put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*values[:index], value, *values[index + 1 :])


@cache
def held_by_all(pages: tuple[Page, ...]) -> Stamp | None:
    return max(common([p.holding.sealed for p in pages]), default=None)


@cache
def decide(chooser: Chooser, own: Slots, seen: tuple[Page, ...]) -> Take | Skip:
    holdings = [p.holding for p in seen]
    return chooser(
        own, cut(holdings, len(seen)), lambda stamp: hopeless(stamp, holdings, len(seen))
    )


# ----------------------------------------------------------------------------------------------
# what can happen


def after_boundary(
    own: Page,
    seen: tuple[Page, ...],
    epoch: int,
    chooser: Chooser = choose,
    pins: frozenset[int] = frozenset(),
) -> Page:
    """The rank completes its next step and captures it, if the chooser finds a slot."""
    step = own.decided + 1
    views = tuple(v._replace(pinned=True) if i in pins else v for i, v in enumerate(own.slots))
    decision = decide(chooser, views, seen)
    if isinstance(decision, Skip):
        return page_of(own.slots, step)
    return page_of(
        put(own.slots, decision.slot, SlotView(SlotState.WRITING, Stamp(step, epoch))), step
    )


def after_finish(own: Page, whole: bool) -> Page:
    """The capture thread seals what is being written, or drops it as torn."""
    index = next(i for i, v in enumerate(own.slots) if v.state is SlotState.WRITING)
    return page_of(
        put(
            own.slots, index, own.slots[index]._replace(state=SlotState.SEALED) if whole else EMPTY
        ),
        own.decided,
    )


def after_death(own: Page) -> Page:
    """A new life finds what was sealed; what was being written is lost."""
    return page_of(tuple(v if v.state is SlotState.SEALED else EMPTY for v in own.slots), -1)


def after_load(own: Page, offer: Stamp | None) -> Page:
    """The rank has loaded the offer and forgotten everything newer."""
    kept = tuple(
        v if v.state is SlotState.SEALED and offer is not None and v.stamp <= offer else EMPTY
        for v in own.slots
    )
    return page_of(kept, -1 if offer is None else offer.step)


def moves(
    world: World, chooser: Chooser, max_step: int, max_deaths: int, dated: int
) -> Iterator[World]:
    """Every next instant. Ranks stay within one step of each other, as ranks that exchange
    gradients do. The first `dated` ranks decide by pages of any age, the others by what the pages
    tell at that instant."""
    pages, ranks = world.pages, range(len(world.pages))
    if world.deaths < max_deaths:
        yield world._replace(
            pages=tuple(map(after_death, pages)), loaded=frozenset(), deaths=world.deaths + 1
        )
    if world.loaded is not None:
        yield from (loads(world, world.loaded, rank) for rank in ranks if rank not in world.loaded)
        return
    slowest = min(p.decided for p in pages)
    for rank, own in enumerate(pages):
        if own.decided == slowest < max_step:
            seen = put(world.seen[rank], rank, own) if rank < dated else pages
            yield world._replace(
                pages=put(pages, rank, after_boundary(own, seen, world.epoch, chooser))
            )
            # a reader came first, or no room
            yield world._replace(pages=put(pages, rank, page_of(own.slots, own.decided + 1)))
        if own.writing:
            yield world._replace(pages=put(pages, rank, after_finish(own, whole=True)))
            yield world._replace(pages=put(pages, rank, after_finish(own, whole=False)))
        for peer in ranks:
            if rank < dated and peer != rank and world.seen[rank][peer] is not pages[peer]:
                yield world._replace(
                    seen=put(world.seen, rank, put(world.seen[rank], peer, pages[peer]))
                )


def loads(world: World, loaded: frozenset[int], rank: int) -> World:
    pages = put(world.pages, rank, after_load(world.pages[rank], held_by_all(world.pages)))
    loaded = loaded | {rank}
    if len(loaded) < len(pages):
        return world._replace(pages=pages, loaded=loaded)
    return world._replace(
        pages=pages, seen=(pages,) * len(pages), loaded=None, epoch=world.epoch + 1
    )


# ----------------------------------------------------------------------------------------------
# what must hold


def check_safety(held: Stamp | None, now: Stamp | None) -> None:
    if held is not None and (now is None or now < held):
        raise Unsafe(f"the cut went from {held!r} back to {now!r}")


def check_liveness(pages: tuple[Page, ...], epoch: int, chooser: Chooser = choose) -> None:
    """Once everything begun has ended, one step in which nothing is late is the new cut, whatever
    happened before."""
    pages = tuple(after_finish(p, whole=True) if p.writing else p for p in pages)
    newest = max(p.decided for p in pages)
    # laggards first reach the newest step
    for step in range(min(p.decided for p in pages) + 1, newest + 2):
        for rank, own in enumerate(pages):
            if own.decided < step:
                own = after_boundary(own, pages, epoch, chooser)
                pages = put(pages, rank, after_finish(own, whole=True) if own.writing else own)
    if held_by_all(pages) != Stamp(newest + 1, epoch):
        raise Unsafe(
            f"nothing was late at step {newest + 1}, and the cut is {held_by_all(pages)!r}: "
            f"{[p.slots for p in pages]}"
        )


def explore(
    ranks: int, slots: int, max_step: int, max_deaths: int, dated: int, chooser: Chooser = choose
) -> int:
    """Every reachable state, breadth first; returns how many. Raises Unsafe."""
    pages = (page_of((EMPTY,) * slots, -1),) * ranks
    first = World(pages, (pages,) * ranks)
    known, queue, judged = {first}, deque([first]), set()
    while queue:
        world = queue.popleft()
        if world.loaded is None and (world.pages, world.epoch) not in judged:
            judged.add((world.pages, world.epoch))
            check_liveness(world.pages, world.epoch, chooser)
        for following in moves(world, chooser, max_step, max_deaths, dated):
            if following not in known:
                check_safety(held_by_all(world.pages), held_by_all(following.pages))
                known.add(following)
                queue.append(following)
    return len(known)


@pytest.mark.parametrize(
    ("ranks", "slots", "max_step", "max_deaths", "dated"),
    [(1, 2, 4, 2, 1), (2, 2, 3, 1, 2), (2, 3, 3, 0, 2), (3, 2, 1, 1, 1), (3, 2, 2, 1, 0)],
)
def test_every_interleaving_of_a_small_world(
    ranks: int, slots: int, max_step: int, max_deaths: int, dated: int
) -> None:
    assert explore(ranks, slots, max_step, max_deaths, dated) > 1000


# ----------------------------------------------------------------------------------------------
# larger worlds, real votes


AGES = st.lists(st.integers(0, 6), min_size=3, max_size=3)
ENDINGS = st.sampled_from(["sealed", "sealed", "torn", "later"])


class Job(RuleBasedStateMachine):
    """2 or 3 ranks with 2 to 4 slots, readers that pin, a keeper that dies, Go that reaches only
    one rank.

    `lives[rank, stamp]` is a ghost: in which life of the job that rank computed that stamp. `cut`
    is the other ghost.
    """

    chooser: Chooser = staticmethod(choose)
    vote_type: type[Vote] = Vote

    @initialize(ranks=st.integers(2, 3), slots=st.integers(2, 4))
    def begin(self, ranks: int, slots: int) -> None:
        self.pages = [page_of((EMPTY,) * slots, -1)] * ranks
        # every page since the vote: what a peer may still believe
        self.told: list[list[Page]] = [[p] for p in self.pages]
        self.epochs = [0] * ranks
        self.doing = ["away"] * ranks
        self.pins: set[tuple[int, int]] = set()
        self.lives: dict[tuple[int, Stamp], int] = {}
        self.life, self.steps_done, self.cut, self.offer = 0, 0, None, None
        self.vote = self.vote_type(ranks, has_store=False)

    def show(self, rank: int, page: Page) -> None:
        self.pages[rank] = page
        self.told[rank].append(page)
        self.pins = {
            (r, s) for r, s in self.pins if r != rank or page.slots[s].state is SlotState.SEALED
        }
        now = held_by_all(tuple(self.pages))
        check_safety(self.cut, now)
        self.cut = now

    @rule(
        order=st.permutations(range(3)),
        interrupted_after=st.none() | st.none() | st.integers(0, 5),
        hears_go=st.integers(-6, 2),
    )
    @precondition(lambda self: "training" not in self.doing)
    def resume(self, order: list[int], interrupted_after: int | None, hears_go: int) -> None:
        """All ranks join, load and go; or everything dies again in the middle; or (`hears_go`) the
        keeper dies while it says go."""
        ranks = [r for r in order if r < len(self.pages)]
        for count, rank in enumerate(ranks + ranks):
            if count == interrupted_after:
                self.die(keeper_too=order[0] == 0)
                return
            if count < len(ranks):
                self.hear(
                    self.vote.joined(Ballot(rank, len(ranks), self.pages[rank].holding.sealed)), []
                )
            elif self.offer is not None:
                self.show(
                    rank,
                    after_load(
                        self.pages[rank], None if self.offer.source == "fresh" else self.offer.stamp
                    ),
                )
                self.hear(
                    self.vote.has_loaded(rank, self.offer.number),
                    [hears_go] if hears_go in ranks else ranks,
                )

    def hear(self, actions: Sequence[Any], hearing: list[int]) -> None:
        for action in actions:
            if isinstance(action, Offer):
                self.offer = action
            if isinstance(action, Go):
                self.offer = None
                self.life, self.steps_done = self.life + 1, 0
                self.told = [[p] for p in self.pages]
                for rank in hearing:
                    self.doing[rank], self.epochs[rank] = "training", action.epoch

    @rule(keeper_too=st.booleans())
    @precondition(lambda self: "training" in self.doing and self.steps_done > 8)
    def die(self, keeper_too: bool) -> None:
        for rank, page in enumerate(self.pages):
            self.vote.left(rank)
            self.doing[rank] = "away"
            self.show(rank, after_death(page))
        self.offer = None
        if keeper_too:
            self.vote = self.vote_type(len(self.pages), has_store=False, epoch=max(self.epochs))

    @rule(steps=st.lists(st.tuples(st.integers(0, 2), AGES, ENDINGS), min_size=1, max_size=8))
    @precondition(lambda self: "training" in self.doing)
    def train(self, steps: list[tuple[int, list[int], str]]) -> None:
        for rank, ages, ending in steps:
            self.step(rank, ages, ending)

    def step(self, rank: int, ages: list[int], ending: str) -> None:
        """A boundary on a rank that is not two steps ahead, deciding by pages of any age; it may
        finish at once."""
        self.steps_done += 1
        training = [r for r, what in enumerate(self.doing) if what == "training"]
        slowest = min(self.pages[r].decided for r in training)
        ready = [r for r in training if self.pages[r].decided <= slowest + 1]
        rank = ready[rank % len(ready)]
        own = self.pages[rank]
        seen = tuple(
            told[max(0, len(told) - 1 - age)] for told, age in zip(self.told, ages, strict=False)
        )
        pins = frozenset(s for r, s in self.pins if r == rank)
        after = after_boundary(own, put(seen, rank, own), self.epochs[rank], self.chooser, pins)
        assert all(after.slots[s] == own.slots[s] for s in pins), "a pinned slot was overwritten"
        if after.writing and not own.writing:
            self.lives[rank, Stamp(after.decided, self.epochs[rank])] = self.life
        self.show(rank, after)
        if after.writing and ending != "later":
            self.finish(rank, whole=ending == "sealed")

    @rule(rank=st.integers(0, 2), whole=st.booleans())
    @precondition(lambda self: any(p.writing for p in self.pages))
    def finish(self, rank: int, whole: bool) -> None:
        ready = [r for r, p in enumerate(self.pages) if p.writing]
        rank = rank if rank in ready else ready[rank % len(ready)]
        self.show(rank, after_finish(self.pages[rank], whole))

    @rule(data=st.data())
    @precondition(lambda self: self.cut is not None and not self.pins)
    def pin(self, data: st.DataObject) -> None:
        for rank, page in enumerate(self.pages):
            self.pins.add(
                (
                    rank,
                    next(
                        i
                        for i, v in enumerate(page.slots)
                        if v.state is SlotState.SEALED and v.stamp == self.cut
                    ),
                )
            )

    @rule()
    @precondition(lambda self: self.pins)
    def unpin(self) -> None:
        self.pins.clear()

    @invariant()
    def equal_stamps_are_one_computation(self) -> None:
        lives: dict[Stamp, int] = {}
        for rank, page in enumerate(getattr(self, "pages", [])):
            for stamp in page.holding.sealed:
                if lives.setdefault(stamp, self.lives[rank, stamp]) != self.lives[rank, stamp]:
                    raise Unsafe(f"{stamp!r} was computed twice, and ranks hold different ones")

    def teardown(self) -> None:
        if getattr(self, "pages", None) and set(self.doing) == {"training"}:
            check_liveness(tuple(self.pages), max(self.epochs), self.chooser)


SEARCH = settings(max_examples=200, stateful_step_count=40, derandomize=True, deadline=None)


def test_larger_worlds_with_votes() -> None:
    run_state_machine_as_test(Job, settings=SEARCH)


# ---------------------------------------------------------------------------------------------- the
# checker finds planted bugs


def ignores_the_horizon(
    slots: Sequence[SlotView],
    horizon: Stamp | None,
    is_hopeless: Callable[[Stamp], bool],
) -> Take | Skip:
    return choose(slots, Stamp(1 << 40, 0), is_hopeless)


def takes_the_horizon_too(
    slots: Sequence[SlotView],
    horizon: Stamp | None,
    is_hopeless: Callable[[Stamp], bool],
) -> Take | Skip:
    return choose(slots, horizon and horizon._replace(epoch=horizon.epoch + 1), is_hopeless)


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


@pytest.mark.parametrize(
    ("bug", "shown_by"),
    [
        (ignores_the_horizon, "the cut went from"),
        (takes_the_horizon_too, "the cut went from"),
        (gives_up_too_early, "the cut went from"),
        # safe, but two ranks with different newer steps wait for each other for ever
        (never_gives_up, "nothing was late"),
    ],
)
def test_the_search_finds_a_planted_bug(bug: Chooser, shown_by: str) -> None:
    with pytest.raises(Unsafe, match=shown_by):
        explore(ranks=2, slots=2, max_step=3, max_deaths=0, dated=2, chooser=bug)


class HastyVote(Vote):
    """Lets ranks go when the first has loaded, in the old epoch."""

    def has_loaded(self, rank: int, number: int) -> list[Any]:
        if self.offer is None or number != self.offer.number:
            return []
        offer = self.offer
        self.loaded[rank] = number
        return [Go(self.epoch, offer)]


class HastyJob(Job):
    vote_type = HastyVote


def test_the_machine_finds_two_computations_mixed() -> None:
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
# examples


def held(*steps: int, decided: int, pending: int | None = None) -> Holding:
    return Holding(
        frozenset(Stamp(s, 1) for s in steps),
        None if pending is None else Stamp(pending, 1),
        decided,
    )


def test_the_cut_is_the_newest_common_stamp() -> None:
    assert cut([held(4, 5, decided=5), held(3, 4, decided=5)], 2) == Stamp(4, 1)
    assert cut([held(4, decided=4), held(5, decided=5)], 2) is None


def test_no_cut_while_a_rank_is_unseen() -> None:
    assert cut([held(4, decided=4)], 2) is None
    assert cut([], 0) is None


def test_the_same_step_of_two_epochs_is_not_common() -> None:
    assert common([{Stamp(4, 1)}, {Stamp(4, 2)}]) == frozenset()


def test_hopeless_needs_a_rank_that_decided_and_neither_holds_nor_writes() -> None:
    stamp = Stamp(5, 1)
    mine = held(4, 5, decided=5)
    assert not hopeless(stamp, [mine, held(4, decided=4)], 2), "the other rank may still capture it"
    assert not hopeless(stamp, [mine, held(4, decided=5, pending=5)], 2), (
        "it is being written there"
    )
    assert not hopeless(stamp, [mine, held(4, 5, decided=6)], 2)
    assert hopeless(stamp, [mine, held(4, decided=5)], 2)
    assert hopeless(stamp, [mine, held(4, 6, decided=6)], 2)


def test_a_status_page_tells_its_holding() -> None:
    slots = (
        SlotView(SlotState.SEALED, Stamp(4, 1)),
        SlotView(SlotState.WRITING, Stamp(5, 1)),
        EMPTY,
    )
    status = RankStatus(
        0, 2, 1, 1, 1, Phase.STEP, 6, 5, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, slots
    )
    assert holding_of(status) == held(4, decided=5, pending=5)
