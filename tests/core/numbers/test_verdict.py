"""What is at fault, from the runs of a step: each way in which numbers can be wrong has its own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.numbers.inquiry import CountIt, Rules, RunIt, SkipIt, next_act
from keepstep.core.numbers.verdict import FAR_MORE, judge, origins, unrepeated
from keepstep.model.numbers import Culprit, Origin, RangeCount, Sight, Sign, StepRun, Way
from keepstep.model.snapshot import Stamp

LAYER = Origin("model.3", "Linear", "backward")
worlds = st.integers(2, 9)


def run(
    world: int,
    way: Way = Way.FIRST,
    bad: Collection[int] = (),
    roles: bool = False,
    signs: Collection[int] | None = None,
    **evidence: object,
) -> StepRun:
    """`bad`: the devices, or with `roles` the roles, that have `evidence`; everybody has the sign,
    as where gradients are summed, or only `signs`."""
    seen = []
    for rank in range(world):
        role = (rank + 1) % world if way is Way.SWAPPED else rank
        is_bad = (role if roles else rank) in bad
        has_sign = bool(bad) if signs is None else rank in signs
        told = (Sign.GRADIENT,) if has_sign else ()
        gives = {"gave": float("nan") if is_bad else 1.0, "gave_bad_at": 0 if is_bad else None}
        found = {**gives, **evidence} if is_bad else {"gave": 1.0}
        seen.append(Sight(rank, role, told, 7, bad_gradients=("model.3.weight",), **found))  # type: ignore[arg-type]
    return StepRun(way, tuple(seen))


def clean(world: int, way: Way = Way.AGAIN) -> StepRun:
    return run(world, way)


@given(worlds, st.data())
def test_one_device_that_errs_once(world: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, world - 1))
    found = judge([run(world, bad=[rank]), clean(world)])
    assert (found.culprit, found.rank, found.comes_again) == (Culprit.HARDWARE, rank, False)
    assert found.where == "model.3.weight"


@given(worlds, st.data())
def test_a_rank_whose_sum_came_out_wrong(world: int, data: st.DataObject) -> None:
    """Only it has the sign: the others were given the same sum, and it was right."""
    rank = data.draw(st.integers(0, world - 1))
    first = run(world, bad=[rank], signs=[rank], gave=1.0, gave_bad_at=None)
    first = StepRun(
        Way.FIRST,
        tuple(s if s.rank == rank else Sight(s.rank, s.role, (), 7, gave=1.0) for s in first.seen),
    )
    found = judge([first, clean(world)])
    assert (found.culprit, found.rank) == (Culprit.HARDWARE, rank)


@given(worlds, st.data(), st.lists(st.sampled_from(Sign), max_size=2, unique=True))
def test_what_the_others_tell_of_a_later_step_is_what_came_of_it(
    world: int, data: st.DataObject, signs: list[Sign]
) -> None:
    """A sum came wrong to one rank, and its update to all: they stand behind a later step."""
    rank = data.draw(st.integers(0, world - 1))
    later = data.draw(st.integers(8, 20))
    held = data.draw(st.sampled_from(["bad_batch", "bad_weights", "bad_moments"]))
    evidence: dict[str, Any] = {held: ("model.1.bias",)} if signs else {}
    bad = {"gave_bad_at": 0, "bad_gradients": ("model.1.bias",), **evidence} if signs else {}
    seen = [Sight(r, r, tuple(signs), later, gave=2.0, **bad) for r in range(world)]
    seen[rank] = Sight(rank, rank, (Sign.GRADIENT,), 7, gave=1.0, bad_gradients=("model.3.weight",))
    found = judge([StepRun(Way.FIRST, tuple(seen)), clean(world)])
    assert (found.culprit, found.rank) == (Culprit.HARDWARE, rank)
    assert found.where == "model.3.weight"


@given(worlds, st.data(), st.sampled_from(["bad_weights", "bad_moments"]))
def test_a_state_that_changed_in_memory(world: int, data: st.DataObject, name: str) -> None:
    rank = data.draw(st.integers(0, world - 1))
    found = judge([run(world, bad=[rank], **{name: ("model.1.bias",)}), clean(world)])
    assert (found.culprit, found.rank, found.where) == (Culprit.MODEL, rank, "model.1.bias")
    assert not found.comes_again


@given(worlds, st.data(), st.sampled_from(["bad_weights", "bad_moments"]))
def test_nobody_says_of_a_state_that_nobody_watched_that_it_changed_by_itself(
    world: int, data: st.DataObject, name: str
) -> None:
    """A gradient of that rank may have been wrong, and nobody has looked."""
    rank = data.draw(st.integers(0, world - 1))
    more = {name: ("model.1.bias",), "looked": False}
    first = run(world, bad=[rank], signs=[rank], **more)
    found = judge([first, clean(world)])
    assert (found.culprit, found.rank, found.where) == (Culprit.UNKNOWN, rank, "model.1.bias")
    assert "is not known" in found.why


@given(worlds, st.data())
def test_a_bad_moment_has_made_a_bad_weight(world: int, data: st.DataObject) -> None:
    """An update makes weights of moments, and one that would make moments of bad gradients is
    withheld: where both are bad, the moment was first."""
    rank = data.draw(st.integers(0, world - 1))
    both = {"bad_weights": ("model.1.bias",), "bad_moments": ("exp_avg of model.1.bias",)}
    found = judge([run(world, bad=[rank], **both), clean(world)])
    assert (found.culprit, found.where) == (Culprit.MODEL, "exp_avg of model.1.bias")


@given(worlds, st.data())
def test_a_batch_that_is_bad_again(world: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, world - 1))
    bad = {"bad_batch": ("batch 3 of epoch 0 of loader '0'",)}
    found = judge([run(world, bad=[rank], **bad), run(world, Way.AGAIN, bad=[rank], **bad)])
    assert (found.culprit, found.rank, found.comes_again) == (Culprit.DATA, rank, True)
    assert "batch 3" in found.why


@given(worlds, st.data())
def test_it_stays_where_the_device_is(world: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, world - 1))
    runs = [run(world, way, bad=[rank], origin=LAYER) for way in Way]
    found = judge(runs)
    assert (found.culprit, found.rank, found.comes_again) == (Culprit.HARDWARE, rank, True)
    assert found.where == str(LAYER)


@given(worlds, st.data())
def test_it_goes_where_the_state_and_the_batch_go(world: int, data: st.DataObject) -> None:
    role = data.draw(st.integers(0, world - 1))
    runs = [run(world, way, bad=[role], roles=True, origin=LAYER) for way in Way]
    found = judge(runs)
    assert (found.culprit, found.rank, found.comes_again) == (Culprit.DATA, role, True)


@given(worlds)
def test_it_is_everywhere(world: int) -> None:
    found = judge([run(world, way, bad=range(world), origin=LAYER) for way in Way])
    assert (found.culprit, found.rank, found.comes_again) == (Culprit.CODE, None, True)


@given(worlds, st.data())
def test_without_a_swap_device_and_code_stay_open(world: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, world - 1))
    found = judge([run(world, way, bad=[rank]) for way in (Way.FIRST, Way.AGAIN)])
    assert (found.culprit, found.comes_again) == (Culprit.UNKNOWN, True)


@given(st.integers(3, 9), st.data())
def test_what_follows_neither_is_open(world: int, data: st.DataObject) -> None:
    """Two places apart in a ring: neither the same device nor the neighbour's role."""
    rank = data.draw(st.integers(0, world - 1))
    other = (rank + 1) % world
    runs = [
        run(world, bad=[rank]),
        run(world, Way.AGAIN, bad=[rank]),
        run(world, Way.SWAPPED, bad=[other]),
    ]
    found = judge(runs)
    assert (found.culprit, found.rank) == (Culprit.UNKNOWN, None)


