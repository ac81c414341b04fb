"""Slow across: this node's part in comparing its ranks with those of other nodes.

    the node's records -> blocks -> the board; the leader's word -> who of this node's ranks is slow
    on the leader, besides: all nodes' blocks -> core/detection/across_nodes.py -> its word

Node 0's agent leads. It says in how many steps all cut; before that nobody tells anything. An
exchange is begun once a second or, where blocks take long, twice a block. Tells the journal
nothing: `slow_ranks.py` does.

Invariant: what the leader said of another life of the ranks does not count; and while it says
nothing new of this node, although the ranks train, `is_overdue`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from keepstep.core.detection.across_nodes import SILENT_NS, AcrossNodes, block_steps_across
from keepstep.core.detection.drift import LEARNT_BLOCKS
from keepstep.core.detection.slow_words import with_words
from keepstep.model.node_steps import (
    MOST_BLOCKS,
    MOST_RANKS,
    NamedSlow,
    NodeSteps,
    SlowWord,
    node_steps_from_text,
    node_steps_to_text,
    slow_word_from_text,
    slow_word_to_text,
)
from keepstep.model.step_work import StepWork, Timing, WorkBlock
from keepstep.model.units import S_NS
from keepstep.runtime.agent.step_blocks import StepBlocks
from keepstep.runtime.agent.steps_board import StepsBoard

EXCHANGE_NS = 1 * S_NS
LEADER = 0
MOST_PASSED_NS = 2 * S_NS  # between two looks; what is more, nobody trained


class SlowAcross:
    """Of one life of this node's ranks."""

    def __init__(
        self,
        board: StepsBoard,
        epoch: int,
        world_size: int,
        step_ns: float,
        timing: Timing,
        blocks_of: Callable[[int], StepBlocks],
    ) -> None:
        """blocks_of: this node's, aligned, of so many steps."""
        self._board = board
        self._epoch = epoch
        self._timing = timing
        self._blocks_of = blocks_of
        self._step_ns = step_ns
        self._cutter: StepBlocks | None = None
        self._mine: dict[int, dict[int, WorkBlock]] = {}  # by last step, newest ones
        self._told_step = -1
        self._posts = 0
        self._exchanged_ns = 0
        self._has_compared = False
        self._first_judged_step = -1
        self._texts: dict[int, str] = {}  # by node, what it told last
        self._word: SlowWord | None = None
        self._waited_ns = self._now_ns = 0
        self.leader: AcrossNodes | None = None
        if board.node == LEADER:
            steps = block_steps_across(step_ns, world_size)
            self.leader = AcrossNodes(epoch, steps, board.nodes)
            self._cutter = blocks_of(steps)

    # -- what is known

    @property
    def named(self) -> dict[int, NamedSlow]:
        """All ranks of the job that are slow, each with its sentence; none by an old word."""
        if self._word is None or self.is_overdue:
            return {}
        return {one.slow.rank: one for one in self._word.slow}

    @property
    def noises(self) -> Mapping[int, float]:
        return {} if self._word is None else self._word.noises or {}

    @property
    def silent(self) -> tuple[int, ...]:
        """Nodes that are not compared, as the leader says."""
        return () if self._word is None else self._word.silent

    @property
    def silent_to_tell(self) -> tuple[int, ...]:
        """The leader tells of them in its journal, and no other node."""
        return () if self.leader is None else self.silent

    @property
    def ranks(self) -> int:
        """So many are compared."""
        return 0 if self._word is None else self._word.ranks

    @property
    def judged_step(self) -> int:
        return -1 if self._word is None else self._word.judged_step

    @property
    def _every_ns(self) -> float:
        """So long between exchanges: two a block."""
        steps = 0 if self._cutter is None or self._word is None else self._cutter.block_steps
        return max(EXCHANGE_NS, steps * self._step_ns / 2)

    @property
    def is_compared(self) -> bool:
        """This node's ranks are compared with others, as the leader last said, and not long ago."""
        return self._has_compared and not self.is_overdue

    @property
    def has_learnt(self) -> bool:
        """Whether the leader has judged as many blocks as it takes to know what ranks usually do,
        and this node has heard that."""
        if self._cutter is None or self._first_judged_step < 0:
            return False
        judged = (self.judged_step - self._first_judged_step) // self._cutter.block_steps + 1
        return judged > LEARNT_BLOCKS

    @property
    def is_overdue(self) -> bool:
        """Nobody has compared them for too long."""
        steps = 0 if self._cutter is None else self._cutter.block_steps
        is_late = self._waited_ns >= SILENT_NS + 2 * steps * self._step_ns
        return is_late or self._board.node in self.silent

    # -- its turn

    def look(self, newest: Mapping[int, StepWork], now_ns: int) -> None:
        """While all of the node's ranks show records of this life."""
        passed_ns = now_ns - self._now_ns if self._now_ns else 1
        self._waited_ns += max(1, min(passed_ns, MOST_PASSED_NS))
        self._now_ns = now_ns
        if self._cutter is not None:
            for end, blocks in self._cutter.cut(newest):
                self._mine[end] = blocks
            for end in sorted(self._mine)[:-MOST_BLOCKS]:
                del self._mine[end]
        if now_ns - self._exchanged_ns < self._every_ns or not self._board.is_free:
            return
        self._exchanged_ns = now_ns
        if self.leader is None:
            self._board.tell(self._new_text(len(newest)), self._hear_word)
        else:
            self._board.gather(self._hear_nodes)

    def _new_text(self, ranks: int) -> str:
        """What this node tells; empty: nothing new. Of more ranks than a text holds, nothing."""
        end = max(self._mine, default=-1)
        if end <= self._told_step or ranks > MOST_RANKS:
            return ""
        self._told_step = end
        self._posts += 1
        return node_steps_to_text(self._steps())

    def _steps(self) -> NodeSteps:
        return NodeSteps(self._posts, self._epoch, self._timing, self._mine)

    def _hear_word(self, text: str) -> None:
        try:
            word = slow_word_from_text(text) if text else None
        except ValueError:
            return  # none of this release's: as if there were none
        if word is None or word.epoch != self._epoch:
            return
        if self._cutter is None or self._cutter.block_steps != word.block_steps:
            self._cutter = self._blocks_of(word.block_steps)
            self._mine.clear()
        self._take(word)

    def _take(self, word: SlowWord) -> None:
        before = -1 if self._word is None else self._word.judged_step
        if word.judged_step > before and self._board.node not in word.silent and word.ranks > 1:
            self._waited_ns, self._has_compared = 0, True
            if self._first_judged_step < 0:
                self._first_judged_step = word.judged_step
        named = tuple(replace(one, slow=with_words(one.slow)) for one in word.slow)
        self._word = replace(word, slow=named)

    # -- the leader's

    def _hear_nodes(self, told: Mapping[int, str]) -> None:
        assert self.leader is not None
        self.leader.hear(LEADER, self._steps(), self._now_ns)
        for node, text in sorted(told.items()):
            if text == self._texts.get(node):
                continue
            self._texts[node] = text
            try:
                self.leader.hear(node, node_steps_from_text(text), self._now_ns)
            except ValueError:
                continue  # it stays behind the others, and that is told
        self._lead(self.leader, self._now_ns)

    def _lead(self, leader: AcrossNodes, now_ns: int) -> None:
        """A word at the beginning, so that all know in how many steps to cut; then one with what is
        new."""
        silent = self.silent
        judged = leader.judge(now_ns)
        if self._word is None or judged or leader.silent(now_ns) != silent:
            self._posts += 1
            word = leader.word(self._posts, now_ns)
            self._take(word)
            self._board.say(slow_word_to_text(word))
