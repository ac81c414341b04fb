"""Trainer: a rank that trains, as `runtime/rank/session.py`, `capturing.py` and `link.py` make it
behave, on a state the oracle knows.

Comes in: words of its keeper and of its agent, and the other ranks' states, by the `Gang` that
stands for their collectives. Goes out: slots and pages of the real format, in the memory of its
machine, and words to the keeper. What a step leaves is written in acts of their own, so that a kill
falls between any two of them, and within the last page too.

Not run here: torch, threads (the trainer's and the capturing one's acts are events of one process),
lazy copies and their fences, a state that grows, signals. The rules are the session's own:
`core/resume/slots.py`, `core/redundancy/memory_budget.py`, `runtime/rank/commit_view.py`,
`edge/shm/slot.py`, `edge/shm/status_page.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from keepstep.core.redundancy import memory_budget
from keepstep.core.resume.slots import Skip, choose
from keepstep.edge.shm.slot import Slot, slot_bytes, slot_path, slot_paths
from keepstep.edge.shm.status_page import StatusPage
from keepstep.errors import DamageError, MemoryBudgetError, StoreError
from keepstep.model.messages.keeper_rank import (
    Attach,
    CheckpointDone,
    FromRank,
    Goodbye,
    JoinVote,
    PageChanged,
    Released,
    SlotDamaged,
    StateLoaded,
    StateOffered,
    StateUnusable,
    ToRank,
    TrainingPermitted,
    VoteRefused,
    WantCheckpoint,
)
from keepstep.model.snapshot import Phase, SlotHeader, SlotState, SlotView, Stamp
from keepstep.model.topology import parse_policy
from keepstep.model.units import KIB, MS_NS, PAGE_BYTES, S_NS
from keepstep.model.wire import Part
from keepstep.runtime.rank.commit_view import Outlook, Pages, Word
from keepstep.sim.protocol.memory import SimMemory
from keepstep.sim.protocol.oracle import advance, mix

if TYPE_CHECKING:
    from keepstep.sim.protocol.job import Job
    from keepstep.sim.protocol.machine import Line
    from keepstep.sim.protocol.site import Site

MANIFEST = b'{"what": "a state of the simulation"}'
LAYOUT_HASH = "00" * 16
EMPTY_VIEW = SlotView(SlotState.EMPTY, Stamp(-1, 0))
RELEASE_NS = 5 * S_NS
TEAR_NS = 1000  # how long the last page of a snapshot takes


@dataclass(frozen=True, slots=True)
class Offer:
    """What the keeper offers."""

    number: int
    source: str
    stamp: Stamp


Members = dict[int, tuple["Rank", int, bytes]]  # by rank: who, into which step, with which state


class Gang:
    """The ranks of one life that train together: a step is over when all have entered it. A member
    that dies leaves the others waiting."""

    def __init__(self, job: Job, attempt: int) -> None:
        self._job, self.attempt = job, attempt
        self._entered: Members = {}
        self._random = job.world.stream(f"gang {attempt}")

    def enter(self, member: Rank, step: int, state: bytes) -> None:
        """`state` is what the member goes into this step with."""
        self._entered[member.rank] = (member, step, state)
        if len(self._entered) < self._job.world_size:
            return
        steps = {s for _, s, _ in self._entered.values()}
        if len(steps) > 1:
            at = ", ".join(f"rank {r} at {s}" for r, (_, s, _) in sorted(self._entered.items()))
            self._job.violate(
                "one stamp", f"ranks that train together stand at different steps: {at}"
            )
        mixed = (
            self._job.oracle.first()
            if step == 0
            else mix(s for _, (_, _, s) in sorted(self._entered.items()))
        )
        self._job.world.after(self._lasts_ns(), None, self._over, dict(self._entered), step, mixed)
        self._entered.clear()

    def _lasts_ns(self) -> int:
        step_ns = self._job.plan.step_ns
        return step_ns + self._random.randrange(step_ns // 4)

    def _over(self, members: Members, step: int, mixed: bytes) -> None:
        if any(not m.is_in(self) for m, _, _ in members.values()):
            return  # one died meanwhile, or gave the step up: nobody gets its result
        for rank, (member, _, _) in sorted(members.items()):
            member.process.after(
                self._random.randrange(MS_NS), member.stepped, self, step, mixed, rank
            )


class Rank:
    """One process. `newcomer`: the others are in the middle of the job, and it takes a dead one's
    place."""

    def __init__(self, site: Site, rank: int, gang: Gang, newcomer: bool, delay_ns: int) -> None:
        self.site, self.job, self.rank, self.newcomer = site, site.job, rank, newcomer
        self.process = site.machine.start(f"rank {rank}")
        self.memory = SimMemory(site.machine.files, self.process)
        self.exit_code: int | None = None
        self.able = False
        self.lost = False
        self.dies_torn = False
        self.trains = False
        self.epoch = 0
        self.step = -1
        self._gang: Gang | None = gang
        self._order: Gang | None = None
        self._line: Line | None = None
        self._join: JoinVote | None = None
        self._offer: Offer | None = None
        self._state = b""
        self._slots: list[Slot] = []
        self._views: list[SlotView] = []
        self._counts = {"captured_steps": 0, "skipped_steps": 0}
        self._busy_ns = 0
        self._made = False
        self._capturing = False
        self._ending = False
        self._said_bye = False
        self._tickets = itertools.count(1)
        self._waiting: dict[int, Callable[[bool, str], None]] = {}
        self._random = self.job.world.stream(f"{self.process.name} {gang.attempt}")
        self.process.after(delay_ns, self._begin)

    def is_in(self, gang: Gang) -> bool:
        return self.process.alive and self._gang is gang and self.trains

    # -- beginning

    def _begin(self) -> None:
        page = StatusPage.own(
            self.memory, self.site.settings.job_dir, self.rank, 0.0, self.site.machine.clock
        )
        if page is None:
            self.job.violate(
                "one writer",
                f"another process owns the page of rank {self.rank} on machine "
                f"{self.site.machine.number}",
            )
            return
        self._page = page
        job_dir = self.site.settings.job_dir
        many = self.job.plan.nodes > 1
        self._outlook: Outlook = (
            Word(self.memory, job_dir) if many else Pages(self.memory, job_dir, self.job.world_size)
        )
        self._slots = [self._open(path) for path in slot_paths(self.memory, job_dir, self.rank)]
        self._find_keeper(self._resume)

    def _open(self, path: Any) -> Slot:
        try:
            return Slot(self.memory, path)
        except DamageError:
            return Slot.create(self.memory, path, 1, 1)

    def _find_keeper(self, then: Callable[[], None]) -> None:
        def found(line: Line) -> None:
            self._line = line
            line.hear, line.gone = self._hear, self._keeper_gone
            then()

        self.site.ensure_keeper(self.process, found)

    def _keeper_gone(self) -> None:
        self._line = None
        if self._said_bye:
            self._leave(0)
            return
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            answer(False, "the keeper died meanwhile")
        if not self._ending:
            self._find_keeper(self._introduce)

    def _introduce(self) -> None:
        self._say(self._join or Attach(self.rank, self.job.world_size))

    def _say(self, message: FromRank) -> bool:
        return self._line is not None and self._line.send(message)

    # -- the vote

    def _resume(self) -> None:
        last = self._page.read()
        self.incarnation = last.incarnation + 1 if last else 1
        self._page.publish(
            **{
                "rank": self.rank,
                "world_size": self.job.world_size,
                "pid": self.site.pid(self.process),
                "incarnation": self.incarnation,
            },
            **{
                "epoch": last.epoch if last else 0,
                "phase": Phase.RESTORE,
                "completed_step": last.completed_step if last else -1,
            },
            **{"decided_step": -1, "slots": ()},
        )
        holds, foreign = self._verified()
        self._join = JoinVote(
            self.rank, self.job.world_size, self.incarnation, tuple(sorted(holds)), foreign
        )
        self.job.progress_ns = self.job.world.now_ns
        self.job.watch.joined(self)
        self._say(self._join)

    def _verified(self) -> tuple[dict[Stamp, int], int | None]:
        found: dict[Stamp, int] = {}
        self._views = [EMPTY_VIEW] * len(self._slots)
        for index, slot in enumerate(self._slots):
            try:
                header, _ = slot.verify_bytes()
            except (DamageError, LookupError):
                continue
            found[header.stamp] = index
            self._views[index] = SlotView(SlotState.SEALED, header.stamp)
        return found, None

    def _look_again(self) -> dict[Stamp, int]:
        for slot in self._slots:
            slot.close()
        paths = slot_paths(self.memory, self.site.settings.job_dir, self.rank)
        self._slots = [self._open(path) for path in paths]
        return self._verified()[0]

    def _hear(self, message: ToRank) -> None:
        match message:
            case CheckpointDone(ticket, ok, _, why):
                answer = self._waiting.pop(ticket, None)
                if answer:
                    answer(ok, why)
            case SlotDamaged(slot):
                self.process.after(MS_NS, self._recheck, slot)
            case Released():
                self._leave(0)
            case _ if self._join is None:
                return  # what was said about a vote that was given up
            case VoteRefused(why):
                self._fail(f"refused: {why}")
            case StateOffered():
                stamp = Stamp(message.step, message.epoch)
                offer = Offer(message.offer, message.source, stamp)
                self._busy_ns = max(self._busy_ns, self.job.world.now_ns) + self._random.randrange(
                    self.job.plan.load_ns
                )
                self.job.world.at(self._busy_ns, self.process, self._load, offer, self._join)
            case TrainingPermitted(epoch, _):
                self._go(epoch)

    def _load(self, offer: Offer, join: JoinVote) -> None:
        if self._join is not join:
            return
        self._offer = offer
        if offer.source == "memory":
            index = next(
                (
                    i
                    for i, v in enumerate(self._views)
                    if v == SlotView(SlotState.SEALED, offer.stamp)
                ),
                None,
            )
            own = index is not None
            if index is None:
                index = self._look_again().get(offer.stamp)
            if index is None:
                self._failed(offer, f"{offer.stamp} was to be brought here and is not in any slot")
                return
            self._load_slot(offer, index, own)
            return
        if offer.source == "store":
            try:
                self._state = self.job.store.read(offer.stamp.step, self.rank)
            except (DamageError, StoreError) as error:
                self._failed(offer, str(error))
                return
        elif self.lost or self.newcomer:
            self.job.refusals += 1
            self._fail(
                "a fresh start cannot be had in the middle of a job, all ranks have to start anew"
            )
            return
        else:
            self._state = b""
        self._forget_newer(None)
        self._loaded(offer)

    def _load_slot(self, offer: Offer, index: int, own: bool) -> None:
        slot = self._slots[index]
        try:
            header, _ = slot.verify_bytes()
            if header.stamp != offer.stamp:
                raise LookupError(f"expected {offer.stamp}, found {header.stamp}")
            self._state = bytes(slot.payload[: header.payload_bytes])
            slot.verify_bytes()
        except (DamageError, LookupError) as error:
            if own:
                self._ask_anew(index)
            else:
                self._failed(offer, str(error))
            return
        self._forget_newer(offer.stamp)
        self._loaded(offer)

    def _ask_anew(self, damaged: int) -> None:
        """What had proven proves no more: others may have a copy."""
        assert self._join is not None
        self._views[damaged] = EMPTY_VIEW
        holds = tuple(v.stamp for v in self._views if v.state is SlotState.SEALED)
        self._join = replace(self._join, holds=holds)
        self._say(self._join)

    def _loaded(self, offer: Offer) -> None:
        self.job.watch.loaded(self, offer.source, offer.stamp, self._state)
        self._say(StateLoaded(self.rank, offer.number))

    def _failed(self, offer: Offer, why: str) -> None:
        self._say(StateUnusable(self.rank, offer.number, why))

    def _forget_newer(self, stamp: Stamp | None) -> None:
        for index, (slot, view) in enumerate(zip(self._slots, self._views, strict=True)):
            if stamp is None or view.state is not SlotState.SEALED or view.stamp > stamp:
                slot.void()
                self._views[index] = EMPTY_VIEW
        self._page.publish(slots=tuple(self._views))

    def _go(self, epoch: int) -> None:
        assert self._offer is not None, "a permission without an offer"
        offer, self._join, self._offer = self._offer, None, None
        self.epoch, self.step = epoch, offer.stamp.step
        self._page.publish(
            epoch=epoch,
            phase=Phase.STARTING,
            step=self.step,
            completed_step=self.step,
            decided_step=self.step,
        )
        self.job.watch.went(self, offer.source, offer.stamp, epoch)
        if not self._made:
            try:
                self._make_slots()
            except MemoryBudgetError as error:
                self._fail(str(error))
                return
            self._made = True
        self.lost = self.newcomer = False
        self.trains = True
        self.site.agent_hears_regrouped(self)
        self._next_step()

    # -- slots

    def _make_slots(self) -> None:
        settings, local = self.site.settings, self.job.plan.ranks_per_node
        payload, manifest = self.job.oracle.nbytes(self.rank) + KIB, len(MANIFEST) + 4 * KIB
        each = slot_bytes(payload, manifest)
        own = sum(s.capacity for s in self._slots) * local + self._held_bytes()
        free = self.memory.free_bytes(settings.arena_dir)
        many = self.job.plan.nodes > 1
        held = memory_budget.held_slots(parse_policy(settings.redundancy)) if many else 0.0
        plan = memory_budget.plan(
            *(
                each,
                local,
                free + own,
                free + own,
                settings.slots,
                settings.store is not None,
                str(settings.arena_dir),
            ),
            held=held,
            many_nodes=many,
        )
        for index in range(plan.slots):
            if index < len(self._slots):
                fits = (
                    self._slots[index].capacity >= payload
                    and self._slots[index].manifest_capacity >= manifest
                )
                if fits or self._views[index].state is SlotState.SEALED:
                    continue
            fresh = Slot.create(
                self.memory, slot_path(settings.job_dir, self.rank, index), payload, manifest
            )
            if index < len(self._slots):
                self._slots[index].close()
                self._slots[index] = fresh
            else:
                self._slots.append(fresh)
                self._views.append(EMPTY_VIEW)
        self._page.publish(slots=tuple(self._views))

    def _held_bytes(self) -> int:
        """What the keeper holds for others already: it is in the plan, and no longer in what is
        free."""
        files, job_dir = self.site.machine.files, self.site.settings.job_dir
        held = (f"{job_dir}/held/", f"{job_dir}/parity/")
        return sum(len(file.data) for path, file in files.every_file() if path.startswith(held))

    # -- steps

    def _next_step(self) -> None:
        if self.step + 1 >= self.job.plan.steps:
            self._end_soon()
            return
        self._page.publish(phase=Phase.STEP, step=self.step + 1)
        assert self._gang is not None
        self._gang.enter(self, self.step + 1, self._state)

    def stepped(self, gang: Gang, step: int, mixed: bytes, rank: int) -> None:
        """The collectives of that step are over."""
        if not self.is_in(gang):
            return
        self._state = advance(mixed, rank, step, self.job.oracle.nbytes(rank))
        self.step = step
        self.job.progress_ns = self.job.world.now_ns
        self.job.watch.stepped(self, step)
        self._page.publish(completed_step=step)
        self._boundary(step)
        self.able = self.job.plan.stays
        every = self.site.settings.persist_every_steps
        if self.site.settings.store and every and (step + 1) % every == 0 and self.rank == 0:
            self._persist(step, f"every {every} steps", _nobody)
        self._next_step()

    def _boundary(self, step: int) -> None:
        views = [self._pinned(i, v) for i, v in enumerate(self._views)]
        horizon, is_hopeless = self._outlook.look(self.epoch)
        decision = choose(step, views, horizon, is_hopeless)
        if isinstance(decision, Skip):
            self._skip(step)
            return
        slot, payload = self._slots[decision.slot], len(self._state)
        if slot.capacity < payload or slot.manifest_capacity < len(MANIFEST):
            slot = self._replace(decision.slot)
        if not slot.lock(exclusive=True):
            self._skip(step)
            return
        stamp, old = Stamp(step, self.epoch), self._views[decision.slot]
        if old.state is SlotState.SEALED:
            self.job.watch.overwrites(self, old.stamp)
        slot.begin(self.job.job_hash, self.rank, self.job.world_size, self.incarnation, stamp)
        self._set_view(decision.slot, SlotView(SlotState.WRITING, stamp), decided_step=step)
        self._capturing = True
        self._act(self._copy_half, decision.slot, stamp, self._state)

    def _replace(self, index: int) -> Slot:
        payload, manifest = self.job.oracle.nbytes(self.rank) + KIB, len(MANIFEST) + 4 * KIB
        fresh = Slot.create(
            self.memory, slot_path(self.site.settings.job_dir, self.rank, index), payload, manifest
        )
        self._slots[index].close()
        self._slots[index] = fresh
        return fresh

    def _pinned(self, index: int, view: SlotView) -> SlotView:
        if view.state is not SlotState.SEALED:
            return view
        slot = self._slots[index]
        if slot.lock(exclusive=True):
            slot.unlock()
            return view
        return view._replace(pinned=True)

    def _skip(self, step: int) -> None:
        self._counts["skipped_steps"] += 1
        self._page.publish(decided_step=step, skipped_steps=self._counts["skipped_steps"])
        self.job.watch.skipped(self, step)
        self._changed()

    def _act(self, act: Callable[..., None], *args: Any) -> None:
        self.process.after(1 + self._random.randrange(self.job.plan.act_ns), act, *args)

    def _copy_half(self, index: int, stamp: Stamp, state: bytes) -> None:
        half = len(state) // 2
        self._slots[index].payload[:half] = state[:half]
        self._act(self._copy_rest, index, stamp, state)

    def _copy_rest(self, index: int, stamp: Stamp, state: bytes) -> None:
        slot, half = self._slots[index], len(state) // 2
        slot.payload[half : len(state)] = state[half:]
        try:
            header = slot.write_table(len(state), MANIFEST)
        except DamageError:
            # a bit flipped in its header meanwhile: that costs a snapshot, not the training
            self._give_up(index)
            return
        self._act(self._seal, index, stamp, header)

    def _give_up(self, index: int) -> None:
        self._slots[index].void()
        self._captured(index, EMPTY_VIEW)

    def _seal(self, index: int, stamp: Stamp, header: SlotHeader) -> None:
        """The header page, in two acts where a kill is to fall within it."""
        slot = self._slots[index]
        view = slot.part(Part.HEADER, header)
        before = bytes(view) if self.job.plan.tears else b""
        slot.seal(header, LAYOUT_HASH, 0.0, self.site.machine.clock.wall_ns())
        if self.job.plan.tears:
            at = self._random.randrange(PAGE_BYTES)
            rest = bytes(view[at:])
            view[at:] = before[at:]
            if self.dies_torn:
                self.process.end("killed within the last page of a snapshot")
            else:
                self.process.after(TEAR_NS, self._seal_rest, index, stamp, at, rest)
        else:
            self._sealed(index, stamp)

    def _seal_rest(self, index: int, stamp: Stamp, at: int, rest: bytes) -> None:
        slot = self._slots[index]
        slot.part(Part.HEADER, _ANY)[at:] = rest
        self._sealed(index, stamp)

    def _sealed(self, index: int, stamp: Stamp) -> None:
        self._counts["captured_steps"] += 1
        self._captured(
            index,
            SlotView(SlotState.SEALED, stamp),
            payload_bytes=self.job.oracle.nbytes(self.rank),
        )
        self.job.watch.sealed(self, stamp)

    def _captured(self, index: int, view: SlotView, **changes: Any) -> None:
        self._capturing = False
        self._slots[index].unlock()
        self._set_view(index, view, **changes, **self._counts)
        if self._ending:
            self._end()
        self._obey()

    def _set_view(self, index: int, view: SlotView, **changes: Any) -> None:
        self._views[index] = view
        self._page.publish(slots=tuple(self._views), **changes)
        self._changed()

    def _changed(self) -> None:
        self._say(PageChanged(self.rank))

    def _recheck(self, index: int) -> None:
        if index >= len(self._views) or self._views[index].state is not SlotState.SEALED:
            return
        try:
            self._slots[index].verify_bytes()
        except DamageError:
            self._slots[index].void()
            self._set_view(index, EMPTY_VIEW)
        except LookupError:
            return

    # -- another rank is lost

    def hear_lost(self) -> None:
        """The notice: the step is given up, nothing is captured any more, and this process waits
        for an order; unless it is done."""
        if self._ending:
            return
        self.lost, self.trains, self._join, self._offer, self._order = True, False, None, None, None

    def regroup(self, gang: Gang) -> None:
        """The order: where to meet. What is being captured is sealed first."""
        self._order = gang
        if not self._capturing:
            self._obey()

    def _obey(self) -> None:
        if self.lost and self._order is not None:
            self._gang, self._order = self._order, None
            self._resume() if self._line is not None else self._find_keeper(self._resume)

    # -- the end

    def _persist(self, step: int | None, why: str, answer: Callable[[bool, str], None]) -> None:
        ticket = next(self._tickets)
        self._waiting[ticket] = answer
        self.job.watch.asked(self, ticket)
        if not self._say(WantCheckpoint(ticket, step, why)):
            self._waiting.pop(ticket, None)
            answer(False, "the keeper is not there to be asked")

    def _end_soon(self) -> None:
        self.trains = False
        self._ending = True
        if not self._capturing:
            self._end()

    def _end(self) -> None:
        self.site.rank_is_done(self)
        if self.site.settings.store is not None:
            self._persist(self.step, "the end of the job", lambda ok, why: self._bye())
        else:
            self._bye()

    def _bye(self) -> None:
        self._page.publish(phase=Phase.DONE)
        self._said_bye = True
        if self._say(Goodbye(self.rank, True, "ended well")):
            self.process.after(RELEASE_NS, self._leave, 0)
        else:
            self._leave(0)

    def _fail(self, why: str) -> None:
        """The program ends with an error."""
        self.able = False
        self._say(Goodbye(self.rank, False, why))
        self._leave(1, why)

    def _leave(self, code: int, why: str = "ended well") -> None:
        if self.exit_code is None:
            self.exit_code = code
            self.process.end(why)


_ANY = SlotHeader(
    SlotState.EMPTY, 0, bytes(16), bytes(16), 0, 0, 0, Stamp(-1, 0), 0, 0, 0, 0, 0, 0, 0, 0.0
)


def _nobody(ok: bool, why: str) -> None:
    """Whose answer nobody waits for."""
