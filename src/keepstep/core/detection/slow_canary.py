"""Slow canary: a slow rank that the judge of slow ranks is shown before it is believed, and now and
then again.

Comes in: a judge as it is made, or one that judges and the last blocks it has seen. Goes out: why
it cannot be believed, empty where it names a rank of which each section takes a whole step longer.
The judge itself learns nothing of it: a copy of it is shown.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy

from keepstep.core.detection.drift import LEARNT_BLOCKS, median
from keepstep.core.detection.stragglers import BLOCK_STEPS, Stragglers, judge_of
from keepstep.model.step_work import JUDGED, PASSES, Section, Slow, Timing, WorkBlock
from keepstep.model.units import MS_NS

LOOKS = 16  # blocks
RANKS = 4  # whom a judge of passes asks for at least
STEP_NS = 20 * MS_NS
KEPT_BLOCKS = 5  # of each rank, of which the middle is what it usually does
BLIND = "what judges the ranks does not see a slow one that is planted"


def flaw_of_fresh_judge(timing: Timing) -> str:
    """Of a judge of ranks that tell so much, as it is made."""
    judge = judge_of(timing)
    own_ns = tuple(STEP_NS * BLOCK_STEPS if section in JUDGED else 0 for section in Section)
    block = WorkBlock(BLOCK_STEPS, own_ns, own_ns, 0, (0,) * len(Section), 0, 0, device_ns=own_ns)
    blocks = dict.fromkeys(range(RANKS), block)
    for number in range(1, LEARNT_BLOCKS + 2):
        if judge.add(blocks, number * BLOCK_STEPS):
            return f"{BLIND}: it calls slow who is as before"
    return _flaw(judge, blocks, 0, (LEARNT_BLOCKS + 1) * BLOCK_STEPS)


def flaw_of_judge(
    judge: Stragglers, seen: Mapping[int, Sequence[WorkBlock]], end_step: int, turn: int
) -> str:
    """Of one that judges. seen: of each rank its last blocks, of equally many steps, up to
    `end_step`. Nothing is said where nobody can be named: of a rank alone, or while all are slow or
    vary too much. turn: another rank each time."""
    usual = {rank: usual_block(blocks) for rank, blocks in seen.items()}
    noisy: Collection[int] = judge.noises()
    may_be_shown = sorted(rank for rank in usual if rank not in judge.slow and rank not in noisy)
    if len(usual) < 2 or not may_be_shown:
        return ""
    return _flaw(deepcopy(judge), usual, may_be_shown[turn % len(may_be_shown)], end_step)


def usual_block(blocks: Sequence[WorkBlock]) -> WorkBlock:
    """What a rank does in the middle; who its groups are is as it was last."""
    last = blocks[-1]

    def middle(name: str) -> tuple[int, ...]:
        columns = zip(*(getattr(block, name) for block in blocks), strict=True)
        return tuple(int(median(column)) for column in columns)

    return last._replace(
        own_ns=middle("own_ns"),
        cpu_ns=middle("cpu_ns"),
        delay_ns=middle("delay_ns"),
        device_ns=middle("device_ns"),
        wait_ns=int(median(block.wait_ns for block in blocks)),
        throttled_ns=0,
        memory_stall_ns=0,
    )


def _flaw(judge: Stragglers, usual: Mapping[int, WorkBlock], rank: int, end_step: int) -> str:
    """The judge is spent then."""
    blocks = {**usual, rank: _slower(usual[rank])}
    for _ in range(LOOKS):
        end_step += blocks[rank].steps
        told = judge.add(blocks, end_step)
        if any(isinstance(one, Slow) and one.rank == rank for one in told):
            return ""
    return f"{BLIND}, rank {rank}"


def _slower(block: WorkBlock) -> WorkBlock:
    """Each section takes as much longer as a whole step takes; its passes share that."""
    whole = block.wait_ns + sum(block.own_ns[section] for section in JUDGED)
    whole = max(whole, sum(block.device_ns[section] for section in JUDGED), block.steps * MS_NS)

    def more(taken: tuple[int, ...]) -> tuple[int, ...]:
        added = [whole if section in JUDGED else 0 for section in Section]
        for section in PASSES:
            if taken[section]:
                added[section] = whole // len(PASSES)
        return tuple(ns + more_ns for ns, more_ns in zip(taken, added, strict=True))

    is_on_device = any(block.device_ns)
    return block._replace(
        own_ns=more(block.own_ns),
        cpu_ns=more(block.cpu_ns),
        device_ns=more(block.device_ns) if is_on_device else block.device_ns,
    )
