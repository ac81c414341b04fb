"""Doubt: ranks that see wrong numbers do the same, each on a thread of its own, and end in the
state of a training in which nothing was wrong."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from keepstep.core.numbers.halt import Halts
from keepstep.core.numbers.inquiry import COOLING_RUNS, SKIPS
from keepstep.core.numbers.told_sight import from_text, to_text
from keepstep.errors import CorruptionError, DamageError, DeviceError, WrongNumbersError
from keepstep.model.messages.keeper_rank import HaltOrder, HaltWord
from keepstep.model.numbers import BatchPlace, Device, NotFinite, Sight, Sign
from keepstep.model.snapshot import Stamp
from keepstep.runtime.rank.calibration import STEPS_BEFORE
from keepstep.runtime.rank.doubt import Doubt, Policy
from keepstep.runtime.rank.halting import Halting
from keepstep.runtime.rank.numbers_journal import NumbersJournal, OwnDevice
from tests.runtime.fakes import FakeJournal

STEPS = 12
BAD = -1  # in a state: an update that was not finite
PATIENCE_S = 20.0
STANDS_WITHIN_S = 5.0


class Alone(Exception):
    """The others have left."""


class Together:
    """What all ranks do together."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._changed = threading.Condition()
        self._rounds: list[dict[int, Any]] = []
        self._turns = [0] * world
        self._have_left = False

    def gather(self, rank: int, mine: Any) -> list[Any]:
        number = self._turns[rank]
        self._turns[rank] += 1
        with self._changed:
            if len(self._rounds) <= number:
                self._rounds.append({})
            given = self._rounds[number]
            given[rank] = mine
            self._changed.notify_all()
            is_there = self._changed.wait_for(
                lambda: len(given) == self.world or self._have_left, PATIENCE_S
            )
        if len(given) < self.world:
            raise Alone if is_there else AssertionError("ranks wait for each other")
        return [given[r] for r in range(self.world)]

    def leave(self) -> None:
        with self._changed:
            self._have_left = True
            self._changed.notify_all()


class Keepers:
    """All of them: what a rank says they decide about at once, and all ranks hear of it."""

    def __init__(self, world: int) -> None:
        self.halts = Halts()
        self.changed = threading.Condition(threading.RLock())
        self.machines: list[Machine] = []
        self.words: list[HaltWord] = []
        self._orders: deque[HaltOrder] = deque()
        self._is_telling = False

    def say_of_halt(self, word: HaltWord, is_kept: bool) -> None:
        """As the client of a rank's keeper has it."""
        self.words.append(word)
        self.tell(self.halts.hear(word))

    def forget_halt(self) -> None:
        """None of them dies."""

    def tell(self, orders: Sequence[HaltOrder]) -> None:
        with self.changed:
            self._orders.extend(orders)
            if self._is_telling:
                return
            self._is_telling = True
            while self._orders:
                order = self._orders.popleft()
                for machine in self.machines:
                    machine.halting.ordered(order, machine.step)
            self._is_telling = False
            self.changed.notify_all()