@given(worlds, st.integers(1, 40), st.data())
def test_a_device_that_errs_for_some_runs(world: int, errs: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, world - 1))
    runs = [run(world, bad=[rank]), *[run(world, Way.AGAIN, bad=[rank])] * errs, clean(world)]
    found = judge(runs)
    assert (found.culprit, found.rank) == (Culprit.HARDWARE, rank)


def test_the_first_sum_tells_who_gave_it_what_is_not_finite() -> None:
    """What came back from it is everybody's, and is given to the next one."""
    seen = [
        Sight(0, 0, (Sign.GRADIENT,), gave=float("nan"), gave_bad_at=1),
        Sight(1, 1, (Sign.GRADIENT,), gave=float("nan"), gave_bad_at=0),
        Sight(2, 2, (Sign.GRADIENT,), gave=float("nan"), gave_bad_at=1),
    ]
    assert origins(StepRun(Way.FIRST, tuple(seen))) == {1}


def test_one_that_gives_far_more_than_all_others_is_the_origin() -> None:
    def with_norm(norm: float) -> frozenset[int]:
        norms = [1.0, 2.0, norm]
        seen = tuple(Sight(r, r, (Sign.EXPLOSION,), gave=n) for r, n in enumerate(norms))
        return origins(StepRun(Way.FIRST, seen))

    assert with_norm(2 * FAR_MORE + 1) == {2}
    assert with_norm(2 * FAR_MORE - 1) == frozenset()


