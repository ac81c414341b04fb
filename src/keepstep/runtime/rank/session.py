"""Session: keepstep inside the trainer, and its public face.

`protect` finds who this rank is, joins the keeper, restores what all ranks agree on, makes the
slots and returns a `Job`. `Job.steps` counts steps; the end of a loop body is the step boundary,
where the state is captured. What a rank does is `rank.py`; here is what belongs to the process: the
environment, hooks, and the threads of `driver.py`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from keepstep.config import Config, Settings, resolve
from keepstep.core.economics.retention import METRICS, check_rules
from keepstep.core.wire.conversations import PROCESS_WITH_AGENT, RANK_WITH_KEEPER
from keepstep.edge.net.agents import NodeAgents
from keepstep.edge.net.keepers import KeeperSocket
from keepstep.edge.os.clock import CLOCK
from keepstep.edge.os.error_file import write_error_file
from keepstep.edge.os.exit import exit_with
from keepstep.edge.os.job_directory import claim_job_dir
from keepstep.edge.os.journal import FileJournal
from keepstep.edge.os.machine import address_towards, available_bytes, proof_threads
from keepstep.edge.os.needs import check_needs
from keepstep.edge.os.preemption import Preemption
from keepstep.edge.os.priority import give_way_in_thread
from keepstep.edge.os.run_name import run_name
from keepstep.edge.os.voice import speak_of_training
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.torch.job_data import JobData
from keepstep.edge.torch.live_state import TorchState
from keepstep.edge.torch.loader import Loader
from keepstep.edge.torch.membership import membership
from keepstep.edge.torch.opening_lines import position_line, protected_line, unserved_line
from keepstep.edge.torch.process_groups import TorchGroups, gather_objects, process_group
from keepstep.edge.torch.state import Protected
from keepstep.errors import ConfigError, KeepstepError, StoreError, UnsavedError
from keepstep.model.events import WARNING
from keepstep.model.messages.keeper_rank import CheckpointDone
from keepstep.model.snapshot import Phase
from keepstep.runtime.job_name import default_job
from keepstep.runtime.keeper_search import KeeperSearches
from keepstep.runtime.rank.bootstrap import NodeFacts
from keepstep.runtime.rank.driver import Driver
from keepstep.runtime.rank.identity import identity_of, place_of_newcomer
from keepstep.runtime.rank.joining import Joined, Joining
from keepstep.runtime.rank.rank import Rank, Stage
from keepstep.runtime.rank.step import Step
from keepstep.runtime.rank.world import RankIdentity, RankOptions, RankWorld

CAPTURE_NICE = 5  # the trainer computes first
PREEMPTED_WITHIN_S = 600.0
LAST_STEP_WITHIN_S = 60.0
LAST_STEP_TOLD_S = 5.0
LAST_STEP_AGAIN_S = 0.01  # what is waited for may be another rank's, which nobody tells

_current: Job | None = None


def _before_fork() -> None:
    if _current is not None and not _current.closed:
        _current._preemption.before_fork()


def _after_fork_in_parent() -> None:
    if _current is not None and not _current.closed:
        _current._preemption.after_fork_in_parent()


def _after_fork_in_child() -> None:
    global _current
    if _current is not None and not _current.closed:
        _current._leave_to_parent()
    _current = None


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)

# Copied by every new Job: the one way to hear phases that pass before `protect` returns (restore).
phase_listeners: list[Callable[[Phase, int], None]] = []


def protect(
    config: Config | Mapping[str, Any] | None = None, /, *nameless: Any, **stateful: Any
) -> Job:
    """Protect a training's state, restoring it first if there is something to restore.

    config: a `Config` or a dict of its fields; None takes everything from `KEEPSTEP_*` variables
        and the defaults.
    stateful: anything with `state_dict()` and `load_state_dict()`, modules, optimizers, tensors,
        generators (restored in place), lists, tuples and dicts of all those, picklable values
        (restored in place where they can be, and always through `job.state`). Random states are
        always included.

    Returns the `Job` whose `steps` drives the loop. All ranks must call it; it waits for all of
    them.

    Raises ConfigError (unknown or impossible settings), MemoryBudgetError (the slots do not fit),
    IdentityError (another job's or a living rank's memory), LayoutError (the saved state has
    another shape: nothing is loaded, nothing is removed), KeeperError.
    """
    try:
        return _protect(config, nameless, stateful)
    except KeepstepError:
        _tell_agent_if_it_ends()
        raise


def _protect(
    config: Config | Mapping[str, Any] | None,
    nameless: tuple[Any, ...],
    stateful: Mapping[str, Any],
) -> Job:
    global _current
    if _current is not None and not _current.closed:
        raise ConfigError(
            "protect() was called twice: expected one call that names everything, or "
            "job.close() in between"
        )
    _check_names(config, nameless, stateful)
    settings = resolve(config, os.environ, default_job(sys.argv))
    check_rules(settings.keep)  # a wrong rule is an error now, not at the first checkpoint
    check_needs(settings)
    who = identity_of(settings.job, settings.arena_dir, os.environ, process_group(), gather_objects)
    trusted = settings.trusted_types.replace(",", " ").split()
    protected = Protected.of(stateful, settings.lazy, trusted)
    claim_job_dir(settings.job_dir)
    journal = FileJournal(settings.journal_path, f"rank {who.rank}")
    speak_of_training(settings.log, speaks=who.rank == 0)
    _current = Job(settings, who, protected, journal)
    return _current


def _tell_agent_if_it_ends() -> None:
    """The program may mend what was wrong and go on. If not, the error is what it ended of."""
    before = sys.excepthook

    def told(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        write_error_file(error, os.environ)
        before(kind, error, trace)

    sys.excepthook = told


def _check_names(config: Any, nameless: tuple[Any, ...], stateful: Mapping[str, Any]) -> None:
    """Raises ConfigError when what should have a name has none, or the other way round."""
    if nameless or not (config is None or isinstance(config, (Config, Mapping))):
        raise ConfigError(
            "protect() takes what it protects by name; write protect(model=model, "
            "optimizer=optimizer), and a Config, if any, in front of them"
        )
    if "config" in stateful:
        raise ConfigError(
            "protect() takes its settings without a name, in front; write protect("
            "keepstep.Config(...), model=model). To protect an object called config, give it "
            "another name"
        )


class Job:
    """A protected training. Made by `protect`."""

    def __init__(
        self, settings: Settings, who: RankIdentity, protected: Protected, journal: FileJournal
    ) -> None:
        self.settings = settings
        self.closed = False
        self.phase_listeners = list(phase_listeners)
        self._who = who
        self._protected = protected
        self._journal = journal
        self._loss: Any = None
        self._finished = False
        self._failure: str | None = None
        self._open_step: tuple[Step, int] | None = None  # and when it began
        self._data = JobData(protected, who.world_size, journal)
        self._driver = Driver(lambda: give_way_in_thread(CAPTURE_NICE))
        try:
            self._world = _world(settings, who, protected, journal, self._driver)
            self._rank = self._join()
        except BaseException:  # so that the program may mend what was wrong and call it again
            self._driver.close()
            raise
        self._hook()

    def _join(self) -> Rank:
        """Until this rank stands where all others stand. Raises KeepstepError."""
        outcome: list[Joined | KeepstepError] = []

        def add(found: Joined | KeepstepError) -> None:
            outcome.append(found)
            self._driver.notify()

        options = RankOptions.of(self.settings, run_name(os.environ))
        facts = _node_facts(self.settings)
        joining = Joining(self._world, options, self._who, facts, add, add)
        self._driver.call(joining.begin)
        self._driver.wait(lambda: bool(outcome))
        joined = outcome[0]
        if isinstance(joined, KeepstepError):
            raise joined
        try:
            rank = self._rank = Rank(self._world, options, self._who, joined, self)
        except BaseException:
            joined.close()
            raise
        try:
            self._driver.call(rank.begin)
            self._wait_until_ready(rank)
        except BaseException:
            rank.abandon()
            raise
        if self._who.rank == 0:
            what = protected_line(self._who.job, self._protected, rank.plan)
            self._journal.record("protected", what)
            where = position_line(rank.resumed, rank.lost_steps)
            self._journal.record("goes-on", where, step=rank.step)
            unserved = unserved_line(self.settings.metrics_port, self._world.has_agent)
            if unserved:
                self._journal.record("no-metrics", unserved, WARNING)
        return rank

    def _wait_until_ready(self, rank: Rank) -> None:
        self._driver.wait(lambda: rank.stage is not Stage.STARTING)
        if rank.error is not None:
            raise rank.error

    # -- the public face

    @property
    def state(self) -> dict[str, Any]:
        """The plain values given to `protect`, by name: read the restored ones here, assign new
        ones here."""
        return self._protected.values

    @property
    def step(self) -> int:
        """The last completed step; -1 before the first."""
        return self._rank.step

    @property
    def rank(self) -> int:
        """This process's number among all ranks."""
        return self._who.rank

    def steps(self, total_steps: int) -> Iterator[Step]:
        """Count the steps 0 .. total_steps - 1, from the one after the restored step.

        The end of the loop's body is the step boundary: the state there is what a restart will
        find. A step is an int; a body inside `with step:` is given up when another rank is lost,
        and the next step is then the first one to do again, in this process.

        Raises PeerLost when a rank is lost and the body was not inside `with step:`; KeeperError
        when there is no going on in this process.
        """
        self._open_step = None  # of a loop that was left in the middle of a body
        if self.step + 1 >= total_steps and self.rank == 0:
            why = (
                f"nothing is left to do: step {self.step} was done before, and {total_steps} are "
                "wanted; for more, ask for more steps, or start over"
            )
            self._journal.record("nothing-left", why, WARNING, step=self.step)
        while self.step + 1 < total_steps:
            self._wait_for_turn()
            if self.step + 1 >= total_steps:
                break
            step = self.step_begin()
            yield step
            if self.closed:
                return
            self.step_end(is_last=step == total_steps - 1)
        self._drain(self._rank.end_steps, within_s=60.0)
        self._finished = True

    def step_begin(self) -> Step:
        """The next step begins: for loops that are not yours, where `steps` cannot be used. Waits
        while a lost rank is replaced; the step is then the one to do again. Ends with `step_end`.

        Raises KeeperError when there is no going on in this process.
        """
        if self._open_step is not None:
            raise ConfigError(
                f"step_begin(): step {self._open_step[0]} has begun and not ended; expected "
                "step_end() before"
            )
        self._wait_for_turn()
        self._data.step_begins(self._rank.epoch, self._rank.resumed_at)
        number = self._driver.call(self._rank.begin_step)
        step = Step.of(number, self._body_entered, self._body_left)
        self._open_step = step, time.monotonic_ns()
        return step

    def step_end(self, is_last: bool = False) -> bool:
        """The step's boundary: the state now is what a restart will find. Call `close` behind the
        last one. `is_last`: this is known to be the last, which is captured in any case.

        Whether the step counts. It does not when a rank was lost and the body was inside
        `with step:`; then the next step is the same one again, from the restored state.

        Raises PeerLost when a rank is lost and the body was not inside `with step:`.
        """
        if self._open_step is None:
            raise ConfigError("step_end(): no step has begun; expected step_begin() before")
        step, began_ns = self._open_step
        self._open_step = None
        self._data.step_ends()
        step_ns = time.monotonic_ns() - began_ns
        if is_last:
            self._wait_for_room()
        return self._end_step(step, step_ns, is_last)

    def _wait_for_turn(self) -> None:
        rank = self._rank
        self._driver.wait(lambda: rank.may_begin_step() or rank.error is not None)
        if rank.error is not None:
            raise rank.error

    def _wait_for_room(self) -> None:
        """The last step is not skipped: wait until there is a slot for it."""
        began_s, is_told = time.monotonic(), False
        while (waited_s := time.monotonic() - began_s) < LAST_STEP_WITHIN_S:
            if self._driver.call(self._rank.may_end_last_step):
                return
            if waited_s >= LAST_STEP_TOLD_S and not is_told:
                is_told = True
                why = (
                    f"the last step, {self.step + 1}, waits for a free slot: other ranks have not "
                    f"captured what this one has. After {LAST_STEP_WITHIN_S:.0f} s it goes on "
                    "without"
                )
                self._journal.record("last-step-waits", why, WARNING, step=self.step + 1)
            self._driver.wait(lambda: False, LAST_STEP_AGAIN_S)

    def _drain(self, ask: Callable[[Callable[[], None]], None], within_s: float) -> bool:
        """Whether all that is being captured is sealed, or given up, in time. `ask`: the rank's
        method that says when."""
        over: list[bool] = []
        self._driver.call(ask, lambda: over.append(True))
        return self._driver.wait(lambda: bool(over), within_s)

    def _body_entered(self, step: int) -> None:
        self._driver.call(self._rank.body_entered, step)

    def _body_left(self) -> bool:
        return self._driver.call(self._rank.body_left)

    def _end_step(self, step: Step, step_ns: int, is_last: bool) -> bool:
        began_ns = time.perf_counter_ns()
        counts = self._driver.call(
            self._rank.end_step, step.entered, step.ended, step_ns, self._loss, is_last
        )
        if counts:
            self._rank.stalled(time.perf_counter_ns() - began_ns, is_boundary=True)
        return counts

    # -- its data

    def loader(self, dataloader: Any, name: str | None = None) -> Loader:
        """The batches of `dataloader`, from the restored place on: `next(data)` from epoch to
        epoch, or `for batch in data` for the rest of one. A batch belongs to the step in which it
        is taken.

        dataloader: torch's `DataLoader`, anything that keeps its own place (`state_dict()` and
            `load_state_dict()`, as torchdata's `StatefulDataLoader`), or what can be iterated
            again and again.
        name: by which a restart finds its place; without one the calls are counted.

        Raises ConfigError when it can be iterated only once, or when steps have begun.
        """
        return self._data.loader(dataloader, name, self.step)

    def places_own_data(self) -> None:
        """Say that the program puts its data back into place by itself (by the step's number, for
        instance): no warning about DataLoaders that are not `job.loader`'s."""
        self._data.places_itself()

    def report(self, **metrics: Any) -> None:
        """Tell the step's `loss` (a number or a one-element tensor; not read on this thread). It is
        shown by `keepstep status` and kept with the snapshot, for `best:loss:min:n` retention."""
        unknown = set(metrics) - set(METRICS)
        if unknown:
            raise ConfigError(f"report() expected {', '.join(METRICS)}, found {sorted(unknown)}")
        loss: Any = metrics.get("loss")
        self._loss = loss.detach() if hasattr(loss, "detach") else loss

    def enter(self, phase: str) -> None:
        """Say what the trainer is doing inside a step (`forward`, `backward`, `update`): shown by
        `keepstep status`."""
        try:
            value = Phase[phase.upper()]
        except KeyError:
            known = [p.name.lower() for p in Phase]
            raise ConfigError(f"enter() expected one of {known}, found {phase!r}") from None
        self._rank.announce(value, self.step + 1)

    def persist(self, wait: bool = False) -> Future[CheckpointDone]:
        """Ask for the last completed step (or a newer one) in the store. The future gives what
        became of it: `ok`, `step` and `why`.

        Where captures take longer than a step, a step may have been skipped. Then the next one that
        is captured is stored in its place; with `wait` there is none to wait for, and this raises.

        Raises StoreError when waiting and neither that step nor a newer one could be written.
        """
        step = self.step
        self._rank.announce(Phase.PERSIST, step)
        future = self._persist(step, "asked for by job.persist()", not (wait or self._finished))
        if wait:
            outcome = future.result()
            if not outcome.ok:
                is_skipped = outcome.step is not None and outcome.step < step
                hint = ". Without wait=True the next captured step is stored" if is_skipped else ""
                raise StoreError(f"step {step} could not be persisted: {outcome.why}{hint}")
        return future

    def _persist(
        self, step: int | None, why: str, steps_follow: bool = False
    ) -> Future[CheckpointDone]:
        future: Future[CheckpointDone] = Future()
        with self._driver.changed:
            self._rank.persist(step, why, future.set_result, steps_follow)
        return future

    def close(self, ok: bool = True) -> None:
        """The training is over: seal what is under way, write the last step to the store if there
        is one, release the memory.

        Raises UnsavedError when the last completed step cannot be written: the memory is kept then,
        as after any failure, and the same command goes on from it.

        Called by itself at interpreter exit when `steps` ran to its end; call it after leaving the
        loop early on purpose.
        """
        if self.closed:
            return
        self.closed = True
        self._preemption.uninstall()
        self._unhook()
        well = ok and self._failure is None
        why = self._failure or ("ended well" if ok else f"left after step {self.step}")
        closed: list[bool] = []
        self._driver.call(self._rank.close, well, why, lambda: closed.append(True))
        self._driver.wait(lambda: bool(closed))
        self._driver.close()
        if self._rank.unsaved:
            error = UnsavedError(self._rank.unsaved)
            write_error_file(error, os.environ)
            raise error

    # -- what the rank tells (`Trainer`)

    def announce(self, phase: Phase, step: int) -> None:
        for listener in self.phase_listeners:
            listener(phase, step)

    def changed(self) -> None:
        self._driver.notify()

    # -- hooks into the process

    def _hook(self) -> None:
        optimizers = self._protected.optimizers
        updated = self._protected.used_gradients.updated
        self._handles = [o.register_step_pre_hook(self._before_update) for o in optimizers]
        self._handles += [o.register_step_post_hook(updated) for o in optimizers]
        self._preemption = Preemption(self._preempted)
        self._preemption.install()
        self._excepthook = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self._at_exit)

    def _before_update(self, *_: Any) -> None:
        """In an optimizer's pre-step hook."""
        began_ns = time.perf_counter_ns()
        copy = self._rank.before_update()
        if copy is not None:
            copy.fence()
            self._driver.call(self._rank.fenced)
        self._rank.stalled(time.perf_counter_ns() - began_ns, is_boundary=False)

    def _unhook(self) -> None:
        self._data.end()
        for handle in self._handles:
            handle.remove()
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._excepthook
        atexit.unregister(self._at_exit)

    def _leave_to_parent(self) -> None:
        """In a forked child: its copies of locks and sockets would keep a killed parent looking
        alive."""
        self.closed = True
        self._preemption.after_fork_in_child()
        atexit.unregister(self._at_exit)
        self._rank.release()

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        is_interrupt = issubclass(kind, KeyboardInterrupt)
        self._failure = "interrupted" if is_interrupt else f"{kind.__name__}: {error}"
        write_error_file(error, os.environ)
        self._excepthook(kind, error, trace)

    def _at_exit(self) -> None:
        try:
            with contextlib.suppress(OSError):
                self.close(ok=self._finished)
        except UnsavedError as error:
            print(f"keepstep: {error}", file=sys.stderr, flush=True)
            exit_with(1)

    def _preempted(self) -> None:
        """On the signal thread: the newest committed step goes to the store, whatever the trainer's
        thread is doing."""
        if self._world.has_agent:
            return  # the agent ends the job, and the keeper writes the newest step then
        rank = self._who.rank
        why = f"rank {rank} received SIGTERM: persisting the newest step every rank holds"
        self._journal.record("preempted", why)
        asked = self._persist(None, f"rank {rank} received SIGTERM")
        outcome = asked.result(timeout=PREEMPTED_WITHIN_S)
        why = f"SIGTERM is answered: {outcome.why}"
        self._journal.record("preempted", why, ok=outcome.ok, step=outcome.step)


