"""Slow ranks: what an agent sees of its ranks' steps, and says of those that are slow.

    step work pages, what hinders processes -> blocks of steps -> core/detection/stragglers.py
    -> `slow-rank`, `slow-confirmed`, `slow-over`, `slow-unknown` and `slow-known` in the journal

Every half second, or as soon as a block of steps may be over, it reads of each rank the records at
the ends of the blocks that all ranks have completed by then: the same steps of all, whatever the
moment. How they do beside ranks of other nodes the leader says (`slow_across.py`): whoever of the
two names a rank first is heard, and the spell is over when both say so.
What is done about a slow one core/balance/remedy.py decides; this module ends nobody.

Invariant: no block reaches over a restore, over the first steps of a life, or over steps whose
records are not there any more; and ranks that train are judged, or it is told why they are not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

from keepstep.core.balance.remedy import Remedy, SlowFacts, remedy
from keepstep.core.detection.across_nodes import SILENT_NS
from keepstep.core.detection.drift import LEARNT_BLOCKS, median
from keepstep.core.detection.reference import ReferenceVerdict, confirm, throttled
from keepstep.core.detection.slow_canary import KEPT_BLOCKS, flaw_of_fresh_judge, flaw_of_judge
from keepstep.core.detection.slow_doubts import (
    UNRECORDED_NS,
    Doubt,
    of_learning,
    of_no_word,
    of_noise,
    of_records,
    of_silent_nodes,
)
from keepstep.core.detection.slow_words import SlowOver, over
from keepstep.core.detection.slowed_part import slowed_cpu, slowed_gpu, throttled_device
from keepstep.core.detection.stragglers import BLOCK_STEPS, common_timing, judge_of
from keepstep.core.economics.swap_price import ASSUMED, SwapPrice
from keepstep.edge.shm.step_work_page import StepWorkReader, work_path
from keepstep.model.events import DEBUG, WARNING
from keepstep.model.node_steps import NamedSlow
from keepstep.model.parts import PartHealth
from keepstep.model.step_work import (
    FixedWork,
    Hindrance,
    Section,
    Slow,
    StepWork,
    Timing,
    WorkBlock,
)
from keepstep.model.units import MS_NS, S_NS
from keepstep.ports import Executor, Journal, Memory, Probes
from keepstep.runtime.agent.slow_across import SlowAcross
from keepstep.runtime.agent.step_blocks import StepBlocks
from keepstep.runtime.agent.steps_board import StepsBoard

TICK_NS = S_NS // 2
LEAST_TICK_NS = 100 * MS_NS
WARM_STEPS = 10  # of a life: compilers, allocators and caches are not done before
# To judge a block takes some 100 us a rank: more of them a second would cost more than 0.5 % of a
# core.
LEAST_BLOCK_NS = 50 * MS_NS
LEAST_BLOCK_NS_A_RANK = 20 * MS_NS
MOST_BLOCK_STEPS = 200
COST_BLOCKS = 5
LATE_STEPS = 8  # by which a device may be behind its trainer
ON_DEVICE = (Timing.DEVICE, Timing.PASSES)
FIXED_WORK_NS = 10 * S_NS  # then nobody knows


class _Life:
    """Steps of one epoch, of the same ranks."""

    def __init__(self, epoch: int, from_step: int, from_ns: int, timing: Timing) -> None:
        self.epoch = epoch
        self.timing = timing
        self.from_step, self.from_ns = from_step, from_ns
        self.block_ns = 0  # not known yet, as is how to cut
        self.cutter: StepBlocks | None = None
        self.across: SlowAcross | None = None  # None: there are no other nodes
        self.ranks = 0
        self.judge = judge_of(timing)
        self.lost_ns: dict[int, int] = {}  # by slow rank, since that was told
        self.confirmed: dict[int, ReferenceVerdict] = {}  # by slow rank, what fixed work has said
        self.costs: dict[int, deque[tuple[float, float]]] = {}  # of a micro-batch, and how many
        self.told_elsewhere: dict[int, NamedSlow] = {}  # of this node, by the leader
        self.seen: dict[int, deque[WorkBlock]] = {}  # of each rank, the last blocks
        self.blocks = 0

    def note(self, blocks: Mapping[int, WorkBlock]) -> None:
        self.blocks += 1
        for rank, block in blocks.items():
            self.seen.setdefault(rank, deque(maxlen=KEPT_BLOCKS)).append(block)
            if block.micro_batches:
                cost = block.own_ns[Section.COMPUTE] / block.micro_batches
                kept = self.costs.setdefault(rank, deque(maxlen=COST_BLOCKS))
                kept.append((cost, block.micro_batches / block.steps))

    @property
    def slow(self) -> dict[int, Slow]:
        """This node's, whoever says so."""
        found = {rank: named.slow for rank, named in self.told_elsewhere.items()}
        return {**found, **self.judge.slow}

    def facts(self, slow: Slow, why_no_swap: str) -> SlowFacts:
        """About a slow rank, for the remedy. One that only the leader has named is compared with
        the ranks of all nodes, and no fixed work can be."""
        if slow.rank not in self.judge.slow and slow.rank in self.told_elsewhere:
            return self._facts_across(self.told_elsewhere[slow.rank], why_no_swap)
        costs_ns = {
            rank: max(1, int(median(cost for cost, _ in kept))) for rank, kept in self.costs.items()
        }
        total = round(sum(kept[-1][1] for kept in self.costs.values()))
        lost_ns = self.lost_ns.get(slow.rank, 0)
        said = self.confirmed[slow.rank].cause
        is_unclear = slow.cause == "compute" and said != "throttled"
        if is_unclear and self.timing is not Timing.HOST and not why_no_swap:
            why_no_swap = (
                "fixed work is not run on devices, so nobody knows whether this one is slow or the "
                "program has more to do there"
            )
        counts = [count for _, count in self.costs.get(slow.rank, ())]
        computes = min(1.0, sum(counts) / len(counts)) if counts else 1.0
        return SlowFacts(slow, self.ranks, costs_ns, total, lost_ns, why_no_swap, computes, said)

    def _facts_across(self, named: NamedSlow, why_no_swap: str) -> SlowFacts:
        slow = named.slow
        assert self.across is not None
        ranks = max(2, self.across.ranks)
        mine = [cost for cost, _ in self.costs.get(slow.rank, ())]
        costs_ns = {}
        if named.micro_batches and mine:
            others = (rank for rank in range(ranks) if rank != slow.rank)
            costs_ns = dict.fromkeys(others, max(1, named.usual_cost_ns))
            costs_ns[slow.rank] = max(1, int(median(mine)))
        said = self.confirmed[slow.rank].cause
        if slow.cause == "compute" and said != "throttled" and not why_no_swap:
            why_no_swap = (
                "fixed work is not compared between nodes, so nobody knows whether the processor "
                "is slow or the program has more to do there"
            )
        lost_ns = self.lost_ns.get(slow.rank, 0)
        return SlowFacts(
            slow, ranks, costs_ns, named.micro_batches, lost_ns, why_no_swap, confirmed=said
        )


