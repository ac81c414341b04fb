"""Pacing: lets the blocks of copies onto the link only where the trainers leave it idle.

Comes in: the collective profile pages of this node's ranks (shared memory: no message a chunk), and
the links' question whether so many bytes may go. Goes out: grants (`core/pacing/gate.py`), what is
planned (`interleave.json`, for people), what was done (`interleaved.json`, for metrics), and in the
journal why copies are interleaved or not.

The gate is open, and nothing is held back, where interleaving would not help: no rank has a
page, no collective was seen, there is no rhythm, or so little idle time that a copy would wait for
many steps. Where the collectives go over another interface, copies are spread evenly over half of a
step (`core/pacing/even_rate.py`). And what was held back for long goes whatever the rhythm says:
late protection is worse than a slower step.

Called by one thread at a time. Never waits, never sends. Invariant: as long as the gate is shut for
a rank, that rank trains.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from keepstep.core.pacing.bandwidth import LinkSpeed
from keepstep.core.pacing.even_rate import EvenRate, even_rate
from keepstep.core.pacing.gate import Grant, Room, Terms, grant, is_late, room
from keepstep.core.pacing.schedule import Plan, Reserve, plan_of
from keepstep.core.pacing.step_profile import FULL_STEPS, Profile, Rhythm, intersection
from keepstep.edge.shm.collective_profile_page import (
    COUNT_FILE,
    PLAN_FILE,
    CollectiveProfileReader,
    profile_path,
    write_word,
)
from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.slot import ranks_in
from keepstep.model.rhythm import NO_STEP, Interleaved, Pulse, Told
from keepstep.model.snapshot import Stamp
from keepstep.model.units import KIB, MIB, MS_NS, S_NS, human_bytes
from keepstep.model.wire import Flow
from keepstep.ports import Clock, Journal, Memory

LOOK_NS = 50 * MS_NS
FIND_NS = S_NS
# what has been counted is told so often, and so often it is seen whether the plan is still one for
# this link
COUNT_NS = S_NS
OTHER_LINK_RATIO = 0.05  # by which its speed differs from what was planned with
TELL_NS = 5 * S_NS  # a rhythm that changes all the time is not to fill the journal
PARTS = 4
MOST_RESERVE_BYTES = 16 * MIB  # what a channel may have unanswered anyway
RESERVE_NS = 8 * MS_NS  # of the link: what may meet a collective that begins early
LEAST_CHUNK_BYTES = 16 * KIB
# of which the acknowledgement may be held back for long (delayed ACK): not what the link makes wait
HELD_BACK_BYTES = 16 * KIB
TRACE = 4096
TARGETS = 6


@dataclass
class Watched:
    """One rank's page and what was learnt from it."""

    page: CollectiveProfileReader
    rhythm: Rhythm
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Sent:
    """A grant: when, for how many bytes, how many were on their way before them."""

    at_ns: int
    nbytes: int
    under_way_bytes: int