# -- this process's world


def _world(
    settings: Settings,
    who: RankIdentity,
    protected: Protected,
    journal: FileJournal,
    driver: Driver,
) -> RankWorld:
    place = place_of_newcomer(os.environ)
    objects = protected.parts().values()
    door = KeeperSocket(driver.loop, settings, RANK_WITH_KEEPER, journal.record)
    return RankWorld(
        clock=CLOCK,
        timers=driver.loop,
        memory=MEMORY,
        journal=journal,
        keepers=KeeperSearches(door, CLOCK, driver.loop),
        agents=NodeAgents(driver.loop, os.environ, PROCESS_WITH_AGENT, journal.record),
        live=TorchState(protected, who.rank, who.world_size, settings),
        groups=TorchGroups(membership, driver.trainer, objects, place is not None),
        trainer=driver.trainer,
        background=driver.background,
        aside=driver.aside,
        available_bytes=available_bytes,
        pid=os.getpid(),
        has_agent="KEEPSTEP_AGENT" in os.environ,
        takes_place_at=place,
        proof_threads=proof_threads(),
    )


def _node_facts(settings: Settings) -> NodeFacts:
    return NodeFacts(
        host=settings.host,
        rack=settings.rack,
        secret=settings.secret,
        encrypt=settings.encrypt,
        meeting_host=os.environ.get("MASTER_ADDR", ""),
        has_process_group=process_group() is not None,
        address_towards=address_towards,
        fresh_secret=secrets.token_hex(32),
    )
