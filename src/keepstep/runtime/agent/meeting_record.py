"""Meeting record: what the agents of a job write where they meet.

Moves arrivals, marks and verdicts of attempts over a KV; decides nothing. But for a few that are
swapped, each key is written once and never changes: the first writer wins, and everybody else is
told what it wrote. Nothing there is secret from who can reach it, unless the job has a secret of
its own.

Invariant: a seat, a mark and a verdict of an attempt are the same for all who read them, for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from keepstep.core.recovery.leader_lease import Lease
from keepstep.core.wire.codec import Codec, NotAMessage
from keepstep.errors import MeetingError
from keepstep.model.attempts import VACANT, Arrival, Failed, Opening, Verdict
from keepstep.model.failure import Failure
from keepstep.ports import KV
from keepstep.runtime.agent.tasks import ask

YES = "yes"
CALLED_OFF = "called off"
LEADER = "coordinator"
OPENING = "opening"  # the first word

KINDS = (Arrival, Verdict, Opening, Failed, Lease)
CODEC: Codec[Any] = Codec(KINDS)

M = TypeVar("M")


class Look(NamedTuple):
    """Who coordinates, and whether the roll of an attempt is called."""

    lease: Lease | None
    is_called: bool


class MeetingRecord:
    """One agent's client of it. Everything awaited here raises MeetingError when what is there is
    none of this release's words."""

    def __init__(self, kv: KV) -> None:
        self._kv = kv

    # -- what all attempts have in common

    async def open(self, proposal: Opening, instead: Opening | None = None) -> Opening:
        """What stands there: the first that was proposed, or proposed `instead` of that one."""
        before = None if instead is None else _encode(instead)
        text = await ask(self._kv.swap, OPENING, before, _encode(proposal))
        return await self.open(proposal) if text is None else _decode(text, Opening)

    # -- one attempt

    async def take_seat(self, attempt: int, place: int, arrival: Arrival) -> Arrival:
        """Who has this place: `arrival`, if it was vacant."""
        return await self._put(f"{attempt}/seat/{place}", arrival, Arrival)

    async def seats(self, attempt: int, places: int) -> list[Arrival | None]:
        """The arrivals in order; None where nobody has come yet."""
        texts = await ask(self._kv.read, [f"{attempt}/seat/{place}" for place in range(places)])
        return [_decode(text, Arrival) if text else None for text in texts]

    async def close_seats(self, attempt: int, places: int) -> None:
        """Nobody takes a place any more that is not taken by now."""
        for place in range(places):
            await self.take_seat(attempt, place, VACANT)
        await self.mark(attempt, "full")

    async def restore(
        self, attempt: int, seats: Sequence[Arrival], answers: Mapping[int, str]
    ) -> bool:
        """Write down an attempt that was formed elsewhere: its seats, and what the nodes there
        answered to their places. Whether it is the one that stands here now; if not it is left as
        it is."""
        for at, seat in enumerate(seats):
            if await self.take_seat(attempt, at, seat) != seat:
                return False
        # Before the answers: an attempt that lacks some is called off, should this agent die here.
        await self.mark(attempt, "full")
        marked = {at: await self.mark(attempt, "ready", at, text) for at, text in answers.items()}
        return marked == dict(answers)

    async def mark(self, attempt: int, what: str, place: int = 0, text: str = YES) -> str:
        """What is marked from now on: `text`, if it was not marked before."""
        found = await ask(self._kv.swap, f"{attempt}/{what}/{place}", None, text)
        return str(found)

    async def marks(
        self, attempt: int, what: str, places: Sequence[int] = (0,)
    ) -> list[str | None]:
        """The texts of these marks; None where there is none yet."""
        found: list[str | None] = await ask(self._kv.read, _marks(attempt, what, places))
        return found

    async def wait_for_marks(
        self,
        attempt: int,
        what: str,
        places: Sequence[int] = (0,),
        within_ns: int | None = None,
    ) -> list[str] | None:
        """The texts of all these marks; None when they did not come in time."""
        found: list[str] | None = await ask(self._kv.wait, _marks(attempt, what, places), within_ns)
        return found

    async def call_off(self, attempt: int, places: int) -> None:
        """Nobody waits any more for this attempt to be full and ready; after its verdict."""
        await self.mark(attempt, "full")
        for place in range(places):
            await self.mark(attempt, "ready", place, CALLED_OFF)

    async def tell_failure(self, attempt: int, place: int, failure: Failure) -> None:
        """What failed there in that attempt, before the node takes its seat in the next one."""
        await self._put(f"{attempt}/failed/{place}", Failed(failure), Failed)

    async def failures(self, attempt: int, places: int) -> tuple[Failure, ...]:
        """What the nodes have told of that attempt."""
        texts = await self.marks(attempt, "failed", range(places))
        return tuple(_decode(text, Failed).failure for text in texts if text is not None)

    async def say(self, attempt: int, verdict: Verdict) -> Verdict:
        """The verdict about the attempt: this one, if it is the first."""
        return await self._put(f"{attempt}/verdict", verdict, Verdict)

    async def say_while(self, lease: Lease, attempt: int, verdict: Verdict) -> Verdict | None:
        """The same, if the register says that still: one transaction, where etcd is met in. None:
        another one coordinates, and nothing is said about the attempt."""
        key = f"{attempt}/verdict"
        guard = LEADER, _encode(lease)
        text = await ask(self._kv.swap_while, guard, key, None, _encode(verdict))
        return _decode(text, Verdict) if text else None

    async def verdict(self, attempt: int) -> Verdict | None:
        text = (await ask(self._kv.read, [f"{attempt}/verdict"]))[0]
        return _decode(text, Verdict) if text else None

    async def wait_for_verdict(self, attempt: int, within_ns: int | None = None) -> Verdict | None:
        """None when it did not come in time."""
        texts = await ask(self._kv.wait, [f"{attempt}/verdict"], within_ns)
        return None if texts is None else _decode(texts[0], Verdict)

    # -- a roll call

    async def say_here(self, attempt: int, place: int, before: str | None, text: str) -> str | None:
        """The agent there answers; what is there now. `before`: what it said last."""
        found: str | None = await ask(self._kv.swap, f"{attempt}/here/{place}", before, text)
        return found

    # -- the register of who leads

    async def look(self, attempt: int) -> Look:
        """What every agent wants to know at every beat, in one question."""
        lease, call = await ask(self._kv.read, [LEADER, *_marks(attempt, "call", [0])])
        return Look(_decode(lease, Lease) if lease else None, call is not None)

    async def swap_lease(self, expected: Lease | None, lease: Lease) -> Lease | None:
        """What is there now: `lease`, if `expected` was there."""
        before = None if expected is None else _encode(expected)
        text = await ask(self._kv.swap, LEADER, before, _encode(lease))
        return _decode(text, Lease) if text else None

    async def _put(self, key: str, message: object, kind: type[M]) -> M:
        text = await ask(self._kv.swap, key, None, _encode(message))
        return _decode(text, kind)


def _marks(attempt: int, what: str, places: Sequence[int]) -> list[str]:
    return [f"{attempt}/{what}/{place}" for place in places]


def _encode(message: object) -> str:
    return CODEC.encode(message).decode()


@lru_cache(maxsize=1 << 14)
def _message(text: str) -> Any:
    """Kept: whoever coordinates reads all seats of an attempt at every beat."""
    return CODEC.decode(text.encode("utf-8", "surrogatepass"))


def _decode(text: str, kind: type[M]) -> M:
    try:
        message = _message(text)
    except NotAMessage as error:
        raise MeetingError(
            "where the nodes meet: expected words of this release without a signature, found "
            f"others; set KEEPSTEP_SECRET on all nodes or on none: {error}"
        ) from error
    if not isinstance(message, kind):
        found = type(message).__name__
        raise MeetingError(f"where the nodes meet: expected {kind.__name__}, found {found}")
    return message
