"""Own launch: which run and which launch a rank's memory is of, beside its own.

Comes in: the rank's options, and that all may train. Goes out: whether the rank asks to start over,
and whether its memory is what this very launch left. Both are asked before a vote, and noted when
it is over.
"""

from __future__ import annotations

from keepstep.edge.shm.begun_run import has_begun, is_of, note_begun, note_launch
from keepstep.ports import Memory
from keepstep.runtime.rank.world import RankOptions


class OwnLaunch:
    """Of one rank."""

    def __init__(self, memory: Memory, options: RankOptions, rank: int) -> None:
        self._memory, self._options, self._rank = memory, options, rank

    @property
    def wants_fresh(self) -> bool:
        """Whether its run is to start over, and has not begun here."""
        options = self._options
        run = options.fresh_run
        return run is not None and not has_begun(self._memory, options.job_dir, self._rank, run)

    @property
    def goes_on(self) -> bool:
        """Whether this launch was the last to train on what is here."""
        options = self._options
        return is_of(self._memory, options.job_dir, self._rank, options.launch)

    def note(self) -> None:
        """All may train: this rank is never to ask for a fresh start again in this run, and what it
        has is of this launch from now on."""
        memory, options, rank = self._memory, self._options, self._rank
        if options.fresh_run is not None:
            note_begun(memory, options.job_dir, rank, options.fresh_run)
        if not self.goes_on:
            note_launch(memory, options.job_dir, rank, options.launch)
