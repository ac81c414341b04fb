"""Program: a simulated training that keepstep protects, in one process: the product's own `Rank`
in a simulated world, and a loop whose steps take virtual time.

What a real program does through `runtime/rank/session.py` is done here by events: a step begins,
its collective, the update behind the fence, the step boundary. A lost peer ends its collective
without a result. What keepstep raises in the program ends the process with exit code 1 and that
message.

How long things take is a `Tempo`'s to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from keepstep.core.numbers.halt import BEHIND
from keepstep.core.numbers.inquiry import can_go_behind
from keepstep.core.numbers.told_sight import from_text, to_text
from keepstep.errors import KeepstepError, PeerLost
from keepstep.model.launch import ErrorReport
from keepstep.model.numbers import Sight
from keepstep.model.snapshot import Phase
from keepstep.model.units import MS_NS, S_NS
from keepstep.ports import StateCopy
from keepstep.runtime.rank.bootstrap import NodeFacts
from keepstep.runtime.rank.joining import Joined, Joining
from keepstep.runtime.rank.rank import Rank
from keepstep.runtime.rank.stage import Stage
from keepstep.runtime.rank.world import RankIdentity, RankOptions, RankWorld
from keepstep.sim.protocol.job.collectives import SimGroups
from keepstep.sim.protocol.job.live_state import SimCopy, SimState
from keepstep.sim.protocol.job.oracle import Oracle, mix
from keepstep.sim.protocol.world.executor import TrainerExecutor
from keepstep.sim.protocol.world.world import Process

LOSS = 1.0
WORTHLESS = b"worthless"
LAST_AGAIN_NS = 20 * MS_NS  # as long as nothing else happens
LAST_TRIES = 3000
CHANGE_NS = 200 * MS_NS  # half of an operation in place takes at most so long
STANDS_NS = 4 * S_NS  # behind a step, until it leaves
STANDS_TRIES = 3000
TAKEN_BACK = 0.5  # of all halts
DOUBTED_STEPS = 3  # so far ahead is the halt at most
# Real doubts end with a verdict. Over a slow network a job that is taken back every other step for
# ever commits nothing, and never ends.
DOUBTED_EPOCHS = 100


class Tempo(Protocol):
    """How long the parts of a step take, each time it is asked; and what the rank does between
    steps and beside them, beyond what its executors' acts take by themselves."""

    def before_collective_ns(self) -> int: ...

    def collective_ns(self) -> int: ...

    def before_update_ns(self) -> int: ...

    def after_update_ns(self) -> int: ...

    def boundary_ns(self) -> int:
        """From when the trainer's executor has nothing left to do until the next step begins."""

    def trainer_act_ns(self) -> int:
        """An act on the trainer's own thread."""

    def background_act_ns(self) -> int:
        """An act beside the steps: of a capture, mostly."""

    def announced(self, phase: Phase) -> None:
        """The rank does this now: what comes next may take another time."""

    def body_over(self) -> None:
        """A step has ended, and is about to be captured."""


