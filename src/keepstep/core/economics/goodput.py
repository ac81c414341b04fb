"""Goodput: where a job's time went, in parts that never overlap and whose sum is its whole time.

Comes in: the journal's events, of one node or of all of them, and what the ranks' status pages say
of their steps. Goes out: an `Account`, and the recoveries with what they cost. Reads no clock and
no file, and never waits.

| part | from | to |
|---|---|---|
| starting | the first word of a launch | every rank may take its first step |
| productive | every rank may train | a fault; less what is stalled and redone |
| stalled | the part of that in which the trainer waited for fault tolerance | |
| redone | the part of that in which steps were done that had been done before | |
| detecting | a fault | the first who noticed |
| recovering | noticed | every rank trains again |
| idle | the last goodbye, the last word before a silence that a launch ended, or the last rank's \
end where nobody was there to start another (`absence.py`) | the next launch |

Invariant: the line of time is cut at events, and each piece goes into exactly one part; stalled and
redone are taken out of the pieces in which ranks trained, never more than there is. So the parts
are never negative and their sum is the whole, whatever the journal says.

What a journal does not tell, and on which side the account errs:

* when a silent fault happened: `detecting` is as long as the event that noticed it says
  (`stalled_ns`), or as the suspicion before it; a death that the kernel tells of counts as noticed
  at once. What is missing is in `productive`.
* how many completed steps were lost where nobody knew how far the job had come (`unknown_losses`
  says how often): those that are known are redone, the others are in `productive`, which is then
  at most so long.
* how long each step took: a step done again is charged at the mean of the steps of that run (its
  last one, when no mean is known).
* the step that a fault cut off: it is in `productive`; less than one step a fault.
* the stalls of a rank that nobody saw leave: they are in `productive`.
* what was trained before a silence, when everything died at once: it is in `idle`, so that
  `productive` is what is sure; at most the time since the last event before.
* clocks: each machine is measured by its own monotonic clock, whatever its wall clock is set to
  meanwhile; machines, and the lives of one from boot to boot, are laid beside each other as their
  wall clocks say, and are wrong by as much as those.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum

from keepstep.core.economics.absence import Absence, Away
from keepstep.core.economics.journal_kinds import (
    BACK,
    CLOSING,
    ON_THE_WAY,
    OPENING,
    READY,
    REFUTING,
    cause_of,
    ends_training,
    is_about,
    loss_of,
    number,
    silence_ns,
)
from keepstep.model.events import Event
from keepstep.model.units import S_NS

# where nobody says which boot it was, two pairs of clocks that disagree by more belong to two
# machines, or have a reboot between them
SAME_CLOCK_NS = 60 * S_NS
SETTLED_NS = 10 * S_NS  # the ranks' words about one recovery come within this


class TimePart(Enum):
    STARTING = "starting"
    TRAINING = "training"  # productive, stalled and redone
    DETECTING = "detecting"
    RECOVERING = "recovering"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class StepTempo:
    """What a living rank's status page says of its steps; `stall_ns` since its process began."""

    rank: int
    pid: int
    completed_step: int
    step_ns: int
    stall_ns: int


@dataclass(frozen=True, slots=True)
class Account:
    """`goodput_ratio` is productive time by all time, None before there is any. `unknown_losses`:
    how often nobody knew how many completed steps are done again."""

    wall_ns: int
    productive_ns: int
    stalled_ns: int
    redone_ns: int
    detecting_ns: int
    recovering_ns: int
    starting_ns: int
    idle_ns: int
    goodput_ratio: float | None
    unknown_losses: int = 0

    def parts(self) -> dict[str, int]:
        """Part by part, as the table above names them; their sum is `wall_ns`."""
        return {
            f.name[:-3]: getattr(self, f.name)
            for f in fields(self)
            if f.name.endswith("_ns") and f.name != "wall_ns"
        }


@dataclass(frozen=True, slots=True)
class Recovered:
    """An incident that is over: from the fault to every rank's next step (or, where no rank told of
    one, to the leave to train), less the time in which nobody had started the job. `began_ns`: the
    fault's moment, on the ledger's axis."""

    cause: str
    took_ns: int
    lost_steps: int
    began_ns: int = field(default=0, compare=False)


class Axis:
    """One line of time for the events of many machines."""

    def __init__(self) -> None:
        self._offsets_ns: list[int] = []
        self._boots: dict[str, int] = {}  # their offsets, as they were told first

    def place(self, wall_ns: int, mono_ns: int, boot: str = "") -> int:
        """Where on the line: the machine is known by its boot, else by how far its two clocks are
        apart."""
        known = self._boots.get(boot)
        if known is None:
            known = self._near(wall_ns - mono_ns)
            if boot:
                self._boots[boot] = known
        return mono_ns + known

    def _near(self, offset_ns: int) -> int:
        known = next((o for o in self._offsets_ns if abs(o - offset_ns) < SAME_CLOCK_NS), None)
        if known is None:
            self._offsets_ns.append(known := offset_ns)
        return known


