"""Capture: one rank's slots, and the snapshots that go into them.

At a step boundary `core/resume/slots.py` chooses a slot, and the trainer's thread copies what may
move. What stands still until the next update is copied, hashed and sealed in the background; only
the fence in front of the update holds the trainer, while bytes that the update would overwrite are
still on their way. Whatever goes wrong here costs a snapshot, never the training.

Comes in: step boundaries, damage that the keeper found, snapshots that the keeper brought. Goes
out: sealed slots, and the rank's status page, which tells of them.

Invariant: a slot is written by one capture at a time, and the page never tells of a snapshot that
is not sealed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from keepstep.core.resume.cadence import Cadence, is_due
from keepstep.core.resume.slot_growth import SlotGrowth
from keepstep.core.resume.slots import Skip, Take, choose
from keepstep.edge.shm.slot import Slot, check_identity, slot_paths
from keepstep.edge.shm.status_page import StatusPage
from keepstep.errors import DamageError
from keepstep.model.events import DEBUG, WARNING
from keepstep.model.numbers import NotFinite
from keepstep.model.shares import RankRun
from keepstep.model.snapshot import Phase, SlotHeader, SlotState, SlotView, Stamp
from keepstep.model.units import KIB, MIB, first_names, human_bytes
from keepstep.ports import Acts, StateCopy
from keepstep.runtime.rank.capture_stages import BegunSnapshot, NoRoom, Sealed, UnderWay
from keepstep.runtime.rank.commit_view import CommitLook, CommitView
from keepstep.runtime.rank.finite_watch import FiniteWatch
from keepstep.runtime.rank.guarded import FailedWork, guarded
from keepstep.runtime.rank.holdings import Holdings, is_damaged
from keepstep.runtime.rank.manifests import SlotManifest, SlotManifests
from keepstep.runtime.rank.replica_watch import ReplicaWatch
from keepstep.runtime.rank.sharing import NOTHING, ShareOrder
from keepstep.runtime.rank.sharing_over_nodes import sharing_of
from keepstep.runtime.rank.slot_maker import SlotMaker
from keepstep.runtime.rank.world import RankIdentity, RankOptions, RankWorld

GROW_INLINE_BYTES = 16 * MIB  # a slot this small is made quicker than a step
OBJECTS_SLACK_BYTES = 64 * KIB  # schedulers and samplers grow a little as numbers get longer
EMPTY_VIEW = SlotView(SlotState.EMPTY, Stamp(-1, 0))
SKIPS_PER_LINE = 100  # the journal tells of the first skip and of every hundredth


class Capture:
    """All slots of one rank. `on_change` hears that the page tells of another slot or decision; it
    must not wait."""

    def __init__(
        self,
        world: RankWorld,
        options: RankOptions,
        who: RankIdentity,
        page: StatusPage,
        view: CommitView,
        announce: Callable[[Phase, int], None],
        on_change: Callable[[], None],
    ) -> None:
        self._world = world
        self._options = options
        self._who = who
        self._page = page
        self._commit_view = view
        self._announce = announce
        self._on_change = on_change
        self._maker = SlotMaker(world, options, who)
        self._sharing = sharing_of(world, options, who, page)
        self._clean: dict[Slot, str] = {}  # of which layout the gaps between tensors are zeros
        self.watch = ReplicaWatch(world, options, who, page, by_blocks=self._sharing.is_on)
        paths = slot_paths(world.memory, options.job_dir, who.rank)
        self._slots: list[Slot] = [self._open(path) for path in paths]
        self._views: list[SlotView] = [EMPTY_VIEW] * len(self._slots)
        self._proven_bytes = 0  # the largest payload that `prove` has found
        self._manifests = SlotManifests()
        self._under_way: UnderWay | None = None
        self._cadence = Cadence()
        self._growth = SlotGrowth()
        self._is_adding = False  # one more slot is being made
        self._captured_steps, self._has_lost = 0, False  # the newest that it tried to take
        self._skipped_steps = 0
        self._is_closed = False
        self._torn_steps = 0
        self.incarnation = 0
        self.finite = FiniteWatch(world.journal, who.rank)

    # -- what is there already

    def _open(self, path: Path) -> Slot:
        try:
            return self._maker.open(path)
        except DamageError as error:
            why = f"{error}; the slot is made anew"
            self._world.journal.record("damaged", why, rank=self._who.rank)
            # It holds its place: a slot's number is its file's. `prepare` gives it its size.
            return Slot.create(self._world.memory, path, 1, 1)

    def prove(self) -> Acts[Holdings]:
        """Prove what every slot says of itself; its payload is read when it is loaded. Raises
        IdentityError when one is another job's or rank's."""
        found: dict[int, SlotHeader] = {}
        foreign: int | None = None
        self._under_way = None
        self._sharing.forget()
        self.finite.forget()
        self._views = [EMPTY_VIEW] * len(self._slots)
        self._proven_bytes = 0
        for index, slot in enumerate(self._slots):
            yield
            try:
                header = slot.verify_frame()
            except DamageError as error:
                why = f"{error}; the next source is used"
                self._world.journal.record("damaged", why, WARNING, rank=self._who.rank, slot=index)
                continue
            except LookupError:
                continue
            who = self._who
            check_identity(header, slot.path, who.job, who.job_hash, who.rank)
            if header.world_size != who.world_size:
                foreign = header.world_size
                continue
            found[index] = header
            self._views[index] = SlotView(SlotState.SEALED, header.stamp, share=header.share)
            self._proven_bytes = max(self._proven_bytes, header.payload_bytes)
        return Holdings.of(found, foreign)

    def look_again(self) -> Acts[Holdings]:
        """The keeper has brought a snapshot into one of the slots: prove them all anew."""
        self._clean.clear()
        self._slots = self._maker.again(self._slots, self._open)
        return (yield from self.prove())

    def slot(self, index: int) -> Slot:
        return self._slots[index]

    def could_not_load(self, index: int, why: str) -> Acts[None]:
        """What lies there counts as nothing any more. When it fails a second proof, too, it is void
        at once: after a restart it would be offered again."""
        self._views[index] = EMPTY_VIEW
        if (yield from is_damaged(self._slots[index])):
            self._void_damaged(index, f"slot {index} is given up, it cannot be loaded: {why}")

    def forget_newer(self, stamp: Stamp | None, keeps_newer: bool = False, at: int = -1) -> None:
        """After loading: void every slot that holds nothing, or what is newer than what was loaded
        (None: all), for that is another epoch's; `keeps_newer`: not yet. Older ones stay until
        everybody goes: should another rank fail to load this one, they are the next source.
        `at`: the slot it was loaded from. Another one may hold the same, brought by the keeper:
        with both on the horizon there would be no slot to write into, ever."""
        for index, (slot, view) in enumerate(zip(self._slots, self._views, strict=True)):
            is_double = at >= 0 and index != at and view.stamp == stamp
            is_newer = stamp is None or (view.stamp > stamp and not keeps_newer)
            if view.state is not SlotState.SEALED or is_newer or is_double:
                slot.void()
                self._views[index] = EMPTY_VIEW
            elif view.stamp == stamp:  # whatever was to be told of its shares, they are there
                self._views[index] = view._replace(share=None)
        # The size is told before anything is captured: where all slots are held until the leader
        # has chosen a policy, it chooses none without it.
        self._page.publish(slots=tuple(self._views), payload_bytes=self._proven_bytes)

    # -- making slots

    def resumed(self, stamp: Stamp, replicas: tuple[RankRun, ...] | None = ()) -> Acts[None]:
        """All ranks have loaded that from memory. What was shared is shared again; `replicas`: by
        these, of several nodes; None: by nobody for now."""
        yield from self._sharing.resumed(stamp, replicas)

    def prepare(self) -> Acts[str]:
        """Make the slots before training: pre-faulted, checked against free memory. The plan in
        words. Raises MemoryBudgetError."""
        coming_bytes, manifest_bytes, remark = self._world.live.coming_bytes()
        payload = coming_bytes + OBJECTS_SLACK_BYTES
        manifest = manifest_bytes + manifest_bytes // 2 + 4 * KIB
        self._sharing.tell_why_not()
        lacking = self._sharing.lacking
        left_bytes = len(lacking) * self._world.memory.block_bytes
        plan = self._maker.first_plan(max(1, payload - left_bytes), manifest, len(self._slots))
        for index in range(plan.slots):
            yield
            is_there = index < len(self._slots)
            if is_there and self._fits(self._slots[index], payload, manifest, lacking):
                self._slots[index].prefault()
            elif is_there and self._views[index].state is SlotState.SEALED:
                continue  # too small, but it holds what was restored: it grows when its turn comes
            else:
                self._replace(index, payload, manifest)
        self._page.publish(slots=tuple(self._views))
        return plan.why + remark

    def _fits(self, slot: Slot, payload: int, manifest: int, lacking: frozenset[int]) -> bool:
        return slot.is_there() and slot.fits(payload, manifest, lacking)

    def _replace(self, index: int, payload: int, manifest: int) -> None:
        fresh = self._maker.make(index, payload, manifest)
        if index < len(self._slots):
            self._clean.pop(self._slots[index], None)
            self._slots[index].close()
            self._slots[index] = fresh
        else:
            self._slots.append(fresh)
            self._views.append(EMPTY_VIEW)

    def _add_slot(self) -> None:
        """One more, beside training and captures: touching fresh memory takes long."""
        if self._is_adding:
            return
        self._is_adding = True
        index, like = len(self._slots), self._slots[0]
        acts = self._maker.one_more(index, like.capacity, like.manifest_capacity)
        self._world.aside.act(guarded(acts), lambda made: self._added(index, made))

    def _added(self, index: int, made: Slot | FailedWork | None) -> None:
        self._is_adding = False
        journal, rank = self._world.journal, self._who.rank
        if isinstance(made, FailedWork):
            why = (
                f"slot {index} of rank {rank} cannot be made, captures go on without it: {made.why}"
            )
            journal.record("slot-refused", why, WARNING, rank=rank, slot=index)
        elif made is not None and (self._is_closed or index != len(self._slots)):
            made.close()  # it has been found there meanwhile, among the rank's own
        elif made is not None:
            why = f"slot {index} of rank {rank} is there: captures found none free"
            journal.record("slot-added", why, rank=rank, slot=index, nbytes=made.capacity)
            self._slots.append(made)
            self._views.append(EMPTY_VIEW)
            self._page.publish(slots=tuple(self._views))

    # -- a step boundary

    def boundary(self, stamp: Stamp, loss: object, step_ns: int = 0, is_last: bool = False) -> None:
        """A step has ended, which took `step_ns`: capture its state, or skip it and count; the page
        tells both at once. The trainer goes on when its executor has nothing left to do. `loss`: a
        number, or something that `float` takes. `is_last`: no step follows, so it is this one's
        turn whatever the period. Raises CorruptionError when this rank's state is wrong."""
        self.passed()
        told = {"completed_step": stamp.step, "step_ns_last": step_ns}
        self._tell_span(stamp.step)
        seen = self._commit_view.look(stamp.epoch)
        self._sharing.boundary(stamp.step, seen)
        self.watch.look(stamp.epoch, seen, self._slots)
        if self.watch.is_condemned:
            self._skip(stamp.step, "replicas differ, and all are to go back", **told)
            self._end_condemned()
            return
        if self.finite.doubted is not None:
            self._skip(stamp.step, f"step {self.finite.doubted} is in doubt", **told)
            return
        if not (is_last or is_due(stamp.step, seen.period_steps)):
            why = f"captures take up to {seen.period_steps} steps on some rank"
            self._skip(stamp.step, why, **told)
            return
        decision = self._take(seen)
        if isinstance(decision, Skip):
            self._skip(stamp.step, decision.why, **told)
            if decision.is_full and self._growth.found_none_free(stamp.step):
                self._add_slot()
            return
        index = decision.slot
        self._cadence.begins(stamp.step)
        who = self._who
        self._slots[index].begin(who.job_hash, who.rank, who.world_size, self.incarnation, stamp)
        # Told by the page alone: what is held now is news once it is sealed, or given up.
        writing = SlotView(SlotState.WRITING, stamp)
        self._show_view(index, writing, decided_step=stamp.step, **told)
        self._world.trainer.act(
            guarded(self._begin(index, stamp)),
            lambda begun: self._begun(index, stamp, begun, loss),
        )

    def _end_condemned(self) -> None:
        """Give up what this rank holds of a computation that went wrong, and end, if it is the one
        that is wrong."""
        error, wrong = self.watch.error(), self.watch.difference
        if error is None or wrong is None:
            return
        sealed = [(v.stamp, n) for n, v in enumerate(self._views) if v.state is SlotState.SEALED]
        # the newest first: nothing may ever be seen without what it was computed from
        for stamp, index in sorted(sealed, reverse=True):
            if wrong.is_condemned(stamp):
                self._slots[index].void()
                self._views[index] = EMPTY_VIEW
        self._page.publish(slots=tuple(self._views))
        self._on_change()
        raise error

    def has_room(self, epoch: int) -> bool:
        """Whether a snapshot would find a slot now."""
        self.passed()
        decision = self._take(self._commit_view.look(epoch))
        if isinstance(decision, Skip):
            return False
        self._slots[decision.slot].unlock()
        return True

    @property
    def _is_writing(self) -> bool:
        return SlotState.WRITING in [view.state for view in self._views]

    def is_in_the_way(self, stamp: Stamp) -> bool:
        """Whether that step is to be captured, and a snapshot is under way."""
        look = self._commit_view.look
        return self._is_writing and is_due(stamp.step, look(stamp.epoch).period_steps)

    def _take(self, seen: CommitLook) -> Take | Skip:
        """The slot for the next snapshot, locked. Only a slot that is chosen is asked whether a
        reader has pinned it: then another one is."""
        views = list(self._views)
        released = seen.released if self._options.slots == 1 else None
        while True:
            decision = choose(views, seen.horizon, seen.is_hopeless, released)
            if isinstance(decision, Skip) or self._slots[decision.slot].lock(exclusive=True):
                return decision
            views[decision.slot] = views[decision.slot]._replace(pinned=True)

    def _tell_span(self, step: int) -> None:
        before = self._cadence.span_steps
        self._cadence.boundary(step, self._is_writing)
        if self._cadence.span_steps != before:
            self._page.publish(span_steps=self._cadence.span_steps)

    def _skip(self, step: int, why: str, **told: object) -> None:
        self._skipped_steps += 1
        count = self._skipped_steps
        self._page.publish(decided_step=step, skipped_steps=count, **told)
        self._on_change()
        if count % SKIPS_PER_LINE == 1:
            why = f"step {step} is not captured: {why} ({count} skipped so far)"
            self._world.journal.record("skipped", why, step=step, skipped_steps=count)

    def _begin(self, index: int, stamp: Stamp) -> Acts[BegunSnapshot | NoRoom]:
        """On the trainer's thread: what has to be copied before the next step begins."""
        live = self._world.live
        gathered = live.gather()
        if gathered.remark:
            self._world.journal.record("caveat", gathered.remark, WARNING, step=stamp.step)
        yield
        still, order = None, None
        if self._sharing.is_on:
            still = live.still_blocks(gathered, self._world.memory.block_bytes)
            order = self._sharing.order(gathered, still)
        lacking, shared = (NOTHING, NOTHING) if order is None else order.blocks
        manifest = self._manifests.of(gathered.layout, still)
        text_bytes = len(manifest.text)
        if not self._has_room(index, stamp, gathered.payload_bytes, text_bytes, lacking):
            payload = gathered.payload_bytes + gathered.payload_bytes // 8 + OBJECTS_SLACK_BYTES
            return NoRoom(payload, text_bytes + text_bytes // 2 + 4 * KIB)
        copy = live.copy(gathered, self._slots[index], lacking, shared)
        self._under_way = UnderWay(index, stamp, copy)
        self.watch.gathered(stamp.step, gathered, copy.is_on_device)
        copy.copy_moving()
        return BegunSnapshot(gathered, copy, manifest, order, self._world.groups.mark())

    def _has_room(
        self, index: int, stamp: Stamp, payload: int, manifest: int, lacking: frozenset[int]
    ) -> bool:
        """Whether the snapshot fits into the slot, which is made anew at once where that is quick,
        and where its keeper has taken it for a fetch that failed."""
        if self._fits(self._slots[index], payload, manifest, lacking):
            return True
        if payload > GROW_INLINE_BYTES:
            return False
        grown = payload + payload // 8 + OBJECTS_SLACK_BYTES
        self._replace(index, grown, manifest + manifest // 2 + 4 * KIB)
        slot = self._slots[index]
        slot.lock(exclusive=True)
        who = self._who
        slot.begin(who.job_hash, who.rank, who.world_size, self.incarnation, stamp)
        return True

    def _begun(
        self,
        index: int,
        stamp: Stamp,
        begun: BegunSnapshot | NoRoom | FailedWork,
        loss: object,
    ) -> None:
        if isinstance(begun, FailedWork):
            self._lost_snapshot(index, begun.why)
        elif isinstance(begun, NoRoom):
            size = human_bytes(begun.payload_bytes)
            why = f"slot {index} has no room for the state and is being made anew, for {size}"
            self._skip(stamp.step, why)
            self._set_view(index, SlotView(SlotState.WRITING, Stamp(-1, 0)))  # busy until then
            self._world.background.act(
                guarded(self._grow(index, begun)), lambda grown: self._grown(index, grown)
            )
        else:
            acts = self._finish(index, stamp, begun, loss)
            self._world.background.act(
                guarded(acts), lambda sealed: self._finished(index, stamp, sealed)
            )

    def _grow(self, index: int, wanted: NoRoom) -> Acts[None]:
        yield
        self._replace(index, wanted.payload_bytes, wanted.manifest_bytes)

    def _grown(self, index: int, grown: FailedWork | None) -> None:
        if isinstance(grown, FailedWork):
            self._lost_snapshot(index, grown.why)
        else:
            self._set_view(index, EMPTY_VIEW)

    # -- in the background

    def _finish(
        self, index: int, stamp: Stamp, begun: BegunSnapshot, loss: object
    ) -> Acts[Sealed | FailedWork]:
        """Copy what stands still, hash, seal. The header comes last."""
        slot = self._slots[index]
        copy, manifest, order = begun.copy, begun.manifest, begun.order
        clock = self._world.clock
        try:
            self._announce(Phase.CAPTURE, stamp.step)
            yield
            self._make_alike(slot, manifest, order)
            yield from copy.copy_still()
            if copy.moved:
                return Sealed(moved=tuple(copy.moved))
            began_ns = clock.monotonic_ns()
            nbytes = begun.gathered.payload_bytes
            header = slot.write_table(nbytes, manifest.text, copy.sums, bool(copy.digests))
            replicas = self.watch.digest(slot, header)
            yield from copy.settle()
            if copy.moved:
                return Sealed(moved=tuple(copy.moved))
            if bad := copy.not_finite():
                return Sealed(bad=bad)
            if not self._world.groups.stands(begun.mark):
                why = f"a collective before {stamp} had not ended as a peer was lost"
                return FailedWork(why)
            self._announce(Phase.SEAL, stamp.step)
            value = float("nan") if loss is None else float(loss)  # type: ignore[arg-type]
            share = self._sharing.share(order, slot.table(header), copy.digests)
            yield
            slot.seal(header, manifest.layout_hash, value, clock.wall_ns(), share, replicas)
            self._maker.pin_kept(slot)
            slot.unlock()  # before it is told: a keeper that hears of it locks it at once
            seal_ns = clock.monotonic_ns() - began_ns
            left = 0 if order is None else len(order.lacking) * slot.block_bytes
            return Sealed((), copy.copy_ns, seal_ns, nbytes, value, share, left, replicas[1])
        finally:
            copy.end()

    def _make_alike(self, slot: Slot, manifest: SlotManifest, order: ShareOrder | None) -> None:
        """Where ranks share, equal tensors make equal blocks: what lies between them is zeros. And
        what others keep takes no memory."""
        if order is not None and order.lacking:
            slot.shed(order.lacking)
        if manifest.still is not None and self._clean.get(slot) != manifest.layout_hash:
            slot.clear_gaps(manifest.layout)
            self._clean[slot] = manifest.layout_hash

    def _finished(self, index: int, stamp: Stamp, sealed: Sealed | FailedWork) -> None:
        if self._is_closed:
            return  # this rank has failed, and what it was writing is no more its own
        if isinstance(sealed, FailedWork):
            self._lost_snapshot(index, sealed.why)
            return
        if sealed.bad:
            self._condemn(index, stamp, sealed.bad)
            return
        moved = sealed.moved or self._moved_since()
        if moved:
            self._torn(index, stamp, moved)
            return
        if self._under_way is not None:
            self._under_way.is_sealed = True
        self._captured_steps, self._has_lost = self._captured_steps + 1, False
        self._set_view(
            index,
            SlotView(SlotState.SEALED, stamp, share=sealed.share, digest=sealed.digest),
            captured_steps=self._captured_steps,
            copy_ns_last=sealed.copy_ns,
            seal_ns_last=sealed.seal_ns,
            payload_bytes=sealed.payload_bytes,
            kept_bytes=sealed.payload_bytes - sealed.lacking_bytes,
            loss=sealed.loss,
        )

    def _moved_since(self) -> tuple[str, ...]:
        """Seen by the trainer's thread while the header was written."""
        return () if self._under_way is None else tuple(self._under_way.copy.moved)

    def passed(self) -> None:
        """The trainer's thread is here, between two operations. What has moved by now, and no
        counter told, makes the newest snapshot torn, sealed or not."""
        under_way = self._under_way
        if under_way is None:
            return
        under_way.copy.passed()
        if not under_way.is_sealed:
            return  # whoever seals it looks as well
        self._under_way = None
        if under_way.copy.moved:
            self._torn(under_way.index, under_way.stamp, tuple(under_way.copy.moved))

    def _torn(self, index: int, stamp: Stamp, moved: tuple[str, ...]) -> None:
        self._under_way = None
        self._torn_steps += 1
        self._tell_torn(stamp, moved)
        self._give_up(index)

    def _condemn(self, index: int, stamp: Stamp, bad: NotFinite) -> None:
        self._under_way = None
        self._give_up(index)
        self.finite.found(stamp, bad)

    def condemn_from(self, step: int) -> None:
        """Give up every snapshot of that step or a later one: what they hold may be wrong. Nothing
        may be under way. Where this rank has none of before they stay, for a person to look at:
        nobody is offered them all the same."""
        if all(stamp.step >= step for stamp in self.holds):
            return
        for index, view in enumerate(self._views):
            if view.state is SlotState.SEALED and view.stamp.step >= step:
                why = f"the snapshot of {view.stamp} is condemned: step {step} is in doubt"
                journal, rank = self._world.journal, self._who.rank
                journal.record("condemned", why, step=view.stamp.step, rank=rank)
                self._give_up(index)

    @property
    def holds(self) -> tuple[Stamp, ...]:
        """Of the snapshots that are sealed."""
        return tuple(view.stamp for view in self._views if view.state is SlotState.SEALED)

    def _lost_snapshot(self, index: int, why: str) -> None:
        self._under_way = None
        told = f"a snapshot was lost: {why}"
        level, self._has_lost = DEBUG if self._has_lost else WARNING, True  # there may be thousands
        self._world.journal.record("capture-failed", told, level, rank=self._who.rank)
        self._give_up(index)

    def _give_up(self, index: int) -> None:
        self._slots[index].void()
        self._slots[index].unlock()
        self._set_view(index, EMPTY_VIEW, torn_steps=self._torn_steps)

    def _tell_torn(self, stamp: Stamp, moved: tuple[str, ...]) -> None:
        self._world.live.copy_eagerly(moved)
        why = (
            f"the snapshot of {stamp} is dropped: {first_names(moved)} changed outside an "
            "optimizer's step while being copied; they are copied at the boundary from now on"
        )
        self._world.journal.record("torn", why, step=stamp.step, moved=list(moved[:50]))

    def _set_view(self, index: int, view: SlotView, **changes: object) -> None:
        self._show_view(index, view, **changes)
        self._on_change()

    def _show_view(self, index: int, view: SlotView, **changes: object) -> None:
        self._views[index] = view
        self._page.publish(slots=tuple(self._views), **changes)

    # -- meanwhile

    @property
    def copy_under_way(self) -> StateCopy | None:
        """The copy that the next update has to wait for, and to let look; None when there is
        none."""
        return None if self._under_way is None else self._under_way.copy

    def damaged(self, index: int, why: str) -> None:
        """The keeper's scrub found a slot that no longer proves: forget it, unless it has been
        rewritten since."""
        if index >= len(self._views) or self._views[index].state is not SlotState.SEALED:
            return
        view = self._views[index]

        def looked(found: bool | FailedWork) -> None:
            if found is not True or self._views[index] != view:
                return
            self._void_damaged(index, f"slot {index} is given up after scrubbing: {why}")
            self._set_view(index, EMPTY_VIEW)

        self._world.background.act(guarded(is_damaged(self._slots[index])), looked)

    def _void_damaged(self, index: int, why: str) -> None:
        self._world.journal.record("slot-voided", why, rank=self._who.rank, slot=index)
        self._slots[index].void()

    def drain(self, then: Callable[[], None]) -> None:
        """`then` is called when everything that has begun is sealed, or given up."""
        self._world.background.submit(lambda: None, lambda _: then())

    @property
    def counts(self) -> tuple[int, int, int]:  # captured, skipped and torn
        return self._captured_steps, self._skipped_steps, self._torn_steps

    def close(self) -> None:
        """Give up maps and locks; the slots stay."""
        self._is_closed = True
        self._commit_view.close()
        for slot in self._slots:
            slot.close()
