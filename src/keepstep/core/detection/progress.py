"""Progress: which ranks of a node are late, since when, and what they have been doing meanwhile.

Comes in: at every tick each rank's status page and one look at its process; of suspects also its
process group and its stack. Goes out: one `Evidence` a rank. Learns how long each phase takes in
this job; decides nothing about anybody.

A phase may stall for a floor (`core/detection/deadlines.py`) or a multiple of what this job's own
steps took, whichever is longer: 5 medians until it is suspected, 5 times the 99.9th percentile
while quiet, 10 times while something runs, never more than the longest grace. Until `LEARNT_STEPS`
durations are known, and in phases that are no steps (first step, evaluation, persist, restore), the
long floors hold. That limits follow from the job's own iteration time instead of one constant is
Unicron's idea (arXiv 2401.00134).

Invariant: what passes while somebody is stopped, or while nobody looked, is neither learnt nor
counted against anybody.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

from keepstep.core.detection.deadlines import ASLEEP_TAILS, BUSY_TAILS, LATE_MEDIANS, Deadlines
from keepstep.model.diagnosis import Evidence, GroupSample, ProcessSample, Stack
from keepstep.model.snapshot import Phase, RankStatus
from keepstep.model.units import KIB, S_NS

STEPPING = frozenset(
    {Phase.STEP, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE, Phase.CAPTURE, Phase.SEAL}
)
HELD = frozenset({"stopped", "frozen"})

LEARNT_STEPS = 50
MEDIAN_STEPS = 5
REMEMBERED = 4096
ACTIVE_RATIO = 0.05  # of one core: watchdogs and progress threads that only poll stay below it
ACTIVE_BYTES_PER_S = 64 * KIB
ACTIVITY_NS = 5 * S_NS  # processor time is counted in ticks of 10 ms: shorter spans say little
UNSEEN = ProcessSample("unknown", 0, 0)
UNKNOWN_STACK = Stack("")


class Durations:
    """The newest `REMEMBERED` durations, and their quantiles."""

    def __init__(self) -> None:
        self._order: deque[int] = deque()
        self._sorted: list[int] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, duration_ns: int) -> None:
        if len(self._order) == REMEMBERED:
            del self._sorted[bisect_left(self._sorted, self._order.popleft())]
        self._order.append(duration_ns)
        insort(self._sorted, duration_ns)

    def quantile_ns(self, share: float) -> int:
        """0 when nothing is known; the longest where there are too few for the share."""
        return (
            self._sorted[min(len(self._sorted) - 1, int(share * len(self._sorted)))]
            if self._sorted
            else 0
        )


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a phase may stall: until it is suspected, and until it is called hung, quiet or
    not."""

    late_ns: int
    asleep_ns: int
    busy_ns: int


class StepRhythm:
    """How long things take in this job."""

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._steps = Durations()
        self._others: dict[Phase, Durations] = {}

    def learn_step(self, duration_ns: int) -> None:
        self._steps.add(duration_ns)

    def learn_phase(self, phase: Phase, duration_ns: int) -> None:
        self._others.setdefault(phase, Durations()).add(duration_ns)

    def patience(self, phase: Phase, first: bool) -> Patience:
        """`first`: no step has been completed in this life yet."""
        limits = self._deadlines
        known = self._steps if phase in STEPPING else self._others.get(phase, Durations())
        grace = first or phase not in STEPPING
        tail_ns = known.quantile_ns(0.999)
        late_ns = limits.grace_asleep_ns // 10
        if not grace and len(known) >= MEDIAN_STEPS:
            late_ns = max(limits.late_ns, LATE_MEDIANS * known.quantile_ns(0.5))
        if not limits.learns and not grace:
            return Patience(min(late_ns, limits.late_ns), limits.asleep_ns, limits.busy_ns)
        floors = (limits.asleep_ns, limits.busy_ns)
        if grace or len(known) < LEARNT_STEPS:
            floors = (limits.grace_asleep_ns, limits.grace_busy_ns)
        # Never beyond the longest grace: the process group's own timeout comes after it.
        asleep_ns = min(max(floors[0], ASLEEP_TAILS * tail_ns), limits.grace_busy_ns)
        busy_ns = min(max(floors[1], BUSY_TAILS * tail_ns), limits.grace_busy_ns)
        return Patience(min(late_ns, asleep_ns), asleep_ns, busy_ns)