def test_a_rank_alone_is_the_origin_of_what_it_sees() -> None:
    alone = StepRun(Way.FIRST, (Sight(0, 0, (Sign.STATE,)),))
    assert origins(alone) == {0}


@given(worlds, st.data())
def test_whose_state_was_bad_first_is_the_origin(world: int, data: st.DataObject) -> None:
    """What nobody looked at has spread to all by the time that anybody looks. That the others were
    right at first is known where they hold a snapshot of then."""
    rank = data.draw(st.integers(0, world - 1))
    unsure = data.draw(st.none() | st.integers(0, world - 1))
    seen = tuple(
        Sight(
            *(r, r, (Sign.STATE,), 7 + (r != rank)),
            looked=False,
            bad_weights=(f"w{r}",),
            holds=tuple(Stamp(step, 1) for step in (5, 6, 7)[: 2 if r in (rank, unsure) else 3]),
        )
        for r in range(world)
    )
    found = judge([StepRun(Way.FIRST, seen), clean(world)])
    assert found.culprit is Culprit.UNKNOWN
    if unsure is None or unsure == rank:
        assert (found.rank, found.where) == (rank, f"w{rank}")
    else:
        assert (found.rank, found.where) == (None, "")


@given(worlds)
def test_a_state_that_was_bad_on_all_at_once_is_nobodys(world: int) -> None:
    def state(looked: bool) -> StepRun:
        signs = (Sign.STATE,)
        seen = [Sight(r, r, signs, 7, looked=looked, bad_weights=("w",)) for r in range(world)]
        return StepRun(Way.FIRST, tuple(seen))

    assert judge([state(False), clean(world)]).culprit is Culprit.UNKNOWN
    found = judge([state(True), clean(world)])  # no gradient made it so
    assert (found.culprit, found.rank) == (Culprit.MODEL, None)


@given(worlds, st.data(), st.sampled_from(["bad_moments", "bad_weights"]))
def test_behind_the_newest_snapshot_that_was_right_it_may_have_come_in_any_step(
    world: int, data: st.DataObject, name: str
) -> None:
    rank = data.draw(st.integers(0, world - 1))
    newest = data.draw(st.integers(3, 6))

    def sight(r: int) -> Sight:
        holds = tuple(Stamp(step, 1) for step in range(3, newest + 1 if r == rank else 7))
        found = Sight(r, r, (Sign.STATE,) if r == rank else (), 7, holds=holds)
        return replace(found, **{name: ("w",)}) if r == rank else found

    first = StepRun(Way.FIRST, tuple(map(sight, range(world))))
    found = judge([first, clean(world)])
    assert (found.culprit, found.rank, found.where) == (Culprit.MODEL, rank, "w")
    assert found.since == (None if newest == 6 else newest + 1)
    assert ("or later" in found.why) == (newest < 6)


def test_of_what_nobody_holds_a_snapshot_of_the_step_in_doubt_is_told() -> None:
    first = StepRun(Way.FIRST, (Sight(0, 0, (Sign.STATE,), 7, bad_moments=("m",)),))
    assert judge([first, clean(1)]).since is None


