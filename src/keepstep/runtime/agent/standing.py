"""Standing: where a node stands in its job, in whichever KV the nodes meet.

Values of one agent, which `meeting.py` reads and writes and `multi_node.py` carries from one KV to
the next. Moves and decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from keepstep.model.attempts import Arrival, Verdict
from keepstep.model.units import S_NS
from keepstep.runtime.agent.rendezvous import JoinRequest

NONE_BEFORE = Verdict("again", "")  # where there is no attempt that this one follows
# So long the nodes of the attempt before may take their places before others do.
FIRST_NS = 2 * S_NS


@dataclass(slots=True)
class TakenSeat:
    """This agent's `place` in an attempt, -1 for none; `places`: those that nodes have taken."""

    attempt: int
    place: int
    places: Sequence[int]


@dataclass(frozen=True, slots=True)
class Lived:
    """An attempt that was formed, as all its nodes have seen it. `answers`: by place."""

    seats: tuple[Arrival, ...]
    answers: dict[int, str]


@dataclass(slots=True)
class Standing:
    """Where this node stands, in whichever KV the nodes meet.

    mine: how it arrives. follows: the attempt in which this node's agent was killed; -1 for none.
    seat: the newest it had. number: the attempt that it lives in or is to take part in, -1 when it
    has come newly; first: what that was when it came; before: the verdict before that.
    not_before_ns: when it may take part again, as that verdict said. request: what has not been
    answered by an attempt. lived: attempt `number`, once formed. verdict: the newest `again` it
    heard; last: the last word about the job; judged: the attempt that it had a word about, and what
    became of that, which it may not have heard as the others do. is_well: its ranks have ended well
    in `number`; was_well: in an earlier one. words: what is still to be said. epoch: the newest of
    which anything was said (`opening.py`).
    """

    mine: Arrival
    seat: TakenSeat
    follows: int = -1
    number: int = -1
    first: int = 0
    before: Verdict = NONE_BEFORE
    waits_ns: int = 0
    not_before_ns: int = 0
    request: JoinRequest | None = None
    lived: Lived | None = None
    verdict: Verdict | None = None
    judged: tuple[int, Verdict] | None = None
    last: Verdict | None = None
    is_well: bool = False
    was_well: bool = False
    words: deque[Any] = field(default_factory=deque)
    secret: str | None = None
    epoch: int = 0

    def go_on(self, verdict: Verdict) -> None:
        """To the attempt after this one, which has ended."""
        self.number, self.before = self.number + 1, verdict
        self.waits_ns = 0 if self.seat.place >= 0 else FIRST_NS
        self.was_well = self.was_well or self.is_well
        self.lived, self.is_well, self.verdict = None, False, verdict
