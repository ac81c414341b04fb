"""Capturing: one rank's slots, and the thread that fills them.

At a step boundary `begin` decides (core/slots) and copies what moves; the thread copies the rest,
hashes and seals. The trainer is only ever held by `fence`, in the optimizer's pre-step hook, while
bytes that the update would overwrite are still on their way. Whatever goes wrong here costs a
snapshot, never the training.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.config import Settings
from keepstep.core.redundancy import memory_budget
from keepstep.core.resume.slots import Skip, choose
from keepstep.edge.os.clock import CLOCK
from keepstep.edge.os.journal import Journal
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot, check_identity, slot_bytes, slot_path, slot_paths
from keepstep.edge.shm.status_page import StatusPage
from keepstep.edge.torch.capture import Copy, lower_priority, pin
from keepstep.edge.torch.state import Protected, State
from keepstep.errors import DamageError, IdentityError
from keepstep.model.layout import Layout
from keepstep.model.snapshot import Phase, SlotHeader, SlotState, SlotView, Stamp
from keepstep.model.topology import parse_policy
from keepstep.model.units import KIB, MIB, human_bytes
from keepstep.runtime.job_name import job_hash
from keepstep.runtime.rank.commit_view import Outlook

GROW_INLINE_BYTES = 16 * MIB  # a slot this small is made quicker than a step
OBJECTS_SLACK_BYTES = 64 * KIB  # schedulers and samplers grow a little as numbers get longer
EMPTY_VIEW = SlotView(SlotState.EMPTY, Stamp(-1, 0))
SKIPS_PER_LINE = 100  # the journal tells the first skip and every hundredth


@dataclass(frozen=True)
class Identity:
    """Who writes these slots."""

    job: str
    uid: int
    rank: int
    world_size: int
    local_world_size: int

    @property
    def has_many_nodes(self) -> bool:
        return self.local_world_size < self.world_size

    @property
    def job_hash(self) -> bytes:
        return job_hash(self.job, self.uid)


@dataclass(frozen=True)
class Manifest:
    """A layout as it is written into a slot."""

    layout: Layout
    layout_hash: str
    text: bytes


class Capturing:
    """All slots of one rank. `page` is the rank's status page; `on_phase` hears capture and seal,
    `on_change` that the page tells of another slot or decision: it must not wait."""

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        page: StatusPage,
        outlook: Outlook,
        journal: Journal,
        on_phase: Callable[[Phase, int], None],
        on_change: Callable[[], None],
    ) -> None:
        self._settings, self._who, self._page, self._outlook, self._journal = (
            settings,
            identity,
            page,
            outlook,
            journal,
        )
        self._on_phase, self._on_change = on_phase, on_change
        self.slots: list[Slot] = [
            self._open(path) for path in slot_paths(MEMORY, settings.job_dir, identity.rank)
        ]
        self._views: list[SlotView] = [EMPTY_VIEW] * len(self.slots)
        self._views_lock = threading.Lock()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._copy: Copy | None = None
        self._manifest: Manifest | None = None
        self._counts = {"captured_steps": 0, "skipped_steps": 0, "torn_steps": 0}
        self.incarnation = 0

    # -- what is there already

    def _open(self, path: Path) -> Slot:
        try:
            return Slot(MEMORY, path)
        except DamageError as error:
            self._journal.record("damaged", f"{error}; the slot is made anew", rank=self._who.rank)
            # holds its place: a slot's number is its file's; `prepare` gives it its size
            return Slot.create(MEMORY, path, 1, 1)

    def verified(self) -> tuple[dict[Stamp, int], int | None]:
        """Prove every slot. ({stamp: slot}, world size of foreign snapshots or None). Raises
        IdentityError."""
        found: dict[Stamp, int] = {}
        foreign: int | None = None
        self._views = [EMPTY_VIEW] * len(self.slots)
        for index, slot in enumerate(self.slots):
            try:
                header, _ = slot.verify()
            except DamageError as error:
                self._journal.record(
                    "damaged", f"{error}; the next source is used", rank=self._who.rank, slot=index
                )
                continue
            except LookupError:
                continue
            check_identity(header, slot.path, self._who.job, self._who.job_hash, self._who.rank)
            if header.world_size != self._who.world_size:
                foreign = header.world_size
                continue
            found[header.stamp] = index
            self._views[index] = SlotView(SlotState.SEALED, header.stamp)
        return found, foreign

    def look_again(self) -> dict[Stamp, int]:
        """The keeper has brought a snapshot into one of the slots: prove them all anew."""
        for slot in self.slots:
            slot.close()
        self.slots = [
            self._open(path) for path in slot_paths(MEMORY, self._settings.job_dir, self._who.rank)
        ]
        self._views = [EMPTY_VIEW] * len(self.slots)
        return self.verified()[0]

    def forget_newer(self, stamp: Stamp | None) -> None:
        """After loading: void every slot that is newer than what was loaded (None: all), for it is
        another epoch's, or that holds nothing.

        Older ones stay until everybody goes: should another rank fail to load this one, they are
        the next source.
        """
        for index, (slot, view) in enumerate(zip(self.slots, self._views, strict=True)):
            if stamp is None or view.state is not SlotState.SEALED or view.stamp > stamp:
                slot.void()
                self._views[index] = EMPTY_VIEW
        self._publish_views()

    # -- making slots

    def prepare(
        self, payload_bytes: int, manifest_bytes: int, free_bytes: int, available_bytes: int
    ) -> str:
        """Make the slots before training: pre-faulted, checked against free memory. Raises
        MemoryBudgetError."""
        payload, manifest = (
            payload_bytes + OBJECTS_SLACK_BYTES,
            manifest_bytes + manifest_bytes // 2 + 4 * KIB,
        )
        each = slot_bytes(payload, manifest)
        own = sum(s.capacity for s in self.slots) * self._who.local_world_size + self._held_bytes()
        plan = memory_budget.plan(
            each,
            self._who.local_world_size,
            free_bytes + own,
            available_bytes + own,
            self._settings.slots,
            self._settings.store is not None,
            str(self._settings.arena_dir),
            held=memory_budget.held_slots(parse_policy(self._settings.redundancy))
            if self._who.has_many_nodes
            else 0.0,
            many_nodes=self._who.has_many_nodes,
        )
        for index in range(plan.slots):
            if index < len(self.slots) and self._fits(self.slots[index], payload, manifest):
                self.slots[index].prefault()
                continue
            if index < len(self.slots) and self._views[index].state is SlotState.SEALED:
                continue  # too small, but it holds what was restored: it grows when its turn comes
            self._replace(index, payload, manifest)
        self._publish_views()
        return plan.why

    def _held_bytes(self) -> int:
        """What this node's keeper holds for others already: it is in the plan, and no longer in
        what is free."""
        held = [
            *self._settings.job_dir.glob("held/rank-*/slot-?"),
            *self._settings.job_dir.glob("parity/rank-*/slot-?"),
        ]
        return sum(path.stat().st_size for path in held)

    def _fits(self, slot: Slot, payload: int, manifest: int) -> bool:
        return slot.capacity >= payload and slot.manifest_capacity >= manifest

    def _replace(self, index: int, payload: int, manifest: int) -> None:
        fresh = Slot.create(
            MEMORY, slot_path(self._settings.job_dir, self._who.rank, index), payload, manifest
        )
        pin(fresh)
        if index < len(self.slots):
            self.slots[index].close()
            self.slots[index] = fresh
        else:
            self.slots.append(fresh)
            self._views.append(EMPTY_VIEW)

    # -- a step boundary

    def boundary(self, step: int, epoch: int, protected: Protected, loss: Any) -> None:
        """On the trainer's thread, at the end of a step. Capture its state, or skip it and
        count."""
        self._guarded(lambda: self._begin(step, epoch, protected, loss))

    def _begin(self, step: int, epoch: int, protected: Protected, loss: Any) -> None:
        with self._views_lock:
            views = list(self._views)
        views = [self._pinned(i, v) for i, v in enumerate(views)]
        horizon, is_hopeless = self._outlook.look(epoch)
        decision = choose(step, views, horizon, is_hopeless)
        if isinstance(decision, Skip):
            self._skip(step, decision.why)
            return
        state = protected.gather()
        manifest = self._manifest_of(state.layout)
        if not self._has_room(decision.slot, step, state, len(manifest.text)):
            return
        slot = self.slots[decision.slot]
        if not slot.lock(exclusive=True):
            self._skip(step, f"slot {decision.slot} was pinned by a reader this moment")
            return
        stamp = Stamp(step, epoch)
        slot.begin(
            self._who.job_hash, self._who.rank, self._who.world_size, self.incarnation, stamp
        )
        self._set_view(decision.slot, SlotView(SlotState.WRITING, stamp), decided_step=step)
        handed_over = False
        try:
            self._copy = copy = Copy(state, slot)
            copy.copy_moving()
            self._queue.put(
                lambda: self._finish(decision.slot, stamp, copy, manifest, protected, loss)
            )
            handed_over = True
        finally:
            if not handed_over:
                self._copy = None
                self._give_up(decision.slot)

    def _manifest_of(self, layout: Layout) -> Manifest:
        # it rarely changes, and writing it out costs as much as a gather
        if self._manifest is None or self._manifest.layout != layout:
            self._manifest = Manifest(
                layout, layout.hash(), json.dumps(layout.to_json(), separators=(",", ":")).encode()
            )
        return self._manifest

    def _pinned(self, index: int, view: SlotView) -> SlotView:
        if view.state is not SlotState.SEALED:
            return view
        slot = self.slots[index]
        if slot.lock(exclusive=True):
            slot.unlock()
            return view
        return view._replace(pinned=True)

    def _has_room(self, index: int, step: int, state: State, manifest_bytes: int) -> bool:
        if self._fits(self.slots[index], state.payload_bytes, manifest_bytes):
            return True
        payload = state.payload_bytes + state.payload_bytes // 8 + OBJECTS_SLACK_BYTES
        manifest = manifest_bytes + manifest_bytes // 2 + 4 * KIB
        if payload <= GROW_INLINE_BYTES:
            self._replace(index, payload, manifest)
            return True
        self._skip(
            step,
            f"the state has grown to {human_bytes(state.payload_bytes)} and slot {index} is "
            "being made larger",
        )
        with self._views_lock:
            # busy until it has grown
            self._views[index] = SlotView(SlotState.WRITING, Stamp(-1, 0))
        self._queue.put(lambda: self._grow(index, payload, manifest))
        return False

    def _grow(self, index: int, payload: int, manifest: int) -> None:
        try:
            self._replace(index, payload, manifest)
        finally:
            self._set_view(index, EMPTY_VIEW)

    def _skip(self, step: int, why: str) -> None:
        self._counts["skipped_steps"] += 1
        count = self._counts["skipped_steps"]
        self._page.publish(decided_step=step, skipped_steps=count)
        self._on_change()
        if count % SKIPS_PER_LINE == 1:
            self._journal.record(
                "skipped",
                f"step {step} is not captured: {why} ({count} skipped so far)",
                step=step,
                skipped_steps=count,
            )

    def fence(self) -> None:
        """In the optimizer's pre-step hook: wait for the bytes this update would overwrite."""
        if self._copy is not None:
            self._copy.fence()

    # -- the thread

    def start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="keepstep-capture", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        lower_priority()
        while (task := self._queue.get()) is not None:
            self._guarded(task)

    def _guarded(self, task: Callable[[], None]) -> None:
        """The executor: whatever a task raises costs a snapshot and is told, but never reaches the
        trainer."""
        try:
            task()
        except Exception as error:  # noqa: BLE001
            self._journal.record(
                "capture-failed",
                f"a snapshot was lost: {type(error).__name__}: {error}",
                rank=self._who.rank,
            )

    def _finish(
        self,
        index: int,
        stamp: Stamp,
        copy: Copy,
        manifest: Manifest,
        protected: Protected,
        loss: Any,
    ) -> None:
        sealed = False
        try:
            self._on_phase(Phase.CAPTURE, stamp.step)
            copy.copy_still()
            if copy.moved:
                self._torn(stamp, copy.moved, protected)
                return
            began_ns = time.perf_counter_ns()
            header = copy.slot.write_table(copy.state.payload_bytes, manifest.text)
            self._on_phase(Phase.SEAL, stamp.step)
            value = float(loss) if loss is not None else float("nan")
            copy.slot.seal(header, manifest.layout_hash, value, CLOCK.wall_ns())
            sealed = True
            self._counts["captured_steps"] += 1
            seal_ns = time.perf_counter_ns() - began_ns
            copy.slot.unlock()  # before anybody is told: who hears of it pins it at once
            self._set_view(
                index,
                SlotView(SlotState.SEALED, stamp),
                **self._counts,
                copy_ns_last=copy.copy_ns,
                seal_ns_last=seal_ns,
                payload_bytes=copy.state.payload_bytes,
                loss=value,
            )
        finally:
            copy.done.set()  # whatever happened, the trainer is not to wait for it
            if not sealed:
                self._give_up(index)

    def _give_up(self, index: int) -> None:
        self.slots[index].void()
        self.slots[index].unlock()
        self._set_view(index, EMPTY_VIEW, **self._counts)

    def _torn(self, stamp: Stamp, moved: list[str], protected: Protected) -> None:
        self._counts["torn_steps"] += 1
        protected.eager_names.update(moved)
        names = ", ".join(moved[:5]) + (f" and {len(moved) - 5} more" if len(moved) > 5 else "")
        self._journal.record(
            "torn",
            f"the snapshot of {stamp} is dropped: {names} changed outside an optimizer's "
            "step while being copied; "
            "they are copied at the boundary from now on",
            step=stamp.step,
            moved=moved[:50],
        )

    def _set_view(self, index: int, view: SlotView, **changes: Any) -> None:
        with self._views_lock:
            self._views[index] = view
            self._page.publish(slots=tuple(self._views), **changes)
        self._on_change()

    def _publish_views(self) -> None:
        with self._views_lock:
            self._page.publish(slots=tuple(self._views))

    def damaged(self, index: int, why: str) -> None:
        """The keeper's scrub found a slot that no longer proves: forget it, unless it has been
        rewritten since."""
        self._queue.put(lambda: self._recheck(index, why))

    def _recheck(self, index: int, why: str) -> None:
        if self._views[index].state is not SlotState.SEALED:
            return
        try:
            self.slots[index].verify()
        except DamageError:
            self._journal.record(
                "slot-voided",
                f"slot {index} is given up after scrubbing: {why}",
                rank=self._who.rank,
                slot=index,
            )
            self.slots[index].void()
            self._set_view(index, EMPTY_VIEW)

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything begun is sealed; True when it is."""
        done = threading.Event()
        self._queue.put(done.set)
        return done.wait(timeout_s)

    def stop(self) -> None:
        self._queue.put(None)
        if self._thread:
            self._thread.join(5.0)

    def close(self) -> None:
        """Give up maps and locks; the slots stay."""
        self._outlook.close()
        for slot in self.slots:
            slot.close()


def snapshot_of(capturing: Capturing, stamp: Stamp, index: int) -> tuple[Slot, SlotHeader, Layout]:
    """A slot proven again just before it is loaded. Raises DamageError, LookupError,
    IdentityError."""
    slot = capturing.slots[index]
    header, layout = slot.verify()
    if header.stamp != stamp:
        raise IdentityError(
            f"{slot.path}: expected {stamp} of epoch {stamp.epoch}, found {header.stamp} of "
            f"epoch {header.stamp.epoch}"
        )
    return slot, header, layout