def digested(runs: Sequence[StepRun], noisy: Collection[tuple[int, int]] = ()) -> list[StepRun]:
    """As watched runs tell: what is wrong has other bits in each run, what is right always the
    same, but for `noisy`: a run's number and the role whose gradients came out otherwise in it."""
    told = [runs[0]]
    for number, one in enumerate(runs[1:], 1):
        seen = []
        for sight in one.seen:
            own = sight.gave_bad_at is not None or (number, sight.role) in noisy
            digest = f"{sight.role}" + (f" in run {number}" if own else "")
            seen.append(replace(sight, digest=digest))
        told.append(StepRun(one.way, tuple(seen)))
    return told


def ways_to_be_wrong(world: int, rank: int) -> list[list[StepRun]]:
    """Of which each has a culprit that is found by comparing runs."""
    return [
        [run(world, way, bad=[rank], origin=LAYER) for way in Way],
        [run(world, way, bad=[rank], roles=True, origin=LAYER) for way in Way],
        [run(world, bad=[rank]), run(world, Way.AGAIN, bad=[rank]), clean(world, Way.SWAPPED)],
        [run(world, bad=[rank]), *[run(world, Way.AGAIN, bad=[rank])] * 2, clean(world)],
    ]


@given(worlds, st.data())
def test_where_right_gradients_repeat_the_verdict_is_the_same_as_without_digests(
    world: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world - 1))
    for runs in [*ways_to_be_wrong(world, rank), [run(world, bad=[rank]), clean(world)]]:
        assert judge(digested(runs)) == judge(runs) and unrepeated(digested(runs)[1:]) is None


@given(worlds, st.data())
def test_where_right_gradients_do_not_repeat_nobody_is_accused(
    world: int, data: st.DataObject
) -> None:
    """Whichever run they came out otherwise in, and whoever was right twice or more."""
    rank = data.draw(st.integers(0, world - 1))
    runs = data.draw(st.sampled_from(ways_to_be_wrong(world, rank)))
    right = [
        {s.role for s in one.seen if s.gave_bad_at is None} if n else set[int]()
        for n, one in enumerate(runs)
    ]
    number = data.draw(st.integers(1, len(runs) - 1))
    elsewhere = set.union(*(roles for n, roles in enumerate(right) if n != number))
    shared = sorted(right[number] & elsewhere)
    if not shared:  # two ranks, one of them wrong in each place: nobody was right twice
        assert judge(digested(runs)) == judge(runs)
        return
    role = data.draw(st.sampled_from(shared))
    found = judge(digested(runs, [(number, role)]))
    assert (found.culprit, judge(runs).culprit is Culprit.UNKNOWN) == (Culprit.UNKNOWN, False)
    assert "does not repeat bit for bit" in found.why and f"batch of rank {role}," in found.why
    assert judge(runs).why in found.why and found.comes_again == judge(runs).comes_again


@given(worlds, st.data(), st.sampled_from(["bad_weights", "bad_moments", "bad_batch"]))
def test_what_lay_in_memory_needs_no_bits_that_repeat(
    world: int, data: st.DataObject, name: str
) -> None:
    rank = data.draw(st.integers(0, world - 1))
    bad: dict[str, Any] = {name: ("x",)}
    for last in (clean(world), run(world, Way.AGAIN, bad=[rank], **bad)):
        runs = [run(world, bad=[rank], **bad), run(world, Way.AGAIN, bad=[rank], **bad), last]
        noisy = digested(runs, [(2, role) for role in range(world)])
        assert judge(noisy) == judge(runs)


@given(worlds, st.integers(1, 9), st.data())
def test_runs_of_different_steps_are_not_compared(
    world: int, further: int, data: st.DataObject
) -> None:
    """What was seen in one may turn out to have come from one before it."""
    later = clean(world)
    later = StepRun(
        later.way,
        tuple(replace(s, first_step=s.first_step + further, digest="other") for s in later.seen),
    )
    now = digested([clean(world), clean(world)])[1]
    assert unrepeated([later, now]) is None
    same_step = StepRun(later.way, tuple(replace(s, first_step=7) for s in later.seen))
    assert unrepeated([same_step, now]) == (same_step.seen[0], now.seen[0])


