"""Replicas: differences are found where a dumb comparison finds them, the wrong ranks are named,
and whatever ages of pages ranks decide by, a state from before the first difference stays."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.detection.replicas import (
    CONDEMNS,
    JUDGED,
    MARKS,
    OBSERVED_STEPS,
    Agreed,
    Agreement,
    blame,
    differing,
    first_difference,
    marked,
    sound,
    tensors_in_words,
)
from keepstep.core.resume.cut import Holding, common, cut, hopeless
from keepstep.core.resume.slots import Take, choose
from keepstep.model.replicas import ReplicaDifference
from keepstep.model.snapshot import SlotState, SlotView, Stamp

RIGHT, WRONG, WORSE = 1000, 2000, 3000
EPOCH = 1

steps = st.integers(0, 3)
values = st.sampled_from((RIGHT, WRONG))
marks = st.sampled_from((0, JUDGED, MARKS))


def at(step: int, epoch: int = EPOCH) -> Stamp:
    return Stamp(step, epoch)


def holding(digests: Mapping[int, int], group: int = 7) -> Holding:
    """Of a rank that holds these steps."""
    told = tuple((at(step), digest) for step, digest in sorted(digests.items()))
    return Holding(frozenset(map(at, digests)), None, max(digests, default=-1), group, told)


@st.composite
def held(draw: st.DrawFn) -> list[Holding]:
    """Ranks that all hold the same steps; some have no digest of some."""
    there = sorted(draw(st.sets(steps, min_size=1)))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        told = {step: draw(values) | draw(marks) for step in there if draw(st.integers(0, 9))}
        one = holding(told, draw(st.sampled_from((0, 5, 7))))
        found.append(one._replace(sealed=frozenset(map(at, there))))
    return found


def dumb_first(ranks: list[Holding], mark: int) -> Stamp | None:
    """By pairs, after all of a group have been asked whether they are to be judged."""
    for stamp in sorted(common([r.sealed for r in ranks])):
        for one, other in combinations([r for r in ranks if r.group], 2):
            if one.group != other.group:
                continue
            group = [dict(r.digests).get(stamp, 0) for r in ranks if r.group == one.group]
            mine, theirs = (dict(r.digests).get(stamp, 0) for r in (one, other))
            if all(d & mark for d in group) and mine & ~MARKS != theirs & ~MARKS:
                return stamp
    return None


@given(held(), st.sampled_from((JUDGED, CONDEMNS)))
def test_differences_are_found_where_every_pair_is_compared(
    ranks: list[Holding], mark: int
) -> None:
    shared = common([r.sealed for r in ranks])
    assert first_difference(ranks, shared, mark) == dumb_first(ranks, mark)


@given(held())
def test_what_is_sound_is_older_than_the_first_condemned_difference(ranks: list[Holding]) -> None:
    shared = common([r.sealed for r in ranks])
    wrong = dumb_first(ranks, CONDEMNS)
    expected = {s for s in shared if wrong is None or s < wrong}
    assert sound(ranks, shared) == expected
    assert cut(ranks, len(ranks)) == max(expected, default=None)


def test_only_the_epoch_that_went_wrong_is_condemned() -> None:
    ranks = [holding({3: RIGHT | MARKS}), holding({3: WRONG | MARKS})]
    shared = common([r.sealed for r in ranks]) | {at(9, EPOCH + 1), at(2, EPOCH - 1)}
    assert sound(ranks, shared) == {at(9, EPOCH + 1), at(2, EPOCH - 1)}
    wrong = ReplicaDifference(at(3), (1,), 2, False, condemns=True)
    assert wrong.is_condemned(at(3)) and wrong.is_condemned(at(4))
    assert not wrong.is_condemned(at(2)) and not wrong.is_condemned(at(9, EPOCH + 1))


@given(st.integers(2, 9).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_the_majority_is_right_and_without_one_all_are_named(case: tuple[int, set[int]]) -> None:
    n, wrong = case
    if not 0 < len(wrong) < n:
        return
    told = {r: holding({4: (WRONG if r in wrong else RIGHT) | MARKS}) for r in range(n)}
    found = blame(told, at(4))
    if 2 * len(wrong) == n:
        assert found == ReplicaDifference(at(4), tuple(range(n)), n, False, True)
        assert "none of them has a majority" in found.sentence()
    else:
        minority = wrong if 2 * len(wrong) < n else set(range(n)) - wrong
        assert found == ReplicaDifference(at(4), tuple(sorted(minority)), n, True, True)
        assert "silent corruption: rank" in found.sentence("weight (1 of 2 tensors)")


def test_every_rank_wrong_in_its_own_way_is_no_majority() -> None:
    told = {r: holding({4: v | MARKS}) for r, v in enumerate((RIGHT, WRONG, WORSE))}
    assert blame(told, at(4)).is_certain is False


def test_groups_are_compared_apart() -> None:
    """Two stages of a pipeline, two replicas of each: different between, equal within."""
    told = {r: holding({4: (RIGHT, WRONG)[r // 2] | MARKS}, group=3 + r // 2) for r in range(4)}
    assert first_difference(list(told.values()), [at(4)]) is None
    told[3] = holding({4: WORSE | MARKS}, group=4)
    assert first_difference(list(told.values()), [at(4)]) == at(4)
    assert blame(told, at(4)).ranks == (2, 3)


@given(st.integers(0, 2**64 - 1), st.booleans(), st.booleans())
def test_a_mark_leaves_the_digest_as_it_is(found: int, is_judged: bool, condemns: bool) -> None:
    digest = marked(found, is_judged, condemns)
    assert digest and digest < 2**64
    assert digest & ~MARKS == (found & ~MARKS or (0 if is_judged else MARKS + 1))
    assert bool(digest & JUDGED) is is_judged
    assert bool(digest & CONDEMNS) is (is_judged and condemns)


# -- agreement


def test_a_claim_counts_once_all_agree_and_what_nobody_claims_after_several_changes() -> None:
    agreement = Agreement(EPOCH)
    for step in range(OBSERVED_STEPS):
        assert not Agreed(agreement.steps, is_claimed=False).is_shown
        ranks = [holding({step: RIGHT + 8 * step})] * 2
        assert agreement.saw(ranks, [at(step)]) == step + 1
        assert Agreed(agreement.steps, is_claimed=True).is_shown
    assert Agreed(agreement.steps, is_claimed=False).is_shown


def test_what_never_changes_shows_nothing_new() -> None:
    agreement = Agreement(EPOCH)
    for step in range(9):
        agreement.saw([holding({step: RIGHT})] * 2, [at(step)])
    assert agreement.steps == 1


def test_who_differs_in_between_has_to_show_it_all_anew() -> None:
    """Ranks that are averaged at every third step."""
    agreement = Agreement(EPOCH)
    for step in range(60):
        digest = RIGHT + 8 * step
        other = digest if step % 3 == 0 else digest + 8
        agreement.saw([holding({step: digest}), holding({step: other})], [at(step)])
        assert not Agreed(agreement.steps, is_claimed=False).is_shown


@pytest.mark.parametrize("other", [holding({3: WRONG}), holding({}), holding({2: RIGHT})])
def test_silence_and_difference_are_no_agreement(other: Holding) -> None:
    agreement = Agreement(EPOCH)
    assert agreement.saw([holding({3: RIGHT}), other], [at(3)]) == 0


def test_an_older_epoch_says_nothing_about_this_one() -> None:
    agreement = Agreement(EPOCH + 1)
    assert agreement.saw([holding({3: RIGHT})] * 2, [at(3)]) == 0


# -- pages of any age


class Run:
    """Ranks that take snapshots of lockstep training and decide by pages of any age, as
    `runtime/rank/capture.py` does. One of them is wrong from a step on, or for some steps."""

    def __init__(self, n: int, slots: int, culprit: int, wrong_steps: range) -> None:
        self.n, self.culprit, self.wrong_steps = n, culprit, wrong_steps
        self.views = [[SlotView(SlotState.EMPTY, Stamp(-1, 0))] * slots for _ in range(n)]
        self.decided = [-1] * n
        self.step = [-1] * n
        self.is_shown = [False] * n
        self.agreement = [Agreement(EPOCH) for _ in range(n)]
        self.difference: list[ReplicaDifference | None] = [None] * n
        self.ended: set[int] = set()
        # every page that each rank has ever shown
        self.pages: list[list[Holding]] = [[Holding(frozenset(), None, -1)] for _ in range(n)]

    def publish(self, rank: int) -> None:
        views = self.views[rank]
        sealed = [v for v in views if v.state is SlotState.SEALED]
        pending = [v.stamp for v in views if v.state is SlotState.WRITING]
        told = tuple(sorted((v.stamp, v.digest) for v in sealed if v.digest))
        held = frozenset(v.stamp for v in sealed)
        page = Holding(held, pending[0] if pending else None, self.decided[rank], 7, told)
        self.pages[rank].append(page)

    def may_step(self, rank: int) -> bool:
        """Gradients are reduced: nobody is more than a step ahead, and nobody trains on alone."""
        return not self.ended and self.step[rank] <= min(self.step)

    def boundary(self, rank: int, ages: list[int]) -> None:
        step = self.step[rank] = self.step[rank] + 1
        seen = [
            pages[max(0, len(pages) - 1 - age)] for pages, age in zip(self.pages, ages, strict=True)
        ]
        seen[rank] = self.pages[rank][-1]
        shared = common([page.sealed for page in seen])
        stamp = first_difference(seen, shared)
        if stamp is not None and self.difference[rank] is None:
            self.difference[rank] = blame(dict(enumerate(seen)), stamp)
        self.decided[rank] = step
        if self.difference[rank] is not None:
            self.end(rank, self.difference[rank])
            return
        self.agreement[rank].saw(seen, shared)
        self.is_shown[rank] |= Agreed(self.agreement[rank].steps, True).is_shown
        decision = choose(self.views[rank], cut(seen, self.n), lambda s: hopeless(s, seen, self.n))
        if isinstance(decision, Take):
            self.views[rank][decision.slot] = SlotView(SlotState.WRITING, at(step))
        self.publish(rank)

    def end(self, rank: int, wrong: ReplicaDifference | None) -> None:
        if wrong is not None and rank in wrong.ranks:
            self.ended.add(rank)
            self.views[rank] = [
                SlotView(SlotState.EMPTY, Stamp(-1, 0)) if wrong.is_condemned(v.stamp) else v
                for v in self.views[rank]
            ]
        self.publish(rank)

    def seal(self, rank: int) -> None:
        for index, view in enumerate(self.views[rank]):
            if view.state is SlotState.WRITING:
                step = view.stamp.step
                is_wrong = rank == self.culprit and step in self.wrong_steps
                value = (WRONG if is_wrong else RIGHT) + 8 * step
                digest = marked(value, self.is_shown[rank], condemns=True)
                self.views[rank][index] = SlotView(SlotState.SEALED, view.stamp, digest=digest)
                self.publish(rank)

    def held(self) -> frozenset[Stamp]:
        """What all hold at this moment: what a vote would offer."""
        return common([self.pages[rank][-1].sealed for rank in range(self.n)])

    def offered(self) -> Stamp | None:
        return max(sound([self.pages[r][-1] for r in range(self.n)], self.held()), default=None)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_state_from_before_the_difference_is_left_whatever_pages_ranks_go_by(
    data: st.DataObject,
) -> None:
    n = data.draw(st.integers(2, 4))
    first = data.draw(st.integers(0, 6))
    wrong_steps = range(first, first + data.draw(st.integers(1, 9)))
    run = Run(n, data.draw(st.integers(2, 3)), data.draw(st.integers(0, n - 1)), wrong_steps)
    was_sound, first_wrong = False, None
    for _ in range(60):
        rank = data.draw(st.integers(0, n - 1))
        if data.draw(st.booleans()):
            run.seal(rank)
        elif run.may_step(rank) and SlotState.WRITING not in [v.state for v in run.views[rank]]:
            run.boundary(rank, [data.draw(st.integers(0, 3)) for _ in range(n)])
        judged = all(dict(page[-1].digests).get(at(first), JUDGED) & JUDGED for page in run.pages)
        offered = run.offered()
        if not judged:
            return  # it was wrong before anybody knew that it had to be equal
        was_sound |= offered is not None
        if was_sound:
            assert offered is not None, "there was a state to go back to, and it is gone"
        common_wrong = [s.step for s in run.held() if s.step in wrong_steps]
        if first_wrong is None:
            first_wrong = min(common_wrong, default=None)
        if offered is not None and first_wrong is not None:
            assert offered.step < first_wrong, "a state that went wrong is offered"


# -- in words


def test_tensors_that_differ_are_named() -> None:
    assert differing(["a", "b", "c"], [1, 2, 9], [1, 5, 3]) == ["b", "c"], "either way"
    with pytest.raises(ValueError):
        differing(["a"], [1], [1, 2])
    assert tensors_in_words(["b"], 3) == "b (1 of 3 tensors)"
    names = [f"t{number}" for number in range(12)]
    assert tensors_in_words(names, 40).endswith("t7 and 4 more (12 of 40 tensors)")
