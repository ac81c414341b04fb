"""Session: keepstep inside the trainer, and its public face.

`protect` finds who this rank is, joins the keeper, restores what all ranks agree on, makes the
slots and returns a `Job`. `Job.steps` counts steps; the end of a loop body is the step boundary,
where the state is captured.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from keepstep.config import Config, Settings, resolve
from keepstep.core.economics.retention import parse_rules
from keepstep.edge.os.error_file import write_last_words
from keepstep.edge.os.journal import Journal
from keepstep.edge.os.machine import available_bytes
from keepstep.edge.shm.collective_profile_page import rhythm_path
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import StatusPage
from keepstep.edge.torch import predict, restore
from keepstep.edge.torch.ddp_rebuild import renew
from keepstep.edge.torch.state import Protected
from keepstep.errors import ConfigError, IdentityError, KeeperError, StoreError
from keepstep.model.rhythm import NO_STEP
from keepstep.model.snapshot import Phase
from keepstep.model.units import human_ns
from keepstep.runtime.job_name import default_job
from keepstep.runtime.rank.bootstrap import count_here, meet, place_in_world, process_group
from keepstep.runtime.rank.capture import Capturing, Identity
from keepstep.runtime.rank.commit_view import Pages, Word
from keepstep.runtime.rank.keeper_client import Link
from keepstep.runtime.rank.preemption import Preemption
from keepstep.runtime.rank.regroup import Peers, Step
from keepstep.runtime.rank.restore import Resuming

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
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)

# Copied by every new Job: the one way to hear phases that pass before `protect` returns (restore).
phase_listeners: list[Callable[[Phase, int], None]] = []


def protect(config: Config | Mapping[str, Any] | None = None, /, **stateful: Any) -> Job:
    """Protect a training's state, restoring it first if there is something to restore.

    config: a `Config` or a dict of its fields; None takes everything from `KEEPSTEP_*` variables
        and the defaults.
    stateful: anything with `state_dict()` and `load_state_dict()`, modules, optimizers, tensors
        (restored in place), picklable values (restored in place where they can be, and always
        through `job.state`). Random states are always included.

    Returns the `Job` whose `steps` drives the loop. All ranks must call it; it waits for all of
    them.

    Raises ConfigError (unknown or impossible settings), MemoryBudgetError (the slots do not fit),
    IdentityError (another job's or a living rank's memory), LayoutError (the saved state has
    another shape: nothing is loaded, nothing is removed), KeeperError.
    """
    global _current
    if _current is not None and not _current.closed:
        raise ConfigError(
            "protect() was called twice: expected one call that names everything, or "
            "job.close() in between"
        )
    settings = resolve(config, os.environ, default_job(sys.argv, os.environ))
    parse_rules(settings.keep)  # a rule that cannot be is told now, not by the first checkpoint
    who = _identity(settings)
    journal = Journal(settings.journal_path, f"rank {who.rank}")
    _current = Job(settings, who, Protected.of(stateful, settings.lazy), journal)
    return _current


def _identity(settings: Settings) -> Identity:
    group = process_group()
    if group is not None:
        rank, world = group.get_rank(), group.get_world_size()
    else:
        rank, world = place_in_world(os.environ)
    told = os.environ.get("LOCAL_WORLD_SIZE")
    if told is None and group is not None and world > 1:
        return Identity(settings.job, os.getuid(), rank, world, count_here(settings.arena_dir))
    return Identity(settings.job, os.getuid(), rank, world, int(told or world))


class Job:
    """A protected training. Made by `protect`."""

    def __init__(
        self, settings: Settings, who: Identity, protected: Protected, journal: Journal
    ) -> None:
        self.settings, self.closed = settings, False
        self.phase_listeners = list(phase_listeners)
        self._who, self._protected, self._journal = who, protected, journal
        self._loss: Any = None
        self._stall_ns_total = self._stall_ns_last = 0
        self._finished = False
        self._failure: str | None = None
        self._peers = Peers(os.environ, who.rank, journal)
        # so that the program may mend what was wrong and call protect() again
        with contextlib.ExitStack() as undo:
            self._link = Link(
                settings,
                who.rank,
                who.world_size,
                journal,
                lambda slot, why: self._capturing.damaged(slot, why),
            )
            undo.callback(self._link.end)
            if who.has_many_nodes and "KEEPSTEP_AGENT" not in os.environ:
                meet(self._link, settings, who)
            self._page = self._own_page()
            undo.callback(self._page.close)
            outlook = (
                Word(MEMORY, settings.job_dir)
                if who.has_many_nodes
                else Pages(MEMORY, settings.job_dir, who.world_size)
            )
            on_change = self._link.changed if who.has_many_nodes else lambda: None
            self._capturing = Capturing(
                settings, who, self._page, outlook, journal, self._announce, on_change
            )
            undo.callback(self._capturing.close)
            undo.callback(self._peers.close)
            self._resuming = Resuming(
                settings,
                who,
                protected,
                self._page,
                self._capturing,
                self._link,
                self._peers,
                journal,
                self._announce,
            )
            self._resume()
            self._link.listen()
            self._make_slots()
            if who.has_many_nodes and settings.interleave == "auto":
                self._peers.show_rhythm(rhythm_path(settings.job_dir, who.rank))
            if self._peers.newcomer:
                self._peers.join(os.environ)
            undo.pop_all()
        self._peers.tell_collectives(lambda sequence: self._page.publish(collective=sequence))
        self._hook()

    # -- the public face

    @property
    def state(self) -> dict[str, Any]:
        """The plain values given to `protect`, by name: read the restored ones here, assign new
        ones here."""
        return self._protected.values

    @property
    def step(self) -> int:
        """The last completed step; -1 before the first."""
        return self._step

    @property
    def rank(self) -> int:
        return self._who.rank

    def steps(self, total_steps: int) -> Iterator[Step]:
        """Count the steps 0 .. total_steps - 1, from the one after the restored step.

        The end of the loop's body is the step boundary: the state there is what a restart will
        find. A step is an int; a body inside `with step:` is given up when another rank is lost,
        and the next step is then the first one to do again, in this process.

        Raises PeerLost when a rank is lost and the body was not inside `with step:`; KeeperError
        when there is no going on in this process.
        """
        resumed_ns: int | None = time.monotonic_ns() if self._step >= 0 else None
        while self._step + 1 < total_steps:
            if self._peers.lost:
                self._regroup()
                resumed_ns = time.monotonic_ns()
                continue
            step = Step.of(self._step + 1, self._peers)
            began_ns = time.monotonic_ns()
            self._announce(Phase.STEP, step)
            self._peers.step_begins(step)
            yield step
            if self.closed:
                return
            if self._peers.lost and not self._peers.is_genuine(step):
                if not step.entered:
                    self._peers.check()
                continue
            self._boundary(int(step), time.monotonic_ns() - began_ns)
            if resumed_ns is not None:
                took_ns = time.monotonic_ns() - resumed_ns
                self._journal.record(
                    "next-step",
                    f"step {step} is done, {human_ns(took_ns)} after the restore",
                    step=int(step),
                    duration_ns=took_ns,
                )
                resumed_ns = None
        self._peers.step_begins(NO_STEP)
        self._capturing.drain(60.0)
        self._announce(Phase.DONE, self._step)
        self._finished = True

    def report(self, **metrics: Any) -> None:
        """Tell the step's `loss` (a number or a one-element tensor; not read on this thread). It is
        shown by `keepstep status` and kept with the snapshot, for `best:loss:min:n` retention."""
        unknown = set(metrics) - {"loss"}
        if unknown:
            raise ConfigError(f"report() expected loss, found {sorted(unknown)}")
        loss: Any = metrics.get("loss")
        self._loss = loss.detach() if hasattr(loss, "detach") else loss

    def enter(self, phase: str) -> None:
        """Say what the trainer is doing inside a step (`forward`, `backward`, `update`): shown by
        `keepstep status`."""
        try:
            value = Phase[phase.upper()]
        except KeyError:
            raise ConfigError(
                f"enter() expected one of {[p.name.lower() for p in Phase]}, found {phase!r}"
            ) from None
        self._announce(value, self._step + 1)

    def persist(self, wait: bool = False) -> Future[dict[str, Any]]:
        """Ask for the last completed step (or a newer one) in the store. The future gives {"ok",
        "step", "why"}.

        Raises StoreError when waiting and the checkpoint could not be written.
        """
        self._announce(Phase.PERSIST, self._step)
        future = self._link.persist(self._step, "asked for by job.persist()")
        if wait:
            outcome = future.result()
            if not outcome["ok"]:
                raise StoreError(f"step {self._step} could not be persisted: {outcome['why']}")
        return future

    def close(self, ok: bool = True) -> None:
        """The training is over: seal what is under way, write the last step to the store if there
        is one, release the memory.

        Called by itself at interpreter exit when `steps` ran to its end; call it after leaving the
        loop early on purpose.
        """
        if self.closed:
            return
        self.closed = True
        self._preemption.uninstall()
        self._unhook()
        self._capturing.drain(60.0)
        if ok and self._failure is None and self.settings.store is not None and self._step >= 0:
            outcome = self._link.persist(self._step, "the end of the job").result()
            if not outcome["ok"]:
                self._journal.record(
                    "persist-failed", f"the last step is not in the store: {outcome['why']}"
                )
        self._capturing.stop()
        self._summarize()
        self._page.publish(phase=Phase.DONE)
        self._link.goodbye(
            ok and self._failure is None,
            self._failure or ("ended well" if ok else f"left after step {self._step}"),
        )
        self._link.end()
        # no collective touches the page from here on
        self._peers.close(ok and self._failure is None)
        self._capturing.close()
        self._page.close()

    def _summarize(self) -> None:
        page = self._page.read()
        if page is None:
            return
        seen = max(1, page.captured_steps + page.skipped_steps + page.torn_steps)
        counts = {
            "captured_steps": page.captured_steps,
            "skipped_steps": page.skipped_steps,
            "torn_steps": page.torn_steps,
        }
        stall_ns = self._stall_ns_total // seen
        self._journal.record(
            "summary",
            f"{page.captured_steps} steps captured, {page.skipped_steps} skipped, "
            f"{page.torn_steps} torn; "
            f"the trainer waited {human_ns(stall_ns)} a step",
            stall_ns_per_step=stall_ns,
            **counts,
        )

    # -- joining and restoring

    def _own_page(self) -> StatusPage:
        page = StatusPage.own(MEMORY, self.settings.job_dir, self._who.rank)
        if page is None:
            raise IdentityError(
                f"rank {self._who.rank} of job {self._who.job!r} is already running in "
                "another process; wait for it to end, "
                "or give this run a name of its own (job=... or KEEPSTEP_JOB)"
            )
        return page

    def _regroup(self) -> None:
        """A rank is lost and this one stays: back to what all have, in this process."""
        self._capturing.drain(60.0)
        try:
            self._peers.meet_again(self._resume)
        except (KeeperError, RuntimeError):
            self._peers.unable()
            raise
        renew(self._protected.objects.values())

    def _resume(self, given_up: Callable[[], bool] = lambda: False) -> None:
        agreed = self._resuming.resume(given_up)
        if agreed is not None:
            self._step, self._epoch = agreed

    def _make_slots(self) -> None:
        state = self._protected.gather()
        coming = [predict.coming_bytes(o) for o in self._protected.optimizers]
        # A tensor of optimizer state costs its alignment, a manifest entry and a place in the tree.
        entries = len(state.items) * (4 if any(coming) else 1)
        payload = state.payload_bytes + sum(c or 0 for c in coming) + 256 * entries
        why = self._capturing.prepare(
            payload, 400 * entries, MEMORY.free_bytes(self.settings.arena_dir), available_bytes()
        )
        unknown = (
            ""
            if None not in coming
            else "; an optimizer's coming state is unknown, its slots may grow after the first step"
        )
        self._journal.record("slots-made", why + unknown)
        for caveat in (
            restore.caveats(self._protected, self._who.world_size) if self._who.rank == 0 else ()
        ):
            self._journal.record("caveat", caveat, logging.WARNING)
        self._capturing.start()

    # -- every step

    def _boundary(self, step: int, step_ns: int) -> None:
        began_ns = time.perf_counter_ns()
        self._step = step
        self._page.publish(completed_step=step, step_ns_last=step_ns)
        self._capturing.boundary(step, self._epoch, self._protected, self._loss)
        every = self.settings.persist_every_steps
        if self.settings.store and every and (step + 1) % every == 0 and self._who.rank == 0:
            self._link.persist(step, f"every {every} steps")
        self._stalled(time.perf_counter_ns() - began_ns, first=True)

    def _fence(self, *_: Any) -> None:
        self._peers.check()
        began_ns = time.perf_counter_ns()
        self._capturing.fence()
        self._stalled(time.perf_counter_ns() - began_ns, first=False)

    def _stalled(self, stall_ns: int, first: bool) -> None:
        self._stall_ns_total += stall_ns
        self._stall_ns_last = stall_ns if first else self._stall_ns_last + stall_ns
        self._page.publish(stall_ns_total=self._stall_ns_total, stall_ns_last=self._stall_ns_last)

    def _announce(self, phase: Phase, step: int) -> None:
        if self.closed:
            return
        if phase not in (Phase.CAPTURE, Phase.SEAL):  # those happen beside the trainer's own phase
            self._page.publish(phase=phase, step=step)
        for listener in self.phase_listeners:
            listener(phase, step)

    # -- hooks into the process

    def _hook(self) -> None:
        self._handles = [o.register_step_pre_hook(self._fence) for o in self._protected.optimizers]
        self._preemption = Preemption(self._preempted)
        self._preemption.install()
        self._excepthook = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self._at_exit)

    def _unhook(self) -> None:
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
        self._page.close()
        self._capturing.close()
        self._link.release()
        self._peers.release()

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        self._failure = (
            "interrupted" if issubclass(kind, KeyboardInterrupt) else f"{kind.__name__}: {error}"
        )
        write_last_words(error, os.environ)
        self._excepthook(kind, error, trace)

    def _at_exit(self) -> None:
        with contextlib.suppress(OSError):
            self.close(ok=self._finished)

    def _preempted(self) -> None:
        """On the signal thread: the newest committed step goes to the store, whatever the trainer's
        thread is doing."""
        if "KEEPSTEP_AGENT" in os.environ:
            return  # the agent ends the job, and the keeper writes the newest step then
        self._journal.record(
            "preempted",
            f"rank {self._who.rank} received SIGTERM: persisting the newest step every rank holds",
        )
        outcome = self._link.persist(None, f"rank {self._who.rank} received SIGTERM").result(
            timeout=600
        )
        self._journal.record(
            "preempted",
            f"SIGTERM is answered: {outcome['why']}",
            ok=outcome["ok"],
            step=outcome["step"],
        )
