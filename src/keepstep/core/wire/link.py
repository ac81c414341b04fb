"""A link between two keepers: is it well, away for a moment, or dead; and what still has to cross
it.

A link is what two lives of two keepers have with each other; it outlives its connections. Comes in:
what happened to its connections, what arrived, and the time. Goes out: `SendPing`, `Cut` or `Dead`
with the reason, what to send next, and what came twice.

Invariants: a link that was away for less than `dead_ns` is never called dead; one that stays away
longer always is. While the link lives, a message arrives exactly once and in order, and a block is
delivered exactly once, however often connections break.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from keepstep.core.wire.messages import encode
from keepstep.model.messages.peers import KeeperMessage
from keepstep.model.units import MIB, MS_NS, S_NS, human_ns
from keepstep.model.wire import Cut, Dead, SendPing

T = TypeVar("T")

# of a block that arrives damaged: a source that changes under our hands never arrives whole
MAX_TRIES = 4
WINDOW_BLOCKS = 64  # in flight on a lane


@dataclass(frozen=True, slots=True)
class Patience:
    """How long each thing may take."""

    ping_ns: int = 1 * S_NS
    # nothing heard for so long: the connection is broken, whatever the kernel thinks
    silence_ns: int = 5 * S_NS
    dead_ns: int = 20 * S_NS  # away for so long: the other side is gone
    retry_first_ns: int = 50 * MS_NS
    retry_most_ns: int = 1 * S_NS

    def __post_init__(self) -> None:
        assert (
            0 < self.ping_ns < self.silence_ns
            and self.retry_first_ns <= self.retry_most_ns < self.dead_ns
        )

    @classmethod
    def within(cls, dead_ns: int) -> Patience:
        """Of a link that is dead after `dead_ns`: what comes before that takes a part of it, and no
        longer than usual."""
        usual = cls()
        silence_ns, retry_ns = (
            min(usual.silence_ns, dead_ns // 2),
            min(usual.retry_most_ns, dead_ns // 8),
        )
        return cls(
            silence_ns // 4, silence_ns, dead_ns, min(usual.retry_first_ns, retry_ns), retry_ns
        )

    def retry_ns(self, attempt: int) -> int:
        """The wait after the `attempt`-th failure in a row (from 1): doubling, up to a bound."""
        return min(self.retry_first_ns << min(attempt - 1, 30), self.retry_most_ns)


class Health:
    """One link's health. `decide` is asked at least every `ping_ns`."""

    def __init__(self, patience: Patience, now_ns: int) -> None:
        self._patience = patience
        self.is_open = False
        self._why = "it was never reached"
        self._heard_ns = self._pinged_ns = self._away_since_ns = self._asked_ns = now_ns

    def opened(self, now_ns: int) -> None:
        self.is_open, self._heard_ns = True, now_ns

    def heard(self, now_ns: int) -> None:
        """Anything arrived on the control connection."""
        self._heard_ns = now_ns

    def cut(self, why: str, now_ns: int) -> None:
        """The control connection is gone, or could not be made."""
        self._why = why
        if self.is_open:
            self.is_open, self._away_since_ns = False, now_ns

    def decide(self, now_ns: int) -> SendPing | Cut | Dead | None:
        asleep_ns = now_ns - self._asked_ns
        self._asked_ns = now_ns
        # we were stopped ourselves: that says nothing about the other side
        if asleep_ns > self._patience.silence_ns:
            # what happened while nobody asked is younger than that
            self._heard_ns = min(self._heard_ns + asleep_ns, now_ns)
            self._away_since_ns = min(self._away_since_ns + asleep_ns, now_ns)
        if not self.is_open:
            away_ns = now_ns - self._away_since_ns
            if away_ns <= self._patience.dead_ns:
                return None
            return Dead(
                f"away for {human_ns(away_ns)}, longer than "
                f"{human_ns(self._patience.dead_ns)}: {self._why}"
            )
        silent_ns = now_ns - self._heard_ns
        if silent_ns > self._patience.silence_ns:
            return Cut(
                f"silent for {human_ns(silent_ns)}, longer than "
                f"{human_ns(self._patience.silence_ns)}"
            )
        if now_ns - self._pinged_ns >= self._patience.ping_ns:
            self._pinged_ns = now_ns
            return SendPing()
        return None


