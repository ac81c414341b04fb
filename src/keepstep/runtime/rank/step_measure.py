"""Step measure: the step clock of this process, and all that tells it where the trainer is.

Comes in: that a step, a body or an update begins or ends, that a batch is taken, that collectives
are under way. Goes out: the rank's step work page. Where slow ranks are not looked for, or the page
cannot be made, nothing is measured.

Invariant: the clock is that of the thread that began the first step; it is made there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from keepstep.config import Settings
from keepstep.edge.os.thread_times import ThreadTimes
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.step_work_page import StepWorkWriter, work_path
from keepstep.edge.torch.device_marks import device_marks
from keepstep.edge.torch.loader import Loaders
from keepstep.edge.torch.membership import Membership, membership
from keepstep.edge.torch.process_groups import (
    all_groups_are_ours,
    entered_collectives,
    uses_device,
)
from keepstep.edge.torch.state import Protected
from keepstep.errors import ConfigError, MemoryBudgetError
from keepstep.model.events import WARNING
from keepstep.model.snapshot import Phase
from keepstep.model.step_work import Section, Timing
from keepstep.ports import DeviceMarks, Journal, Memory
from keepstep.runtime.rank.device_clock import DeviceClock
from keepstep.runtime.rank.step_clock import StepClock
from keepstep.runtime.rank.world import RankIdentity

APART = frozenset({Phase.EVALUATE, Phase.PERSIST})


class StepMeasure:
    """Of one rank. Everything but the end of collectives is told on the trainer's thread."""

    def __init__(
        self,
        memory: Memory,
        job_dir: Path,
        rank: int,
        membership: Membership,
        loaders: Loaders,
        journal: Journal,
        sees_collectives: Callable[[], bool],
        uses_device: Callable[[], bool],
        is_on: bool = True,
        marks_of_device: Callable[[], DeviceMarks | None] = lambda: None,
        entered: Callable[[], int | None] = lambda: None,
    ) -> None:
        """sees_collectives: whether all of this process's go through `membership`. uses_device:
        whether its trainer is ahead of what is computed. marks_of_device: by which that is
        measured. entered: how many collectives this process has entered, if that is known of groups
        that are not ours."""
        self._entered = entered
        self._marks_of_device = marks_of_device
        self._memory = memory
        self._path = work_path(job_dir, rank)
        self._membership = membership
        self._loaders = loaders
        self._journal = journal
        self._sees_collectives, self._uses_device = sees_collectives, uses_device
        self._begins = is_on
        self._clock: StepClock | None = None
        self._let_go: list[Callable[[], None]] = []
        self._before_take = int(Section.DATA)

    def begin(self) -> None:
        """A step is about to begin; the first one begins it all."""
        if not self._begins:
            return
        self._begins = False
        sees_collectives = self._sees_collectives()
        try:
            page = StepWorkWriter(self._memory, self._path)
        except (OSError, MemoryBudgetError) as error:
            why = f"what this rank does in its steps is not measured: {error}"
            self._journal.record("caveat", why, WARNING)
            return
        device = self._device_clock(page, sees_collectives)
        times = ThreadTimes()
        self._let_go = [page.close, times.close]
        write = page.write if device is None else device.step_ended
        entered = self._entered if device is not None and not sees_collectives else None
        self._clock = StepClock(
            *(time.monotonic_ns, times.cpu_ns, times.delay_ns, write),
            *(sees_collectives, device, entered),
        )
        if device is not None:
            self._let_go.insert(0, device.close)
            self._membership.on_wait = device.waits
        self._membership.on_busy = self._clock.busy
        self._loaders.on_take = self._take

    def _device_clock(self, page: StepWorkWriter, sees_collectives: bool) -> DeviceClock | None:
        """Where collectives are not seen, a device's time is as long as the slowest rank's, but for
        passes without any."""
        marks = self._marks_of_device() if sees_collectives or self._entered() is not None else None
        if marks is None:
            page.begin(Timing.UNSEEN if self._uses_device() else Timing.HOST)
            return None
        page.begin(Timing.DEVICE if sees_collectives else Timing.PASSES)
        return DeviceClock(marks, page.write)

    def end(self) -> None:
        """Nothing is measured any more."""
        self._begins = False
        if self._clock is None:
            return
        self._clock = None
        self._membership.on_busy = self._membership.on_wait = _nothing
        self._loaders.on_take = _nothing
        let_go, self._let_go = self._let_go, []
        for act in let_go:
            act()

    # -- where the trainer is

    def enter(self, section: Section) -> None:
        if self._clock is not None:
            self._clock.enter(section)

    def step_begun(self) -> None:
        if self._clock is not None:
            self._clock.step_begun()

    def body_entered(self) -> None:
        if self._clock is not None:
            self._clock.body_entered()

    def forward_begun(self) -> int:
        """Here and in the next ones: see `StepClock`."""
        return 0 if self._clock is None else self._clock.forward_begun()

    def forward_ended(self, before: int) -> None:
        if self._clock is not None:
            self._clock.forward_ended(before)

    def backward_begun(self) -> None:
        """From the thread that computes gradients."""
        clock = self._clock
        if clock is not None:
            clock.backward_begun()

    def backward_ended(self) -> None:
        """Likewise."""
        clock = self._clock
        if clock is not None:
            clock.backward_ended()

    def update_begun(self, *_: object) -> None:
        """The optimizer's step is called, before any hook of it."""
        if self._clock is not None:
            self._clock.in_body()
            self._clock.enter(Section.UPDATE)

    def before_update(self) -> None:
        """The optimizer's pre-step hook begins."""
        if self._clock is not None:
            self._clock.in_body()
            self._clock.enter(Section.HOOK)

    def updated(self, *_: object) -> None:
        """The optimizer's post-step hook."""
        self.enter(Section.COMPUTE)

    def announced(self, phase: Phase) -> None:
        """By the program, inside a step."""
        if self._clock is not None:
            self._clock.in_body()
            self._clock.enter(Section.APART if phase in APART else Section.COMPUTE)

    def worked(self, tokens: int) -> None:
        if self._clock is not None:
            self._clock.worked(tokens)

    def shared(self, micro_batches: int) -> None:
        if self._clock is not None:
            self._clock.shared(micro_batches)

    def step_ended(self, step: int, epoch: int) -> None:
        """It counts."""
        if self._clock is not None:
            members = self._membership
            self._clock.step_ended(step, epoch, members.entered, members.entered_by_group)

    def _take(self, begins: bool) -> None:
        """A batch is being taken from a loader, or has been."""
        if self._clock is None:
            return
        if begins:
            self._before_take = self._clock.enter(Section.DATA)
        else:
            self._clock.back(self._before_take)


def _nothing(_: bool) -> None:
    """Nobody wants to know any more."""


def measure_of(
    settings: Settings, who: RankIdentity, protected: Protected, journal: Journal
) -> StepMeasure:
    """This process's."""
    return StepMeasure(
        MEMORY,
        settings.job_dir,
        who.rank,
        membership,
        protected.loaders,
        journal,
        sees_collectives=all_groups_are_ours,
        uses_device=uses_device,
        marks_of_device=device_marks,
        entered=entered_collectives,
        is_on=settings.slow_ranks != "off",
    )


def as_count(told: object) -> int:
    """What a program tells of its tokens. Raises ConfigError for what is no number of them."""
    if isinstance(told, bool) or not isinstance(told, int) or told < 0:
        raise ConfigError(
            f"report() expected tokens= a whole number, 0 or more, found {told!r}"
            + ("; call .item() on a tensor" if hasattr(told, "item") else "")
        )
    return told
