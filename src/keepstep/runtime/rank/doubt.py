"""Doubt: what a rank does about a step whose numbers are wrong.

    a rank sees something wrong -> it asks for a halt -> all stand behind one step, and tell what
    they see -> all decide alike
    -> the step is taken back and run again, or counts, or its batches are left out, or all stop

What is seen to be wrong behind a step may have been made in an earlier one that nobody looked at.
All go back to the newest snapshot of before it; every step from there on, up to the one that was
seen, is looked at as it is run again. The first that is wrong is the one in doubt; if none is, what
was wrong has not come again.

While nobody doubts anything the ranks tell each other nothing. A halt goes by way of the keepers
(core/numbers/halt.py): who never stands there is waited for a while, and then all go on.

Comes in: the beginnings and ends of bodies, on the trainer's thread. Goes out: whether a body
counts; steps that are taken back; the journal. `core/numbers/inquiry.py` decides.

Invariant: all ranks do the same, because all decide from the same evidence; what is in doubt is in
no snapshot that anybody resumes from; and a snapshot from which all resumed is condemned only for
what it holds itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from keepstep.core.numbers.halt import BEFORE, BEHIND, next_halt
from keepstep.core.numbers.inquiry import (
    SKIPS_WITHIN_STEPS,
    CountIt,
    Leave,
    LetBe,
    NoWayBack,
    Rules,
    RunIt,
    SkipIt,
    Stop,
    can_go_behind,
    next_act,
    told,
)
from keepstep.core.numbers.suspicion import Suspicion
from keepstep.errors import CorruptionError, DeviceError, KeepstepError, WrongNumbersError
from keepstep.model.numbers import (
    BatchPlace,
    Lasting,
    NotFinite,
    Sight,
    Sign,
    StepRun,
    StepVerdict,
    Way,
)
from keepstep.model.rhythm import NO_STEP
from keepstep.model.snapshot import Stamp
from keepstep.ports import Journal, StepNumbers
from keepstep.runtime.rank.calibration import Calibration
from keepstep.runtime.rank.numbers_journal import NumbersJournal, OwnDevice
from keepstep.runtime.rank.takes_back import TakesBack

MOST_VOID = 4  # halts that come to nothing, before nobody asks for one any more
UNHEARD_ASKS = 8  # for a halt, before this rank stands where it is
NOWHERE = OwnDevice()
ENOUGH_VOID = 2  # and before this rank decides by itself what the program means


@dataclass
class Trial:
    """A step in doubt, its runs so far, and how it is run next. `begins`: the first step behind
    what all have resumed from: those between are run again as well."""

    step: int
    begins: int = NO_STEP
    runs: list[StepRun] = field(default_factory=list)
    way: Way = Way.AGAIN
    can_swap: bool = True
    is_prepared: bool = False
    places: tuple[BatchPlace, ...] = ()  # of what this rank took in it


@dataclass(frozen=True, slots=True)
class Policy:
    """may_skip, skips_spikes, only_undoes: see `Rules`. can_swap: all ranks' snapshots are within
    reach. can_go_back: a snapshot of before a step stays while the next one is made. has_more: a
    state may come from elsewhere than the ranks' own memory. look_every_steps: in other steps only
    snapshots are looked at. calibration_runs: see `Calibration`."""

    may_skip: bool = True
    skips_spikes: bool = False
    only_undoes: bool = False
    can_swap: bool = False
    can_go_back: bool = True
    has_more: bool = False
    look_every_steps: int = 1
    calibration_runs: int = 0


class Doubt:
    """One rank's. Where all change places, each takes its neighbour's, around the ring."""

    def __init__(
        self,
        numbers: StepNumbers,
        rank: TakesBack,
        journal: Journal,
        number: int,
        world_size: int,
        policy: Policy,
        pause: Callable[[int], None],
        own: OwnDevice = NOWHERE,
    ) -> None:
        """number: this rank's. pause: waits for so many nanoseconds. own: what it computes on."""
        self._numbers, self._rank = numbers, rank
        self._told = NumbersJournal(journal, number, own)
        self._calibration = Calibration(self._told, policy.calibration_runs)
        self._device = own.device
        self._number, self._world_size = number, world_size
        self._policy = policy
        self._pause = pause
        self._suspicion: Suspicion | None = None
        self._trial: Trial | None = None
        self._has_given_up = False  # nothing can be done about wrong numbers any more
        self._regroups = rank.regroups
        self._skipped_at: list[int] = []

    # -- a body begins

    def prepare(self, step: int) -> bool:
        """Before that step begins: whether it may. Not when what it needs cannot be had here: then
        it was taken back once more."""
        if self._regroups != self._rank.regroups:
            self._regroups, self._trial, self._suspicion = self._rank.regroups, None, None
            self._calibration.start_anew()
        trial = self._trial
        if trial is None or trial.is_prepared:
            return True
        trial.is_prepared, trial.begins = True, step  # all see the same
        if trial.way is Way.SWAPPED and trial.step != step:
            trial.way, trial.can_swap = Way.AGAIN, False  # there is no snapshot of just before it
        if trial.way is not Way.SWAPPED:
            return self._is_sound(trial, step)
        return self._stand_in(trial, step)

    def _stand_in(self, trial: Trial, step: int) -> bool:
        """Whether every rank is in its neighbour's place now, with its batches."""
        why = ""
        try:
            self._rank.stand_in(self._role)
        except KeepstepError as error:
            why = str(error)
        mine = Sight(self._number, self._role, signs=(Sign.STATE,) if why else ())
        seen = self._rank.meet(step, BEFORE, mine)
        if not isinstance(seen, str) and not any(s.signs for s in seen):
            if not self._rank.has_lost_peer:
                # Now: whatever loads a state puts loaders back to their own place.
                self._numbers.hand_over_batches(self._role)
            return True
        others = "another rank cannot load its neighbour's snapshot"
        self._told.run_in_its_own_place(step, why or others)
        trial.way, trial.can_swap, trial.is_prepared = Way.AGAIN, False, False
        if isinstance(seen, str):
            self._give_up(step, seen)
        self._rank.take_back(step)
        return False

    def _is_sound(self, trial: Trial, step: int) -> bool:
        """Whether the state that all have resumed from is finite on all ranks. If not, it was
        captured before anybody saw that: all go back behind it.

        Raises WrongNumbersError where there is none.
        """
        bad, resumed, number = self._numbers.bad_state(), self._rank.resumed_at, self._number
        mine = Sight(number, number, signs=(Sign.STATE,) if bad else (), holds=self._holds)
        seen = self._rank.meet(step, BEFORE, mine)
        if self._rank.has_lost_peer:
            return True
        if isinstance(seen, str):
            self._give_up(step, seen)
            return True
        if not any(s.signs for s in seen) or resumed < 0:
            return True
        if bad:
            self._told.condemned(resumed, bad.names)
        if not (can_go_behind(resumed, seen) or self._policy.has_more):
            why = f"the state of step {resumed} holds what is not finite, and no older one is left"
            if self._policy.only_undoes:
                self._give_up(step, why)
                return True
            raise WrongNumbersError(
                f"{why} in memory. It is kept; start over with KEEPSTEP_FRESH=1 (keepstep run "
                "--fresh), or go on from it with KEEPSTEP_WRONG_NUMBERS=off"
            )
        trial.step, trial.runs, trial.is_prepared = resumed, trial.runs[:1], False
        trial.begins = NO_STEP
        self._rank.take_back(resumed)
        return False

    def begin(self, step: int) -> None:
        """Its body begins."""
        self._calibration.begins(self._rank.resumed_at)
        is_watched = self._is_tried(step) or self._calibration.is_due(step)
        if self._is_tried(step) or (self._is_looked_at(step) and not self._has_given_up):
            self._numbers.begin(is_watched)
        else:
            self._numbers.drop()

    def replay_erred(self, step: int, names: Sequence[str]) -> None:
        """What this rank made again in that step was wrong, and right when it was made once more:
        the state is as it should be."""
        self._told.replay_erred(step, names, self._device)

    @property
    def is_trying(self) -> bool:
        """Whether the body that has begun is a run of what is in doubt."""
        return self._trial is not None and self._trial.is_prepared

    def stand_down(self, why: str) -> bool:
        """Doubt nothing any more. Who stands somewhere hears at the end of this step that this rank
        does not. Whether nothing was wrong, but what may be meant: else what is not finite is to
        stay out of snapshots."""
        suspicion, bad = self._suspicion, self._rank.not_finite
        signs = suspicion is not None and suspicion.signs
        if not signs and (bad is None or bad[1].may_be_meant):
            self._clear()
            return True
        first = suspicion.first if suspicion is not None else NO_STEP if bad is None else bad[0]
        self._give_up(first, why)
        return False

    def _is_tried(self, step: int) -> bool:
        trial = self._trial
        return trial is not None and trial.is_prepared and trial.begins <= step <= trial.step

    def _is_looked_at(self, step: int) -> bool:
        """By all ranks, or by none."""
        return step % self._policy.look_every_steps == 0 or self._calibration.is_due(step)

    @property
    def _role(self) -> int:
        """Whose place this rank takes when all change places."""
        return (self._number + 1) % self._world_size

    @property
    def _holds(self) -> tuple[Stamp, ...]:
        """What this rank can go back to."""
        return self._rank.holds if self._policy.can_go_back else ()

    # -- a body is over

    def counts(self, step: int, loss: object, entered: bool, is_last: bool = False) -> bool:
        """Whether the body that is over may count. When not, the step is taken back. `entered`: by
        `with step:`, so that it can be. `is_last`: no step follows in which it could be seen what
        came of this one.

        Raises WrongNumbersError, DeviceError where it is this rank's hardware, and CorruptionError
        where only a restart can undo it.
        """
        is_tried = self._is_tried(step)
        if self._has_given_up:
            return True
        is_looked_at = is_tried or is_last or self._is_looked_at(step)
        signs = self._numbers.end(loss) if is_looked_at else ()
        if is_tried:
            return self._tried(step, signs, entered)
        suspicion = self._suspect(step, signs, is_last, entered)
        all_stand = self._rank.halts_at == step or self._calibration.is_due(step)
        if suspicion is None and not all_stand:
            if is_looked_at:
                self._numbers.accept()
            return True
        if suspicion is not None and not self._is_time(step, suspicion, is_last):
            return True
        return self._tell_each_other(step, signs, entered, is_last)

    def _suspect(
        self, step: int, signs: tuple[Sign, ...], is_last: bool, entered: bool
    ) -> Suspicion | None:
        bad, suspicion = self._rank.not_finite, self._suspicion
        if suspicion is None:
            if signs:  # the others may be past this step: what is seen now is not seen again
                suspicion = Suspicion(step, self._sight(step, signs, None, entered))
            elif bad is not None:
                suspicion = Suspicion(bad[0])
            elif is_last and self._numbers.bad_state():
                suspicion = Suspicion(step)
            else:
                return None
            self._suspicion = suspicion
            self._rank.doubt(suspicion.first)
        elif bad is not None:
            suspicion.first = min(suspicion.first, bad[0])
        return suspicion

    def _is_time(self, step: int, suspicion: Suspicion, is_last: bool) -> bool:
        """Whether all stand behind this step: what is wrong with a sum is seen by all in the same
        step. Else one is asked for that is looked at, and that nobody is likely to be past."""
        if is_last or (suspicion.first == step and suspicion.signs):
            return True
        at = self._rank.halts_at
        if at is not None:
            return at == step
        if self._world_size == 1:
            return self._is_looked_at(step)
        suspicion.asks += 1
        if suspicion.asks % UNHEARD_ASKS == 0:
            return True  # so that it is known that nobody comes
        every = self._policy.look_every_steps
        self._rank.ask_to_halt(next_halt(step, every, suspicion.void, suspicion.asks))
        return False

    def _tell_each_other(
        self, step: int, signs: tuple[Sign, ...], entered: bool, is_last: bool
    ) -> bool:
        """All stand behind this step: what comes of it."""
        if self._rank.has_lost_peer:
            return True
        self._rank.settle()
        bad, now = self._rank.not_finite, self._numbers.bad_state()
        means, suspicion = False, self._suspicion
        if not signs and (bad is not None or now):
            signs, bad, means = self._of_state(bad, now)
        mine = replace(self._sight(step, signs, bad, entered), means=means)
        if suspicion is not None:
            # An update of which nothing is left is not taken back where nobody is to notice.
            no_trace = {Sign.GRADIENT} if self._policy.only_undoes else set()
            mine = suspicion.told_with(mine, no_trace)
        seen = self._rank.meet(step, BEHIND, mine)
        if self._rank.has_lost_peer:
            return True
        if isinstance(seen, str):
            if self._calibration.is_due(step):
                self._calibration.failed(step, seen)
            return self._met_nobody(step, seen, is_last, means)
        run = StepRun(Way.FIRST, seen)
        if not run.is_clean:
            if self._calibration.is_due(step):
                self._calibration.failed(step, "its numbers are wrong")
            return self._judge(step, run, entered)
        if any(s.means for s in seen):
            self._mean(step)
        self._clear()
        if self._calibration.is_due(step) and self._calibration.heard(step, run, is_last):
            self._rank.take_back(step)
            return False
        return True

    def _of_state(
        self, bad: tuple[int, NotFinite] | None, now: NotFinite
    ) -> tuple[tuple[Sign, ...], tuple[int, NotFinite] | None, bool]:
        """What a state says that is not finite, or was not when it was copied, though the step's
        gradients are: signs, what of a copy is to be told, and whether it may be meant."""
        captured = None if bad is None else bad[1]
        if (captured is None or captured.may_be_meant) and (not now or now.may_be_meant):
            return (), None, True
        if not now and self._policy.only_undoes:
            return (), None, False  # the program has put it right by itself
        return (Sign.STATE,), bad, False

    def _met_nobody(self, step: int, why: str, is_last: bool, means: bool) -> bool:
        """Not all stand here. Raises CorruptionError where that cannot be left as it is. `means`:
        nothing is wrong but what the program may have meant, as this rank's gradients say, too."""
        if (suspicion := self._suspicion) is None:
            return True
        suspicion.void += 1
        if means and (is_last or suspicion.void >= ENOUGH_VOID):
            self._mean(step)
            self._clear()
            return True
        if not is_last and suspicion.void < MOST_VOID:
            return True
        is_withheld = Sign.GRADIENT in suspicion.signs
        self._give_up(
            suspicion.first, f"rank {self._number} saw wrong numbers, and cannot halt all: {why}"
        )
        if self._policy.only_undoes or not (is_withheld or self._numbers.bad_state()):
            return True
        raise CorruptionError(
            f"step {suspicion.first} has wrong numbers on rank {self._number}, and the ranks do "
            f"not halt together: {why}. A restart goes on from before it"
        )

    def _tried(self, step: int, signs: tuple[Sign, ...], entered: bool) -> bool:
        """A run of a step, or of one before it, that is in doubt."""
        if not signs and self._numbers.bad_state():
            signs = (Sign.STATE,)  # made so by an update, or by what followed it
        self._rank.settle()
        way = self._way(step)
        mine = self._sight(step, signs, self._rank.not_finite, entered)
        seen = self._rank.meet(step, BEHIND, mine)
        is_foreign = way is Way.SWAPPED  # it counts for nobody
        if self._rank.has_lost_peer:
            return not is_foreign
        if isinstance(seen, str):
            self._give_up(step, seen)
            if is_foreign:
                self._rank.take_back(step)
            return not is_foreign
        return self._judge(step, StepRun(way, seen), entered)

    def _clear(self) -> None:
        """Nobody sees anything wrong."""
        self._suspicion = None
        self._rank.forgive()
        self._numbers.accept()

    def _give_up(self, step: int, why: str) -> None:
        """From here on nothing is done about wrong numbers: there is no way to. What is not finite
        is in no snapshot all the same."""
        self._suspicion = self._trial = None
        self._has_given_up = True
        self._numbers.drop()
        self._rank.doubt(None)
        self._told.given_up(step, why)

    def _mean(self, step: int) -> None:
        """What is not finite in parameters does no harm: no gradient of that step, on any rank, was
        touched by it. A program has put it there."""
        bad = self._numbers.bad_state()
        self._numbers.learn()
        self._rank.forgive()
        if bad:
            self._told.meant(step, bad.names)

    def _way(self, step: int) -> Way:
        """A step before the one in doubt is run again as it was."""
        trial = self._trial
        if trial is None or not self._is_tried(step):
            return Way.FIRST
        return trial.way if trial.step == step else Way.AGAIN

    def _sight(
        self,
        step: int,
        signs: tuple[Sign, ...],
        bad: tuple[int, NotFinite] | None,
        entered: bool,
    ) -> Sight:
        first, names = (step, ()) if bad is None else (bad[0], bad[1].names)
        has_spread = not all(map(self._is_looked_at, range(first + 1, step + 1)))
        found = self._numbers.sight(names, has_spread)
        since = self._rank.differs_since
        return replace(
            found,
            rank=self._number,
            differs_since=since if since is not None and since < min(first, step) else None,
            looked=found.looked and (self._is_looked_at(first) or self._is_tried(first)),
            role=self._role if self._way(step) is Way.SWAPPED else self._number,
            skips=sum(at > step - SKIPS_WITHIN_STEPS for at in self._skipped_at),
            signs=signs if bad is None else tuple(dict.fromkeys((*signs, Sign.STATE))),
            first_step=min(first, step),
            device=self._device,
            holds=self._holds if entered else (),
        )

    def _why_not_back(self, why: str, entered: bool) -> str:
        if not entered:
            return "with the loop's body inside `with step:` it would be taken back and run again"
        if not self._policy.can_go_back:
            return "with one slot no step can be taken back (KEEPSTEP_SLOTS)"
        return why

    def _without_way_back(self, step: int, run: StepRun, why_not: str) -> bool:
        """The step cannot be taken back. An update that no rank has made is none that spoils
        anything. Raises CorruptionError where something is spoilt."""
        if self._policy.only_undoes:
            is_state = all(seen.signs in ((), (Sign.STATE,)) for seen in run.seen)
            self._let_be(step, is_state and self._is_looked_at(step), f"{told(run)}; {why_not}")
            return True
        are_alike = all(seen.signs == run.seen[0].signs for seen in run.seen)
        is_state = any(Sign.STATE in seen.signs for seen in run.seen)
        seen = f"step {step} has wrong numbers: {told(run)}"
        if (are_alike or all(not _is_withheld(s) for s in run.seen)) and not is_state:
            done = "its update was left out" if _is_withheld(run.seen[0]) else "it counts"
            self._told.counts_all_the_same(step, f"{seen}; {done}; {why_not}")
            self._clear()
            return True
        raise CorruptionError(f"{seen}; {why_not}. A restart goes on from before it")

    def _judge(self, step: int, run: StepRun, entered: bool) -> bool:
        first = min((s.first_step for s in run.seen if s.signs), default=step)
        trial = self._trial
        is_new = trial is None or not self._is_tried(step)
        if trial is None or is_new:
            trial = self._trial = Trial(first)
        elif run.is_clean and step < trial.step:
            self._numbers.accept()
            return True  # it was none of those up to here
        else:
            trial.step = first  # where what was seen behind it has come from
        trial.runs.append(run)
        if run.way is Way.AGAIN:
            trial.places = self._numbers.places() if first == step else ()
        act = next_act(trial.step, trial.runs, self._rules(trial, run))
        if is_new and not isinstance(act, NoWayBack):
            self._told.seen(step, run)
        match act:
            case RunIt():
                return self._run_it(trial, act)
            case CountIt(verdict):
                self._end_trial(trial, verdict, Lasting.TRANSIENT)
                self._clear()
                return True
            case LetBe(verdict, is_meant, why):
                self._end_trial(trial, verdict, None)
                self._let_be(step, is_meant, why)
                return True
            case NoWayBack(_, why):
                self._trial = None
                return self._without_way_back(step, run, self._why_not_back(why, entered))
            case SkipIt(verdict):
                self._end_trial(trial, verdict, None)
                self._skip(trial)
                return False
            case Leave(verdict):
                self._end_trial(trial, verdict, Lasting.PERMANENT)
                if verdict.rank == self._number:
                    raise DeviceError(verdict.why)
                self._go_back(trial.step)
                return False
            case Stop(verdict, why):
                self._end_trial(trial, verdict, None)
                raise WrongNumbersError(why)

    def _rules(self, trial: Trial, run: StepRun) -> Rules:
        policy = self._policy
        again = [run for run in trial.runs if run.way is Way.AGAIN]
        took_batches = bool(again) and all(seen.batches > 0 for seen in again[-1].seen)
        can_swap = policy.can_swap and trial.can_swap and self._world_size > 1
        return Rules(
            may_skip=policy.may_skip,
            skips_spikes=policy.skips_spikes,
            can_skip=took_batches and bool(trial.places),
            can_swap=can_swap and min(seen.batches for seen in run.seen) > 0,
            only_undoes=policy.only_undoes,
            within=self._calibration.within,
        )

    def _run_it(self, trial: Trial, act: RunIt) -> bool:
        self._told.run_again(trial.step, act)
        if act.pause_ns:
            self._pause(act.pause_ns)
        trial.way, trial.is_prepared = act.way, False
        self._go_back(trial.step)
        return False

    def _go_back(self, step: int) -> None:
        self._suspicion = None
        self._rank.take_back(step)

    def _let_be(self, step: int, is_meant: bool, why: str) -> None:
        if is_meant:
            self._mean(step)
            self._clear()
        else:
            self._give_up(step, why)

    def _skip(self, trial: Trial) -> None:
        self._skipped_at.append(trial.step)
        self._numbers.skip(trial.places)
        self._go_back(trial.step)
        self._told.skipped(trial.step, trial.places)

    def _end_trial(self, trial: Trial, verdict: StepVerdict, lasting: Lasting | None) -> None:
        self._trial = None
        self._told.judged(trial.step, trial.runs, verdict, lasting)


def _is_withheld(seen: Sight) -> bool:
    return Sign.GRADIENT in seen.signs
