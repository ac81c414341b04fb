"""Share classes: ranks that told the same are one class, whatever nodes they live on, until one of
them goes by something else, or they differ."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.redundancy.share_classes import (
    ADOPTED_WITHIN_STEPS,
    ShareClasses,
    class_of,
    differing,
)
from keepstep.core.resume.cut import Holding
from keepstep.model.shares import (
    CANDIDATE,
    MOST_RUNS,
    RankRun,
    Share,
    ShareClass,
    members_of,
    rank_runs,
)
from keepstep.model.snapshot import Stamp


def at(step: int) -> Stamp:
    return Stamp(step, 1)


@dataclass
class Told:
    """What ranks tell: all hold the same stamps."""

    ranks: int
    step: int = 0
    shares: dict[int, Share] = field(default_factory=dict)  # of the newest, by rank
    plans: dict[int, int] = field(default_factory=dict)
    older: dict[int, Share] = field(default_factory=dict)  # of the one before

    def holdings(self) -> dict[int, Holding]:
        found = {}
        for rank in range(self.ranks):
            shares = [(at(self.step), self.shares.get(rank))]
            shares.append((at(self.step - 1), self.older.get(rank)))
            told = tuple((stamp, share) for stamp, share in shares if share is not None)
            sealed = frozenset({at(self.step), at(self.step - 1)})
            found[rank] = Holding(
                sealed, None, self.step, shares=told, plan=self.plans.get(rank, 0)
            )
        return found


def begun(told: Told) -> ShareClasses:
    """All have passed a boundary."""
    classes = ShareClasses(told.ranks)
    assert not classes.look(told.holdings()) and classes.classes is None
    told.step += 1
    classes.look(told.holdings())
    return classes


@given(st.sets(st.integers(0, 60)))
def test_runs_are_the_ranks_they_were_made_of(ranks: set[int]) -> None:
    assert members_of(rank_runs(ranks)) == tuple(sorted(ranks))


def test_ranks_of_the_same_place_of_every_node_are_one_run() -> None:
    assert rank_runs(range(3, 1024, 8)) == (RankRun(3, 128, 8),)


def test_who_told_the_same_of_a_step_that_all_hold_is_one_class() -> None:
    told = Told(5)
    told.shares = {0: Share(7, CANDIDATE), 2: Share(7, CANDIDATE), 4: Share(7, CANDIDATE)}
    told.shares |= {1: Share(8, CANDIDATE), 3: Share(9, CANDIDATE)}
    assert begun(told).classes == (ShareClass((RankRun(0, 3, 2),), 7),)


def test_who_keeps_all_under_a_plan_is_no_candidate() -> None:
    told = Told(2)
    told.shares = {0: Share(7, 0), 1: Share(7, 0)}
    assert begun(told).classes == ()


def test_ranks_without_order_are_not_shared() -> None:
    """Each node has to hear of all of them."""
    told = Told(40)
    odd = [0, 1, 3, 4, 8, 13, 15, 22, 30, 31, 39]
    assert len(rank_runs(odd)) > MOST_RUNS
    told.shares = dict.fromkeys(odd, Share(7, CANDIDATE))
    assert begun(told).classes == ()


def adopted(told: Told) -> ShareClasses:
    told.shares = dict.fromkeys(range(told.ranks), Share(7, CANDIDATE))
    classes = begun(told)
    told.step += 1
    told.plans = {0: 77}
    assert not classes.look(told.holdings()), "the others have not yet"
    told.plans = dict.fromkeys(range(told.ranks), 77)
    assert classes.look(told.holdings())
    assert classes.classes == (ShareClass(rank_runs(range(told.ranks)), 7, 77),)
    return classes


def test_a_class_that_not_all_adopt_is_given_up() -> None:
    told = Told(2, shares=dict.fromkeys(range(2), Share(7, CANDIDATE)))
    classes = begun(told)
    told.plans, told.shares = {0: 77}, {}
    told.step += ADOPTED_WITHIN_STEPS + 1
    classes.look(told.holdings())
    assert classes.classes is not None and classes.classes[0].is_over
    told.plans = {}
    classes.look(told.holdings())
    assert classes.classes == ()


def test_it_is_over_when_one_goes_by_another_plan_until_nobody_goes_by_it() -> None:
    told = Told(3)
    classes = adopted(told)
    told.plans[1] = 0
    classes.look(told.holdings())
    assert classes.classes is not None
    [known] = classes.classes
    assert known.is_over and known.number == 77
    told.plans = {0: 77, 1: 0, 2: 0}
    assert not classes.look(told.holdings())
    told.plans = {}
    told.shares = {}
    classes.look(told.holdings())
    assert classes.classes == ()


def test_it_is_over_when_they_differ_at_a_step_that_all_have_sealed() -> None:
    told = Told(2)
    classes = adopted(told)
    told.step += 1
    told.older, told.shares = {}, {0: Share(11, 2), 1: Share(11, 2)}
    assert not classes.look(told.holdings())
    told.step += 1
    told.older, told.shares = told.shares, {0: Share(12, 2), 1: Share(13, 2)}
    members = list(told.holdings().values())
    assert differing(members, at(0)) == [at(told.step)] != differing(members, at(told.step))
    classes.look(told.holdings())
    known = class_of(1, classes.classes or ())
    assert known is not None and known.is_over and class_of(2, classes.classes or ()) is None


def test_another_leader_finds_the_class_by_the_number_that_they_show() -> None:
    told = Told(4)
    told.plans = {0: 5, 1: 5, 2: 6, 3: 6}
    told.shares = dict.fromkeys(range(4), Share(7, 2))
    assert begun(told).classes == (
        ShareClass((RankRun(0, 2, 1),), 0, 5),
        ShareClass((RankRun(2, 2, 1),), 0, 6),
    )