@dataclass
class _Track:
    """One life of one rank."""

    since_ns: int  # it told of something new
    moved_ns: int  # or was seen to do something
    step_since_ns: int
    phase_since_ns: int
    mark: tuple[int, ...] = ()
    status: RankStatus | None = None
    sample: ProcessSample = UNSEEN
    stopped_since_ns: int | None = None
    first: bool = True
    spoilt: bool = True  # the step under way is no example of one
    exited: bool = False
    cpu: deque[tuple[int, int]] = field(default_factory=deque)
    cpu_ratio: float = 0.0
    group: tuple[int, GroupSample] | None = None
    wchan: str = ""
    stack: Stack = UNKNOWN_STACK
    # completed step and collective: what a step's count is measured from
    counted_from: tuple[int, int] = (0, 0)

    @property
    def phase(self) -> Phase:
        return self.status.phase if self.status else Phase.STARTING

    def shift(self, gap_ns: int) -> None:
        self.since_ns += gap_ns
        self.moved_ns += gap_ns
        self.step_since_ns += gap_ns
        self.phase_since_ns += gap_ns
        if self.stopped_since_ns is not None:
            self.stopped_since_ns += gap_ns
        self.spoilt = True
        self.cpu.clear()
        self.group = None


class Progress:
    """The ranks of one node."""

    def __init__(self, deadlines: Deadlines, node: int = 0) -> None:
        self.rhythm = StepRhythm(deadlines)
        self._deadlines, self._node = deadlines, node
        self._tracks: dict[int, _Track] = {}
        self._ticked_ns: int | None = None

    def begin(self, rank: int, now_ns: int) -> None:
        """A new life of that rank: nothing of the one before counts, nor of others that failed
        before it."""
        self._tracks = {
            r: track
            for r, track in self._tracks.items()
            if not track.exited or track.phase == Phase.DONE
        }
        self._tracks[rank] = _Track(now_ns, now_ns, now_ns, now_ns)

    def forget(self, rank: int) -> None:
        """It has exited."""
        if rank in self._tracks:
            self._tracks[rank].exited = True

    def tick(self, now_ns: int) -> None:
        """Before the looks of a tick. A long time without one means that we did not run ourselves,
        and says nothing about the ranks."""
        gap_ns = 0 if self._ticked_ns is None else now_ns - self._ticked_ns
        self._ticked_ns = now_ns
        if gap_ns > max(self._deadlines.stopped_ns // 2, 4 * self._deadlines.tick_ns):
            for track in self._tracks.values():
                track.shift(gap_ns)

    def observe(
        self, rank: int, status: RankStatus | None, sample: ProcessSample, now_ns: int
    ) -> None:
        """One look at the page and the process of a rank. A page of another life than the process's
        is None."""
        track = self._tracks[rank]
        before, track.status, track.sample = track.status, status, sample
        if status is not None:
            mark = (
                status.epoch,
                status.phase,
                status.step,
                status.completed_step,
                status.collective,
            )
            if mark != track.mark:
                track.mark, track.since_ns = mark, now_ns
                self._advanced(rank, before, status, now_ns)
        self._watch_state(track, sample, now_ns)
        if track.phase not in STEPPING or track.stopped_since_ns is not None:
            for other in self._tracks.values():  # they wait for this one
                other.spoilt = True

    def note(
        self, rank: int, group: GroupSample | None, wchan: str, stack: Stack | None, now_ns: int
    ) -> None:
        """What a closer look at a suspect has found."""
        track = self._tracks.get(rank)
        if track is None:
            return
        track.wchan = wchan
        track.stack = stack or track.stack
        if group is not None and track.group is not None and now_ns > track.group[0]:
            span_ns, cpu_ns = now_ns - track.group[0], group.cpu_ns - track.group[1].cpu_ns
            moved_bytes = group.io_bytes - track.group[1].io_bytes
            # A sum that has become smaller means that a child has ended: something happens there.
            if (
                min(cpu_ns, moved_bytes) < 0
                or cpu_ns >= ACTIVE_RATIO * span_ns
                or moved_bytes * S_NS >= ACTIVE_BYTES_PER_S * span_ns
            ):
                track.moved_ns = max(track.moved_ns, now_ns)
        if group is not None:
            track.group = (now_ns, group)

    def is_suspicious(self, now_ns: int) -> bool:
        """Whether any rank is late, stopped, or not there where others are."""
        late_ns: dict[tuple[Phase, bool], int] = {}  # ranks that step together wait for the same
        for track in self._tracks.values():
            phase = track.phase
            if track.exited or phase is Phase.DONE:
                continue
            if track.stopped_since_ns is not None:
                return True
            where = phase, track.first
            if where not in late_ns:
                late_ns[where] = self.rhythm.patience(phase, track.first).late_ns
            if now_ns - track.since_ns >= late_ns[where]:
                return True
        return False

    def evidence(self, now_ns: int) -> list[Evidence]:
        return [self._evidence(rank, track, now_ns) for rank, track in sorted(self._tracks.items())]

    def _advanced(
        self, rank: int, before: RankStatus | None, status: RankStatus, now_ns: int
    ) -> None:
        track = self._tracks[rank]
        # Ranks step together: one of them tells the rhythm, or as many would look like as many
        # steps.
        tells = rank == min([r for r, t in self._tracks.items() if not t.exited])
        if before is None or before.epoch != status.epoch:  # a new life, or a rollback
            track.step_since_ns, track.spoilt, track.first = now_ns, True, True
        if (
            before is None
            or status.collective < before.collective
            or status.completed_step < before.completed_step
        ):
            track.counted_from = (status.completed_step, status.collective)
        if before is not None and before.phase != status.phase:
            if (
                before.phase not in STEPPING
                and before.phase != Phase.DONE
                and track.stopped_since_ns is None
            ):
                self.rhythm.learn_phase(before.phase, now_ns - track.phase_since_ns)
            track.phase_since_ns = now_ns
        if (
            before is not None
            and before.epoch == status.epoch
            and status.completed_step != before.completed_step
        ):
            steps = status.completed_step - before.completed_step
            if steps > 0 and tells and not track.first and not track.spoilt:
                self.rhythm.learn_step((now_ns - track.step_since_ns) // steps)
            if steps > 0:
                track.first = False
            track.step_since_ns, track.spoilt = now_ns, False

    def _watch_state(self, track: _Track, sample: ProcessSample, now_ns: int) -> None:
        if sample.state not in HELD:
            track.stopped_since_ns = None
        elif track.stopped_since_ns is None:
            track.stopped_since_ns = now_ns
        track.cpu.append((now_ns, sample.cpu_ns))
        while len(track.cpu) > 2 and now_ns - track.cpu[1][0] >= ACTIVITY_NS:
            track.cpu.popleft()
        span_ns = now_ns - track.cpu[0][0]
        if span_ns >= ACTIVITY_NS:
            track.cpu_ratio = (sample.cpu_ns - track.cpu[0][1]) / span_ns
        is_moving = (
            sample.state == "running" or span_ns < ACTIVITY_NS or track.cpu_ratio >= ACTIVE_RATIO
        )
        track.moved_ns = now_ns if is_moving else max(track.moved_ns, track.since_ns)

    def _evidence(self, rank: int, track: _Track, now_ns: int) -> Evidence:
        status, patience = track.status, self.rhythm.patience(track.phase, track.first)
        stopped_ns = 0 if track.stopped_since_ns is None else now_ns - track.stopped_since_ns
        return Evidence(
            rank=rank,
            node=self._node,
            phase=track.phase,
            has_page=status is not None,
            completed_step=status.completed_step if status else -1,
            step=status.step if status else -1,
            collective=status.collective if status else 0,
            state="gone" if track.exited else track.sample.state,
            wchan=track.wchan or track.sample.wchan,
            cpu_ratio=round(track.cpu_ratio, 3),
            stalled_ns=now_ns - track.since_ns,
            quiet_ns=now_ns - max(track.since_ns, track.moved_ns),
            stopped_ns=stopped_ns,
            late_ns=patience.late_ns,
            asleep_ns=patience.asleep_ns,
            busy_ns=patience.busy_ns,
            counted_steps=status.completed_step - track.counted_from[0] if status else 0,
            counted=status.collective - track.counted_from[1] if status else 0,
            stack=track.stack.digest,
            waits=track.stack.waits,
        )
