"""Step blocks: a node's ranks' records, cut into blocks of steps that all of them have completed.

Comes in: the newest record of each rank, whenever somebody looks. Goes out: the blocks that are
over since, each with the same steps of all ranks, and what hindered them meanwhile.

Invariant: no block reaches over records that are not there any more; then the next one begins
behind what all have done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from keepstep.model.step_work import Hindrance, StepWork, WorkBlock, block_between

Records = dict[int, StepWork]


class StepBlocks:
    """Of one life of the ranks. is_aligned: blocks end at multiples of their steps, as those of
    other nodes do."""

    def __init__(
        self,
        block_steps: int,
        records: Callable[[int, Mapping[int, StepWork]], Records | None],
        hindrances: Callable[[], dict[int, Hindrance]],
        is_aligned: bool = False,
    ) -> None:
        """records: of all ranks at a step, given their newest ones; None: one is not there."""
        self.block_steps = block_steps
        self._records, self._hindrances = records, hindrances
        self._is_aligned = is_aligned
        self._ends: Records = {}  # of the last block
        self._hindered: dict[int, Hindrance] = {}  # as they were then

    def cut(self, newest: Mapping[int, StepWork]) -> list[tuple[int, dict[int, WorkBlock]]]:
        """All blocks that all ranks have completed, with the last step of each."""
        if self._ends.keys() != newest.keys():  # not there until now, or records that are lost
            self._anchor(newest)
            return []
        last_step = min(work.step for work in newest.values())
        begun = next(iter(self._ends.values())).step
        count = (last_step - begun) // self.block_steps
        if count <= 0:
            return []
        now = self._hindrances()
        grown = {rank: _grown(self._hindered[rank], now[rank], count) for rank in now}
        self._hindered = now
        found = []
        for number in range(1, count + 1):
            end = begun + number * self.block_steps
            ends = self._records(end, newest)
            if ends is None:
                self._anchor(newest)
                break
            blocks = {
                rank: block_between(self._ends[rank], work)._replace(
                    throttled_ns=grown[rank][0], memory_stall_ns=grown[rank][1]
                )
                for rank, work in ends.items()
            }
            self._ends = ends
            found.append((end, blocks))
        return found

    def _anchor(self, newest: Mapping[int, StepWork]) -> None:
        step = min(work.step for work in newest.values())
        if self._is_aligned:
            step -= step % self.block_steps
        self._ends = self._records(step, newest) or {}
        self._hindered = self._hindrances()


def _grown(before: Hindrance, after: Hindrance, blocks: int) -> tuple[int, int]:
    """Of each kind, what falls to one of so many blocks; 0 where nobody counts."""
    first, second = (
        0 if a is None or b is None else max(0, b - a) // blocks
        for a, b in zip(before, after, strict=True)
    )
    return first, second
