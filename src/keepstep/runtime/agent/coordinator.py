"""Coordinator: this agent's part in who coordinates, and what the one who does has to decide.

Comes in: the round this agent is in. Goes out: `coordinator` events in the journal, and, from the
one who coordinates, the verdict `again` about a round that nobody in it can end: a node came and
then did not answer, nobody of it is there any more, or some ranks ended well and an agent that
should say the same of its own is gone (a roll call finds out; while all train nobody is called).
`core/recovery/leader_lease.py` decides who; the rendezvous' KV carries it. What a coordinator knows
it reads there: another takes over from nothing.

Verdicts are first-writer-wins, so an order too many is no second verdict. Never touches a rank;
when it ends, what is under way goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from keepstep.core.recovery.leader_lease import (
    Action,
    Due,
    Found,
    Leadership,
    Look,
    Now,
    Order,
    Refused,
    Role,
    Swap,
    Wish,
    word_from_text,
)
from keepstep.core.recovery.rendezvous import Silence, missing, present
from keepstep.edge.os.journal import Journal
from keepstep.edge.torch.rendezvous import Rendezvous
from keepstep.errors import MeetingError
from keepstep.model.rounds import Arrival, Verdict
from keepstep.model.units import S_NS, human_ns
from keepstep.ports import BlockingKV

REGISTER = "coordinator"


@dataclass(frozen=True, slots=True)
class Present:
    """The round this agent is in, or waits for, and its place there; -1 for none. `name` is how
    people call it."""

    number: int
    place: int
    name: str


class Coordinator:
    """A thread of its own. `kv` is its client; `over` ends it."""

    def __init__(
        self,
        kv: BlockingKV,
        who: str,
        lease_s: float,
        nodes: int,
        present: Callable[[], Present],
        journal: Journal,
        over: threading.Event,
    ) -> None:
        self._kv, self._point, self._journal, self._over = kv, Rendezvous(kv), journal, over
        self._leadership = Leadership(who, int(lease_s * S_NS))
        self._lease_s, self._nodes, self._present = lease_s, nodes, present
        self._bereft = -1  # the round that this agent found without anybody, when it took over
        self._called_off = -1
        # the round that is full but not formed, and since when
        self._unready: tuple[int, int] | None = None
        self._silence = Silence(2 * self._leadership.lease_ns)
        self._here: str | None = None  # what this agent last said at a roll call
        self._thread = threading.Thread(target=self._live, name="keepstep-coordinator", daemon=True)
        self._thread.start()

    def _live(self) -> None:
        try:
            while True:
                self._beat(self._present())
                if self._over.wait(self._leadership.renew_ns / S_NS):
                    return
        except MeetingError as error:
            if not self._over.is_set():
                self._journal.record(
                    "coordinator-left",
                    f"takes no part in coordinating any more: {error}",
                    logging.WARNING,
                )

    def _beat(self, present: Present) -> None:
        led = self._leadership.epoch if self._leadership.leads else 0
        self._carry_out(
            self._leadership.handle(Due(present.name, present.place >= 0), time.monotonic_ns()),
            present,
        )
        if present.place >= 0:
            self._answer_call(present.number, present.place)
        if not self._leadership.leads or present.number < 0:
            self._unready = None
            return
        if self._leadership.epoch != led and present.place < 0:
            self._bereft = present.number
        if why := self._judge(present.number, time.monotonic_ns()):
            self._carry_out(self._leadership.handle(Wish(why), time.monotonic_ns()), present)

    def _carry_out(self, actions: list[Action], present: Present) -> None:
        for action in actions:
            if isinstance(action, (Look, Swap)):
                asked_ns = time.monotonic_ns()
                text = self._ask(action)
                found = Found(word_from_text(text) if text else None, asked_ns)
                self._carry_out(self._leadership.handle(found, time.monotonic_ns()), present)
            elif isinstance(action, Now):
                self._journal.record(
                    "coordinator", action.why, epoch=action.epoch, leads=action.role is Role.LEADS
                )
            elif isinstance(action, Order):
                self._order(present.number, action)
            else:
                assert isinstance(action, Refused)
                why = f"the order of epoch {action.epoch} ({action.order}) was {action.why}"
                self._journal.record("order-refused", why, logging.WARNING, epoch=action.epoch)

    def _ask(self, question: Look | Swap) -> str | None:
        if isinstance(question, Look):
            return self._kv.read([REGISTER])[0]
        return self._kv.swap(
            REGISTER,
            question.expected.to_text() if question.expected else None,
            question.word.to_text(),
        )

    def _answer_call(self, number: int, place: int) -> None:
        if self._point.marks(number, "call")[0] is not None:
            said = f"{self._leadership.who} {time.monotonic_ns()}"
            self._here = self._kv.swap(f"{number}/here/{place}", self._here, said)

    # -- what the one who coordinates decides

    def _judge(self, number: int, now_ns: int) -> str | None:
        """Why round `number` has to end now; None when it has not."""
        seats = self._point.seats(number, self._nodes)
        places = present(seats)
        marks = self._point.marks(number, "ready", places)
        if self._point.verdict(number) is not None:
            # somebody may be waiting for them still
            if (None in marks or None in seats) and self._called_off != number:
                self._point.call_off(number, self._nodes)
                self._called_off = number
            return None
        if number == self._bereft:
            lease = human_ns(self._leadership.lease_ns)
            return (
                f"no agent of round {number} is there any more: none took over when its "
                f"coordinator's lease of {lease} had ended"
            )
        if None in seats:
            return None
        arrivals = [a for a in seats if a is not None and not a.is_nobody]
        if None not in marks:
            return self._call_roll(number, arrivals, places, now_ns)
        if self._unready is None or self._unready[0] != number:
            self._unready = number, now_ns
        if now_ns - self._unready[1] < self._leadership.lease_ns:
            return None
        late = missing(arrivals, [mark is not None for mark in marks])
        return f"{late} came and then did not answer for {self._lease_s:.0f} s"

    def _call_roll(
        self, number: int, arrivals: list[Arrival], places: list[int], now_ns: int
    ) -> str | None:
        well = [mark is not None for mark in self._point.marks(number, "well", places)]
        if not any(well) or all(well):
            return None
        self._point.mark(number, "call")
        awaited = [place for place, said in zip(places, well, strict=True) if not said]
        said = self._point.marks(number, "here", awaited)
        gone = self._silence.gone(dict(zip(awaited, said, strict=True)), now_ns)
        if not gone:
            return None
        who = missing(arrivals, [place not in gone for place in places])
        return (
            f"the others' ranks ended well, and nobody can say it of {who}: no word from there "
            f"for {human_ns(self._silence.limit_ns)}"
        )

    def _order(self, number: int, order: Order) -> None:
        verdict = Verdict("again", order.order)
        if self._point.say(number, verdict) == verdict:
            why = f"told the other nodes about round {number}: {order.order}"
            self._journal.record("round-wanted", why, round=number, epoch=order.epoch)
        self._point.call_off(number, self._nodes)
        self._called_off = number
