"""Coordinator: an agent's part in the leadership of agents, and what the one that leads decides.

Comes in: the attempt this agent takes part in, and where the agents meet. Goes out: `coordinator`
events in the journal, and, from the one who coordinates, the verdict `again` about an attempt that
nobody in it can end: a node came and then did not answer, nobody of it is there any more, or some
ranks ended well and an agent that should say the same of its own is gone (a roll call finds out;
while all train nobody is called).

`core/recovery/leader_lease.py` decides who coordinates. What a coordinator knows it reads where the
agents meet: another takes over from nothing. Verdicts are first-writer-wins, so an order too many
is no second verdict; and a verdict is written only while the lease stands by which it was granted
(with etcd in one transaction). Never touches a rank; when it ends, what is under way goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keepstep.core.recovery.leader_lease import (
    Action,
    LeaderKnown,
    Leadership,
    LookDue,
    OrderGranted,
    OrderRefused,
    OrderWanted,
    ReadRegister,
    RegisterFound,
    Role,
    SwapRegister,
)
from keepstep.core.recovery.rendezvous import Silence, missing, present
from keepstep.errors import KeepstepError
from keepstep.model.attempts import Arrival, Verdict
from keepstep.model.events import WARNING
from keepstep.model.units import S_NS, human_ns
from keepstep.ports import Clock, Journal, Timer, Timers
from keepstep.runtime.agent.meeting_record import MeetingRecord
from keepstep.runtime.agent.tasks import Task, sleep

# A machine that has vanished refuses nothing, and TCP tries for a quarter of an hour. It is longer
# than an etcd may be away (`edge/net/etcd.py`).
SILENT_NS = 150 * S_NS


@dataclass(frozen=True, slots=True)
class Presence:
    """The attempt this agent takes part in, or waits for, and its place there; -1 for none. `name`
    is how people call the agent."""

    attempt: int
    place: int
    name: str


@dataclass(slots=True)
class _Judged:
    """What the coordinator has seen of one attempt."""

    attempt: int
    silence: Silence
    unready_since_ns: int | None = None  # it is full, and not all have answered
    is_called_off: bool = False
    is_bereft: bool = False  # this agent took over because none of the attempt's agents did


class Coordinator:
    """One agent's. Begins at once."""

    def __init__(
        self,
        clock: Clock,
        timers: Timers,
        journal: Journal,
        record: MeetingRecord,
        who: str,
        lease_s: float,
        nodes: int,
        presence: Callable[[], Presence],
        silent: Callable[[], None],
    ) -> None:
        """who: this life of the agent. nodes: places of an attempt. `silent` is called when the KV
        has not answered for `SILENT_NS`."""
        self._clock = clock
        self._timers = timers
        self._journal = journal
        self._record = record
        self._leadership = Leadership(who, int(lease_s * S_NS))
        self._nodes = nodes
        self._presence = presence
        self._silent = silent
        self._silence: Timer | None = None
        self._judged = self._new_judgement(-1)
        self._here: str | None = None  # what this agent last said at a roll call
        self._is_called: bool | None = None  # the roll, as was read in this beat; None: not read
        self._task = Task(self._live(), _over, self._failed)

    def close(self) -> None:
        self._task.cancel()
        if self._silence is not None:
            self._silence.cancel()

    def _failed(self, error: KeepstepError) -> None:
        self.close()
        why = f"no longer takes part in coordinating: {error}"
        self._journal.record("coordinator-left", why, WARNING)

    def _new_judgement(self, attempt: int) -> _Judged:
        return _Judged(attempt, Silence(2 * self._leadership.lease_ns))

    async def _live(self) -> None:
        while True:
            self._silence = self._timers.after(SILENT_NS, self._silent)
            await self._beat(self._presence())
            self._silence.cancel()
            await sleep(self._timers, self._leadership.renew_ns)

    async def _beat(self, presence: Presence) -> None:
        led = self._leadership.term if self._leadership.leads else 0
        self._is_called = None
        await self._handle(LookDue(presence.name, presence.place >= 0), presence)
        if presence.place >= 0:
            await self._answer_call(presence)
        if not self._leadership.leads or presence.attempt < 0:
            if self._judged.attempt >= 0:
                self._judged = self._new_judgement(-1)
            return
        if self._judged.attempt != presence.attempt:
            await self._clear(presence.attempt - 1)
            self._judged = self._new_judgement(presence.attempt)
        if self._leadership.term != led and presence.place < 0:
            self._judged.is_bereft = True
        if why := await self._judge(self._judged):
            await self._handle(OrderWanted(why), presence)

    # -- who coordinates

    async def _handle(self, event: LookDue | OrderWanted, presence: Presence) -> None:
        for action in self._leadership.handle(event, self._clock.monotonic_ns()):
            await self._carry_out(action, presence)

    async def _carry_out(self, action: Action, presence: Presence) -> None:
        match action:
            case ReadRegister() | SwapRegister():
                asked_ns = self._clock.monotonic_ns()
                if isinstance(action, ReadRegister):
                    lease, self._is_called = await self._record.look(presence.attempt)
                else:
                    lease = await self._record.swap_lease(action.expected, action.lease)
                found = RegisterFound(lease, asked_ns)
                for further in self._leadership.handle(found, self._clock.monotonic_ns()):
                    await self._carry_out(further, presence)
            case LeaderKnown(role=role, term=term, why=why):
                leads = role is Role.LEADS
                self._journal.record("coordinator", why, term=term, leads=leads)
            case OrderGranted():
                await self._order(presence.attempt, action)
            case OrderRefused(term=term, order=order, why=why):
                told = f"the order of term {term} ({order}) was {why}"
                self._journal.record("order-refused", told, WARNING, term=term)

    async def _order(self, attempt: int, order: OrderGranted) -> None:
        verdict, lease = Verdict("again", order.order), self._leadership.lease
        assert lease is not None, "it was granted by its renewal"
        said = await self._record.say_while(lease, attempt, verdict)
        if said is None:
            told = f"the order of term {order.term} ({order.order}) was refused: another one leads"
            self._journal.record("order-refused", told, WARNING, term=order.term)
            return
        if said == verdict:
            why = f"told the other nodes about attempt {attempt}: {order.order}"
            self._journal.record("attempt-wanted", why, attempt=attempt, term=order.term)
        await self._call_off(attempt)

    async def _call_off(self, attempt: int) -> None:
        await self._record.call_off(attempt, self._nodes)
        if self._judged.attempt == attempt:
            self._judged.is_called_off = True

    async def _clear(self, attempt: int) -> None:
        """Call off an attempt that has its verdict: the agent that said it may have been killed
        before it did."""
        if attempt < 0:
            return
        seats = await self._record.seats(attempt, self._nodes)
        marks = await self._record.marks(attempt, "ready", present(seats))
        if None in seats or None in marks:
            await self._call_off(attempt)

    async def _answer_call(self, presence: Presence) -> None:
        attempt, place = presence.attempt, presence.place
        if self._is_called is None:  # who coordinates has not read it
            self._is_called = (await self._record.marks(attempt, "call"))[0] is not None
        if self._is_called:
            text = f"{self._leadership.who} {self._clock.monotonic_ns()}"
            self._here = await self._record.say_here(attempt, place, self._here, text)

    # -- what the one who coordinates decides

    async def _judge(self, judged: _Judged) -> str | None:
        """Why the attempt has to end now; None when it has not."""
        attempt = judged.attempt
        seats = await self._record.seats(attempt, self._nodes)
        places = present(seats)
        marks = await self._record.marks(attempt, "ready", places)
        if await self._record.verdict(attempt) is not None:
            may_be_awaited = None in marks or None in seats
            if may_be_awaited and not judged.is_called_off:
                await self._call_off(attempt)
            return None
        if judged.is_bereft:
            lease = human_ns(self._leadership.lease_ns)
            return (
                f"no agent of attempt {attempt} is there any more: none took over when its "
                f"coordinator's lease of {lease} had ended"
            )
        if None in seats:
            return None
        arrivals = [a for a in seats if a is not None and not a.is_vacant]
        if None not in marks:
            return await self._call_roll(judged, arrivals, places)
        return self._judge_unready(judged, arrivals, [mark is not None for mark in marks])

    def _judge_unready(
        self, judged: _Judged, arrivals: Sequence[Arrival], answered: Sequence[bool]
    ) -> str | None:
        now_ns = self._clock.monotonic_ns()
        if judged.unready_since_ns is None:
            judged.unready_since_ns = now_ns
        if now_ns - judged.unready_since_ns < self._leadership.lease_ns:
            return None
        late = missing(arrivals, answered)
        return f"{late} came and then did not answer for {human_ns(self._leadership.lease_ns)}"

    async def _call_roll(
        self, judged: _Judged, arrivals: Sequence[Arrival], places: Sequence[int]
    ) -> str | None:
        marks = await self._record.marks(judged.attempt, "well", places)
        ended = [mark is not None for mark in marks]
        if not any(ended) or all(ended):
            return None
        await self._record.mark(judged.attempt, "call")
        awaited = [place for place, well in zip(places, ended, strict=True) if not well]
        texts = await self._record.marks(judged.attempt, "here", awaited)
        answers = dict(zip(awaited, texts, strict=True))
        gone = judged.silence.gone(answers, self._clock.monotonic_ns())
        if not gone:
            return None
        who = missing(arrivals, [place not in gone for place in places])
        limit = human_ns(judged.silence.limit_ns)
        return (
            f"the others' ranks ended well, and nobody can say it of {who}: no word from there for "
            f"{limit}"
        )


def _over(_: None) -> None:
    """It lives as long as its agent."""