@dataclass
class Machine:
    """A device and its rank's state: `state` is what the batches trained on made of it. `errs`: of
    a step, how many of its runs on this device are wrong. `bad`: batches that are. `spoils`: an
    update with a wrong gradient, which nobody has looked at, becomes state. `period`: in so many
    steps one is captured, into so many `slots`."""

    rank: int
    together: Together
    keepers: Keepers
    errs: dict[int, int] = field(default_factory=dict)
    summed_wrong: set[int] = field(default_factory=set)  # steps whose sum comes wrong to it, once
    bad: set[int] = field(default_factory=set)
    takes_batches: bool = True
    state: list[int] = field(default_factory=list)
    snapshots: list[tuple[int, list[int], int]] = field(default_factory=list)
    step: int = -1
    resumed_at: int = -1
    not_finite: tuple[int, NotFinite] | None = None
    spoils: bool = False
    period: int = 1
    slots: int = 3
    is_looking: bool = False
    saw_wrong: bool = False
    forgiven: list[int] = field(default_factory=list)
    learnt: int = 0
    infinite_from: int | None = None  # a gate that the program closes in that step
    has_lost_peer: bool = False
    differs_since: int | None = None
    regroups: int = 0
    error: DamageError | None = None
    place: int = 0  # of the next batch
    skipped: set[int] = field(default_factory=set)
    taken: int = -1
    given: int | None = None
    role: int | None = None  # whose place it takes
    peers: list[Machine] = field(default_factory=list)
    watched: list[int] = field(default_factory=list)
    is_wrong: bool = False
    draws: int = 0
    bad_snapshots: set[int] = field(default_factory=set)
    can_agree: bool = True
    doubted: int | None = None
    epoch: int = 0
    withholds: bool = True  # updates with wrong gradients, of those that it looks at
    updates_wrong: dict[int, int] = field(
        default_factory=dict
    )  # as `errs`, though gradients are right
    nan_from: int | None = None  # what the program puts there in that step
    puts_right_in: int | None = None  # the program replaces a bad state by itself
    noise: float | None = None  # by which a gradient differs in each run; None: has no digest
    is_apart: bool = False  # it shares nothing with its peers, not even their number of steps

    def __post_init__(self) -> None:
        self.halting = Halting(self.keepers, self.rank, self.together.world)  # type: ignore[arg-type]
        self.halting.train(self.epoch)

    # -- the rank

    @property
    def halts_at(self) -> int | None:
        return self.halting.at

    def ask_to_halt(self, step: int) -> None:
        with self.keepers.changed:
            self.halting.ask(step)

    def meet(self, step: int, turn: int, mine: Sight) -> tuple[Sight, ...] | str:
        if self.together.world == 1:
            return (mine,)
        changed, halting = self.keepers.changed, self.halting
        with changed:
            halting.stand(step, turn, to_text(mine))
            if not changed.wait_for(lambda: halting.is_decided, STANDS_WITHIN_S):
                halting.leave()
                assert changed.wait_for(lambda: halting.is_decided, PATIENCE_S)
            halting.go_on()
        if halting.found is None:
            return halting.why_void
        return tuple(map(from_text, halting.found))

    def doubt(self, step: int | None) -> None:
        self.doubted = step

    @property
    def holds(self) -> tuple[Stamp, ...]:
        return tuple(Stamp(step, 0) for step, _, _ in self.snapshots)

    def take_back(self, first: int) -> None:
        self.snapshots = [s for s in self.snapshots if s[0] < first]
        held = self.together.gather(self.rank, {s[0] for s in self.snapshots})
        common = set.intersection(*held)
        assert common, "nothing is left to go back to"
        self.snapshots = [s for s in self.snapshots if s[0] <= max(common)]
        step, state, self.place = self.snapshots[-1]
        self.state, self.step, self.resumed_at = list(state), step, step
        self.not_finite, self.role, self.given, self.doubted = None, None, None, None
        self.epoch += 1
        with self.keepers.changed:
            self.halting.train(self.epoch)
        self.together.gather(self.rank, None)  # who hears more knows that all train

    def settle(self) -> None:
        """Nothing is under way."""

    def forgive(self) -> None:
        self.forgiven.append(self.step + 1)
        self.not_finite = self.doubted = None

    def capture(self, step: int) -> None:
        """Behind a step that counts."""
        if step % self.period:
            return
        bad = self.bad_state()
        if bad and step not in self.bad_snapshots and self.doubted is None:
            self.not_finite = self.not_finite or (step, bad)
        # What not all have sealed takes nobody's slot from what all have.
        is_held = self.not_finite is not None or self.doubted is not None
        if is_held if self.is_apart else any(self.together.gather(self.rank, is_held)):
            return
        self.snapshots.append((step, list(self.state), self.place))
        del self.snapshots[: -self.slots]

    def stand_in(self, role: int) -> None:
        if self.error is not None:
            raise self.error
        self.role, self.given = role, None  # loaders are where that state has them

    # -- its numbers

    def begin(self, is_watched: bool) -> None:
        self.is_wrong, self.is_looking = False, True
        if is_watched:
            self.watched.append(self.step + 1)

    def run(self) -> None:
        """The body."""
        step = self.step + 1
        if self.given is None:
            while self.place in self.skipped:
                self.place += 1
            self.taken, self.place = self.place, self.place + 1
        batch = self.taken if self.given is None else self.given
        is_bad_batch = batch in (self.bad if self.role is None else self.peers[self.role].bad)
        self.is_wrong = is_bad_batch or self.errs.get(step, 0) > 0 or BAD in self.state
        if self.errs.get(step, 0) > 0:
            self.errs[step] -= 1
        # what is summed is wrong for all
        self.saw_wrong = self.is_wrong
        if not self.is_apart:
            self.saw_wrong = any(self.together.gather(self.rank, self.is_wrong))
        if step in self.summed_wrong:
            self.summed_wrong.discard(step)
            self.saw_wrong = True
        becomes_state = not self.withholds or (self.spoils and not self.is_looking)
        is_spoilt = self.saw_wrong and becomes_state
        if self.updates_wrong.get(step, 0) > 0:
            self.updates_wrong[step] -= 1
            is_spoilt = True
        if step == self.puts_right_in:
            self.state = list(range(step))
            is_spoilt = self.saw_wrong = False
        self.state.append(BAD if is_spoilt else batch)

    def end(self, loss: object) -> tuple[Sign, ...]:
        return (Sign.GRADIENT,) if self.saw_wrong else ()

    def accept(self) -> None:
        """Nobody asks how great it was."""

    def learn(self) -> None:
        self.learnt += 1

    def sight(self, bad_in_snapshot: Sequence[str], has_spread: bool) -> Sight:
        at = 0 if self.is_wrong else None
        taken = int(self.takes_batches and self.given is None)
        moments = tuple(bad_in_snapshot)
        gradients = ("weight",) if self.saw_wrong else ()
        digest, sketch = "", ()
        if self.noise is not None:
            self.draws += 1
            value = 1.0 + self.noise * (1 + self.rank + self.draws % 3) / 100
            digest, sketch = f"{value!r}", (value, -value)
        return Sight(
            *(0, 0),
            gave=1.0,
            digest=digest,
            sketch=sketch,
            gave_bad_at=at,
            batches=taken,
            bad_moments=moments,
            bad_gradients=gradients,
        )

    def bad_state(self) -> NotFinite:
        if BAD in self.state:
            return NotFinite(("weight",))
        if self.step in self.bad_snapshots and self.state[-1:] == [self.step]:
            return NotFinite(("exp_avg of a",))
        nan = self.nan_from
        if nan is not None and len(self.state) > nan and not self.learnt:
            return NotFinite(("marks",))
        gate = self.infinite_from
        if gate is not None and len(self.state) > gate and not self.learnt:
            return NotFinite(("gate",), may_be_meant=True)
        return NotFinite()

    def hand_over_batches(self, role: int) -> None:
        self.given = self.together.gather(self.rank, self.taken)[role]

    def places(self) -> tuple[BatchPlace, ...]:
        return (BatchPlace("0", 0, self.taken),)

    def skip(self, places: Sequence[BatchPlace]) -> None:
        self.skipped |= {place.number for place in places}

    def drop(self) -> None:
        self.is_looking = False


