"""Step clock: what a rank does itself in a step, by section, and what it waits for its peers.

    the trainer enters a section; collectives are under way, or none is; a step ends
    -> one record of sums a step (`edge/shm/step_work_page.py`)

While no collective is under way all time is the rank's own: whether it computes, sleeps or reads a
file, its peers will wait for it. While one is under way, only the time is in which it uses the
processor or is ready to: the rest it waits for them. So a rank that computes beside its
collectives, as DistributedDataParallel does, is not taken for one that waits, and no transport has
to tell who waited for whom. Where collectives are not seen, one may always be under way, but for
between two steps and in a loader.

Marks are made by the trainer's thread, and where collectives begin and end by any other: a few
microseconds each, a dozen a step, however many tensors there are. Decides nothing.

Invariant: the sections' own time and the waits add up to the wall time since the clock began.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from keepstep.model.step_work import GroupEntries, Section, StepWork

SECTIONS = len(Section)
UNTOLD = SECTIONS  # between a step's beginning and its body, if it has one
NO_PASS, FORWARD, BACKWARD = range(3)  # of a body
_ALONE = (Section.DATA, UNTOLD)  # where no collective is expected that is not seen


class FollowsSections(Protocol):
    """A clock of what is only ordered here."""

    def enter(self, section: int) -> None: ...

    def settle(self, section: int) -> None: ...


class StepClock:
    """Of one rank's trainer thread."""

    def __init__(
        self,
        wall_ns: Callable[[], int],
        cpu_ns: Callable[[], int],
        delay_ns: Callable[[], int],
        write: Callable[[StepWork], None],
        sees_collectives: bool = True,
        device: FollowsSections | None = None,
    ) -> None:
        """cpu_ns, delay_ns: the trainer thread's, asked from any thread. sees_collectives: `busy`
        is told of all of them. device: hears where the trainer is, too."""
        self._device = device
        self._wall_ns, self._cpu_ns, self._delay_ns = wall_ns, cpu_ns, delay_ns
        self._write = write
        self._lock = threading.RLock()  # a collective may end wherever an object is freed
        self._section = int(Section.HOOK)
        self._own = [0] * (SECTIONS + 1)
        self._cpu = [0] * (SECTIONS + 1)
        self._wait = 0
        self._pass = NO_PASS
        self._passes = [0, 0, 0]
        self._is_busy = False
        self._sees_collectives = sees_collectives
        self._tokens = self._micro_batches = 0
        self._wall_at, self._cpu_at = wall_ns(), cpu_ns()
        self._delay = [0] * (SECTIONS + 1)
        self._delay_at = delay_ns()

    # -- from any thread

    def busy(self, is_busy: bool) -> None:
        """A collective is under way now, or none is any more."""
        with self._lock:
            self._mark()
            self._is_busy = is_busy

    def backward_begun(self) -> None:
        """Gradients of what a forward pass gave are computed: until the next one begins, or the
        trainer is somewhere else."""
        with self._lock:
            self._mark()
            if self._section == Section.COMPUTE:
                self._pass = BACKWARD

    # -- on the trainer's thread

    def forward_begun(self) -> int:
        """A protected module is called. Whether within another one, for `forward_ended`."""
        with self._lock:
            self._mark()
            if self._section == UNTOLD:  # the body has begun
                self._settle(Section.COMPUTE)
            before = FORWARD if self._pass == FORWARD else NO_PASS
            if self._section == Section.COMPUTE:
                self._pass = FORWARD
            return before

    def forward_ended(self, before: int) -> None:
        """If it was called within another one, that goes on."""
        with self._lock:
            self._mark()
            if self._section == Section.COMPUTE:
                self._pass = before

    def enter(self, section: Section) -> int:
        """From now on it is there. Where it was before, for `back`."""
        with self._lock:
            self._mark()
            before = self._section
            self._go_to(int(section))
            return before

    def back(self, section: int) -> None:
        """It is where it was."""
        with self._lock:
            self._mark()
            self._go_to(section)

    def worked(self, tokens: int) -> None:
        """The program tells how much there was to do."""
        self._tokens += tokens

    def shared(self, micro_batches: int) -> None:
        """So many of the step's micro-batches are this rank's."""
        self._micro_batches += micro_batches

    def step_begun(self) -> None:
        """keepstep's part of the beginning is over. Whether data follows or the body is known when
        the latter is entered."""
        with self._lock:
            self._mark()
            self._go_to(UNTOLD)

    def body_entered(self) -> None:
        """What lay between was data."""
        with self._lock:
            self._mark()
            self._settle(Section.DATA)
            self._go_to(int(Section.COMPUTE))

    def in_body(self) -> None:
        """The trainer is in the body: a body that did not say so began with the step."""
        with self._lock:
            self._mark()
            self._settle(Section.COMPUTE)

    def step_ended(
        self, step: int, epoch: int, collectives: int, groups: tuple[GroupEntries, ...] = ()
    ) -> None:
        """The step counts, and what follows is the next one's data. collectives: entered by now;
        groups: of these, by process group."""
        with self._lock:
            self._mark()
            self._settle(Section.COMPUTE)
            self._section = int(Section.DATA)
            work = StepWork(
                step,
                epoch,
                self._wall_at,
                tuple(self._own[:SECTIONS]),
                tuple(self._cpu[:SECTIONS]),
                self._wait,
                tuple(self._delay[:SECTIONS]),
                collectives,
                self._tokens,
                self._micro_batches,
                groups=groups,
                forward_ns=self._passes[FORWARD],
                backward_ns=self._passes[BACKWARD],
            )
        self._write(work)

    def _go_to(self, section: int) -> None:
        self._section, self._pass = section, NO_PASS
        if self._device is not None:
            self._device.enter(section)

    def _settle(self, section: Section) -> None:
        """Time whose section was not known yet was that one's."""
        if self._device is not None:
            self._device.settle(int(section))
        own, computed, ready = self._own[UNTOLD], self._cpu[UNTOLD], self._delay[UNTOLD]
        if section is not Section.DATA and not self._sees_collectives:
            mine = min(own, computed + ready)
            own, self._wait = mine, self._wait + own - mine
        self._own[section] += own
        self._cpu[section] += computed
        self._delay[section] += ready
        self._own[UNTOLD] = self._cpu[UNTOLD] = self._delay[UNTOLD] = 0
        if self._section == UNTOLD:
            self._section = int(section)

    def _mark(self) -> None:
        """Charge what has passed since the last mark."""
        wall, cpu, delay = self._wall_ns(), self._cpu_ns(), self._delay_ns()
        passed, computed = wall - self._wall_at, cpu - self._cpu_at
        ready = delay - self._delay_at
        self._wall_at, self._cpu_at, self._delay_at = wall, cpu, delay
        self._cpu[self._section] += computed
        self._delay[self._section] += ready
        if not self._is_busy and (self._sees_collectives or self._section in _ALONE):
            self._charge(passed)
            return
        own = min(passed, computed + ready)
        self._charge(own)
        self._wait += passed - own

    def _charge(self, own: int) -> None:
        self._own[self._section] += own
        if self._section == Section.COMPUTE:
            self._passes[self._pass] += own
