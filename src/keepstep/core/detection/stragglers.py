"""Stragglers: which rank is slow, since when, in which section of its steps, and what for.

Comes in: blocks of a few steps, of all ranks that are looked at, each with what the rank did itself
(`model/step_work.py`). Goes out: who has become slow and who is no longer, each with a sentence.
Accuses nobody of what it waits for its peers, and changes nothing.

What is watched is a ratio in log space: how much longer a step would take if this rank's section
took its own time, and all else what the median of the *other* ranks takes (leave-one-out). Hardware
differs and roles do, so the ratio is compared with the rank's own history (`drift.py`). What has
risen is verified: the median since the onset lies above the least excess, it has cost some steps'
time already (a processor is slower for a few seconds now and then), and the rank needs more than it
did itself, for of two ranks one may have become faster. Ratios to peers and verification
follow FALCON's (ATC 2025) and NVRx's practice; that work is divided by what there was to do is
ResiHP's.

A section's time is watched without what the rank was ready to run and did not, because others had
the processor: on a busy machine that is most of it, and noise. What it is with that, all sections
together, is told only of a rank that is hindered. Processor time alone is watched, too. Where a
program tells its tokens, all of these are watched by the token as well, and of the two the quieter
one counts; the passes are by the token alone.
Where ranks share a step's micro-batches, who is slow has fewer: what its passes take is multiplied
to be that of equally many.

The forward and the backward pass are watched by themselves, too, where they are seen in all ranks:
each by its share of a step, as every section. What alarms is named by what has grown
(`slow_pass.py`): a pass, or the body of the step as a whole.

Where ranks compute on a device and that is measured, its time takes the place of the thread's: what
the device did is then both a section's time and its processor's, in forward and backward pass and
update; elsewhere the device stands still, for want of orders. A device may wait for others and
nobody sees it: so a section counts there only where the whole step has become longer beside others'
(`whole_step.py`).

Where ranks have no peers here, a rank is measured against its own past alone. That is told only
where the kernel counts what hinders it: else a program that has more to do looks the same.

Invariant: while the reference is not learnt, or is too noisy, nobody is called slow by it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

from keepstep.core.detection.drift import (
    KEPT_BLOCKS,
    LEARNT_BLOCKS,
    VERIFIED_BLOCKS,
    Drift,
    DriftPoint,
    Rise,
    median,
)
from keepstep.core.detection.leave_one_out import OthersMedian
from keepstep.core.detection.slow_cause import cause_of, is_kept
from keepstep.core.detection.slow_doubts import Doubt, of_noise, standing_doubts
from keepstep.core.detection.slow_pass import slow_part
from keepstep.core.detection.slow_words import SlowOver, over, with_words
from keepstep.core.detection.standing_excess import StandingExcess, beyond
from keepstep.core.detection.whole_step import whole_ratio
from keepstep.core.detection.work_measures import (
    BODY,
    all_free_ns,
    all_own_ns,
    free_ns_of,
    own_ns_of,
    processor_ns,
    scaled,
    timed,
    with_share,
)
from keepstep.core.detection.work_peers import peers_of
from keepstep.model.step_work import JUDGED, PASSES, Section, Slow, SlowCause, Timing, WorkBlock

BLOCK_STEPS = 5
# channels, besides the judged sections by their names: processor time, all time, all time against
# the rank's own past; and what is taken by the token
COMPUTE, PROCESSOR, ALL, PAST, BY_TOKEN = "compute", "processor", "all", "past", "/token"
WITH_DELAY = (ALL, PAST)
PASS_NAMES = tuple(section.name.lower() for section in PASSES)
BY_WORK = (COMPUTE, PROCESSOR, ALL, *PASS_NAMES)
LEAST_EXCESS = log(1.06)  # of a step
LEAST_OWN_EXCESS = log(1.15)  # against its past alone
STANDING_EXCESS = log(1.25)  # against its peers alone, from the beginning on
# Where a wait may go unseen (of messages from rank to rank, in a pass): who wait are then the most,
# and each is compared with the others of them.
LEAST_RANKS_UNSEEN = 4
LEAST_EXCESS_NS = 200_000  # a step
# Who shares its processor has less of its caches, too: that is no more work.
SHARED_EXCESS = log(1.2)
LEAST_COST_STEPS = 10  # in steps' time, since it began: what is slow for a few seconds passes
WHOLE_SHARE = 0.5  # of a section's excess on a device, that the whole step must have
OWN_SHARE = 0.3  # of the excess over its peers, that it needs more than it did itself
OVER_BLOCKS = 8

HINDERED: tuple[SlowCause, ...] = ("quota", "memory", "neighbour")


@dataclass(frozen=True, slots=True)
class _Spell:
    """A rank that is slow: which channel says so, and from where on it does not any more."""

    slow: Slow
    channel: str
    over_ratio: float


class _Peers:
    """What the others of each rank need, in one block. fast: whose numbers count."""

    def __init__(
        self,
        free_ns: Mapping[int, float],
        needs_ns: Mapping[str, Mapping[int, float]],
        fast: frozenset[int],
    ) -> None:
        self._free_ns, self._needs_ns = free_ns, needs_ns
        self.fast = fast
        self.free = OthersMedian(free_ns, fast)
        self.needs = {name: OthersMedian(ns, fast) for name, ns in needs_ns.items()}

    def own_ns(self, name: str, rank: int) -> float:
        return self._needs_ns[name][rank]

    def all_of_them(self) -> _Peers:
        """The slow ones, too: there are no others."""
        return _Peers(self._free_ns, self._needs_ns, frozenset(self._free_ns))


class Stragglers:
    """Of the ranks that one agent sees. `judged`: the sections whose time says something of the
    rank; with `counts_processor` its processor time does."""

    def __init__(
        self,
        judged: Sequence[Section] = JUDGED,
        counts_processor: bool = True,
        timing: Timing = Timing.HOST,
        passes: Sequence[Section] = PASSES,
    ) -> None:
        """timing: of all these ranks. passes: of them, those that are watched where they are
        seen."""
        self._judged, self._passes = tuple(judged), tuple(passes)
        sees_body = Section.COMPUTE in self._judged
        self._summed = self._judged if sees_body else self._judged + self._passes
        self._counts_processor = counts_processor
        self._timing = timing
        self._is_on_device = timing in (Timing.DEVICE, Timing.PASSES)
        self._channels: dict[tuple[int, str], Drift] = {}
        self._facts: dict[int, deque[WorkBlock]] = {}
        self._spells: dict[int, _Spell] = {}
        self._over: dict[int, deque[float]] = {}
        self._tokens: float = 0.0  # of a step, in the first block that told them
        self._micro_batches: float = 0.0  # likewise
        self._blocks = 0
        self._first_step = 0
        self._alike: tuple[int, dict[int, frozenset[int]]] = 0, {}  # at which block, and who

    @property
    def slow(self) -> dict[int, Slow]:
        """Who is, now."""
        return {rank: spell.slow for rank, spell in self._spells.items()}

    @property
    def tells_tokens(self) -> bool:
        """Whether all ranks have told how much work they had."""
        return self._tokens > 0

    def forget(self, rank: int) -> None:
        """It is not looked at any more."""
        self._spells.pop(rank, None)
        self._facts.pop(rank, None)
        for key in [key for key in self._channels if key[0] == rank]:
            del self._channels[key]

    def doubts(self, has_peers: bool = True) -> dict[Doubt, str]:
        """Why it cannot be told of some rank whether it is slow. has_peers: the job has more than
        one rank, here or on other nodes."""
        computes_here = Section.COMPUTE in self._judged
        found = standing_doubts(self._facts, computes_here, has_peers) if self._facts else {}
        if noises := self.noises():
            found["noise"] = of_noise(noises, self.tells_tokens)
        return found

    def noises(self) -> dict[int, float]:
        """Of the ranks of which nothing can be concluded, how much their steps vary."""
        computes_here = Section.COMPUTE in self._judged
        watched = (COMPUTE, PROCESSOR) if computes_here else tuple(s.name.lower() for s in JUDGED)
        noises: dict[int, float] = {}
        known: set[int] = set()
        for (rank, name), channel in self._channels.items():
            if not name.startswith(watched) or channel.reference is None:
                continue
            if channel.is_noisy:
                noises[rank] = min(noises.get(rank, 9.0), channel.reference.noise)
            else:
                known.add(rank)
        return {rank: noise for rank, noise in noises.items() if rank not in known}

    def add(self, blocks: Mapping[int, WorkBlock], end_step: int) -> list[Slow | SlowOver]:
        """One block of each rank, all of the same steps, the last of them `end_step`. Who has
        become slow, and who is no more."""
        blocks = self._evened({rank: timed(block, self._timing) for rank, block in blocks.items()})
        steps = next(iter(blocks.values())).steps
        before_step = end_step - steps
        if self._blocks == 0:
            self._first_step = before_step + 1
        self._blocks += 1
        for rank, block in blocks.items():
            self._facts.setdefault(rank, deque(maxlen=2 * KEPT_BLOCKS)).append(block)
        totals = {rank: all_own_ns(block) for rank, block in blocks.items()}
        free = {rank: all_free_ns(block) for rank, block in blocks.items()}
        needs = self._needs(blocks)
        peers = _Peers(free, needs, self._fast(blocks))
        standing = self._standing() if self._blocks == 2 * LEARNT_BLOCKS else None
        found: list[Slow | SlowOver] = []
        for rank in blocks:
            if (fast := self._fast(blocks)) != peers.fast:
                peers = _Peers(free, needs, fast)
            points = self._points(rank, totals, peers)
            told: Slow | SlowOver | None = None
            if rank in self._spells:
                told = self._look_for_end(rank, points, before_step, end_step)
            if told is None and not self._is_slow_itself(rank):
                told = self._look_for_onset(rank, points, before_step, standing)
            if told is not None:
                found.append(told)
        return found

    def _is_slow_itself(self, rank: int) -> bool:
        """Not only for others that have the processor: that may hide another slowness, and does not
        make it a worse measure for its peers."""
        spell = self._spells.get(rank)
        return spell is not None and _is_of_section(spell.channel)

    # -- what is watched

    def _evened(self, blocks: Mapping[int, WorkBlock]) -> Mapping[int, WorkBlock]:
        """As if each had equally many micro-batches, where they share them."""
        counts = {rank: block.micro_batches / block.steps for rank, block in blocks.items()}
        if min(counts.values()) <= 0:
            return blocks
        self._micro_batches = self._micro_batches or sum(counts.values()) / len(counts)
        return {
            rank: with_share(block, self._micro_batches / counts[rank])
            for rank, block in blocks.items()
        }

    def _scales(self, blocks: Mapping[int, WorkBlock]) -> dict[int, float]:
        """By which each rank's work is multiplied to be that of equally many tokens; empty where
        not all tell."""
        tokens = {rank: block.tokens / block.steps for rank, block in blocks.items()}
        if min(tokens.values()) <= 0:
            return {}
        self._tokens = self._tokens or sum(tokens.values()) / len(tokens)
        return {rank: self._tokens / count for rank, count in tokens.items()}

    def _needs(self, blocks: Mapping[int, WorkBlock]) -> dict[str, dict[int, float]]:
        """By channel, what each rank needs, nanoseconds a step."""
        may_tell = self._timing is not Timing.PASSES or len(blocks) >= LEAST_RANKS_UNSEEN
        passes = self._passes if may_tell else ()
        seen = [p for p in passes if all(b.own_ns[p] > 0 for b in blocks.values())]
        found = {
            section.name.lower(): {r: free_ns_of(b, section) for r, b in blocks.items()}
            for section in (*self._judged, *seen)
        }
        if self._counts_processor:
            found[PROCESSOR] = {r: processor_ns(b) for r, b in blocks.items()}
            found[ALL] = {r: all_own_ns(b) for r, b in blocks.items()}
        scales = self._scales(blocks)
        for name in BY_WORK if scales else ():
            if name in found:
                found[name + BY_TOKEN] = {r: ns * scales[r] for r, ns in found[name].items()}
                if name in PASS_NAMES:  # of these one measure each: the body has both
                    del found[name]
        return found

    def _fast(self, blocks: Mapping[int, WorkBlock]) -> frozenset[int]:
        """Who is slow is nobody's measure, while there are others."""
        return frozenset(rank for rank in blocks if not self._is_slow_itself(rank))

    def _points(
        self, rank: int, totals: Mapping[int, float], peers: _Peers
    ) -> dict[str, DriftPoint]:
        """By channel."""
        total_ns = totals[rank]
        found: dict[str, DriftPoint] = {}
        if self._counts_processor:
            found[PAST] = DriftPoint(log(max(1.0, total_ns)), total_ns)
        if not peers.fast - {rank}:
            if rank in peers.fast or len(totals) == 1:
                return found
            peers = peers.all_of_them()
        of_step = peers.free.of(rank)
        if of_step <= 0:
            return found
        for name, others in peers.needs.items():
            usual = others.of(rank)
            whole = usual if name.startswith(ALL) else of_step
            if whole > 0:
                own_ns = peers.own_ns(name, rank)
                found[name] = DriftPoint(beyond(own_ns, usual, whole), own_ns)
        return found

    # -- who becomes slow

    def _look_for_onset(
        self,
        rank: int,
        points: Mapping[str, DriftPoint],
        before_step: int,
        standing: StandingExcess | None,
    ) -> Slow | None:
        alarms = []
        for name, point in points.items():
            if rank in self._spells and not _is_of_section(name):
                continue  # that is told
            if self._channel(rank, name).add(point, before_step):
                alarms.append(name)
        for name in alarms:
            if name == PAST and not self._is_everybodys(rank):
                continue
            if self._counts(rank, name) and (slow := self._verified(rank, name)) is not None:
                return self._begin(rank, name, slow)
        return None if standing is None else self._slow_so_far(rank, standing)

    def _is_everybodys(self, rank: int) -> bool:
        """Whether all others need more than they did as well, or there are none: else peers tell
        better who is slow."""
        return all(
            self._channels[r, PAST].is_beyond
            if r not in self._spells
            else self._spells[r].channel == PAST
            for r in self._facts
            if r != rank and (r, PAST) in self._channels
        )

    def _channel(self, rank: int, name: str) -> Drift:
        key = rank, name
        if key not in self._channels:
            self._channels[key] = Drift(LEAST_OWN_EXCESS if name == PAST else LEAST_EXCESS)
        return self._channels[key]

    def _counts(self, rank: int, name: str) -> bool:
        """Of a measure by the step and the same by the token the quieter one."""
        plain = name.removesuffix(BY_TOKEN)
        twin = self._channels.get((rank, plain if plain != name else name + BY_TOKEN))
        mine = self._channels[rank, name].reference
        if twin is None or twin.reference is None or mine is None:
            return True
        return mine.noise <= twin.reference.noise

    def _verified(self, rank: int, name: str) -> Slow | None:
        rise = self._channels[rank, name].rise()
        if rise is None or rise.own_excess_ns < LEAST_EXCESS_NS:
            return None
        if rise.excess < (LEAST_OWN_EXCESS if name == PAST else LEAST_EXCESS):
            return None
        facts = self._comparable_facts(rank, name)
        now, before = facts[-rise.blocks :], facts[: -rise.blocks]
        if not before or self._cost_steps(rank, now[-1].steps) < LEAST_COST_STEPS:
            return None
        expected_ns = (exp(rise.excess) - 1) * median(self._basis(b, name) for b in before)
        if rise.own_excess_ns < OWN_SHARE * expected_ns:
            return None  # its peers have become faster
        if not self._grows_as_a_whole(rank, name, rise):
            return None  # it waits for others, unseen
        if name != PAST and self._is_still_faster(rank, name, now):
            return None  # than those that do the same: nobody waits for it
        excess, is_own = rise.excess, _is_of_section(name)
        if is_own and rank not in self._spells and self._is_kept(now, before):
            if not self._channel(rank, ALL).is_blind:
                return None  # that one tells it, with its delay
            is_own = False
            excess = log(median(map(all_own_ns, now)) / median(map(all_own_ns, before)))
        slow = self._described(rank, name, now, before, rise.onset_step, excess, is_own=is_own)
        if slow.excess_ns < LEAST_EXCESS_NS:
            return None  # all sections together cost nothing: there is no price to tell
        if is_own and rank in self._spells and excess < SHARED_EXCESS:
            return None
        return slow if is_own or slow.cause in HINDERED else None

    def _is_still_faster(self, rank: int, name: str, now: Sequence[WorkBlock]) -> bool:
        """Than its peers, with all that it does now."""
        needs = all_free_ns if _is_of_section(name) else all_own_ns
        others = self._peers_now().get(rank, frozenset()) - {rank}
        theirs = [b for r in others for b in self._comparable_facts(r, name)[-len(now) :]]
        return bool(theirs) and median(map(needs, now)) <= median(map(needs, theirs))

    def _is_kept(self, now: Sequence[WorkBlock], before: Sequence[WorkBlock]) -> bool:
        """From the processor, mostly. A device's time has no delays."""
        return self._timing is Timing.HOST and self._counts_processor and is_kept(now, before)

    def _cost_steps(self, rank: int, steps: int) -> float:
        """What has risen most, in any channel, has cost since its onset. steps: of a block."""
        rises = [channel.rise() for (r, _), channel in self._channels.items() if r == rank]
        return steps * max(rise.cost_blocks for rise in rises if rise is not None)

    def _grows_as_a_whole(self, rank: int, name: str, rise: Rise) -> bool:
        """Asked of a device that may wait unseen, and of a section."""
        if self._timing is not Timing.DEVICE or not _is_of_section(name):
            return True
        others = {r for r in self._facts if r != rank and not self._is_slow_itself(r)}
        others = others or self._facts.keys() - {rank}
        mine = self._comparable_facts(rank, name)
        theirs = [self._comparable_facts(r, name) for r in others]
        now = whole_ratio(mine[-rise.blocks :], [one[-rise.blocks :] for one in theirs])
        before = whole_ratio(mine[: -rise.blocks], [one[: -rise.blocks] for one in theirs])
        return now - before >= WHOLE_SHARE * rise.excess

    def _comparable_facts(self, rank: int, name: str) -> list[WorkBlock]:
        """A rank's last blocks, as if of equally many tokens where the channel takes them so."""
        facts = self._facts[rank]
        if not name.endswith(BY_TOKEN):
            return list(facts)
        return [scaled(b, self._tokens * b.steps / b.tokens) for b in facts if b.tokens]

    def _basis(self, block: WorkBlock, name: str) -> float:
        """What the channel's ratio is a ratio of, nanoseconds a step."""
        return all_free_ns(block) if _is_of_section(name) else all_own_ns(block)

    def _peers_now(self) -> dict[int, frozenset[int]]:
        """By rank, those that do the same, with itself, where there are any."""
        if self._alike[0] != self._blocks:
            self._alike = self._blocks, peers_of(self._facts)
        return self._alike[1]

    def _standing(self) -> StandingExcess:
        """What each has needed so far, in the middle."""
        ranks = [rank for rank, facts in self._facts.items() if len(facts) == self._blocks]
        history = [
            {r: self._facts[r][n] for r in ranks} for n in range(self._blocks if ranks else 0)
        ]
        needs = [self._needs(blocks) for blocks in history]
        free = {r: median([all_free_ns(b) for b in self._facts[r]]) for r in ranks}
        usual = {
            name: {r: median([need[name][r] for need in needs]) for r in ranks}
            for name in (needs[0] if needs else ())
            if all(name in need for need in needs)
        }
        return StandingExcess(usual, free, self._peers_now())

    def _slow_so_far(self, rank: int, standing: StandingExcess) -> Slow | None:
        """Slow from the beginning, where others do the same: there is no better past to compare
        with."""
        for name in standing.names:
            channel = self._channels.get((rank, name))
            beside = standing.beside(rank, name, is_whole=name.startswith(ALL))
            if beside is None or channel is None or channel.reference is None or channel.is_noisy:
                continue
            if beside.peers < STANDING_EXCESS or not self._counts(rank, name):
                continue
            now = self._comparable_facts(rank, name)
            others = self._peers_now()[rank] - {rank}
            theirs = [self._comparable_facts(r, name) for r in others]
            may_wait = self._timing is Timing.DEVICE and _is_of_section(name)
            if may_wait and whole_ratio(now, theirs) < WHOLE_SHARE * beside.peers:
                continue
            before = [block for blocks in theirs for block in blocks]
            if _is_of_section(name) and self._is_kept(now, before):
                continue  # with its delay it is told
            slow = self._described(
                rank,
                name,
                now,
                before,
                self._first_step,
                beside.peers,
                is_own=_is_of_section(name),
                is_standing=True,
            )
            if slow.excess_ns >= LEAST_EXCESS_NS:
                return self._begin(rank, name, slow, beside.peers_beside_all)
        return None

    def _begin(self, rank: int, name: str, slow: Slow, usual: float | None = None) -> Slow:
        """usual: its ratio if it were not slow; None: what it was before."""
        channel = self._channels[rank, name]
        reference, rise = channel.reference, channel.rise()
        assert reference is not None
        centre = reference.centre if usual is None else usual
        # of the channel: with its delays the rank may need more
        excess = rise.excess if usual is None and rise is not None else log(1 + slow.excess_ratio)
        self._spells[rank] = _Spell(slow, name, centre + max(LEAST_EXCESS, excess) / 2)
        self._over[rank] = deque(maxlen=OVER_BLOCKS)
        for (r, _), other in self._channels.items():
            if r == rank:
                other.drop_rise()
        return slow

    def _described(
        self,
        rank: int,
        name: str,
        now: Sequence[WorkBlock],
        before: Sequence[WorkBlock],
        onset_step: int,
        excess: float,
        is_own: bool,
        is_standing: bool = False,
    ) -> Slow:
        """before: its own blocks, or its peers' where it has been slow from the beginning. is_own:
        without its delays."""
        needs = free_ns_of if is_own else own_ns_of
        since_onset = now
        now = now[-max(VERIFIED_BLOCKS, len(now) // 2) :]  # noise lets onsets seem too early
        sections = {*self._judged, *self._passes}
        now_ns = {s: median([needs(b, s) for b in now]) for s in sections}
        before_ns = {s: median([needs(b, s) for b in before]) for s in sections}
        more = {s: now_ns[s] - before_ns[s] for s in self._summed}
        section = max(more, key=lambda s: more[s])
        plain = name.removesuffix(BY_TOKEN)
        if plain not in (PROCESSOR, *WITH_DELAY):
            section = Section[plain.upper()]
        elif plain == PROCESSOR and more[section] < LEAST_EXCESS_NS:
            section = Section.COMPUTE
        if section in BODY and sections.issuperset(BODY):
            bodies = ([{s: needs(b, s) for s in BODY} for b in of] for of in (now, before))
            section = slow_part(*bodies)
        excess_ns = max(0.0, sum(more.values()))
        usual_ns = sum(before_ns[s] for s in self._summed)
        took_ns = [(b.steps, sum(needs(b, s) for s in self._summed)) for b in since_onset]
        cause = cause_of(section, excess_ns, now, before, needs, self._is_on_device)
        fast = {r for r in self._facts if r != rank and not self._is_slow_itself(r)}
        others = sorted(fast & self._peers_now().get(rank, fast) or fast)
        peers = [b for r in others for b in self._comparable_facts(r, name)[-len(now) :]]
        has_peers = bool(peers) and name != PAST
        peers_ns = median([needs(b, section) for b in (peers if has_peers else before)])
        slow = Slow(
            rank=rank,
            section=section,
            cause=cause,
            since_step=onset_step,
            own_ns=int(now_ns[section]),
            peers_ns=int(peers_ns),
            excess_ns=int(excess_ns),
            excess_ratio=exp(excess) - 1,
            has_peers=has_peers,
            is_standing=is_standing,
            why="",
            is_stage=any(entries.messages for block in now for entries in block.groups),
            lost_ns=int(sum(steps * max(0.0, ns - usual_ns) for steps, ns in took_ns)),
        )
        return with_words(slow)

    # -- who is no longer

    def _look_for_end(
        self, rank: int, points: Mapping[str, DriftPoint], before_step: int, end_step: int
    ) -> SlowOver | None:
        spell = self._spells[rank]
        point = points.get(spell.channel)
        if point is None:
            return None
        recent = self._over[rank]
        recent.append(point.ratio)
        if len(recent) < OVER_BLOCKS or median(recent) >= spell.over_ratio:
            return None
        del self._spells[rank], self._over[rank]
        return over(spell.slow, end_step - OVER_BLOCKS // 2 * (end_step - before_step))


def _is_of_section(name: str) -> bool:
    """Or of the processor time in all of them; not of a time with its delays."""
    return not name.startswith(WITH_DELAY)


def judge_of(timing: Timing) -> Stragglers:
    """Of ranks whose time tells that of what they compute."""
    if timing is Timing.UNSEEN:
        return Stragglers((Section.DATA,), counts_processor=False, passes=())
    if timing is Timing.PASSES:
        return Stragglers((Section.DATA,), counts_processor=False, timing=timing)
    return Stragglers(timing=timing)


def common_timing(timings: Collection[Timing]) -> Timing:
    """What ranks can be compared by: a thread's time and a device's are not alike."""
    return next(iter(timings)) if len(set(timings)) == 1 else Timing.UNSEEN