class Ranks:
    """A training of so many ranks."""

    def __init__(
        self,
        world: int = 2,
        *,
        may_skip: bool = True,
        can_swap: bool = True,
        entered: bool = True,
        every: int = 1,
        **policy: bool,
    ) -> None:
        together = Together(world)
        self.entered = entered
        self.keepers = keepers = Keepers(world)
        self.machines = [Machine(rank, together, keepers) for rank in range(world)]
        keepers.machines = self.machines
        self.journals = [FakeJournal() for _ in range(world)]
        self.pauses: list[int] = []
        self.errors: list[BaseException | None] = [None] * world
        for machine in self.machines:
            machine.peers = self.machines
        self.doubts = [
            Doubt(
                machine,
                machine,
                journal,
                machine.rank,
                world,
                Policy(may_skip=may_skip, can_swap=can_swap, look_every_steps=every, **policy),
                self.pauses.append,
            )
            for machine, journal in zip(self.machines, self.journals, strict=True)
        ]

    def train(self, *steps: int) -> Ranks:
        """So many each."""
        each = steps or (STEPS,)
        threads = [
            threading.Thread(target=self._train, args=(rank, each[rank % len(each)]))
            for rank in range(len(self.machines))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE_S)
            assert not thread.is_alive(), "ranks wait for each other"
        assert not any(isinstance(error, AssertionError) for error in self.errors), self.errors
        return self

    def _train(self, rank: int, steps: int) -> None:
        machine, doubt = self.machines[rank], self.doubts[rank]
        try:
            while machine.step + 1 < steps:
                step = machine.step + 1
                if not doubt.prepare(step):
                    continue
                handed = machine.given
                machine.halting.step_begins()
                doubt.begin(step)
                machine.run()
                if doubt.counts(step, None, self.entered, step == steps - 1):
                    assert machine.role is None and handed is None, "another's state counts"
                    with self.keepers.changed:
                        machine.step = step
                        machine.halting.counts(step)
                        self.keepers.changed.notify_all()
                    machine.capture(step)
            with self.keepers.changed:
                machine.halting.loop_over()
        except (WrongNumbersError, CorruptionError, Alone, AssertionError) as error:
            self.errors[rank] = error
            with self.keepers.changed:
                self.keepers.tell(self.keepers.halts.gone(rank))
            machine.together.leave()

    @property
    def states(self) -> list[list[int]]:
        return [machine.state for machine in self.machines]

    def verdicts(self) -> list[tuple[str, str, int | None]]:
        return [
            (e.data["culprit"], e.data["lasting"], e.data["rank"])
            for e in self.journals[0].of("numbers-judged")
        ]


UNDISTURBED = [list(range(STEPS))] * 2


def test_nothing_is_done_where_nothing_is_wrong() -> None:
    ranks = Ranks().train()
    assert ranks.states == UNDISTURBED
    assert all(journal.events == [] for journal in ranks.journals)


@pytest.mark.parametrize("errs", [1, 2, 7, COOLING_RUNS])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_device_that_errs_for_some_runs_leaves_no_trace(rank: int, errs: int) -> None:
    ranks = Ranks()
    ranks.machines[rank].errs = {5: errs}
    ranks.train()
    assert ranks.states == UNDISTURBED
    assert ranks.verdicts() == [("hardware", "transient", rank)]
    assert [len(j.of("soft-error")) for j in ranks.journals] == [int(r == rank) for r in (0, 1)]
    assert bool(ranks.pauses) == (errs > 1)