class Pacing:
    """Of one keeper, over all its links."""

    def __init__(
        self,
        job_dir: Path,
        hosts: Sequence[str],
        memory: Memory,
        clock: Clock,
        journal: Journal,
        interface_of: Callable[[str], str],
        reserve: Reserve | None = None,
    ) -> None:
        """hosts: the links' own addresses. interface_of: the network interface that has an address.
        reserve: what RESERVE_NS of the link are, in PARTS, unless given."""
        self._job_dir = job_dir
        self._hosts = hosts
        self._memory = memory
        self._clock = clock
        self._journal = journal
        self._interface_of = interface_of
        self._reserve = reserve
        self._watched: dict[int, Watched] = {}
        self._looked_ns = self._found_ns = -S_NS
        self._speed = LinkSpeed()
        # of each node: bytes under way, and when that was so
        self._flows: dict[int, tuple[int, int]] = {}
        self._round_trip_ns = 0
        self._was_busy = False
        self._step_bytes = 0  # that a step's copies take
        self._target: Stamp | None = None
        # of the last targets, the present one last
        self._target_bytes: deque[int] = deque([0], maxlen=TARGETS)
        self._open_because = "no rank has a page"
        # interfaces of the collectives alone: with any, copies have a network of their own
        self._elsewhere: set[str] = set()
        self._even = EvenRate()
        self._told: tuple[str, str, bool] | None = None
        self._told_ns = self._counted_ns = 0
        self._counted: Interleaved | None = None
        self._granted_bytes = Counter[str]()
        self._plans = self._planned_bytes_per_s = 0
        self.plan: Plan | None = None
        self.trace: deque[Sent] = deque(maxlen=TRACE)
        self.late = 0

    def expects(self, nbytes: int) -> None:
        """So many bytes are sent for a step."""
        if nbytes != self._step_bytes:
            self._step_bytes = nbytes
            self._replan()

    # -- the links ask

    def ask(self, nbytes: int, flow: Flow) -> tuple[int, int]:
        """See `edge.net.traffic.Gate`."""
        now_ns = self._clock.monotonic_ns()
        self._look(now_ns)
        pulses = [
            (watched.page.pulse(now_ns), watched.rhythm.profile)
            for watched in self._watched.values()
        ]
        under_way = self._under_way(
            flow, now_ns, any(pulse is not None and pulse.pending for pulse, _ in pulses)
        )
        rooms = [room(pulse, profile, now_ns) for pulse, profile in pulses]
        if self._elsewhere and (spread := self._spread(rooms, nbytes, now_ns)) is not None:
            found, rooms = spread, []
        else:
            rooms = [] if self._open_because else rooms
            found = grant(rooms, nbytes, under_way, self._terms())
        when = "free" if all(r.left_ns is None for r in rooms) else "idle"
        if not found.nbytes and is_late(
            self._age_steps(pulse for pulse, _ in pulses), self._step_ns
        ):
            self.late, when = self.late + 1, "late"
            found = grant([], nbytes, under_way, self._terms())
        if found.nbytes:
            self._granted_bytes[when] += found.nbytes
            self._flows[flow.node] = (flow.queued_bytes + found.nbytes, now_ns)
            self._target_bytes[-1] += found.nbytes
            if rooms:
                self.trace.append(Sent(now_ns, found.nbytes, under_way))
        return found.nbytes, found.wait_ns

    def _spread(self, rooms: Sequence[Room], nbytes: int, now_ns: int) -> Grant | None:
        """None: nobody trains, or how long a step is and what is sent for it nobody knows yet."""
        trains = any(r.left_ns is not None for r in rooms)
        rate = even_rate(self._step_bytes, self._step_ns) if trains else 0
        return self._even.grant(nbytes, rate, now_ns) if rate else None

    def _under_way(self, flow: Flow, now_ns: int, busy: bool) -> int:
        """Bytes on the link, of all channels: of this one as its socket says, of the others as they
        were, less what has drained since."""
        before, at_ns = self._flows.get(flow.node, (0, now_ns))
        alone, self._was_busy = not (busy or self._was_busy), busy
        if before and now_ns > at_ns and alone:  # beside a collective it tells nothing of the link
            self._speed.drained(
                before - flow.queued_bytes,
                now_ns - at_ns,
                emptied=flow.queued_bytes <= HELD_BACK_BYTES,
            )
        self._flows[flow.node] = (flow.queued_bytes, now_ns)
        self._round_trip_ns = flow.round_trip_ns
        rate = self._speed.bytes_per_s
        others = (
            max(0, left - rate * (now_ns - then) // S_NS)
            for node, (left, then) in self._flows.items()
            if node != flow.node
        )
        return flow.queued_bytes + sum(others)

    def _terms(self) -> Terms:
        cost = self._speed.cost(self._round_trip_ns)
        reserve = self._reserve or self._reserve_of(cost.bytes_per_s)
        return Terms(
            cost,
            reserve.chunk_bytes,
            reserve.nbytes,
            max(1, min(LEAST_CHUNK_BYTES, reserve.chunk_bytes) // 4),
        )

    def _reserve_of(self, bytes_per_s: int) -> Reserve:
        return Reserve(
            max(
                PARTS * LEAST_CHUNK_BYTES, min(MOST_RESERVE_BYTES, bytes_per_s * RESERVE_NS // S_NS)
            ),
            PARTS,
        )

    def _age_steps(self, pulses: Iterable[Pulse | None]) -> int:
        """How many steps the ranks have gone on since the present target's."""
        step = max((pulse.step for pulse in pulses if pulse is not None), default=NO_STEP)
        return 0 if self._target is None else step - self._target.step

    @property
    def _step_ns(self) -> int:
        """Of the rank with the longest steps; 0 before any is known."""
        return max((profile.step_ns for profile in self._profiles()), default=0)

    # -- what the ranks do

    def _look(self, now_ns: int) -> None:
        if now_ns - self._looked_ns < LOOK_NS:
            return
        self._looked_ns = now_ns
        if now_ns - self._found_ns >= FIND_NS:
            self._found_ns = now_ns
            self._find()
        changed = False
        for watched in self._watched.values():
            for step in watched.page.steps():
                watched.steps += 1
                changed |= watched.rhythm.saw(step)
        self._follow_target()
        self._elsewhere = set() if self._are_loopback else self._other_interfaces()
        self._open_because = self._why_open()
        due = now_ns - self._counted_ns >= COUNT_NS
        if changed or (due and self._is_other_link()):
            self._replan()
        if due:
            self._counted_ns = now_ns
            self._count()
        self._tell(now_ns)

    def _find(self) -> None:
        """The pages of the ranks that live here now."""
        for rank in [
            rank for rank, watched in self._watched.items() if not watched.page.is_there()
        ]:
            self._watched.pop(rank).page.close()
        for rank in ranks_in(self._memory, self._job_dir):
            if rank not in self._watched:
                path = profile_path(self._job_dir, rank)
                try:
                    page = CollectiveProfileReader(self._memory, path)
                    self._watched[rank] = Watched(page, Rhythm())
                except (OSError, ValueError):
                    continue

    def _follow_target(self) -> None:
        """What was sent for the last targets is what the next one will take."""
        try:
            page = HorizonPage(self._memory, self._job_dir, make=False)
        except (OSError, ValueError):
            return
        target = page.last().target
        page.close()
        if target != self._target:
            self._target = target
            whole = list(self._target_bytes)[1:]  # the first one had begun before
            if whole:
                self.expects(round(statistics.median(whole)))
            self._target_bytes.append(0)

    def _profiles(self) -> list[Profile]:
        return [w.rhythm.profile for w in self._watched.values() if w.rhythm.profile is not None]

    @property
    def _are_loopback(self) -> bool:
        """The links: they share no network with anything."""
        return all(host.startswith("127.") for host in self._hosts)

    @cached_property
    def _interfaces(self) -> set[str]:
        """Those that the copies go over."""
        return {self._interface_of(host) for host in self._hosts}

    def _other_interfaces(self) -> set[str]:
        """That the collectives go over and the copies do not."""
        found = {w.page.interface for w in self._watched.values() if w.page.interface}
        return found - self._interfaces

    def _why_open(self) -> str:
        """Why nothing is to be held back; empty when the ranks' rhythm counts."""
        if not self._watched:
            return "no rank tells of its collectives"
        own = ", ".join(self._hosts)
        if self._are_loopback:
            return f"the links are loopback ({own}): no network is shared"
        if self._elsewhere:
            copies_over = ", ".join(sorted(self._interfaces - {""})) or own
            return (
                f"the collectives go over {', '.join(sorted(self._elsewhere))}, the "
                f"copies over {copies_over}, spread over each step"
            )
        profiles = self._profiles()
        if profiles and all(p.collectives == 0 for p in profiles):
            return "no collective was seen"
        for rank, watched in self._watched.items():
            if watched.rhythm.profile is None and watched.steps >= FULL_STEPS:
                return f"rank {rank}: {watched.rhythm.why}"
        if self.plan is not None and self.plan.spread_steps is None:
            return f"there is too little idle time: {self.plan.why}"
        return ""

    def _is_other_link(self) -> bool:
        planned = self._planned_bytes_per_s
        return (
            self._speed.is_known
            and abs(self._speed.bytes_per_s - planned) > OTHER_LINK_RATIO * planned
        )

    def _replan(self) -> None:
        """For people, and to see whether it can be done at all."""
        profiles = self._profiles()
        if (
            len(profiles) < max(1, len(self._watched))
            or not self._step_bytes
            or not self._speed.is_known
        ):
            return
        terms, mu = self._terms(), min(p.mu for p in profiles)
        self._planned_bytes_per_s = terms.cost.bytes_per_s
        told = Told(
            open_because="",
            mu=mu,
            alpha_ns=terms.cost.alpha_ns,
            bytes_per_s=terms.cost.bytes_per_s,
            reserve_bytes=terms.reserve_bytes,
            chunk_bytes=terms.chunk_bytes,
            least_bytes=terms.least_bytes,
            step_bytes=self._step_bytes,
            late=self.late,
        )
        self.plan, self._plans = plan_of(told, intersection(profiles)), self._plans + 1
        self._open_because = self._why_open()
        self._write(PLAN_FILE, replace(told, open_because=self._open_because))

    def _count(self) -> None:
        if self.plan is None:
            return
        overflow_ns, granted = self.plan.overflow_ns, self._granted_bytes
        counted = Interleaved(
            plans=self._plans,
            idle_ns=sum(self.plan.budget_ns),
            used_ns=sum(self.plan.used_ns) - overflow_ns,
            overflow_ns=overflow_ns,
            idle_bytes=granted["idle"],
            late_bytes=granted["late"],
            free_bytes=granted["free"],
        )
        if counted != self._counted:
            self._counted = counted
            self._write(COUNT_FILE, counted)

    def _write(self, name: str, word: Told | Interleaved) -> None:
        write_word(self._memory, self._job_dir / name, word)

    def _tell(self, now_ns: int) -> None:
        """In the journal, when it is another story than before."""
        rhythm = next(
            iter(
                sorted(w.rhythm.why for w in self._watched.values() if w.rhythm.profile is not None)
            ),
            "",
        )
        changed = rhythm if rhythm.startswith("the rhythm has changed") else ""
        story = (self._open_because, changed, self.plan is not None)
        if story == self._told or not (self._open_because or rhythm):
            return  # of a rank that trains, there is nothing to tell before its rhythm is known
        if self._told is not None and now_ns - self._told_ns < TELL_NS:
            return
        self._told, self._told_ns = story, now_ns
        if self._open_because:
            why = f"copies are not interleaved: {self._open_because}"
        else:
            planned = (
                f"; {self.plan.why}, on a link of {human_bytes(self._speed.bytes_per_s)}/s"
                if self.plan is not None
                else ""
            )
            why = f"copies go where the trainers leave the network idle: {rhythm}{planned}"
        self._journal.record("interleave", why, interleaved=not self._open_because)