@dataclass(frozen=True, slots=True)
class EvenTempo:
    """Steps of about `step_ns`, all of it in the collective."""

    step_ns: int
    random: Random

    def before_collective_ns(self) -> int:
        return 0

    def collective_ns(self) -> int:
        return self.step_ns + self.random.randrange(max(1, self.step_ns // 4))

    def before_update_ns(self) -> int:
        return 0

    def after_update_ns(self) -> int:
        return 0

    def boundary_ns(self) -> int:
        return 0

    def trainer_act_ns(self) -> int:
        return 0

    def background_act_ns(self) -> int:
        return 0

    def announced(self, phase: Phase) -> None:
        """Everything else takes as long as its executor has it."""

    def body_over(self) -> None:
        """As above."""


@dataclass(frozen=True, slots=True)
class Script:
    """What the program is written to do. `gives_up_steps`: its body is in `with step:`.
    `asks_every`: it asks for a checkpoint itself, every so many steps; 0: never. `names_phases`: it
    says which part of a step it is in, as `job.enter` does. `changes`: the part of all steps whose
    body begins with an operation on the state in place, and one that takes it back. `doubts`: the
    part of all steps at whose end this rank asks all to halt behind one step, of which half are
    then taken back."""

    steps: int
    gives_up_steps: bool
    asks_every: int = 0
    names_phases: bool = False
    changes: float = 0.0
    doubts: float = 0.0


class ProgramObserver(Protocol):
    """Who wants to hear what programs do."""

    def announced(self, program: Program, phase: Phase, step: int) -> None: ...

    def stepped(self, program: Program, step: int) -> None: ...

    def halted(self, program: Program, step: int, is_taken_back: bool | None) -> None: ...

    def done(self, program: Program) -> None: ...


class Program:
    """One life of a rank's process."""

    def __init__(
        self,
        process: Process,
        world: RankWorld,
        options: RankOptions,
        who: RankIdentity,
        node: NodeFacts,
        live: SimState,
        groups: SimGroups,
        trainer: TrainerExecutor,
        oracle: Oracle,
        script: Script,
        tempo: Tempo,
        observer: ProgramObserver,
    ) -> None:
        self.process = process
        self.who = who
        self._world = world
        self._options = options
        self._node = node
        self._live = live
        self.groups = groups
        self._trainer = trainer
        self._oracle = oracle
        self._script = script
        self._tempo = tempo
        self._observer = observer
        self._random = process.world.stream(f"program {process.name}")
        self._in_step = False
        self._is_closing = False
        self.rank: Rank | None = None
        self.report = ErrorReport()
        self.exit_code: int | None = None

    @property
    def state(self) -> bytes:
        """The live one."""
        return self._live.state

    @property
    def is_waiting(self) -> bool:
        """Whether it is in a collective, or waits until it may train."""
        rank = self.rank
        return self.groups.is_waiting or (rank is not None and rank.stage is not Stage.READY)

    def begin(self) -> None:
        """Meet the others, then join keepstep, as a program does in its first lines."""
        self.groups.begin(self._met)

    def _met(self, why: str | None) -> None:
        if why is not None:
            self._fail(KeepstepError(why))
            return
        Joining(
            self._world, self._options, self.who, self._node, self._joined, self._cannot_join
        ).begin()

    def _joined(self, joined: Joined) -> None:
        try:
            self.rank = Rank(self._world, self._options, self.who, joined, self)
        except KeepstepError as error:
            joined.close()
            self._fail(error)
        else:
            self.rank.begin()

    def _cannot_join(self, error: KeepstepError) -> None:
        self._fail(error)

    # -- what the rank tells (`Trainer`)

    def announce(self, phase: Phase, step: int) -> None:
        self._tempo.announced(phase)
        self._observer.announced(self, phase, step)

    def changed(self) -> None:
        self.process.after(0, self._go_on)

    # -- the loop

    def _go_on(self) -> None:
        """Whatever can be done next. Called when the program waits for nothing of its own."""
        rank = self.rank
        if rank is None or self._in_step or self._is_closing or self._trainer.is_busy:
            return
        if rank.error is not None:
            self._fail(rank.error)
        elif rank.stage in (Stage.READY, Stage.REGROUPING) and rank.step + 1 >= self._script.steps:
            self._end(rank)
        elif rank.may_begin_step():
            self._begin_step(rank)
        elif rank.error is not None:
            self._fail(rank.error)

    def _begin_step(self, rank: Rank) -> None:
        self._in_step = True
        step = rank.begin_step()
        if self._script.gives_up_steps:
            rank.body_entered(step)
        self._enter(rank, Phase.FORWARD, step)
        if step and self._script.changes and self._random.random() < self._script.changes:
            self._change_in_place(lambda: self._change_in_place(lambda: self._forward(rank, step)))
        else:
            self._forward(rank, step)

    def _change_in_place(self, then: Callable[[], None]) -> None:
        """An operation in place: what it has written shows at once, its version when it is over."""
        live, lasts_ns = self._live, 1 + self._random.randrange(CHANGE_NS)

        def second_half() -> None:
            live.change_half(is_first=False)
            self.process.after(lasts_ns, over)

        def over() -> None:
            live.changed()
            self.process.after(1, then)

        live.change_half(is_first=True)
        self.process.after(lasts_ns, second_half)

    def _forward(self, rank: Rank, step: int) -> None:
        self._later(self._tempo.before_collective_ns(), self._reduce, rank, step)

    def _enter(self, rank: Rank, phase: Phase, step: int) -> None:
        """What `job.enter` does."""
        if self._script.names_phases:
            rank.announce(phase, step)

    def _reduce(self, rank: Rank, step: int) -> None:
        self._enter(rank, Phase.BACKWARD, step)
        lasts_ns = self._tempo.collective_ns()
        kind = f"step {step} of epoch {rank.epoch}"
        combine = mix if step else self._first
        self.groups.collective(
            kind,
            self._live.state,
            lasts_ns,
            combine,
            lambda mixed: self._reduced(rank, step, mixed),
        )

    def _first(self, given: Sequence[bytes]) -> bytes:
        """Whatever was in the live state before step 0."""
        return self._oracle.first

    def _reduced(self, rank: Rank, step: int, mixed: bytes | None) -> None:
        """`mixed`: None when the collective ended because a peer is lost."""
        self._later(self._tempo.before_update_ns(), self._update, rank, step, mixed or WORTHLESS)

    def _update(self, rank: Rank, step: int, mixed: bytes) -> None:
        self._enter(rank, Phase.UPDATE, step)
        try:
            copy = rank.before_update()
        except PeerLost as error:
            self._body_failed(rank, error)
            return
        self._behind(copy, lambda: self._fenced(rank, step, mixed, copy))

    def _fenced(self, rank: Rank, step: int, mixed: bytes, copy: StateCopy | None) -> None:
        if copy is not None:
            copy.fence()
            rank.fenced()
        self._updated(rank, step, mixed)

    def _behind(self, copy: StateCopy | None, then: Callable[[], None]) -> None:
        """As the fence has it: not before what is being copied has left the live state."""
        if isinstance(copy, SimCopy):
            copy.when_over(lambda: self.process.after(1, then))
        else:
            then()

    def _updated(self, rank: Rank, step: int, mixed: bytes) -> None:
        number = self.who.rank
        self._live.state = self._oracle.made_of(mixed, number, step)
        self._later(self._tempo.after_update_ns(), self._halt_or_leave, rank)

    def _halt_or_leave(self, rank: Rank) -> None:
        """At the end of a body: where somebody doubts a step all stand behind it first."""
        step, halting = rank.step + 1, rank.halting
        doubts = self._script.doubts and self._random.random() < self._script.doubts
        if doubts and rank.epoch < DOUBTED_EPOCHS:
            halting.ask(step + 1 + self._random.randrange(DOUBTED_STEPS))
        if halting.at != step or rank.has_lost_peer:
            self._leave_body(rank, True)
            return
        mine = Sight(self.who.rank, self.who.rank, holds=rank.holds)
        halting.stand(step, BEHIND, to_text(mine))
        self.process.after(STANDS_NS, halting.leave)
        self._stand(rank, step, 0)

    def _stand(self, rank: Rank, step: int, tries: int) -> None:
        halting = rank.halting
        if not (halting.is_decided or rank.has_lost_peer) and tries < STANDS_TRIES:
            self.process.after(LAST_AGAIN_NS, self._stand, rank, step, tries + 1)
            return
        halting.go_on()
        if rank.has_lost_peer:
            self._leave_body(rank, True)
            return
        is_agreed, is_taken_back = halting.found is not None, False
        if halting.found is not None and Random(f"{step} of {rank.epoch}").random() < TAKEN_BACK:
            is_taken_back = can_go_behind(step, [*map(from_text, halting.found)])
        self._observer.halted(self, step, is_taken_back if is_agreed else None)
        if not is_taken_back:
            self._leave_body(rank, True)
            return
        if self._script.gives_up_steps:
            rank.body_left()
        self._in_step = False
        rank.take_back(step)
        self._trainer.when_idle(self._leave_boundary)

    def _body_failed(self, rank: Rank, error: PeerLost) -> None:
        """The optimizer's step raised it: `with step:` swallows that, a bare body does not."""
        if self._script.gives_up_steps:
            self._leave_body(rank, False)
        else:
            self._fail(error)

    def _leave_body(self, rank: Rank, ended: bool, tries: int = 0) -> None:
        is_last = rank.step + 2 >= self._script.steps
        if is_last and tries < LAST_TRIES and not rank.may_end_last_step():
            self.process.after(LAST_AGAIN_NS, self._leave_body, rank, ended, tries + 1)
            return
        entered = self._script.gives_up_steps
        if entered:
            rank.body_left()
        self._tempo.body_over()
        try:
            counts = rank.end_step(entered, ended, 0, LOSS, is_last)
        except PeerLost as error:
            self._fail(error)
            return
        self._in_step = False
        if counts:
            self._observer.stepped(self, rank.step)
            every = self._script.asks_every
            if every and (rank.step + 1) % every == 0:
                self._enter(rank, Phase.PERSIST, rank.step)
                rank.persist(rank.step, "asked for by job.persist()", lambda done: None, True)
        self._trainer.when_idle(self._leave_boundary)

    def _leave_boundary(self) -> None:
        self._later(self._tempo.boundary_ns(), self._go_on)

    def _later(self, delay_ns: int, call: Callable[..., None], *arguments: object) -> None:
        if delay_ns:
            self.process.after(delay_ns, call, *arguments)
        else:
            call(*arguments)

    # -- the end

    def _end(self, rank: Rank) -> None:
        self._is_closing = True
        self._observer.done(self)
        rank.end_steps(lambda: rank.close(True, "ended well", lambda: self._closed(rank)))

    def _closed(self, rank: Rank) -> None:
        if rank.unsaved:
            self.report = ErrorReport(f"UnsavedError: {rank.unsaved}")
        self._exit(1 if rank.unsaved else 0)

    def terminated(self, signum: int) -> None:
        """A signal that ends it. Under an agent the process just ends; else the newest step goes to
        the store first."""
        rank = self.rank
        if self._world.has_agent or rank is None:
            self._exit(-signum)
        else:
            rank.persist(None, f"signal {signum}", lambda done: self._exit(-signum))

    def _fail(self, error: KeepstepError) -> None:
        """The program ends with an error, as a program does that catches none: its words are
        written, and what keepstep has is closed."""
        self._is_closing = True
        self.report = ErrorReport(f"{type(error).__name__}: {error}")
        rank = self.rank
        if rank is None or rank.stage is Stage.FAILED:
            self._exit(1)
        else:
            rank.close(False, self.report.message, lambda: self._exit(1))

    def _exit(self, code: int) -> None:
        if self.exit_code is None:
            self.exit_code = code
            self.process.end(f"exit code {code} {self.report.message}".strip())