@dataclass
class Outbox:
    """Messages that have not been confirmed, at most `limit`; the oldest has the number
    `_first`."""

    limit: int
    _waiting: deque[KeeperMessage] = field(default_factory=deque)
    _first: int = 1
    _sent: int = 0  # how many of those waiting went out on the present connection

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, message: KeeperMessage) -> bool:
        """False when it is full. Raises NotAMessage when no peer would accept it: sent, it would
        come back for ever."""
        encode(message)
        if len(self._waiting) >= self.limit:
            return False
        self._waiting.append(message)
        return True

    def next(self) -> tuple[int, KeeperMessage] | None:
        """The next one for the present connection, and its number."""
        if self._sent >= len(self._waiting):
            return None
        self._sent += 1
        return self._first + self._sent - 1, self._waiting[self._sent - 1]

    def rewind(self) -> None:
        """There is a new connection: nobody knows how much of the old one arrived."""
        self._sent = 0

    def confirmed(self, number: int) -> None:
        """All up to this number have arrived. More than was sent is not believed."""
        for _ in range(min(number - self._first + 1, self._sent)):
            self._waiting.popleft()
            self._first += 1
            self._sent -= 1


@dataclass
class Inbox:
    """Which messages have arrived: all up to `last`, since they come in order."""

    last: int = 0

    def is_new(self, number: int) -> bool:
        """False for one that came before."""
        if number <= self.last:
            return False
        self.last = number
        return True


@dataclass
class _Flying(Generic[T]):
    item: T
    nbytes: int
    tries: int = 1


class Flight(Generic[T]):
    """Blocks of one lane that were sent and not yet answered. An item is whatever the owner needs
    to send it again.

    Between the oldest unanswered number and the newest lie less than `window_blocks`: the other
    side remembers more than that (`Seen`).
    """

    def __init__(self, window_bytes: int) -> None:
        self._window_bytes = window_bytes
        self._flying: dict[int, _Flying[T]] = {}
        self._again: deque[int] = deque()
        self._next = 1
        self._bytes = 0

    def has_room(self) -> bool:
        """May another block be started? One always may, however large."""
        return not self._flying or (
            self._bytes < self._window_bytes
            and self._next - next(iter(self._flying)) < WINDOW_BLOCKS
        )

    def start(self, item: T, nbytes: int) -> int:
        """Its number."""
        number, self._next = self._next, self._next + 1
        self._flying[number] = _Flying(item, nbytes)
        self._bytes += nbytes
        return number

    def next_again(self) -> tuple[int, T] | None:
        """A block that must be sent once more, under its old number."""
        if not self._again:
            return None
        number = self._again.popleft()
        return number, self._flying[number].item

    def rewind(self) -> None:
        """There is a new connection: what was not answered is sent again."""
        self._again = deque(self._flying)

    def landed(self, number: int) -> T | None:
        """It has arrived (or is not wanted); None when nothing of that number is in flight."""
        flying = self._flying.pop(number, None)
        if flying is None:
            return None
        self._bytes -= flying.nbytes
        if number in self._again:
            self._again.remove(number)
        return flying.item

    def damaged(self, number: int) -> T | None:
        """It arrived damaged: it goes again, or is given up and returned after `MAX_TRIES`."""
        flying = self._flying.get(number)
        if flying is None:
            return None
        if flying.tries >= MAX_TRIES:
            return self.landed(number)
        flying.tries += 1
        if number not in self._again:
            self._again.append(number)
        return None

    def items(self) -> list[T]:
        """All in flight, oldest first."""
        return [f.item for f in self._flying.values()]


@dataclass
class Seen:
    """Which blocks of one lane have arrived: all up to `_floor`, and those in `_above`.

    A number given up by its sender leaves a hole; it is closed once the sender's window has passed
    it.
    """

    _floor: int = 0
    _above: set[int] = field(default_factory=set)

    def __contains__(self, number: int) -> bool:
        return number <= self._floor or number in self._above

    def add(self, number: int) -> None:
        self._above.add(number)
        self._floor = max(self._floor, max(self._above) - WINDOW_BLOCKS)
        while self._floor + 1 in self._above:
            self._floor += 1
        self._above = {n for n in self._above if n > self._floor}


class Lane(Generic[T]):
    """One data lane's books: what flies out, what has been seen coming in."""

    def __init__(self, window_bytes: int) -> None:
        self.flight: Flight[T] = Flight(window_bytes)
        self.seen = Seen()


class Link(Generic[T]):
    """One link's books. `lanes` counts the data lanes. With two each direction has its own, where
    no answer waits behind a block."""

    def __init__(
        self,
        now_ns: int,
        *,
        patience: Patience | None = None,
        lanes: int = 1,
        window_bytes: int = 16 * MIB,
        max_messages: int = 1000,
    ) -> None:
        self.patience = patience or Patience()
        self.health = Health(self.patience, now_ns)
        self.outbox, self.inbox = Outbox(max_messages), Inbox()
        self.lanes: tuple[Lane[T], ...] = tuple(Lane(window_bytes) for _ in range(lanes))
