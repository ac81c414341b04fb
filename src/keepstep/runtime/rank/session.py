"""Session: keepstep inside the trainer, and its public face.

`protect` finds who this rank is, joins the keeper, restores what all ranks agree on, makes the
slots and returns a `Job`. What a rank does is `rank.py`; the threads on which it does it are
`driver.py`'s; what a job offers, one module each, is in `job/`. Here the parts are put together,
and here stands what each method promises to a program. Nothing is decided here.

Invariant: at most one job of a process is open.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from keepstep.config import Config, Settings, resolve
from keepstep.core.economics.retention import check_rules
from keepstep.edge.os.error_file import write_error_file
from keepstep.edge.os.job_directory import claim_job_dir
from keepstep.edge.os.journal import FileJournal
from keepstep.edge.os.needs import check_needs
from keepstep.edge.os.priority import give_way_in_thread
from keepstep.edge.os.voice import speak_of_training
from keepstep.edge.torch.job_data import JobData
from keepstep.edge.torch.loader import Loader
from keepstep.edge.torch.micro_batches import MicroBatch
from keepstep.edge.torch.one_core import compute_on_one_core
from keepstep.edge.torch.passes import watch_passes
from keepstep.edge.torch.process_groups import gather_objects, process_group
from keepstep.edge.torch.state import Protected
from keepstep.errors import ConfigError, KeepstepError, UnsavedError
from keepstep.model.events import WARNING
from keepstep.model.messages.keeper_rank import CheckpointDone
from keepstep.model.snapshot import Phase
from keepstep.runtime.job_name import default_job
from keepstep.runtime.rank.driven_rank import DrivenRank
from keepstep.runtime.rank.driver import Driver
from keepstep.runtime.rank.entrance import (
    check_encrypt_is_heard,
    check_names,
    tell_agent_if_it_ends,
    unheard_options,
)
from keepstep.runtime.rank.identity import identity_of
from keepstep.runtime.rank.job.buddy_check import BuddyCheck
from keepstep.runtime.rank.job.checkpoint_requests import CheckpointRequests
from keepstep.runtime.rank.job.entry import join
from keepstep.runtime.rank.job.local_steps import LocalSteps
from keepstep.runtime.rank.job.micro_batches import MicroBatches
from keepstep.runtime.rank.job.optimizer_hooks import OptimizerHooks
from keepstep.runtime.rank.job.partial_sums import PartialSumsOfJob
from keepstep.runtime.rank.job.phases import Phases
from keepstep.runtime.rank.job.process_hooks import ProcessHooks
from keepstep.runtime.rank.job.reports import Reports
from keepstep.runtime.rank.job.step_loop import StepLoop
from keepstep.runtime.rank.process_world import process_world
from keepstep.runtime.rank.step import Step
from keepstep.runtime.rank.step_measure import measure_of
from keepstep.runtime.rank.step_numbers import NumbersOfProcess
from keepstep.runtime.rank.world import RankIdentity, RankOptions

CAPTURE_NICE = 5  # the trainer computes first

_current: Job | None = None


def _before_fork() -> None:
    if _current is not None and not _current.closed:
        _current._process.before_fork()


def _after_fork_in_parent() -> None:
    if _current is not None and not _current.closed:
        _current._process.after_fork_in_parent()


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
    """Protect a training's state, restoring it first if there is something to restore. All ranks
    must call it; it waits for all of them.

    Args:
        config: a `Config` or a dict of its fields; None takes everything from `KEEPSTEP_*`
            variables and the defaults.
        stateful: by name: anything with `state_dict()` and `load_state_dict()`, modules,
            optimizers, tensors, generators (restored in place), lists, tuples and dicts of all
            those, picklable values (restored in place where they can be, and always through
            `job.state`). Random states are always included.

    Returns:
        The `Job` whose `steps` drives the loop.

    Raises:
        ConfigError: unknown or impossible settings, or what cannot be protected.
        MemoryBudgetError: the slots do not fit.
        IdentityError: another job's, or a living rank's, memory.
        LayoutError: the saved state has another shape: nothing is loaded, nothing is removed.
        KeeperError: the keeper cannot be started, or there is no going on in this process.
    """
    try:
        return _protect(config, nameless, stateful)
    except KeepstepError:
        tell_agent_if_it_ends()
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
    check_names(config, nameless, stateful)
    settings = resolve(config, os.environ, default_job(sys.argv))
    check_rules(settings.keep)  # a wrong rule is an error now, not at the first checkpoint
    check_needs(settings)
    who = identity_of(settings.job, settings.arena_dir, os.environ, process_group(), gather_objects)
    if who.has_many_nodes:
        check_encrypt_is_heard(settings, os.environ)
    trusted = settings.trusted_types.replace(",", " ").split()
    protected = Protected.of(stateful, settings.lazy, trusted)
    claim_job_dir(settings.job_dir)
    journal = FileJournal(settings.journal_path, f"rank {who.rank}")
    if who.rank == 0:
        _tell_unheard(settings, who, journal)
    speak_of_training(settings.log, speaks=who.rank == 0)
    _current = Job(settings, who, protected, journal)
    return _current


def _tell_unheard(settings: Settings, who: RankIdentity, journal: FileJournal) -> None:
    """What code says that agents read, and have not heard."""
    unheard = unheard_options(settings, os.environ, nodes=2 if who.has_many_nodes else 1)
    if unheard:
        journal.record("option-unheard", unheard, WARNING)


def _begin_background() -> None:
    """On each thread that works beside the trainer."""
    give_way_in_thread(CAPTURE_NICE)
    compute_on_one_core()


class Job:
    """A protected training. Made by `protect`."""

    def __init__(
        self, settings: Settings, who: RankIdentity, protected: Protected, journal: FileJournal
    ) -> None:
        self.settings = settings
        self.closed = False
        self._who = who
        self._protected = protected
        self._journal = journal
        self._data = JobData(protected, who.world_size, journal)
        self._driver = driver = Driver(_begin_background)
        phases = Phases(phase_listeners, driver.notify)
        try:
            self._world = process_world(settings, who, protected, journal, driver)
            self._rank = rank = join(settings, who, protected, self._world, driver, phases)
        except BaseException:  # so that the program may mend what was wrong and call it again
            driver.close()
            raise
        driven = DrivenRank(rank, driver, self._world, RankOptions.of(settings), who)
        self._numbers = numbers = NumbersOfProcess(settings, who, protected, driven, journal)
        self._measure = measure = measure_of(settings, who, protected, journal)
        self._micro_batches = MicroBatches(
            protected, who.rank, who.world_size, journal, self._check_peers, measure.shared
        )
        self._partial_sums = PartialSumsOfJob(
            *(protected, who, settings, journal, self._check_peers, measure.shared),
            numbers.stand_down,
        )
        self._local_steps = LocalSteps(protected, who.world_size, settings, self._check_peers)
        self._reports = Reports(rank, measure)
        speaks, over = who.rank == 0, self._partial_sums.finish
        self._loop = StepLoop(
            *(rank, driver, self._data, numbers, measure, self._reports, journal),
            *(self._world.live, speaks, over),
        )
        kept_s = None if settings.store else settings.grace_s
        self._checkpoints = CheckpointRequests(rank, who.rank, driver, measure, journal, kept_s)
        self._updates = OptimizerHooks(protected, rank, driver, numbers, measure)
        if settings.slow_ranks != "off":
            self._updates.add(watch_passes(protected.parts().values(), measure))
        self._process = ProcessHooks(self._preempted, self._at_exit)
        self._data.restored(rank.step)

    # -- the values

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

    # -- its steps

    def steps(self, total_steps: int) -> Iterator[Step]:
        """Count the steps 0 .. total_steps - 1, from the one after the restored step.

        The end of the loop's body is the step boundary: the state there is what a restart will
        find. A step is an int; a body inside `with step:` is given up when another rank is lost,
        and the next step is then the first one to do again, in this process.

        Args:
            total_steps: how many there are in all, those of earlier lives included.

        Yields:
            The number of each step.

        Raises:
            PeerLost: a rank is lost and the body was not inside `with step:`.
            KeeperError: there is no going on in this process.
        """
        return self._loop.run(total_steps)

    def step_begin(self) -> Step:
        """The next step begins: for loops that are not yours, where `steps` cannot be used. Waits
        while a lost rank is replaced; the step is then the one to do again. Ends with `step_end`.

        Returns:
            The number of the step.

        Raises:
            ConfigError: a step has begun and not ended.
            KeeperError: there is no going on in this process.
        """
        return self._loop.begin()

    def step_end(self, is_last: bool = False) -> bool:
        """The step's boundary: the state now is what a restart will find. Call `close` behind the
        last one.

        Args:
            is_last: this is known to be the last, which is captured in any case.

        Returns:
            Whether the step counts. It does not when a rank was lost, or the step's numbers are
            wrong, and the body was inside `with step:`; then the next step is the same one again,
            from the restored state.

        Raises:
            ConfigError: no step has begun.
            PeerLost: a rank is lost and the body was not inside `with step:`.
            WrongNumbersError: numbers are wrong and there is no going on from them.
        """
        return self._loop.end(is_last)

    def _drain(self, ask: Callable[[Callable[[], None]], None], within_s: float) -> bool:
        """See `StepLoop.drain`: for tests and benchmarks, whose steps may be shorter than their
        captures."""
        return self._loop.drain(ask, within_s)

    def micro_batches(
        self, total: int, model: Any = None, in_order: bool = True
    ) -> Iterator[MicroBatch]:
        """This rank's share of the step's micro-batches, once a step, by all ranks alike: faster
        ranks have more, the global batch stays the same (docs/operations.md, "Slow ranks").

        Args:
            total: of all ranks together, at least two a rank if they are to be shared by speed.
            model: the DistributedDataParallel; None for those given to `protect`.
            in_order: gradients are added in one order, whoever has computed them: equal bits.

        Returns:
            This rank's micro-batches, each a number: what it is made of follows from the step and
            that number. Multiply its mean loss by its `weight`.

        Raises:
            ConfigError: no step has begun, or the ranks ask for different things.
            PeerLost: a rank is lost and the body was not inside `with step:`.
        """
        step, resumed_at = self._loop.open_step, self._rank.resumed_at
        return self._micro_batches.of_step(step, resumed_at, total, model, in_order)

    def partial_sum(
        self,
        need: int,
        wait_s: float = 0.0,
        late: str = "drop",
        model: Any = None,
        replay: str | os.PathLike[str] | None = None,
    ) -> Iterator[None]:
        """Compute this rank's gradient, once a step, by all ranks alike; behind the loop it is the
        mean of those that came in time. Where this rank was late in the step before, the loop's
        body is left out. Other numbers than with all (docs/operations.md, "Slow ranks").

        Args:
            need: so many ranks' gradients of the step are waited for: ranks minus backup workers.
            wait_s: and so long for the others.
            late: what becomes of the gradient of who came later: "drop", or "add" in the next step.
            model: the DistributedDataParallel; None for those given to `protect`.
            replay: a record (`partial-sums.jsonl`, beside the journal) that says who came, whatever
                time they take.

        Returns:
            One turn of the loop, or none.

        Raises:
            ConfigError: no step has begun, the ranks ask for different things, the process groups
                are torch's own, parameters are on a device, or `wrong_numbers` is `skip` or `stop`.
            PeerLost: a rank is lost and the body was not inside `with step:`.
        """
        step, epoch = self._loop.open_step, self._rank.epoch
        return self._partial_sums.of_step(step, epoch, need, wait_s, late, model, replay)

    def local_steps(self, every: int, model: Any = None) -> AbstractContextManager[None]:
        """Around forward and backward pass and update of a step, by all ranks alike: gradients are
        not reduced, and behind each `every`-th step parameters are averaged over all ranks. Other
        numbers than with a reduction in each step (docs/operations.md, "Slow ranks").

        Args:
            every: steps from one mean to the next.
            model: the DistributedDataParallel; None for those given to `protect`.

        Returns:
            What a `with` enters.

        Raises:
            ConfigError: no step has begun, sharded parameters, or `share_replicas` is on.
            PeerLost: a rank is lost and the body was not inside `with step:`.
        """
        return self._local_steps.of_step(self._loop.open_step, every, model)

    # -- its data

    def loader(self, dataloader: Any, name: str | None = None) -> Loader:
        """The batches of `dataloader`, from the restored place on: `next(data)` from epoch to
        epoch, or `for batch in data` for the rest of one. A batch belongs to the step in which it
        is taken.

        Args:
            dataloader: torch's `DataLoader`, anything that keeps its own place (`state_dict()` and
                `load_state_dict()`, as torchdata's `StatefulDataLoader`), or what can be iterated
                again and again.
            name: by which a restart finds its place; without one the calls are counted.

        Returns:
            The batches, without end by `next`, or those of an epoch by `for`.

        Raises:
            ConfigError: it can be iterated only once, or steps have begun.
        """
        return self._data.loader(dataloader, name, self.step)

    def places_own_data(self) -> None:
        """Say that the program puts its data back into place by itself (by the step's number, for
        instance): no warning about DataLoaders that are not `job.loader`'s."""
        self._data.places_itself()

    def buddy(self, model: Any, compute: Any, every_steps: int = 100) -> Any:
        """Have one rank's gradient computed by another one, too, every so many steps: what goes
        wrong before gradients are reduced, replicas cannot tell. `docs/detection.md` says how.

        Args:
            model: the DistributedDataParallel that is trained, without a communication hook.
            compute: `compute(model, batch)` gives the loss. It uses the model it is given, of
                random numbers torch's alone, and a batch is made of tensors.
            every_steps: how often.

        Returns:
            What is called in place of `compute`, `loss = check(batch)`; `backward` follows.

        Raises:
            ConfigError: another model, or a number below 1.
        """
        check = BuddyCheck(self._rank, self.rank, self._journal, self._driver.call)
        made, handles = check.make(model, compute, every_steps, self._protected.optimizers)
        self._updates.add(handles)
        return made

    # -- what it is told and asked for

    def report(self, **metrics: Any) -> None:
        """Tell of the step what a person or a rule wants to know of it.

        Args:
            metrics: `loss`, a number or a one-element tensor (not read on this thread), which is
                shown by `keepstep status` and kept with the snapshot, for `best:loss:min:n`; and
                `tokens`, how many this rank has worked on, so that one with more to do is not
                called slow.

        Raises:
            ConfigError: another name, or tokens that are no whole number.
        """
        self._reports.tell(metrics)

    def enter(self, phase: str) -> None:
        """Say what the trainer is doing inside a step: shown by `keepstep status`.

        Args:
            phase: `forward`, `backward` or `update`.

        Raises:
            ConfigError: another word.
        """
        self._reports.enter(phase)

    def persist(self, wait: bool = False) -> Future[CheckpointDone]:
        """Ask for the last completed step (or a newer one) in the store. Where captures take longer
        than a step, one may have been skipped. Then the next one that is captured is stored in its
        place; with `wait` there is none to wait for, and this raises.

        Args:
            wait: until it is there.

        Returns:
            A future of what became of it: `ok`, `step` and `why`.

        Raises:
            StoreError: waiting, and neither that step nor a newer one could be written.
        """
        return self._checkpoints.of_last_step(wait, steps_follow=not self._loop.is_finished)

    # -- its end

    def close(self, ok: bool = True) -> None:
        """The training is over: seal what is under way, write the last step to the store if there
        is one, release the memory. Called by itself at interpreter exit when `steps` ran to its
        end; call it after leaving the loop early on purpose.

        Args:
            ok: whether it ended well. If not, the memory is kept as after any failure.

        Raises:
            UnsavedError: the last completed step cannot be written: the memory is kept then, and
                the same command goes on from it.
        """
        if self.closed:
            return
        self.closed = True
        self._loop.close()
        self._process.ignore_preemption()
        self._data.end()
        self._measure.end()
        self._numbers.close()
        self._updates.remove()
        self._process.remove()
        failure = self._process.failure
        if ok and failure is None:
            self._partial_sums.finish()
        why = failure or ("ended well" if ok else f"left after step {self.step}")
        well = ok and failure is None
        closed: list[bool] = []
        self._driver.call(self._rank.close, well, why, lambda: closed.append(True))
        self._driver.wait(lambda: bool(closed))
        self._driver.close()
        if self._rank.unsaved:
            error = UnsavedError(self._rank.unsaved)
            write_error_file(error, os.environ)
            raise error

    def _leave_to_parent(self) -> None:
        """In a forked child: its copies of locks and sockets would keep a killed parent looking
        alive."""
        self.closed = True
        self._loop.close()
        self._process.after_fork_in_child()
        self._rank.release()

    # -- what its parts ask of each other

    def _check_peers(self) -> None:
        """Raises PeerLost when what came from them is worthless."""
        self._driver.call(self._rank.before_update)

    def _preempted(self) -> None:
        if not self._world.has_agent:  # which ends the job; the keeper writes the newest step then
            self._checkpoints.preempted()

    def _at_exit(self) -> None:
        self.close(ok=self._loop.is_finished)