@dataclass(slots=True)
class _Training:
    """A piece of time in which ranks trained. It began with `base_step` done; `done_step` was done
    `done_ns` after its begin. `high_step`: the newest step that had been done by then."""

    length_ns: int = 0
    base_step: int | None = None
    high_step: int = -1
    done_step: int | None = None
    done_ns: int = 0

    def tells(self, step: int, at_ns: int) -> None:
        if self.done_step is None or step > self.done_step:
            self.done_step, self.done_ns = step, at_ns

    @property
    def steps(self) -> int:
        return (
            max(0, self.done_step - self.base_step)
            if self.done_step is not None and self.base_step is not None
            else 0
        )

    def redone_ns(self, step_ns: float) -> int:
        again = max(0, self.high_step - self.base_step) if self.base_step is not None else 0
        return min(self.length_ns, int(again * step_ns))


@dataclass(slots=True)
class _Incident:
    cause: str
    began_ns: int
    ended_ns: int | None = None
    lost_steps: int = 0
    away_ns: int = 0


class Ledger:
    """The account as it grows: `add` every event in the order of time, ask whenever you like."""

    def __init__(self) -> None:
        self.axis = Axis()
        self._part = TimePart.IDLE
        self._before = TimePart.IDLE  # what the ranks did until they could train
        self._since_ns = self._first_ns = self._last_ns = 0
        self._known = False
        self._spent_ns = dict.fromkeys(TimePart, 0)
        self._trainings: list[_Training] = []
        self._epoch: int | None = None  # of the newest leave to train
        self._high_step = -1
        self._unknown_losses = 0
        self._incidents: list[_Incident] = []
        self._absence = Absence()
        self._suspected_ns: int | None = None
        # the last word before a launch that came unexpectedly, and that launch
        self._reopened: tuple[int, int] | None = None
        self._parted_ns: int | None = None  # the last goodbye
        self._pids: dict[int, int] = {}
        self._stall_ns: dict[tuple[int, int], int] = {}

    # -- what happens

    def add(self, event: Event) -> None:
        at_ns = self._place(event)
        if not self._known:
            self._known = True
            self._since_ns = self._first_ns = self._last_ns = at_ns
        at_ns = max(at_ns, self._last_ns)
        self._hear_stalls(event)
        if (away := self._absence.hear(event)) is not None:
            self._was_away(away)
        kind = event.kind
        if kind in BACK:
            self._may_train(event, at_ns)
        elif kind in OPENING:
            self._opened(at_ns)
        elif kind in CLOSING:
            self._closed(at_ns)
        elif ends_training(event):
            self._noticed(event, at_ns)
        elif kind in ON_THE_WAY:
            self._on_the_way(at_ns)
        elif kind in READY:
            self._prepared(event, at_ns)
        elif kind == "suspicion" and self._suspected_ns is None:
            self._suspected_ns = at_ns - silence_ns(event)
        elif kind == "rank-bye" and self._part is TimePart.TRAINING:
            self._parted_ns = at_ns
        elif kind == "rank-attached":
            self._reopened = None  # a keeper was replaced; the ranks never stopped
        if kind in REFUTING:
            self._suspected_ns = None
        self._hear_steps(event, at_ns)
        self._last_ns = at_ns

    def _opened(self, at_ns: int) -> None:
        if self._part is TimePart.IDLE:
            self._turn(TimePart.STARTING, at_ns)
        elif self._part is TimePart.TRAINING and self._reopened is None:
            self._reopened = (self._last_ns, at_ns)

    def _relaunched(self) -> None:
        """Whoever trained is gone, and nobody saw it: nothing is known from the last word to the
        launch."""
        if self._reopened is not None:
            gone_ns, launch_ns = self._reopened
            self._turn(TimePart.IDLE, gone_ns)
            self._turn(TimePart.STARTING, launch_ns)

    def _closed(self, at_ns: int) -> None:
        self._relaunched()
        parted = self._parted_ns if self._part is TimePart.TRAINING else None
        self._turn(TimePart.IDLE, at_ns if parted is None else parted)
        self._incidents = [i for i in self._incidents if i.ended_ns is not None]

    def _was_away(self, away: Away) -> None:
        """Until the launch nobody was there to recover."""
        if self._part is TimePart.RECOVERING:
            self._turn(TimePart.IDLE, self._place(away.since))
            gone_ns = self._since_ns
            self._turn(TimePart.RECOVERING, self._place(away.until))
            self._incidents[-1].away_ns += self._since_ns - gone_ns

    def _place(self, event: Event) -> int:
        return self.axis.place(event.wall_ns, event.mono_ns, event.boot)

    def _noticed(self, event: Event, at_ns: int) -> None:
        if self._part in (TimePart.TRAINING, TimePart.STARTING):
            fault_ns = at_ns - silence_ns(event)
            if self._suspected_ns is not None and is_about(self._suspected_ns, event, at_ns):
                fault_ns = min(fault_ns, self._suspected_ns)
            fault_ns = max(fault_ns, self._since_ns)
            self._recover(cause_of(event), fault_ns, at_ns)
        elif event.kind == "diagnosis" and self._incidents and self._part is TimePart.RECOVERING:
            # the first sign of a failure is seldom its name
            self._incidents[-1].cause = cause_of(event)

    def _recover(self, cause: str, fault_ns: int, noticed_ns: int) -> None:
        self._turn(TimePart.DETECTING, fault_ns)
        self._turn(TimePart.RECOVERING, noticed_ns)
        self._incidents.append(_Incident(cause, fault_ns))

    def _on_the_way(self, at_ns: int) -> None:
        if self._part is TimePart.TRAINING:
            self._relaunched()
        if self._part is TimePart.TRAINING:
            self._recover("unknown", at_ns, at_ns)
        elif self._part is TimePart.IDLE:
            self._turn(TimePart.STARTING, at_ns)

    def _may_train(self, event: Event, at_ns: int) -> None:
        epoch = event.data.get("epoch")
        is_new = epoch is None or epoch != self._epoch
        if self._part is TimePart.TRAINING and not is_new:
            return  # said again: to a node whose keeper had died, or by another node
        self._relaunched()
        self._before = (
            TimePart.RECOVERING if self._part is TimePart.RECOVERING else TimePart.STARTING
        )
        self._turn(TimePart.TRAINING, at_ns)
        step, (known, lost) = number(event.data.get("step")), loss_of(event)
        self._unknown_losses += known is None and is_new
        if step is not None:
            self._high_step = max(self._high_step, step + lost)
            self._trainings[-1].base_step, self._trainings[-1].high_step = step, self._high_step
        if self._incidents and self._before is not TimePart.STARTING:
            self._incidents[-1].ended_ns = at_ns
            self._incidents[-1].lost_steps += lost if is_new else 0
        self._epoch = epoch

    def _prepared(self, event: Event, at_ns: int) -> None:
        """A rank is ready, or has done its first step: it did not train before."""
        if self._part is not TimePart.TRAINING:
            return  # a step that had been under way when the failure came
        duration_ns = number(event.data.get("duration_ns")) if event.kind == "next-step" else 0
        if duration_ns is not None:
            began_ns = min(at_ns, max(self._since_ns, at_ns - duration_ns))
            self._spent_ns[self._before] += began_ns - self._since_ns
            self._since_ns = began_ns
        if self._before is TimePart.RECOVERING:
            self._incidents[-1].ended_ns = at_ns

    def _hear_steps(self, event: Event, at_ns: int) -> None:
        step = number(event.data.get("completed_step" if event.kind == "rank-left" else "step"))
        if step is None or event.kind not in ("rank-left", "next-step") or not self._trainings:
            return
        newest = self._trainings[-1]
        is_open = self._part is TimePart.TRAINING
        newest.tells(step, at_ns - self._since_ns if is_open else newest.length_ns)
        self._high_step = max(self._high_step, step)

    def _hear_stalls(self, event: Event) -> None:
        if event.kind == "rank-joined":
            self._pids[number(event.data.get("rank")) or 0] = number(event.data.get("pid")) or 0
        elif event.kind == "rank-left":
            self._stalled(
                number(event.data.get("rank")) or 0,
                number(event.data.get("pid")),
                number(event.data.get("stall_ns")) or 0,
            )
        elif (
            event.kind == "summary" and event.who.startswith("rank ") and event.who[5:].isdecimal()
        ):
            steps = sum(
                number(event.data.get(f"{word}_steps")) or 0
                for word in ("captured", "skipped", "torn")
            )
            stall_ns = steps * (number(event.data.get("stall_ns_per_step")) or 0)
            waited_ns = number(event.data.get("waited_ns")) or 0  # for the store
            self._stalled(int(event.who[5:]), None, stall_ns + waited_ns)

    def _stalled(self, rank: int, pid: int | None, stall_ns: int) -> None:
        life = (rank, self._pids.get(rank, 0) if pid is None else pid)
        self._stall_ns[life] = max(self._stall_ns.get(life, 0), stall_ns)

    def _turn(self, part: TimePart, at_ns: int) -> None:
        """What was until now ends at `at_ns`."""
        length_ns = max(0, at_ns - self._since_ns)
        if self._part is TimePart.TRAINING:
            self._trainings[-1].length_ns += length_ns
        else:
            self._spent_ns[self._part] += length_ns
        self._since_ns += length_ns
        self._part = part
        if part is TimePart.TRAINING:
            self._trainings.append(_Training())
        self._suspected_ns = self._reopened = self._parted_ns = None

    # -- what follows

    def account(self, tempos: Sequence[StepTempo] = (), now_ns: int | None = None) -> Account:
        """Up to `now_ns` (on the axis) when the job is running, else up to the last event."""
        end_ns = max(self._last_ns, now_ns or 0) if self._known else 0
        spent_ns, trainings = dict(self._spent_ns), list(self._trainings)
        open_ns = end_ns - self._since_ns
        if self._part is TimePart.TRAINING:
            last = trainings[-1]
            trainings[-1] = _Training(
                last.length_ns + open_ns,
                last.base_step,
                last.high_step,
                last.done_step,
                last.done_ns,
            )
            if tempos:
                trainings[-1].tells(max(t.completed_step for t in tempos), open_ns)
        else:
            away_ns = self._away_ns(end_ns)
            spent_ns[self._part] += open_ns - away_ns
            spent_ns[TimePart.IDLE] += away_ns
        step_ns = _step_ns(trainings, tempos)
        trained_ns = sum(t.length_ns for t in trainings)
        redone_ns = sum(t.redone_ns(step_ns) for t in trainings)
        stalled_ns = min(trained_ns - redone_ns, self._longest_stall_ns(tempos))
        productive_ns = trained_ns - redone_ns - stalled_ns
        wall_ns = end_ns - self._first_ns
        return Account(
            wall_ns=wall_ns,
            productive_ns=productive_ns,
            stalled_ns=stalled_ns,
            redone_ns=redone_ns,
            detecting_ns=spent_ns[TimePart.DETECTING],
            recovering_ns=spent_ns[TimePart.RECOVERING],
            starting_ns=spent_ns[TimePart.STARTING],
            idle_ns=spent_ns[TimePart.IDLE],
            goodput_ratio=productive_ns / wall_ns if wall_ns else None,
            unknown_losses=self._unknown_losses,
        )

    def _away_ns(self, end_ns: int) -> int:
        """For how long, as things are, nobody has been there to recover."""
        since = self._absence.since
        if since is None or self._part is not TimePart.RECOVERING:
            return 0
        return max(0, end_ns - max(self._since_ns, self._place(since)))

    @property
    def step_ns(self) -> float:
        """What a step takes, as far as steps were counted; 0 when none were."""
        return _step_ns(self._trainings, ())

    def _longest_stall_ns(self, tempos: Sequence[StepTempo]) -> int:
        """Of one rank in all its lives: ranks wait for each other, so the job waits as long as the
        one that waits longest."""
        lives = dict(self._stall_ns)
        for t in tempos:
            lives[t.rank, t.pid] = max(lives.get((t.rank, t.pid), 0), t.stall_ns)
        by_rank: dict[int, int] = {}
        for (rank, _), stall_ns in lives.items():
            by_rank[rank] = by_rank.get(rank, 0) + stall_ns
        return max(by_rank.values(), default=0)

    def recovered(self, now_ns: int | None = None) -> tuple[Recovered, ...]:
        """The incidents that are over, in order; with `now_ns` only those that no later word will
        lengthen."""
        over = ((i, i.ended_ns) for i in self._incidents if i.ended_ns is not None)
        settled = (
            (i, ended_ns)
            for i, ended_ns in over
            if now_ns is None or now_ns - ended_ns >= SETTLED_NS
        )
        return tuple(
            Recovered(i.cause, max(0, ended_ns - i.began_ns - i.away_ns), i.lost_steps, i.began_ns)
            for i, ended_ns in settled
        )


def account(
    events: Iterable[Event],
    tempos: Sequence[StepTempo] = (),
    now: tuple[int, int, str] | None = None,
) -> Account:
    """Of events in any order; `now` (wall and monotonic clock, boot) when the job is running."""
    ledger = Ledger()
    for event in sorted(events, key=lambda e: ledger.axis.place(e.wall_ns, e.mono_ns, e.boot)):
        ledger.add(event)
    return ledger.account(tempos, None if now is None else ledger.axis.place(*now))


def _step_ns(trainings: Iterable[_Training], tempos: Sequence[StepTempo]) -> float:
    """What a step costs: the mean where steps were counted, else the slowest rank's last one."""
    counted = [t for t in trainings if t.steps]
    steps = sum(t.steps for t in counted)
    return (
        sum(t.done_ns for t in counted) / steps
        if steps
        else max((t.step_ns for t in tempos), default=0)
    )
