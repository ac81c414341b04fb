"""Coordinator: this agent's part in who coordinates, and what the one who does has to decide.

Comes in: the round this agent is in. Goes out: `coordinator` events in the journal, and, from the one who coordinates, the verdict `again`
about a round that cannot become or stay one: a node came and then did not answer, or nobody of it is there any more. `core/leadership.py`
decides who; the rendezvous' KV carries it. Everything the coordinator knows it reads from there, so another one takes over from nothing.

Verdicts are first-writer-wins, so an order too many is no second verdict. Never touches a rank; when it ends, what is under way goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from keepstep.core.leadership import Action, Due, Found, Leadership, Look, Now, Order, Refused, Role, Swap, Wish, word_from_text
from keepstep.core.rounds import missing
from keepstep.edge.journal import Journal
from keepstep.edge.torch.rendezvous import Rendezvous
from keepstep.errors import MeetingError
from keepstep.model.rounds import Verdict
from keepstep.model.units import S_NS, human_ns
from keepstep.ports import KV

REGISTER = "coordinator"


@dataclass(frozen=True, slots=True)
class Present:
    """The round this agent is in, or waits for; -1 before the first. `name` is how people call this agent."""

    number: int
    seated: bool
    name: str


class Coordinator:
    """A thread of its own. `kv` is its client; `over` ends it."""

    def __init__(
        self, kv: KV, who: str, lease_s: float, nodes: int, present: Callable[[], Present], journal: Journal, over: threading.Event
    ) -> None:
        self._kv, self._point, self._journal, self._over = kv, Rendezvous(kv), journal, over
        self._leadership = Leadership(who, int(lease_s * S_NS))
        self._lease_s, self._nodes, self._present = lease_s, nodes, present
        self._bereft = -1  # the round that this agent found without anybody, when it took over
        self._called_off = -1
        self._unready: tuple[int, int] | None = None  # the round that is full but not formed, and since when
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
                self._journal.record("coordinator-left", f"takes no part in coordinating any more: {error}", logging.WARNING)

    def _beat(self, present: Present) -> None:
        led = self._leadership.epoch if self._leadership.leads else 0
        self._carry_out(self._leadership.handle(Due(present.name, present.seated), time.monotonic_ns()), present)
        if not self._leadership.leads or present.number < 0:
            self._unready = None
            return
        if self._leadership.epoch != led and not present.seated:
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
                self._journal.record("coordinator", action.why, epoch=action.epoch, leads=action.role is Role.LEADS)
            elif isinstance(action, Order):
                self._order(present.number, action)
            else:
                assert isinstance(action, Refused)
                why = f"the order of epoch {action.epoch} ({action.order}) was {action.why}"
                self._journal.record("order-refused", why, logging.WARNING, epoch=action.epoch)

    def _ask(self, question: Look | Swap) -> str | None:
        if isinstance(question, Look):
            return self._kv.read([REGISTER])[0]
        return self._kv.swap(REGISTER, question.expected.to_text() if question.expected else None, question.word.to_text())

    # -- what the one who coordinates decides

    def _judge(self, number: int, now_ns: int) -> str | None:
        """Why round `number` has to end now; None when it has not."""
        marks = self._point.marks(number, "ready", range(self._nodes))
        if self._point.verdict(number) is not None:
            if None in marks and self._called_off != number:  # somebody may be waiting for them still
                self._point.call_off(number, self._nodes)
                self._called_off = number
            return None
        if number == self._bereft:
            lease = human_ns(self._leadership.lease_ns)
            return f"no agent of round {number} is there any more: none took over when its coordinator's lease of {lease} had ended"
        arrivals = [a for a in self._point.seats(number, self._nodes) if a is not None]
        if None not in marks or len(arrivals) < self._nodes:
            self._unready = None
            return None
        if self._unready is None or self._unready[0] != number:
            self._unready = number, now_ns
        if now_ns - self._unready[1] < self._leadership.lease_ns:
            return None
        late = missing(arrivals, [mark is not None for mark in marks])
        return f"{late} came and then did not answer for {self._lease_s:.0f} s"

    def _order(self, number: int, order: Order) -> None:
        verdict = Verdict("again", order.order)
        if self._point.say(number, verdict) == verdict:
            why = f"told the other nodes about round {number}: {order.order}"
            self._journal.record("round-wanted", why, round=number, epoch=order.epoch)
        self._point.call_off(number, self._nodes)
        self._called_off = number
