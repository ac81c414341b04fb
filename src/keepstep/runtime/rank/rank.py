"""Rank: keepstep inside one trainer, as an object over ports.

    the program's steps, the keeper's and the agent's messages, the clock -> Rank -> captures,
    restores, messages

From its beginning to its end:

    STARTING    votes, loads, makes its slots
    READY       the program trains; each step boundary is captured
    REGROUPING  a peer is lost: votes and loads again, builds its groups anew, in this process
    GOING_BACK  a step is taken back, all peers are there: votes and loads again
    ENDING      seals what is under way, asks for the last checkpoint, says goodbye
    OVER        nothing of it is left but the slots
    FAILED      there is no going on in this process; the slots stay

Comes in: events, one at a time, from whoever drives it (`RankWorld` says how). Goes out: effects
through ports, and `Trainer.changed` when the stage has changed. Blocks never; what takes long runs
on the world's executors.

Invariant: nothing is captured while a peer is lost, but a body that has all it needed from its
peers; and the program trains only after `TrainingPermitted`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from keepstep.edge.shm.collective_profile_page import profile_path
from keepstep.errors import KeeperError, KeepstepError
from keepstep.model.events import WARNING
from keepstep.model.messages.agent_rank import RegroupAt
from keepstep.model.messages.keeper_rank import CheckpointDone, HaltOrder, StateOffered
from keepstep.model.rhythm import NO_STEP
from keepstep.model.snapshot import Phase, Stamp
from keepstep.model.units import S_NS, human_ns
from keepstep.ports import Acts, StateCopy
from keepstep.runtime.rank.capture import Capture
from keepstep.runtime.rank.commit_view import PagesOfOneNode
from keepstep.runtime.rank.device_release import ReleaseUnderWay
from keepstep.runtime.rank.halting import Halting
from keepstep.runtime.rank.joining import Joined
from keepstep.runtime.rank.keeper_client import Answered
from keepstep.runtime.rank.own_launch import OwnLaunch
from keepstep.runtime.rank.periodic_checkpoints import PeriodicCheckpoints
from keepstep.runtime.rank.regroup import Regroup
from keepstep.runtime.rank.resumption import Resumption, attempted
from keepstep.runtime.rank.sharing import leaders_word
from keepstep.runtime.rank.stage import Stage
from keepstep.runtime.rank.stall import Stall
from keepstep.runtime.rank.summary import summary_of
from keepstep.runtime.rank.wanted_checkpoint import WantedCheckpoint
from keepstep.runtime.rank.world import RankIdentity, RankOptions, RankWorld, Trainer

RELEASE_WITHIN_NS = 5 * S_NS
WAITS_TOLD_NS = 1 * S_NS  # so often, on its page
ENDED_WITHIN_NS = 5 * S_NS  # by the agent, where nobody may train


class Rank:
    """One process's, from when it has its page and its keeper. `begin` comes first, `close`
    last."""

    def __init__(
        self,
        world: RankWorld,
        options: RankOptions,
        who: RankIdentity,
        joined: Joined,
        trainer: Trainer,
    ) -> None:
        """Raises MemoryBudgetError when a damaged slot cannot even be made anew."""
        self._world = world
        self._options = options
        self._who = who
        self._joined = joined
        self._trainer = trainer
        self._page = joined.page
        self._keeper = joined.keeper
        self._agent = joined.agent
        self._regroup = Regroup(world, who.rank, who.world_size, joined.agent)
        self._release = ReleaseUnderWay(world, who.rank)
        self._launch = OwnLaunch(world.memory, options, who.rank)
        many = who.has_many_nodes
        view = (
            leaders_word(world.memory, options, who)
            if many
            else PagesOfOneNode(world.memory, options.job_dir, who.world_size)
        )
        self._capture = Capture(
            world,
            options,
            who,
            joined.page,
            view,
            announce=self.announce,
            on_change=self._keeper.page_changed if many else _nothing,
        )
        self.finite, self.watch = self._capture.finite, self._capture.watch
        self.halting = Halting(joined.keeper, who.rank, who.world_size)
        self._resumption: Resumption | None = None  # while this rank votes and loads
        self._resumed_ns: int | None = None  # until the first step after a restore is done
        self._stall = Stall()
        self._ending_ns: int | None = None  # since when it waits at its end
        self._checkpoints = PeriodicCheckpoints(
            options, world.journal, who.rank == 0, self._keeper.persist
        )
        self.resumed: StateOffered | None = None  # what all stand on since the last vote
        self.loss = ""  # the completed steps that are to be done again since then, in words
        self.plan = ""  # the memory for snapshots, in words
        self.stage = Stage.STARTING
        self.error: KeepstepError | None = None
        self.unsaved = ""  # why the last step is not in the store, when it was to be there
        self.step = -1  # the last completed one
        self.resumed_at = -1  # the restored one
        self._is_draining = False  # before it may meet its peers again
        self._doubted_from: int | None = None  # while steps are taken back: the first of them
        self.epoch = 0

    def begin(self) -> None:
        """Find out where all resume, and load it. READY or FAILED follows."""
        self._keeper.hearer = self
        self._agent.hearer = self
        self._resume()

    # -- where all resume

    def _resume(self) -> None:
        last = self._page.read()
        self._capture.incarnation = last.incarnation + 1 if last else 1
        self._page.publish(
            rank=self._who.rank,
            world_size=self._who.world_size,
            pid=self._world.pid,
            incarnation=self._capture.incarnation,
            epoch=last.epoch if last else 0,
            phase=Phase.RESTORE,
            # Until the vote is over the page goes on telling what the last life had reached: it
            # says what was lost.
            completed_step=last.completed_step if last else -1,
            decided_step=-1,
            slots=(),
        )
        self._resumption = Resumption(
            self._world,
            self._who,
            self._capture,
            self._keeper,
            in_midst=(
                self._regroup.is_lost
                or self._world.groups.is_muted
                or self._doubted_from is not None
            ),
            wants_fresh=self._launch.wants_fresh,
            goes_on=self._launch.goes_on,
            doubted_from=self._doubted_from,
            announce=self.announce,
            failed=self._fail,
        )
        self._resumption.begin()

    def _begin_run(self, resumed: Stamp | None, has_kept: bool) -> None:
        """All begin: without what memory held, if it was not that, or what is newer there."""
        if resumed is None or has_kept:
            self._capture.forget_newer(resumed)  # first: else a restart would find it, and its run
        self._launch.note()

    def offered(self, offer: StateOffered) -> None:
        if self._resumption is not None:
            self._resumption.offered(offer)

    def refused(self, why: str, is_final: bool = False) -> None:
        if is_final and self._world.has_agent:  # it says so once for all ranks, and ends them
            self._world.timers.after(ENDED_WITHIN_NS, lambda: self._fail(KeeperError(why)))
        else:
            self._fail(KeeperError(why))

    def delayed(self, why: str) -> None:
        if self._resumption is not None:
            self._resumption.delayed(why)

    def permitted(self, epoch: int, offer: int, loss: str) -> None:
        state = self._resumption.permitted(offer) if self._resumption is not None else None
        if state is None:
            return
        self._resumption = None
        self._doubted_from = None
        resumed = Stamp(state.step, state.epoch) if state.source == "memory" else None
        self._begin_run(resumed, state.keeps_newer)
        self.step = self.resumed_at = state.step
        self.epoch = epoch
        self.halting.train(epoch)
        self.resumed, self.loss = state, loss
        self._page.publish(
            epoch=epoch,
            phase=Phase.STARTING,
            step=state.step,
            completed_step=state.step,
            decided_step=state.step,
        )
        if state.source != "fresh":
            why = f"restored step {state.step} from {state.source}: {state.why}"
            self._world.journal.record("restored", why, step=state.step, source=state.source)
        if self.stage is Stage.STARTING:
            self._world.trainer.act(attempted(self._prepare(resumed, state)), self._prepared)
            return
        goes_back = self.stage is Stage.GOING_BACK
        then = self._ready if goes_back else partial(self._meet, self._place)
        if resumed is None:
            then()
        else:
            acts = self._capture.resumed(resumed, state.replicas)
            self._world.trainer.act(acts, lambda _: then())

    def _prepare(self, resumed: Stamp | None, state: StateOffered) -> Acts[str]:
        if resumed is not None:
            yield from self._capture.resumed(resumed, state.replicas)
        return (yield from self._capture.prepare())

    def _prepared(self, plan: str | KeepstepError) -> None:
        if isinstance(plan, KeepstepError):
            self._fail(plan)
            return
        self.plan = plan
        self._world.journal.record("slots-made", plan)
        if self._who.rank == 0:
            for caveat in self._world.live.caveats():
                self._world.journal.record("caveat", caveat, WARNING)
        groups = self._world.groups
        if self._who.has_many_nodes and self._options.shows_profile:
            groups.record_profile(profile_path(self._options.job_dir, self._who.rank))
        groups.listen(self._agent.suspect, self._entered_collective)
        if groups.is_muted and self._world.takes_place_at is not None:
            self._meet(self._world.takes_place_at)
        else:
            self._ready()

    def _entered_collective(self, number: int) -> None:
        """From any thread."""
        if self.stage not in (Stage.OVER, Stage.FAILED):
            self._page.publish(collective=number)

    def _meet(self, place: RegroupAt) -> None:
        """Build the groups where the peers are."""

        def met(why: str | None) -> None:
            if why is not None:
                self._fail(KeeperError(f"the process groups cannot be built anew: {why}"))
                return
            self._release.built()
            self._regroup.rebuilt(place.attempt)
            self._ready()

        self._world.groups.rebuild(place, met)

    def _ready(self) -> None:
        self.stage = Stage.READY
        self._resumed_ns = self._world.clock.monotonic_ns() if self.step >= 0 else None
        self._trainer.changed()

    # -- steps

    def may_begin_step(self) -> bool:
        """Whether the program may go on; False: not yet, `Trainer.changed` will tell."""
        if self.stage is Stage.READY and self._regroup.is_lost:
            self._begin_regroup()
        return self.stage is Stage.READY

    def begin_step(self) -> int:
        """The next step begins: its number. `may_begin_step` comes before."""
        step = self.step + 1
        self.halting.step_begins()
        self.announce(Phase.STEP, step)
        self._world.groups.profile_step(step)
        return step

    def body_entered(self, step: int) -> None:
        """`with step:`: from here on the step can be given up."""
        self._regroup.body_entered(step)

    def body_left(self) -> bool:
        """Whether a peer is lost: then whatever the body raises is that peer's doing."""
        self._regroup.body_left()
        return self._regroup.is_lost

    def before_update(self) -> StateCopy | None:
        """An optimizer is about to step: the copy that it has to wait for, if there is one.

        Raises PeerLost when a peer is lost and this body's results are worthless.
        """
        self._regroup.check_update()
        return self._capture.copy_under_way

    def fenced(self) -> None:
        """The trainer has waited for that copy, and now the update begins."""
        self._capture.passed()

    def awaits_snapshot(self) -> bool:
        """Before `end_step`: whether the snapshot under way keeps this step from being captured."""
        if self.stage is not Stage.READY or self._regroup.is_lost:
            return False
        return self._capture.is_in_the_way(Stamp(self.step + 1, self.epoch))

    def may_end_last_step(self) -> bool:
        """Before the `end_step` of a training's last step, which is not to be skipped: whether a
        slot is free for it, or it does not count anyway. To be asked again after a while."""
        if self.stage is not Stage.READY or self._regroup.is_lost:
            return True
        return self._capture.has_room(self.epoch)

    def end_step(
        self, entered: bool, ended: bool, step_ns: int, loss: object, is_last: bool = False
    ) -> bool:
        """The body of the loop is over: `entered` by `with step:`, `ended` without an error.
        `is_last`: no step follows.

        Whether the step counts; else it is to be done again, with whoever is there then. Raises
        PeerLost when a peer is lost and the body was not inside `with step:`.
        """
        if not self._regroup.counts(entered, ended):
            if not entered:
                self._regroup.check_update()
            return False
        step = self.step = self.step + 1
        self._capture.boundary(Stamp(step, self.epoch), loss, step_ns, is_last)
        self._checkpoints.completed(step, loss)
        self.halting.counts(step)
        self._tell_first_step(step)
        return True

    def _tell_first_step(self, step: int) -> None:
        since_ns, self._resumed_ns = self._resumed_ns, None
        if since_ns is not None:
            took_ns = self._world.clock.monotonic_ns() - since_ns
            why = f"step {step} is done, {human_ns(took_ns)} after the restore"
            self._world.journal.record("next-step", why, step=step, duration_ns=took_ns)

    def end_steps(self, then: Callable[[], None]) -> None:
        """The loop is over; `then` is called when its last step is sealed."""
        self._world.groups.profile_step(NO_STEP)
        self._regroup.loop_over()
        self.halting.loop_over()

        def drained() -> None:
            self.announce(Phase.DONE, self.step)
            then()

        self._capture.drain(drained)

    def drain(self, then: Callable[[], None]) -> None:
        """`then` is called when everything that is being captured is sealed, or given up."""
        self._capture.drain(then)

    def stalled(self, stall_ns: int, is_boundary: bool) -> None:
        """The trainer waited so long: at a boundary, or in front of an update."""
        stall = self._stall
        stall.waited(stall_ns, is_boundary, self._capture.copy_under_way)
        if self.stage is Stage.READY:
            self._page.publish(stall_ns_total=stall.total_ns, stall_ns_last=stall.last_ns)

    def waited(self, waited_ns: int) -> None:
        """The trainer waited so long for the store, between steps or behind the last."""
        self._stall.waited_for_store(waited_ns)
        self._page.publish(stall_ns_total=self._stall.total_ns)

    def _waits_at_its_end(self) -> None:
        """Tell while it lasts: that is no training."""
        if self._ending_ns is not None:
            now_ns = self._world.clock.monotonic_ns()
            self.waited(now_ns - self._ending_ns)
            self._ending_ns = now_ns
            self._world.timers.after(WAITS_TOLD_NS, self._waits_at_its_end)

    def announce(self, phase: Phase, step: int) -> None:
        """This rank does that now. From any thread."""
        if self.stage in (Stage.OVER, Stage.FAILED):
            return
        if phase not in (Phase.CAPTURE, Phase.SEAL):  # those happen beside the trainer's own phase
            self._page.publish(phase=phase, step=step)
        self._trainer.announce(phase, step)

    def persist(
        self, step: int | None, why: str, answered: Answered, steps_follow: bool = False
    ) -> None:
        """Ask for a checkpoint of `step` or a newer one (None: of the newest step that every rank
        holds), and again when those who write it die. `steps_follow`: as in `WantCheckpoint`."""

        def heard(done: CheckpointDone) -> None:
            if done.ok and done.step is not None:
                self._checkpoints.stored(done.step)
            answered(done)

        has_store = self._options.has_store
        WantedCheckpoint(
            self._world, self._keeper, step, why, heard, has_store, steps_follow
        ).begin()

    # -- what the keeper and the agent say meanwhile

    def slot_damaged(self, index: int, why: str) -> None:
        self._capture.damaged(index, why)

    def peer_lost(self, why: str) -> None:
        self._regroup.peer_lost(why)
        self._release.lost()
        if self.stage is Stage.GOING_BACK:
            self.stage = Stage.REGROUPING
        if self.stage is Stage.REGROUPING:  # one more, while all were finding together
            self._give_up_resumption()
            if not self._is_draining:
                self._release.when_free(self._free_again)
        self._trainer.changed()

    def regroup_at(self, place: RegroupAt) -> None:
        if not self._regroup.awaits_order:
            self.peer_lost(f"the ranks meet anew for attempt {place.attempt}")
        self._regroup.regroup_at(place)

    def agent_gone(self) -> None:
        self._regroup.agent_gone()

    def halt_ordered(self, order: HaltOrder) -> None:
        self.halting.ordered(order, self.step)
        self._trainer.changed()

    # -- a step is taken back

    @property
    def holds(self) -> tuple[Stamp, ...]:
        """The snapshots that this rank holds."""
        return self._capture.holds

    @property
    def has_lost_peer(self) -> bool:
        """Whether a peer is lost, and this rank not yet among its peers again."""
        return self._regroup.is_lost

    @property
    def regroups(self) -> int:
        """How often this rank has met its peers anew."""
        return self._regroup.count

    def take_back(self, first: int) -> None:
        """The step whose body is over does not count, nor does any from `first` on: all ranks say
        the same, and vote again. READY or FAILED follows."""
        if self.stage is not Stage.READY or self._regroup.is_lost:
            return  # whoever is lost has all vote again, in another way
        self.stage = Stage.GOING_BACK
        self._doubted_from = first
        self._world.groups.profile_step(NO_STEP)
        self._is_draining = True
        self._capture.drain(self._drained)

    # -- another rank is lost, and this one stays

    def _begin_regroup(self) -> None:
        self.stage = Stage.REGROUPING
        self._world.groups.profile_step(NO_STEP)
        self._is_draining = True
        self._release.when_free(self._free)

    def _free(self, why_not: str | None) -> None:
        """A drain before would wait for a device that waits for the lost peer."""
        if why_not is None:
            self._capture.drain(self._drained)
        else:
            self._fail(KeeperError(why_not))

    def _free_again(self, why_not: str | None) -> None:
        """What was being captured is drained already."""
        if why_not is None:
            self._wait_for_place()
        else:
            self._fail(KeeperError(why_not))

    def _drained(self) -> None:
        self._is_draining = False
        self._release.when_free(self._free_again)  # one more may have been lost meanwhile

    def _wait_for_place(self) -> None:
        if self.stage is Stage.REGROUPING:
            self._regroup.wait_for_place(self._meet_again)
        elif self.stage is Stage.GOING_BACK:
            self._capture.condemn_from(self._doubted_from or 0)
            self._resume()

    def _meet_again(self, place: RegroupAt | str) -> None:
        if isinstance(place, str):
            self._fail(KeeperError(place))
            return
        self._place = place
        self._resume()

    def _give_up_resumption(self) -> None:
        resumption, self._resumption = self._resumption, None
        if resumption is not None:
            resumption.end()

    # -- the end

    def close(self, ok: bool, why: str, then: Callable[[], None]) -> None:
        """The training is over: seal what is under way, have the last step written to the store if
        it went well, say goodbye. `then` is called when nothing is left to do; `unsaved` is known
        by then. With a last step that cannot be written the job has not ended well: its memory
        stays for as long as after any failure."""
        if self.stage in (Stage.OVER, Stage.FAILED):
            then()
            return
        self._give_up_resumption()
        self.stage = Stage.ENDING
        if ok:
            # There is no step left to meet for: should a peer be lost while this one waits for the
            # store, all start anew, and find that the last step is done. One that ends by an error
            # is about to be lost like a killed one: its peers stay in their process.
            self._agent.cannot_stay()
        self._closed = then
        self._ending_ns = self._world.clock.monotonic_ns()
        self._waits_at_its_end()

        def drained() -> None:
            if ok and self._options.has_store and self.step >= 0:
                self.persist(self.step, "the end of the job", persisted)
            else:
                self._say_goodbye(ok, why)

        def persisted(done: CheckpointDone) -> None:
            if done.ok:
                self._say_goodbye(True, why)
                return
            self.unsaved = f"the last step, {self.step}, is not in the store: {done.why}"
            self._world.journal.record("persist-failed", self.unsaved)  # `unsaved` is an error
            self._say_goodbye(False, self.unsaved)

        self._capture.drain(drained)

    def _say_goodbye(self, ok: bool, why: str) -> None:
        self._waits_at_its_end()
        self._ending_ns = None
        self._summarize(ok)
        self._page.publish(phase=Phase.DONE)
        if ok:
            self._agent.training_ended()
        self._world.timers.after(RELEASE_WITHIN_NS, self.released)
        self._keeper.goodbye(ok, why)

    def _summarize(self, ok: bool) -> None:
        captured, skipped, torn = counts = self._capture.counts
        stall_ns = self._stall.of_steps_ns // max(1, sum(counts))
        kept_s = None if ok or self.step < 0 else self._options.grace_s
        stores_later = self._options.has_store and not self._agent.is_connected
        self._world.journal.record(
            "summary",
            summary_of(counts, stall_ns, self._checkpoints.words(), kept_s, stores_later),
            stall_ns_per_step=stall_ns,
            captured_steps=captured,
            skipped_steps=skipped,
            torn_steps=torn,
            waited_ns=self._stall.for_store_ns,
        )

    def released(self) -> None:
        if self.stage is Stage.ENDING:
            self._let_go(Stage.OVER)
            self._closed()
            self._trainer.changed()

    def _fail(self, error: KeepstepError) -> None:
        if self.stage in (Stage.OVER, Stage.FAILED):
            return
        if self.stage is Stage.REGROUPING or self._world.groups.is_muted:
            self._regroup.cannot()
        self.error = error
        self._let_go(Stage.FAILED)
        self._trainer.changed()

    def abandon(self) -> None:
        """Let go of everything, without a word: the program has been interrupted."""
        if self.stage not in (Stage.OVER, Stage.FAILED):
            self._let_go(Stage.FAILED)

    def release(self) -> None:
        """In a forked child: the parent alone has what this rank has, so that its end is seen."""
        self.stage = Stage.OVER
        self._world.groups.close()
        self._capture.close()
        self._joined.release()

    def _let_go(self, stage: Stage) -> None:
        """Of everything but the slots."""
        self.stage = stage
        self._ending_ns = None
        self._give_up_resumption()
        self._world.groups.close()  # no collective touches the page from here on
        self._capture.close()
        self._joined.close()


def _nothing() -> None:
    """On one node everybody reads the pages."""