class SlowRanks:
    """Of one node's ranks."""

    def __init__(
        self,
        memory: Memory,
        probes: Probes,
        executor: Executor,
        journal: Journal,
        job_dir: Path,
        why_no_swap: Callable[[], str] = lambda: "the job has one node",
        completed_step: Callable[[], int | None] = lambda: None,
        parts: Callable[[], Sequence[PartHealth]] = tuple,
        devices: Sequence[str] = (),
        canary_every_ns: int = 0,
        swap_price: Callable[[], SwapPrice] = lambda: ASSUMED,
    ) -> None:
        """completed_step: the newest one that all of the node's ranks have completed, None: one has
        completed none; told by other means than their records. parts: what is known of the node's
        now. devices: as its ranks' processes see them. canary_every_ns: so often a copy of what
        judges them is shown a slow rank; 0: only when ranks begin to train. swap_price: what it
        costs that a spare takes this node's place."""
        self._memory = memory
        self._probes = probes
        self._executor = executor
        self._journal = journal
        self._job_dir = job_dir
        self._why_no_swap, self._swap_price = why_no_swap, swap_price
        self._wants_swap = ""  # why
        self._pids: dict[int, int] = {}
        self._hindrance: dict[int, Callable[[], Hindrance]] = {}  # of the ranks that live
        self._readers: dict[int, StepWorkReader] = {}
        self._life: _Life | None = None
        self._completed_step = completed_step
        self._parts, self._devices = parts, devices
        # since when records of some rank are missing, and what was completed by then as far as told
        self._missing_since: tuple[int, int | None] | None = None
        self._doubts: dict[Doubt, str] = {}  # told, and not over
        self._moved: dict[int, tuple[int, int, int]] = {}  # step of a rank's newest record, since
        # when, and what was completed by then
        self._canary_every_ns = canary_every_ns
        self._shown_ns, self._times_shown = 0, 0
        self._fresh_flaws: dict[Timing, str] = {}  # of a judge as it is made
        self._world_size = 1
        self._board: StepsBoard | None = None
        self._now_ns = 0

    def begin(
        self, pids: Mapping[int, int], world_size: int, board: StepsBoard | None = None
    ) -> None:
        """These are the node's ranks now: just started, or stayed when others were. board: where
        other nodes tell of theirs; None: there are none."""
        self._world_size, self._board = world_size, board
        for rank in self._hindrance.keys() - pids.keys():
            self.forget(rank)
        for rank in pids:
            self._end_spell(rank, "ranks have been started")
        self._life = self._missing_since = None
        if len(pids) > 1:
            self._is_known("alone", "the rank has peers on its node")
        self._pids = dict(pids)
        self._hindrance = {rank: self._probes.hindrance(pid) for rank, pid in pids.items()}
        if pids:
            self._doubt("learning", of_learning(BLOCK_STEPS))

    def forget(self, rank: int) -> None:
        """It has ended."""
        self._end_spell(rank, "it has ended")
        self._hindrance.pop(rank, None)
        self._pids.pop(rank, None)
        reader = self._readers.pop(rank, None)
        if reader is not None:
            reader.close()

    def close(self) -> None:
        for rank in list(self._readers):
            self._readers.pop(rank).close()

    @property
    def tick_ns(self) -> int:
        """So long `tick` may wait."""
        block_ns = 0 if self._life is None else self._life.block_ns
        return min(TICK_NS, max(LEAST_TICK_NS, block_ns or TICK_NS))

    def tick(self, now_ns: int) -> str:
        """Why a spare is to take this node's place; empty: it is not."""
        if not self._hindrance:
            return ""
        self._now_ns = now_ns
        newest = self._newest()
        missing = self._hindrance.keys() - newest.keys()
        self._mind(newest, missing, now_ns)
        if not missing:
            self._look_at(newest)
        why, self._wants_swap = self._wants_swap, ""
        return why

    def _look_at(self, newest: Mapping[int, StepWork]) -> None:
        life = self._life
        if life is None or {life.epoch} != {work.epoch for work in newest.values()}:
            self._begin_life(newest)
        elif life.cutter is not None:
            self._feed(life, life.cutter, newest)
        else:
            self._choose_block(life, newest)

    def _newest(self) -> dict[int, StepWork]:
        """The last record of each rank that has one."""
        found = {}
        for rank in sorted(self._hindrance):
            reader = self._reader(rank)
            work = None if reader is None else reader.newest()
            if work is not None:
                found[rank] = work
        return found

    def _mind(self, newest: Mapping[int, StepWork], missing: Collection[int], now_ns: int) -> None:
        """Ranks without a record: before their first step, or nobody will ever see what they do.
        And ranks that go on, and whose records do not: whose device has failed, say."""
        step = self._completed_step()
        stale = self._stale(newest, step, now_ns)
        if not missing:
            self._missing_since = None
            if stale:
                self._doubt("records", of_records(stale, UNRECORDED_NS))
            else:
                self._is_known("records", "what all ranks of this node do in their steps is seen")
            return
        since_ns, then = self._missing_since or (now_ns, None)
        self._missing_since = since_ns, step if then is None else then
        trains = step is not None and then is not None and step > then
        if trains and now_ns - since_ns >= UNRECORDED_NS:
            self._doubt("records", of_records(missing, now_ns - since_ns))

    def _stale(
        self, newest: Mapping[int, StepWork], completed: int | None, now_ns: int
    ) -> list[int]:
        found = []
        for rank, work in newest.items():
            step, since_ns, then = self._moved.get(rank, (-1, 0, 0))
            if step != work.step or completed is None:
                self._moved[rank] = work.step, now_ns, completed or 0
            elif completed > then + LATE_STEPS and now_ns - since_ns >= UNRECORDED_NS:
                found.append(rank)
        return found

    def _reader(self, rank: int) -> StepWorkReader | None:
        reader = self._readers.get(rank)
        if reader is not None and reader.is_there():
            return reader
        try:
            fresh = StepWorkReader(self._memory, work_path(self._job_dir, rank))
        except (OSError, ValueError):
            return None
        if reader is not None:
            reader.close()
        self._readers[rank] = fresh
        return fresh

    # -- blocks

    def _begin_life(self, newest: Mapping[int, StepWork]) -> None:
        for rank in list(newest):
            self._end_spell(rank, "its steps are done again from a restored state")
        self._is_known("noise", "steps are done again from a restored state, and judged anew")
        self._doubt("learning", of_learning(BLOCK_STEPS))
        self._life = None
        epochs = {work.epoch for work in newest.values()}
        if len(epochs) > 1:
            return  # not all have done their first step
        timing = common_timing([self._readers[rank].timing for rank in newest])
        last = max(newest.values(), key=lambda work: work.step)
        self._life = _Life(epochs.pop(), last.step + WARM_STEPS, last.ended_ns, timing)
        if timing not in self._fresh_flaws:
            self._fresh_flaws[timing] = flaw_of_fresh_judge(timing)
        self._believe(self._fresh_flaws[timing])

    def _choose_block(self, life: _Life, newest: Mapping[int, StepWork]) -> None:
        """As few steps as take long enough, now that the first ones are over."""
        if min(work.step for work in newest.values()) < life.from_step:
            return
        last = max(newest.values(), key=lambda work: work.step)
        step_ns = (last.ended_ns - life.from_ns) / (last.step - life.from_step + WARM_STEPS)
        least_ns = max(LEAST_BLOCK_NS, LEAST_BLOCK_NS_A_RANK * len(newest))
        wanted = ceil(least_ns / max(1.0, step_ns))
        block_steps = max(BLOCK_STEPS, min(wanted, MOST_BLOCK_STEPS))
        life.block_ns = int(block_steps * step_ns)
        life.ranks = len(newest)
        life.cutter = self._cutter(block_steps, is_aligned=False)
        life.cutter.cut(newest)
        if self._board is not None:
            life.across = SlowAcross(
                self._board,
                life.epoch,
                self._world_size,
                step_ns,
                life.timing,
                lambda steps: self._cutter(steps, is_aligned=True),
            )

    def _cutter(self, block_steps: int, is_aligned: bool) -> StepBlocks:
        return StepBlocks(block_steps, self._records, self._hindrances, is_aligned)

    def _hindrances(self) -> dict[int, Hindrance]:
        return {rank: ask() for rank, ask in self._hindrance.items()}

    def _records(self, step: int, newest: Mapping[int, StepWork]) -> dict[int, StepWork] | None:
        found = {rank: self._readers[rank].at(step, work) for rank, work in newest.items()}
        whole = {rank: work for rank, work in found.items() if work is not None}
        return whole if len(whole) == len(found) else None

    def _feed(self, life: _Life, cutter: StepBlocks, newest: Mapping[int, StepWork]) -> None:
        """All blocks that all ranks have completed."""
        now_step = min(work.step for work in newest.values())
        for end, blocks in cutter.cut(newest):
            self._judge(life, blocks, end, now_step)
        if life.across is not None:
            life.across.look(newest, self._now_ns)
            self._hear_leader(life, life.across, now_step)
        knows_all = life.across is None or life.across.has_learnt
        if life.blocks > LEARNT_BLOCKS and knows_all:
            self._is_known("learning", "enough is known of what steps usually take")

    # -- telling

    def _judge(
        self, life: _Life, blocks: Mapping[int, WorkBlock], end_step: int, now_step: int
    ) -> None:
        """now_step: the last one that all have done by now."""
        life.note(blocks)
        steps = next(iter(blocks.values())).steps
        news = set()
        for told in life.judge.add(blocks, end_step):
            if told.rank in life.told_elsewhere:
                continue  # the leader names it, too: it is over when both say so
            if isinstance(told, Slow):
                news.add(told.rank)
                life.lost_ns[told.rank] = told.lost_ns
                self._tell(life, told, now_step)
            else:
                self._tell_over(told)
        for slow in life.slow.values():
            found = self._remedy(life, slow)
            if slow.rank not in news:  # this block is in what it has cost already
                lost_ns = life.lost_ns.get(slow.rank, 0) + found.left_ns * steps
                life.lost_ns[slow.rank] = lost_ns
            if found.rung == "swap":
                self._wants_swap = found.why
            self._look_for_heat(life, slow)
        for doubt, why in life.judge.doubts(self._world_size > 1).items():
            if doubt != "alone" or life.across is None or life.across.is_overdue:
                self._doubt(doubt, why)
        self._show_canary(life, end_step)

    def _remedy(self, life: _Life, slow: Slow) -> Remedy:
        facts = life.facts(slow, self._why_no_swap())
        return remedy(replace(facts, swap=self._swap_price()))

    def _show_canary(self, life: _Life, end_step: int) -> None:
        """Not before it can have learnt what ranks usually do."""
        is_due = self._canary_every_ns and self._now_ns - self._shown_ns >= self._canary_every_ns
        if is_due and life.blocks > LEARNT_BLOCKS + 1:
            self._times_shown += 1
            turn = self._times_shown
            flaw = flaw_of_judge(life.judge, life.seen, end_step, turn)
            leader = None if life.across is None else life.across.leader
            self._believe(flaw or ("" if leader is None else leader.flaw(turn)))

    def _believe(self, flaw: str) -> None:
        """What judges has been shown a slow rank."""
        self._shown_ns = self._now_ns
        if flaw:
            self._doubt("blind", f"whether a rank is slow cannot be told: {flaw}")
        else:
            self._is_known("blind", "what judges the ranks sees a slow one that is planted")

    def _hear_leader(self, life: _Life, across: SlowAcross, now_step: int) -> None:
        """What it says of this node's ranks, and whether it says anything."""
        named = {rank: one for rank, one in across.named.items() if rank in self._pids}
        for rank, one in named.items():
            is_news = rank not in life.told_elsewhere and rank not in life.judge.slow
            life.told_elsewhere.setdefault(rank, one)
            if is_news:
                life.lost_ns[rank] = one.slow.lost_ns
                self._tell(life, one.slow, now_step)
        for rank in life.told_elsewhere.keys() - named.keys() - life.judge.slow.keys():
            slow = life.told_elsewhere.pop(rank).slow
            if across.is_overdue:
                self._tell_unjudged(slow, "nobody compares it with ranks of other nodes now")
            else:
                self._tell_over(over(slow, across.judged_step))
        if noises := {rank: n for rank, n in across.noises.items() if rank in self._pids}:
            self._doubt("noise", of_noise(noises, life.judge.tells_tokens))
        if across.is_compared:
            self._is_known("alone", "the rank is compared with those of other nodes")
        if across.is_overdue and len(self._pids) > 1:
            self._doubt("nodes", of_no_word(SILENT_NS))
        elif silent := across.silent_to_tell:
            self._doubt("nodes", of_silent_nodes(silent, SILENT_NS))
        elif across.is_compared:
            self._is_known("nodes", "this node's ranks are compared with those of all other nodes")

    def _doubt(self, doubt: Doubt, why: str) -> None:
        """Once: its numbers change, and that is no news."""
        if doubt not in self._doubts:
            self._doubts[doubt] = why
            if doubt == "learning":  # so it is after each start: no news for the log
                self._journal.record("slow-unknown", why, DEBUG, doubt=doubt)
            else:
                self._journal.record("slow-unknown", why, doubt=doubt)

    def _is_known(self, doubt: Doubt, why: str) -> None:
        """That doubt is over, if it was told."""
        if self._doubts.pop(doubt, ""):
            if doubt == "learning":  # so it is after each start: no news for the log
                self._journal.record("slow-known", why, DEBUG, doubt=doubt)
            else:
                self._journal.record("slow-known", why, doubt=doubt)

    def _tell(self, life: _Life, slow: Slow, now_step: int) -> None:
        is_here = slow.rank in life.judge.slow  # a whole node that is slow has no measure on it
        is_computed = slow.cause == "compute" and life.timing is Timing.HOST
        asks = is_computed and len(self._pids) > 1 and is_here
        life.confirmed[slow.rank] = ReferenceVerdict("asked" if asks else "", 0.0, "")
        found = self._remedy(life, slow)
        self._journal.record(
            "slow-rank",
            found.line,
            WARNING,
            detail=f"{slow.why}. What is done: {found.why}",
            rank=slow.rank,
            section=slow.section.name.lower(),
            cause=slow.cause,
            since_step=slow.since_step,
            told_step=now_step,
            own_ns=slow.own_ns,
            peers_ns=slow.peers_ns,
            excess_ns=slow.excess_ns,
            excess_ratio=round(slow.excess_ratio, 4),
            remedy=found.rung,
            left_ns=found.left_ns,
        )
        if asks:
            self._confirm(life, slow)

    def _confirm(self, life: _Life, slow: Slow) -> None:
        """Ask fixed work whether its processor is slow or its program has more to do."""
        pids = dict(self._pids)

        def confirmed(found: Mapping[int, FixedWork]) -> None:
            if self._life is not life or life.judge.slow.get(slow.rank) != slow:
                return
            ratio = slow.own_ns / slow.peers_ns - 1 if slow.peers_ns else slow.excess_ratio
            verdict = confirm(slow.rank, ratio, found)
            self._tell_confirmed(life, slow.rank, verdict)

        self._executor.submit(lambda: self._probes.fixed_work(pids, FIXED_WORK_NS), confirmed)

    def _tell_confirmed(self, life: _Life, rank: int, verdict: ReferenceVerdict) -> None:
        life.confirmed[rank] = verdict
        self._journal.record(
            "slow-confirmed",
            verdict.why,
            rank=rank,
            cause=verdict.cause,
            ratio=round(verdict.ratio, 4),
        )

    def _look_for_heat(self, life: _Life, slow: Slow) -> None:
        """It is known some looks of the probe later than that the rank is slow."""
        rank, verdict = slow.rank, life.confirmed[slow.rank]
        if verdict.cause == "processor" and (cpu := slowed_cpu(self._parts())) is not None:
            self._tell_confirmed(life, rank, throttled(rank, verdict, cpu))
        elif verdict.cause == "" and slow.cause == "compute" and life.timing in ON_DEVICE:
            place, places = sorted(self._pids).index(rank), len(self._pids)
            gpu = slowed_gpu(place, places, self._devices, self._parts())
            if gpu is not None:
                self._tell_confirmed(life, rank, throttled_device(rank, gpu))

    def _tell_over(self, over: SlowOver) -> None:
        self._journal.record(
            "slow-over",
            over.why,
            rank=over.rank,
            since_step=over.since_step,
            until_step=over.until_step,
        )

    def _end_spell(self, rank: int, why: str) -> None:
        """What was known of that rank's steps is over."""
        slow = None if self._life is None else self._life.slow.get(rank)
        if slow is not None:
            assert self._life is not None
            self._tell_unjudged(slow, why)
            self._life.judge.forget(rank)
            self._life.told_elsewhere.pop(rank, None)

    def _tell_unjudged(self, slow: Slow, why: str) -> None:
        told = f"rank {slow.rank} was slow since step {slow.since_step}, and is no longer judged"
        facts = {"rank": slow.rank, "since_step": slow.since_step}
        self._journal.record("slow-over", f"{told}: {why}", **facts)
