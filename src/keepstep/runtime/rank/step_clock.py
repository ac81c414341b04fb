"""Step clock: what a rank does itself in a step, by section, and what it waits for its peers.

    the trainer enters a section; collectives are under way, or none is; a step ends
    -> one record of sums a step (`edge/shm/step_work_page.py`)

While no collective is under way all time is the rank's own: whether it computes, sleeps or reads a
file, its peers will wait for it. While one is under way, only the time is in which it uses the
processor or is ready to: the rest it waits for them. So a rank that computes beside its
collectives, as DistributedDataParallel does, is not taken for one that waits, and no transport has
to tell who waited for whom. Where collectives are not seen, one may always be under way, but for
between two steps and in a loader.

Within the body a forward and a backward pass may be seen: their time is counted by itself besides.
On a device that may wait for others unseen, a pass is one only if no collective can have been
waited for in it: if none was entered from the beginning of the update before it until its end. What
has been entered before an update was waited for there.

Marks are made by the trainer's thread, and where collectives begin and end by any other: a few
microseconds each, a dozen a step, however many tensors there are. Decides nothing.

Invariant: the own time of all sections but the passes, and the waits, add up to the wall time since
the clock began.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from keepstep.model.step_work import GroupEntries, Section, StepWork

SECTIONS = len(Section)
UNTOLD = SECTIONS  # between a step's beginning and its body, if it has one
NO_PASS = -1  # beside the two that are sections
_ALONE = (Section.DATA, UNTOLD)  # where no collective is expected that is not seen
# Who ran all the time but this was kept waiting for no longer: to ask costs more than all else of
# a mark, and what is not asked now is in the next answer.
UNASKED_NS = 20_000


class FollowsSections(Protocol):
    """A clock of what is only ordered here."""

    def enter(self, section: int, part: int = NO_PASS) -> None: ...

    def disown(self, part: int) -> None: ...

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
        entered: Callable[[], int | None] | None = None,
    ) -> None:
        """cpu_ns, delay_ns: the trainer thread's, asked from any thread. sees_collectives: `busy`
        is told of all of them. device: hears where the trainer is, too. entered: where that one
        waits unseen, how many collectives were entered by now, if anybody knows."""
        self._device = device
        self._entered, self._entered_at_update = entered, None if entered is None else entered()
        self._wall_ns, self._cpu_ns, self._delay_ns = wall_ns, cpu_ns, delay_ns
        self._write = write
        self._lock = threading.RLock()  # a collective may end wherever an object is freed
        self._section = int(Section.HOOK)
        self._own = [0] * (SECTIONS + 1)
        self._cpu = [0] * (SECTIONS + 1)
        self._wait = 0
        self._pass = self._around_backward = NO_PASS
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
        """Gradients of what a forward pass gave are computed: until that ends, the next one begins,
        or the trainer is somewhere else."""
        with self._lock:
            self._mark()
            if self._section == Section.COMPUTE and self._pass != Section.BACKWARD:
                self._around_backward = self._pass
                self._go_on_in(Section.BACKWARD)

    def backward_ended(self) -> None:
        """All of them are there."""
        with self._lock:
            self._mark()
            if self._pass == Section.BACKWARD:
                self._go_on_in(self._around_backward)

    # -- on the trainer's thread

    def forward_begun(self) -> int:
        """A protected module is called. Whether within another one, for `forward_ended`."""
        with self._lock:
            self._mark()
            if self._section == UNTOLD:  # the body has begun
                self._settle(Section.COMPUTE)
            before = int(self._pass if self._pass == Section.FORWARD else NO_PASS)
            if self._section == Section.COMPUTE:
                self._go_on_in(Section.FORWARD)
            return before

    def forward_ended(self, before: int) -> None:
        """If it was called within another one, that goes on."""
        with self._lock:
            self._mark()
            if self._section == Section.COMPUTE:
                self._go_on_in(before)

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
            self._leave_pass()
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
            )
        self._write(work)

    def _go_to(self, section: int) -> None:
        self._leave_pass()
        if section == Section.UPDATE and self._entered is not None:
            self._entered_at_update = self._entered()
        self._section = section
        if self._device is not None:
            self._device.enter(section)

    def _go_on_in(self, part: int) -> None:
        """Of the body."""
        if part != self._pass:
            self._leave_pass()
        self._pass = part
        if self._device is not None:
            self._device.enter(self._section, part)

    def _leave_pass(self) -> None:
        """What was one is none where the device may have waited for others in it."""
        left, self._pass = self._pass, NO_PASS
        if left != NO_PASS and self._entered is not None and self._device is not None:
            entered = self._entered()
            if entered is None or entered != self._entered_at_update:
                self._device.disown(left)

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
        wall, cpu = self._wall_ns(), self._cpu_ns()
        passed, computed = wall - self._wall_at, cpu - self._cpu_at
        self._wall_at, self._cpu_at, ready = wall, cpu, 0
        if passed - computed > UNASKED_NS:
            delay = self._delay_ns()
            self._delay_at, ready = delay, delay - self._delay_at
        within = self._within()
        for section in within:
            self._cpu[section] += computed
            self._delay[section] += ready
        if not self._is_busy and (self._sees_collectives or self._section in _ALONE):
            own = passed
        else:
            own = min(passed, computed + ready)
            self._wait += passed - own
        for section in within:
            self._own[section] += own

    def _within(self) -> tuple[int, ...]:
        """The section, and the pass that is a part of it."""
        return (self._section,) if self._pass == NO_PASS else (self._section, self._pass)