@given(worlds, st.data())
def test_what_had_no_place_in_its_type_is_told_beside_the_origin(
    world: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world - 1))
    narrow = RangeCount("model.3", "float16", 40, 3, 0)
    for runs in (
        [run(world, way, bad=[rank], origin=LAYER, narrow=narrow) for way in Way],
        [run(world, way, bad=range(world), origin=LAYER, narrow=narrow) for way in Way],
    ):
        without = [
            StepRun(one.way, tuple(replace(s, narrow=None) for s in one.seen)) for one in runs
        ]
        assert judge(runs) == replace(judge(without), why=f"{judge(without).why}; {narrow}")


@given(worlds, st.data())
def test_what_another_rank_had_no_place_for_is_not_told(world: int, data: st.DataObject) -> None:
    """Nor where nothing was wrong in a run: a layer may be full and right."""
    rank = data.draw(st.integers(0, world - 1))
    narrow = RangeCount("model.3", "float16", 40, 3, 0)
    runs = [
        StepRun(
            one.way, tuple(s if s.rank == rank else replace(s, narrow=narrow) for s in one.seen)
        )
        for one in [run(world, way, bad=[rank], origin=LAYER) for way in Way]
    ]
    assert "float16" not in judge(runs).why


def updated_wrong(world: int, rank: int, way: Way = Way.FIRST) -> StepRun:
    found = run(world, way, bad=[rank], bad_update=("model.3.weight",), gave=1.0, gave_bad_at=None)
    return StepRun(
        way,
        tuple(replace(s, signs=(Sign.UPDATE,) if s.rank == rank else ()) for s in found.seen),
    )


@given(worlds, st.data())
def test_an_update_that_its_gradients_do_not_give_again(world: int, data: st.DataObject) -> None:
    """Once: that rank's device or memory. Each time: nobody can tell, and it counts."""
    rank = data.draw(st.integers(0, world - 1))
    found = judge([updated_wrong(world, rank), clean(world)])
    assert (found.culprit, found.rank, found.where) == (Culprit.HARDWARE, rank, "model.3.weight")
    assert not found.comes_again and "snapshot before it" in found.why
    runs = [updated_wrong(world, rank), updated_wrong(world, rank, Way.AGAIN)]
    assert judge(runs).culprit is Culprit.UNKNOWN
    held = tuple(replace(s, holds=(Stamp(6, 1),)) for s in runs[0].seen)
    assert isinstance(next_act(7, [StepRun(Way.FIRST, held)], Rules()), RunIt)
    for rules in (Rules(), Rules(may_skip=False), Rules(only_undoes=True)):
        assert isinstance(next_act(7, runs, rules), CountIt)


@given(worlds, st.data())
def test_where_replicas_had_differed_before_neither_batch_nor_code_is_at_fault(
    world: int, data: st.DataObject
) -> None:
    """A bit that flips in one rank's weights makes wrong numbers whenever its state is run."""
    rank = data.draw(st.integers(0, world - 1))

    def told_of_it(first: StepRun) -> StepRun:
        return replace(first, seen=tuple(replace(s, differs_since=6) for s in first.seen))

    for runs in (
        [run(world, bad=[rank]), run(world, Way.AGAIN, bad=[rank])],
        [
            run(world, bad=[rank]),
            run(world, Way.AGAIN, bad=[rank]),
            run(world, Way.SWAPPED, bad=[rank], roles=True),
        ],
    ):
        before = judge(runs)
        found = judge([told_of_it(runs[0]), *runs[1:]])
        assert before.culprit is not Culprit.MODEL and found.culprit is Culprit.MODEL
        assert found.comes_again == before.comes_again and "since step 6" in found.why
    stays = [run(world, Way.SWAPPED, bad=[rank])]
    found = judge([told_of_it(run(world, bad=[rank])), run(world, Way.AGAIN, bad=[rank]), *stays])
    assert found.culprit is Culprit.HARDWARE, "a device that stays wrong is at fault all the same"
    rules = Rules(may_skip=True, can_skip=True, can_swap=False, only_undoes=True)
    act = next_act(7, [told_of_it(runs[0]), *runs[1:]], rules)
    assert not isinstance(act, SkipIt), "no healthy batch is left out for it"
