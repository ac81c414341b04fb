"""Takes back: what `doubt.py` asks of a rank, on the trainer's thread: to meet the others behind a
step, to take steps back, and to seal nothing meanwhile. `driven_rank.py` is the real one."""

from __future__ import annotations

from typing import Protocol

from keepstep.model.numbers import NotFinite, Sight
from keepstep.model.snapshot import Stamp


class TakesBack(Protocol):
    """The rank, as the trainer's thread sees it."""

    @property
    def resumed_at(self) -> int:
        """The step that all have resumed from last."""

    @property
    def not_finite(self) -> tuple[int, NotFinite] | None:
        """The first captured state since then that was not finite, and what of it."""

    @property
    def differs_since(self) -> int | None:
        """Since the end of which step replicas have not been equal; None: of none is that known."""

    def doubt(self, step: int | None) -> None:
        """Capture nothing while that step is in doubt; None: nobody doubts any more."""

    def forgive(self) -> None:
        """What was not finite is meant: what follows is sealed again."""

    @property
    def holds(self) -> tuple[Stamp, ...]:
        """Its own snapshots."""

    @property
    def has_lost_peer(self) -> bool:
        """Whether a peer is lost: what all do together is worthless then."""

    @property
    def regroups(self) -> int:
        """How often this rank has met its peers anew: some of them know of no trial."""

    @property
    def halts_at(self) -> int | None:
        """Behind that step all are to stand; None: behind none that this rank has heard of."""

    def ask_to_halt(self, step: int) -> None:
        """Have all stand behind that step. Waits for nobody."""

    def meet(self, step: int, turn: int, mine: Sight) -> tuple[Sight, ...] | str:
        """Stand there until all do: what each has seen, in their order; or why not all stand
        there, which then none does. Worthless when a peer is lost meanwhile."""

    def take_back(self, first: int) -> None:
        """No step from that one on counts; all vote where to resume."""

    def settle(self) -> None:
        """Wait until what is being captured is sealed, or given up."""

    def stand_in(self, role: int) -> None:
        """Load the snapshot that rank `role` has of what all have resumed from. Raises
        KeepstepError."""
