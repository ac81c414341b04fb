"""Store marks: checkpoints whose numbers are in doubt are marked where they lie.

A vote leaves them out because a rank doubts them. Once all train again nobody remembers that, and
the next checkpoint, which says in its manifest that the job went on from before them, may be an
hour away: a job that loses all its memory until then would take them.

Comes in: from which step on states are in doubt. Goes out: marks in the store, and a line of the
journal for each checkpoint that has one. Nobody waits for it. A store that does not answer is asked
again, up to `TRIES` times.

Invariant: nothing is removed, and nothing is marked that an epoch after the doubt has computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from keepstep.core.resume.patience import pause_before
from keepstep.errors import ConfigError, DamageError, IdentityError, StoreError
from keepstep.model.events import WARNING
from keepstep.runtime.keeper_world import KeeperWorld

TRIES = 6


class StoreMarks:
    """One keeper's."""

    def __init__(self, world: KeeperWorld) -> None:
        self._world = world

    def doubt(self, first: int, before_epoch: int) -> None:
        """Mark those of that step and of later ones, which epochs before that one have computed."""
        self._try(first, before_epoch, 0)

    def _try(self, first: int, before_epoch: int, failures: int) -> None:
        work = partial(self._mark, first, before_epoch)
        self._world.workers.submit(work, partial(self._marked, first, before_epoch, failures))

    def _mark(self, first: int, before_epoch: int) -> Sequence[str] | str:
        """On a worker: the directories, or why there are no marks."""
        checkpoints = self._world.checkpoints
        if checkpoints is None:
            return ()
        try:
            return checkpoints.doubt(first, before_epoch)
        except (StoreError, ConfigError, IdentityError, DamageError) as error:
            return str(error)

    def _marked(
        self, first: int, before_epoch: int, failures: int, found: Sequence[str] | str
    ) -> None:
        journal = self._world.journal
        if not isinstance(found, str):
            for where in found:
                why = (
                    f"checkpoint {where} is marked in the store: states from step {first} on were "
                    "in doubt, and nobody resumes from it any more"
                )
                journal.record("condemned", why, WARNING, step=first, checkpoint=where)
            return
        if failures + 1 < TRIES:
            again = partial(self._try, first, before_epoch, failures + 1)
            self._world.timers.after(pause_before(failures), again)
            return
        why = (
            f"checkpoints from step {first} on are in doubt, and the store could not be told in "
            f"{TRIES} tries: {found}. Until the next checkpoint is there, a job that loses all its "
            "memory may take one of them"
        )
        journal.record("condemned", why, WARNING, step=first)
