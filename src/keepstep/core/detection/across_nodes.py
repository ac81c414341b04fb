"""Across nodes: the ranks of all nodes of a job, compared with each other by one of them.

Comes in: blocks of steps, as each node tells them, and the time. Goes out: the leader's word
(`model/node_steps.py`): who is slow, of which ranks nothing can be concluded, and which nodes'
words are missing. Who is slow among them `stragglers.py` decides, as it does of one node's ranks.

All nodes cut at multiples of the same number of steps, so blocks that end with the same step are
the same steps. One is judged once each node has told of it. A node that is behind the others for
`SILENT_NS` is silent: the others are judged without it, and nothing is said of its ranks. A block
that a node has passed without a word of it is judged by nobody.

Invariant: a rank is named only while its node tells; a silent node is told of, never called well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from math import ceil

from keepstep.core.detection.drift import LEARNT_BLOCKS, median
from keepstep.core.detection.slow_canary import KEPT_BLOCKS, flaw_of_judge
from keepstep.core.detection.stragglers import BLOCK_STEPS, Stragglers, common_timing, judge_of
from keepstep.model.node_steps import NamedSlow, NodeSteps, SlowWord
from keepstep.model.step_work import Section, Timing, WorkBlock
from keepstep.model.units import MS_NS, S_NS

SILENT_NS = 30 * S_NS
# A word a block and node crosses the network, and to judge one takes some 200 us a rank.
LEAST_BLOCK_NS = 1 * S_NS
LEAST_BLOCK_NS_A_RANK = 20 * MS_NS
PENDING_BLOCKS = 32
MOST_SHOWN_RANKS = 64  # to copy the judge of more would hold up its agent


def block_steps_across(step_ns: float, ranks: int) -> int:
    """How many steps of so long are judged together, in a job of so many ranks."""
    least_ns = max(LEAST_BLOCK_NS, LEAST_BLOCK_NS_A_RANK * ranks)
    return max(BLOCK_STEPS, ceil(least_ns / max(1.0, step_ns)))


class AcrossNodes:
    """Of one life of the job's ranks, with the leader."""

    def __init__(
        self,
        epoch: int,
        block_steps: int,
        nodes: int,
        judge_of: Callable[[Timing], Stragglers] = judge_of,
    ) -> None:
        """judge_of: who judges ranks whose time tells that."""
        self.epoch = epoch
        self.block_steps = block_steps
        self._nodes = nodes
        self._judge_of = judge_of
        self._judge: Stragglers | None = None
        self._timings: dict[int, Timing] = {}  # by node
        self._last: dict[int, int] = {}  # by node, the last step of its newest block
        self._owner: dict[int, int] = {}  # by rank, its node
        self._behind_ns: dict[int, int] = {}  # by node, since when others are ahead of its newest
        self._pending: dict[int, dict[int, Mapping[int, WorkBlock]]] = {}  # by last step, by node
        self._costs: dict[int, tuple[float, float]] = {}  # of a micro-batch, and how many a step
        self._judged_step, self._ranks = -1, 0
        self._blocks = 0  # of all that are seen
        self._seen: dict[int, deque[WorkBlock]] = {}  # of each rank, the last ones

    def hear(self, node: int, steps: NodeSteps, now_ns: int) -> None:
        """What that node tells now. What it told before, of another life, or of another node's
        ranks is not heard."""
        if steps.epoch != self.epoch or not 0 <= node < self._nodes:
            return
        last = self._last.get(node, -1)
        for end, blocks in sorted(steps.blocks.items()):
            if end <= last or not blocks or not self._fits(node, end, blocks):
                continue
            last = end
            self._pending.setdefault(end, {})[node] = blocks
        self._timings[node] = steps.timing
        if last > self._last.get(node, -1):
            self._last[node] = last
            self._behind_ns.pop(node, None)
        newest = max(self._last.values(), default=-1)
        for other in range(self._nodes):
            if self._last.get(other, -1) < newest:
                self._behind_ns.setdefault(other, now_ns)

    def _fits(self, node: int, end: int, blocks: Mapping[int, WorkBlock]) -> bool:
        if end % self.block_steps or any(b.steps != self.block_steps for b in blocks.values()):
            return False
        if any(self._owner.get(rank, node) != node for rank in blocks):
            return False
        self._owner.update(dict.fromkeys(blocks, node))
        return True

    def silent(self, now_ns: int) -> tuple[int, ...]:
        """Nodes whose words have not come while others' did."""
        return tuple(
            node
            for node, since_ns in sorted(self._behind_ns.items())
            if now_ns - since_ns >= SILENT_NS
        )

    def judge(self, now_ns: int) -> int:
        """All blocks that are there; how many that were."""
        silent = self.silent(now_ns)
        if self._judge is not None:
            for rank, node in self._owner.items():
                if node in silent:
                    self._judge.forget(rank)
                    self._seen.pop(rank, None)
                    self._blocks = 0  # whoever comes back has everything to learn
        awaited = set(range(self._nodes)) - set(silent)
        count = 0
        for end in sorted(self._pending):
            told = self._pending[end]
            missing = awaited - told.keys()
            if any(self._last.get(node, -1) < end for node in missing):
                break  # it is still to come
            del self._pending[end]
            if not missing:
                self._add(end, {r: b for n in sorted(awaited) for r, b in told[n].items()})
                count += 1
        for end in sorted(self._pending)[:-PENDING_BLOCKS]:
            del self._pending[end]
        return count

    def _add(self, end: int, blocks: Mapping[int, WorkBlock]) -> None:
        if self._judge is None:
            self._judge = self._judge_of(common_timing(self._timings.values()))
        for rank, block in blocks.items():
            if block.micro_batches:
                cost_ns = block.own_ns[Section.COMPUTE] / block.micro_batches
                self._costs[rank] = cost_ns, block.micro_batches / block.steps
        self._judge.add(blocks, end)
        self._blocks += 1
        for rank, block in blocks.items():
            self._seen.setdefault(rank, deque(maxlen=KEPT_BLOCKS)).append(block)
        self._judged_step, self._ranks = end, len(blocks)

    def flaw(self, turn: int) -> str:
        """Why what judges is not to be believed: a copy of it is shown a slow rank (`slow_canary`).
        Nothing is said before it can have learnt what ranks do, nor of very many."""
        if self._judge is None or self._blocks <= LEARNT_BLOCKS + 1:
            return ""
        if len(self._seen) > MOST_SHOWN_RANKS:
            return ""
        return flaw_of_judge(self._judge, self._seen, self._judged_step, turn)

    def word(self, post: int, now_ns: int) -> SlowWord:
        judge = self._judge
        return SlowWord(
            post=post,
            epoch=self.epoch,
            block_steps=self.block_steps,
            judged_step=self._judged_step,
            ranks=self._ranks,
            silent=self.silent(now_ns),
            noises={} if judge is None else judge.noises(),
            slow=() if judge is None else tuple(map(self._named, sorted(judge.slow))),
        )

    def _named(self, rank: int) -> NamedSlow:
        assert self._judge is not None
        slow = self._judge.slow[rank]
        others = [cost_ns for r, (cost_ns, _) in self._costs.items() if r != rank]
        if rank not in self._costs or not others:
            return NamedSlow(slow)
        total = round(sum(count for _, count in self._costs.values()))
        return NamedSlow(slow, max(1, int(median(others))), total)