@pytest.mark.parametrize("only_undoes", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_saw_when_the_others_were_past_it_is_not_forgotten(
    rank: int, only_undoes: bool
) -> None:
    """A sum came wrong to it alone: nobody else stands behind that step any more."""
    ranks = Ranks(only_undoes=only_undoes)
    for machine in ranks.machines:
        machine.withholds = not only_undoes
    alone, other = ranks.machines[rank], ranks.machines[1 - rank]
    alone.summed_wrong = {5}
    end = alone.end

    def ends_last(loss: object) -> tuple[Sign, ...]:
        if alone.step + 1 == 5:
            with ranks.keepers.changed:
                ranks.keepers.changed.wait_for(lambda: other.step == 5 or alone.epoch, PATIENCE_S)
        return end(loss)

    alone.end = ends_last  # type: ignore[method-assign]
    ranks.train()
    assert ranks.states == UNDISTURBED and ranks.errors == [None, None]
    assert any(word.says == "leaves" and word.step == 5 for word in ranks.keepers.words)
    assert ranks.verdicts() == [("hardware", "transient", rank)]


def test_a_device_that_errs_for_ever_ends_its_process_alone() -> None:
    ranks = Ranks()
    ranks.machines[1].errs = {5: 10**6}
    ranks.train()
    assert isinstance(ranks.errors[1], DeviceError)
    assert not isinstance(ranks.errors[0], WrongNumbersError)
    assert ranks.verdicts() == [("hardware", "permanent", 1)]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bad_batch_is_left_out_by_all(rank: int) -> None:
    ranks = Ranks()
    ranks.machines[rank].bad = {5}
    ranks.train()
    assert ranks.states == [[n for n in range(STEPS + 1) if n != 5]] * 2
    assert ranks.verdicts() == [("data", "", rank)]
    assert all(len(journal.of("batch-skipped")) == 1 for journal in ranks.journals)


def test_in_each_others_places_each_has_the_others_batch() -> None:
    """Each rank reads rows of its own."""
    ranks = Ranks()
    ranks.machines[1].place = 100
    ranks.machines[1].bad = {105}
    ranks.train()
    assert ranks.verdicts() == [("data", "", 1)]
    left = [n for n in range(STEPS + 1) if n != 5]
    assert ranks.states == [left, [100 + n for n in left]]


def test_too_many_bad_batches_stop() -> None:
    ranks = Ranks()
    ranks.machines[0].bad = {3, 5, 7, 9}
    ranks.train()
    assert all(isinstance(error, WrongNumbersError) for error in ranks.errors)
    assert len(ranks.journals[0].of("batch-skipped")) == SKIPS


@pytest.mark.parametrize("way", ["policy", "no loader"])
def test_what_comes_again_and_cannot_be_left_out_stops(way: str) -> None:
    ranks = Ranks(may_skip=way != "policy")
    ranks.machines[0].bad = {5}
    for machine in ranks.machines:
        machine.takes_batches = way != "no loader"
    ranks.train()
    assert all(isinstance(error, WrongNumbersError) for error in ranks.errors)
    assert all(5 not in machine.snapshots[-1][1] for machine in ranks.machines)


def test_where_a_neighbours_snapshot_cannot_be_loaded_nobody_guesses() -> None:
    ranks = Ranks()
    ranks.machines[1].errs = {5: 3}
    ranks.machines[0].error = DamageError("the slot does not prove")
    ranks.train()
    [(culprit, _, rank)] = ranks.verdicts()
    assert (culprit, rank) == ("unknown", 1)
    assert "5" in str(ranks.journals[0].of("batch-skipped")[0].why)


def test_a_state_that_is_not_finite_takes_its_step_back_too() -> None:
    """Seen in the background, a step later."""
    ranks = Ranks()
    machine = ranks.machines[1]
    begin = machine.begin

    def planted(is_watched: bool) -> None:
        begin(is_watched)
        if machine.step + 1 == 6 and not ranks.journals[0].events:
            machine.not_finite = (5, NotFinite(("exp_avg of a",)))

    machine.begin = planted  # type: ignore[method-assign]
    ranks.train()
    assert ranks.states == UNDISTURBED
    assert ranks.verdicts() == [("model", "", 1)]
    assert machine.watched == [5]


@pytest.mark.parametrize("every", [2, 5, 8])
def test_what_nobody_looked_at_is_found_in_the_snapshot_and_taken_back(every: int) -> None:
    """A wrong gradient has become state: on all ranks, in the same step."""
    ranks = Ranks(every=every)

    def planted(machine: Machine) -> None:
        body = machine.run

        def run() -> None:
            body()
            step = machine.step + 1
            if step == 3 and not ranks.journals[0].events:
                machine.not_finite = (3, NotFinite(("weight",)))

        machine.run = run  # type: ignore[method-assign]

    for machine in ranks.machines:
        planted(machine)
    ranks.train()
    assert ranks.states == UNDISTURBED
    assert ranks.verdicts() == [("unknown", "", None)]
    assert ranks.machines[0].watched == [3]


def test_a_snapshot_that_was_bad_before_anybody_saw_it_is_gone_behind() -> None:
    ranks = Ranks()
    ranks.machines[1].errs = {5: 1}
    ranks.machines[0].bad_snapshots = {4}  # as it was captured, and restored
    ranks.train()
    assert ranks.states == UNDISTURBED
    [condemned] = ranks.journals[0].of("condemned")
    assert condemned.data["step"] == 4
    assert ranks.machines[1].watched == [4], "the step before it is run again"


def test_who_met_peers_anew_forgets_its_trial() -> None:
    """A newcomer among them knows nothing of it."""
    ranks = Ranks()
    ranks.machines[1].errs = {5: 1}
    for machine in ranks.machines:
        take_back = machine.take_back

        def met(first: int, m: Machine = machine, back: Callable[[int], None] = take_back) -> None:
            back(first)
            m.regroups = 1

        machine.take_back = met  # type: ignore[method-assign]
    ranks.train()
    assert ranks.states == UNDISTURBED
    assert ranks.verdicts() == [] and ranks.machines[0].watched == []


def test_a_body_that_is_not_keepsteps_counts_without_its_update() -> None:
    ranks = Ranks(entered=False)
    ranks.machines[1].errs = {5: 1}
    ranks.train()
    [event] = ranks.journals[0].of("wrong-numbers")
    assert "left out" in event.why and ranks.journals[0].of("run-again") == []


def test_a_body_that_is_not_keepsteps_and_has_updated_on_some_ranks_ends() -> None:
    ranks = Ranks(entered=False)
    end = ranks.machines[0].end

    def sees_nothing(loss: object) -> tuple[Sign, ...]:
        end(loss)
        return ()

    ranks.machines[0].end = sees_nothing  # type: ignore[method-assign]
    ranks.machines[1].errs = {5: 1}
    ranks.train()
    assert isinstance(ranks.errors[1], CorruptionError), "a restart undoes it"


@settings(max_examples=60, deadline=None)
@given(
    every=st.integers(1, 9),
    period=st.integers(1, 4),
    slots=st.integers(2, 3),
    step=st.integers(5, 19),
    runs=st.sampled_from([1, 2, 6, None]),
    rank=st.integers(0, 1),
)
def test_what_nobody_looked_at_costs_no_good_snapshot(
    every: int, period: int, slots: int, step: int, runs: int | None, rank: int
) -> None:
    """The bad step was not looked at, and perhaps not captured. `runs`: None for a batch that is
    bad, else those in which the device errs: more than one only where ranks can change places,
    which takes a snapshot of the step before."""
    assume(period == 1 or runs in (None, 1))
    ranks = Ranks(every=every)
    for machine in ranks.machines:
        machine.spoils, machine.period, machine.slots = True, period, slots
    if runs is None:
        ranks.machines[rank].bad = {step}
    else:
        ranks.machines[rank].errs = {step: runs}
    ranks.train(24)
    assert ranks.errors == [None, None]
    trained = [n for n in range(25) if n != step] if runs is None else list(range(24))
    assert ranks.states == [trained] * 2
    for journal in ranks.journals:
        assert journal.of("condemned") == [], "all that was restored is good"
        assert len(journal.of("batch-skipped")) == (runs is None)
    [verdict] = ranks.verdicts()
    if period == 1 and runs is None:
        assert verdict == ("data", "", rank)
    elif period == 1 and runs != 1:
        assert verdict == ("hardware", "transient", rank)


def test_a_step_that_comes_again_is_found_behind_the_snapshot_and_not_before() -> None:
    """Step 9 is bad and not captured, 10 is the first that is known to be bad; 8 is good."""
    ranks = Ranks(every=8)
    for machine in ranks.machines:
        machine.spoils, machine.period, machine.slots = True, 2, 2
    ranks.machines[0].bad = {9}
    ranks.train(20)
    assert ranks.machines[0].watched == [9, 9, 9][: len(ranks.machines[0].watched)]
    assert ranks.verdicts() == [("data", "", 0)]


def test_where_the_last_snapshot_is_bad_nobody_starts_afresh() -> None:
    ranks = Ranks()
    ranks.machines[1].errs = {5: 1}
    ranks.machines[0].bad_snapshots = {4}
    for machine in ranks.machines:
        machine.slots = 1
    ranks.train()
    assert all(isinstance(error, WrongNumbersError) for error in ranks.errors)
    assert all(machine.snapshots[-1][0] == 4 for machine in ranks.machines), "it is kept"


@pytest.mark.parametrize("every", [1, 4])
def test_with_one_slot_the_update_is_left_out_and_told(every: int) -> None:
    ranks = Ranks(every=every, can_go_back=False)
    ranks.machines[1].errs = {8: 1}
    ranks.train()
    assert ranks.states == UNDISTURBED and ranks.errors == [None, None]
    [event] = ranks.journals[0].of("wrong-numbers")
    assert "left out" in event.why and "one slot" in event.why
    assert ranks.journals[0].of("run-again") == []


def test_before_the_first_snapshot_the_update_is_left_out_and_told() -> None:
    ranks = Ranks()
    ranks.machines[1].errs = {0: 1}
    ranks.train()
    assert ranks.states == UNDISTURBED and ranks.errors == [None, None]
    [event] = ranks.journals[0].of("wrong-numbers")
    assert "left out" in event.why and "no snapshot" in event.why


@pytest.mark.parametrize("step", [3, 11])
@pytest.mark.parametrize("every", [1, 5])
def test_infinities_that_do_no_harm_are_meant(every: int, step: int) -> None:
    """A gate that is closed on one rank: no alarm, nothing is taken back."""
    ranks = Ranks(every=every)
    ranks.machines[1].infinite_from = step
    ranks.train()
    assert ranks.states == UNDISTURBED
    assert [machine.learnt for machine in ranks.machines] == [1, 1]
    assert [len(journal.of("meant")) for journal in ranks.journals] == [0, 1]
    assert {event.kind for journal in ranks.journals for event in journal.events} == {"meant"}


def test_infinities_that_do_harm_are_taken_back() -> None:
    ranks = Ranks(every=4)
    for machine in ranks.machines:
        machine.spoils = True
    machine = ranks.machines[1]
    machine.infinite_from = 5
    machine.errs = {8: 1}  # what they made of a gradient
    ranks.train()
    assert ranks.verdicts() and not ranks.journals[0].of("meant")
    assert {machine.resumed_at for machine in ranks.machines} == {4}


def test_what_was_gathered_while_a_peer_was_lost_is_not_judged() -> None:
    ranks = Ranks()
    for machine in ranks.machines:
        meet = machine.meet

        def lost(
            step: int, turn: int, mine: Sight, m: Machine = machine, meet: Any = meet
        ) -> tuple[Sight, ...]:
            found: tuple[Sight, ...] = meet(step, turn, replace(mine, rank=0))
            m.has_lost_peer = True
            return found[:1]

        machine.meet = lost  # type: ignore[method-assign]
    ranks.machines[1].errs = {5: 1}
    ranks.train()
    assert all(journal.events == [] for journal in ranks.journals)


class Fleet:
    """A job on hosts of two ranks each. Each host has a journal, and so has its next life."""

    def __init__(self, *hosts: str) -> None:
        self.journals = {host: FakeJournal() for host in hosts}

    def train(self, *hosts: str, errs: dict[int, list[int]], steps: int = 40) -> list[FakeJournal]:
        """One launch, with rank 2k on the k-th of these hosts. `errs`: steps in which that rank's
        device errs. What the hosts' journals have been told in it."""
        for host in hosts:
            self.journals.setdefault(host, FakeJournal())
        before = {host: len(self.journals[host].events) for host in hosts}
        ranks = Ranks(2 * len(hosts))
        for rank, doubt in enumerate(ranks.doubts):
            journal = self.journals[hosts[rank // 2]]
            past = list(journal.events)  # of before this launch
            own = OwnDevice(Device(hosts[rank // 2], rank % 2), rank % 2 == 0, lambda p=past: p)
            doubt._told = NumbersJournal(journal, rank, own)
            doubt._device = own.device
            ranks.machines[rank].errs = dict.fromkeys(errs.get(rank, []), 1)
        ranks.train(steps)
        told = [FakeJournal() for _ in hosts]
        for host, journal in zip(hosts, told, strict=True):
            journal.events = self.journals[host].events[before[host] :]
        return told


def test_a_restart_does_not_forget_what_a_device_has_done() -> None:
    fleet = Fleet()
    for launch in range(6):
        told = fleet.train("a", "b", errs={2: [5 + 5 * launch]})
        assert [len(journal.of("soft-error")) for journal in told] == [1, 1], "both hosts know"
        assert told[0].of("device-ageing") == []
        assert bool(told[1].of("device-ageing")) == (launch == 5), "as in one launch: six errors"
    [event] = told[1].of("device-ageing")
    assert event.why.startswith("device 0 of b ")


def test_another_host_in_a_ranks_place_starts_with_nothing() -> None:
    fleet = Fleet()
    for launch in range(7):
        told = fleet.train("a", f"b{launch}", errs={2: [5 + 5 * launch]})
        assert all(journal.of("device-ageing") == [] for journal in told)


def test_hosts_that_change_places_keep_their_own_errors() -> None:
    fleet = Fleet()
    for launch in range(2):
        fleet.train("a", "b", errs={2: [5 + 5 * launch]})
    told = fleet.train("b", "a", errs={0: [17], 2: [23]})  # b errs once more, and a for once
    assert [len(journal.of("soft-error")) for journal in told] == [2, 2]
    names = [event.data["device"] for event in fleet.journals["a"].of("soft-error")]
    assert names == ["device 0 of b"] * 3 + ["device 0 of a"]
    assert [e.data["host"] for e in fleet.journals["a"].of("soft-error")] == ["b"] * 3 + ["a"]
    assert told[1].of("device-ageing") == []


def test_what_an_older_version_wrote_names_no_device_and_counts_for_none() -> None:
    fleet = Fleet("a")
    for step in range(9):
        fleet.journals["a"].record("soft-error", "as it was", step=step, rank=0, runs=2)
    told = fleet.train("a", "b", errs={0: [5]})
    assert told[0].of("device-ageing") == []


def test_an_ageing_device_is_told() -> None:
    ranks = Ranks(4)
    ranks.machines[2].errs = dict.fromkeys(range(2, 22, 2), 1)
    ranks.train(30)
    assert [len(j.of("device-ageing")) for j in ranks.journals] == [0, 0, 1, 0]
    assert len(ranks.journals[2].of("soft-error")) == 10
    [told] = ranks.journals[2].of("device-ageing")
    assert " 6 times in" in told.why and "of 6 times on 4 devices" in told.why


# -- where nobody is to be stopped, and every update is made


def undoing(every: int = 1, world: int = 2, entered: bool = True) -> Ranks:
    ranks = Ranks(world, every=every, only_undoes=True, entered=entered)
    for machine in ranks.machines:
        machine.withholds, machine.slots = False, 3
    return ranks


@pytest.mark.parametrize("every", [1, 3, 8])
@pytest.mark.parametrize("step", [4, 8, 13])
def test_what_a_device_did_once_is_undone_without_anybody_asking(every: int, step: int) -> None:
    ranks = undoing(every)
    ranks.machines[1].errs = {step: 1}
    ranks.train(24)
    assert ranks.states == [list(range(24))] * 2
    assert len(ranks.verdicts()) == 1
    assert ranks.machines[0].resumed_at == step - 1


def test_a_batch_is_left_out_without_anybody_asking() -> None:
    ranks = undoing(every=4)
    ranks.machines[0].bad = {9}
    ranks.train(24)
    assert ranks.states == [[n for n in range(25) if n != 9]] * 2
    assert ranks.verdicts() == [("data", "", 0)]


@pytest.mark.parametrize("way", ["no loader", "no body", "many", "first"])
def test_what_cannot_be_undone_stops_nobody_and_is_in_no_snapshot(way: str) -> None:
    ranks = undoing(entered=way != "no body")
    ranks.machines[0].bad = {3, 5, 7, 9} if way == "many" else {0 if way == "first" else 5}
    for machine in ranks.machines:
        machine.takes_batches = way != "no loader"
    ranks.train(20)
    assert ranks.errors == [None, None]
    for machine, journal in zip(ranks.machines, ranks.journals, strict=True):
        assert machine.step == 19
        assert not any(BAD in state for _, state, _ in machine.snapshots)
        assert "left as they are" in journal.of("wrong-numbers")[-1].why


@pytest.mark.parametrize("entered", [True, False])
def test_values_that_a_program_puts_there_are_its_own(entered: bool) -> None:
    """NaN in a parameter, and all gradients finite, once more when the step is run again."""
    ranks = undoing(every=4, entered=entered)
    ranks.machines[1].nan_from = 6
    ranks.train(20)
    assert ranks.errors == [None, None] and ranks.states == [list(range(20))] * 2
    assert [machine.learnt for machine in ranks.machines] == [1, 1]
    assert all(machine.snapshots[-1][0] == 19 for machine in ranks.machines), "it is protected"


@pytest.mark.parametrize("runs", [1, 2, 5, None])
@pytest.mark.parametrize("every", [1, 4])
def test_an_update_that_spoils_all_that_follows_is_meant_by_nobody(
    every: int, runs: int | None
) -> None:
    """The gradients of its own step are finite, those behind it are not. Healthy batches were left
    out, and no good snapshot was kept."""
    ranks = undoing(every=every)
    ranks.machines[1].updates_wrong = {6: 10**6 if runs is None else runs}
    ranks.train(20)
    assert ranks.errors == [None, None]
    assert not any(journal.of("meant") for journal in ranks.journals)
    assert not any(machine.skipped for machine in ranks.machines)
    if runs is None:
        assert {machine.snapshots[-1][0] for machine in ranks.machines} == {5}
    else:
        assert ranks.states == [list(range(20))] * 2


def test_a_state_that_its_program_replaces_is_taken_back_by_nobody() -> None:
    ranks = undoing(every=8)
    for machine in ranks.machines:
        machine.errs = {9: 1} if machine.rank else {}
        machine.puts_right_in = 11
    ranks.train(24)
    assert ranks.errors == [None, None] and ranks.states == [list(range(24))] * 2
    assert ranks.journals[0].of("run-again") == []
    assert all(machine.snapshots[-1][0] == 23 for machine in ranks.machines)


@pytest.mark.parametrize("only_undoes", [True, False])
@pytest.mark.parametrize("steps", [(6, 24), (24, 6), (24, 24)])
def test_ranks_that_share_nothing_train_to_their_ends(
    steps: tuple[int, int], only_undoes: bool
) -> None:
    """One of them is wrong for good: nobody waits for it without end, and none is hindered."""
    ranks = Ranks(every=4, only_undoes=only_undoes)
    for machine in ranks.machines:
        machine.is_apart, machine.withholds = True, not only_undoes
    ranks.machines[1].nan_from = 2
    ranks.machines[1].take_back = ranks.machines[0].take_back = (  # type: ignore[method-assign]
        lambda first: pytest.fail("not together")
    )
    meets = [machine.meet for machine in ranks.machines]
    if steps == (24, 24):  # they meet behind no step
        for machine, meet in zip(ranks.machines, meets, strict=True):
            machine.meet = (  # type: ignore[method-assign]
                lambda step, turn, mine, meet=meet: "one stands elsewhere"
            )
    ranks.train(*steps)
    assert ranks.machines[0].step == steps[0] - 1
    if only_undoes:
        assert ranks.machines[1].step == steps[1] - 1 and ranks.errors == [None, None]
    else:
        assert isinstance(ranks.errors[1], CorruptionError)


def test_what_one_rank_alone_has_withheld_is_taken_back_by_all() -> None:
    """The others are past the step by the time they hear of it."""
    ranks = Ranks()
    end = ranks.machines[0].end

    def sees_nothing_at_first(loss: object) -> tuple[Sign, ...]:
        signs = end(loss)
        return () if ranks.machines[0].step == 4 else signs

    ranks.machines[0].end = sees_nothing_at_first  # type: ignore[method-assign]
    meet = ranks.machines[1].meet

    def too_late(step: int, turn: int, mine: Sight) -> tuple[Sight, ...] | str:
        return "the others are past it" if step == 5 else meet(step, turn, mine)

    ranks.machines[1].meet = too_late  # type: ignore[method-assign]
    ranks.machines[1].errs = {5: 1}
    ranks.train()
    assert ranks.states == UNDISTURBED and ranks.errors == [None, None]
    assert {machine.resumed_at for machine in ranks.machines} == {4}


@pytest.mark.parametrize("way", ["nothing", "may be meant", "copy", "gradient"])
def test_who_stands_down_while_something_is_wrong_says_so(way: str) -> None:
    ranks = undoing(every=8)
    machine, doubt = ranks.machines[0], ranks.doubts[0]
    machine.step = 7
    doubt.begin(8)
    if way in ("copy", "may be meant"):
        machine.not_finite = (6, NotFinite(("weight",), may_be_meant=way == "may be meant"))
    if way == "gradient":
        machine.saw_wrong, machine.state = True, [BAD]
        machine.meet = lambda *_: "nobody comes"  # type: ignore[method-assign]
        assert doubt.counts(8, None, entered=False)
        doubt.begin(9)
    is_well = way in ("nothing", "may be meant")
    told = len(ranks.journals[0].of("wrong-numbers"))
    assert doubt.stand_down("partial sums") == is_well
    assert machine.doubted is None
    told_now = ranks.journals[0].of("wrong-numbers")[told:]
    assert [e.data["step"] for e in told_now] == ([] if is_well else [6 if way == "copy" else 8])
    if way == "may be meant":
        assert machine.not_finite is None, "it is captured again"


# -- an early step is run again on purpose

DUE = STEPS_BEFORE - 1  # all begin anew, behind step -1


def calibrated(runs: int, noise: float | None, **ranks: Any) -> Ranks:
    found = Ranks(calibration_runs=runs, **ranks)
    for machine in found.machines:
        machine.noise = noise
    return found


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("world", [1, 3])
def test_a_clean_step_is_run_again_at_the_start_and_what_that_says_is_told_once(
    world: int, every: int
) -> None:
    ranks = calibrated(3, 0.0, world=world, every=every).train()
    assert ranks.states == [list(range(STEPS))] * world
    assert all(machine.watched == [DUE] * 4 for machine in ranks.machines)
    assert [journal.kinds for journal in ranks.journals] == [["repeats"]] + [[]] * (world - 1)
    [told] = ranks.journals[0].of("repeats")
    assert "the same bits" in told.why and told.data["within"] == 0.0


def test_what_is_not_calibrated_runs_no_step_again() -> None:
    ranks = calibrated(0, 0.0).train()
    assert not any(machine.watched for machine in ranks.machines)


@pytest.mark.parametrize(
    ("runs", "noise", "culprit"),
    [(0, 1e-3, "unknown"), (2, 1e-3, "hardware"), (2, 10.0, "unknown"), (2, 0.0, "hardware")],
)
def test_runs_that_differ_as_clean_ones_do_leave_no_verdict_open(
    runs: int, noise: float, culprit: str
) -> None:
    """A device that is wrong for good, in a program whose steps do not repeat bit for bit."""
    ranks = calibrated(runs, noise)
    ranks.machines[1].errs = {7: 10**6}
    with_errors = run_to_the_end(ranks)
    assert {found for found, _, _ in with_errors.verdicts()} == {culprit}
    kinds = with_errors.journals[0].kinds
    assert kinds.count("not-repeatable") == (runs > 0 and noise > 0)


def run_to_the_end(ranks: Ranks) -> Ranks:
    """A rank whose device is wrong for good ends with an error of its own, and the others stop."""
    try:
        ranks.train()
    except AssertionError:
        if not any(isinstance(error, DeviceError) for error in ranks.errors):
            raise
    return ranks


def test_where_no_step_can_be_taken_back_that_is_told_and_none_is() -> None:
    ranks = calibrated(2, 0.0, entered=False).train()
    assert ranks.states == UNDISTURBED
    [told] = ranks.journals[0].of("repeats")
    assert "not known" in told.why


def test_a_step_that_is_wrong_is_no_clean_one(rank: int = 1) -> None:
    ranks = calibrated(2, 0.0)
    ranks.machines[rank].errs = {DUE: 1}
    ranks.train()
    assert ranks.states == UNDISTURBED
    assert ranks.verdicts() == [("hardware", "transient", rank)]
    assert "numbers are wrong" in ranks.journals[0].of("repeats")[0].why


def test_a_training_that_ends_there_has_its_last_step_once() -> None:
    ranks = calibrated(2, 0.0).train(DUE + 1)
    assert ranks.states == [list(range(DUE + 1))] * 2


def test_who_met_peers_anew_calibrates_with_them() -> None:
    ranks = calibrated(1, 0.0).train(6)
    for machine in ranks.machines:
        machine.regroups += 1
        machine.resumed_at = machine.step
    ranks.train(STEPS)
    assert ranks.states == UNDISTURBED
    assert len(ranks.journals[0].of("repeats")) == 2
