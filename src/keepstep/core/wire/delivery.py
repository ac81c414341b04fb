"""Delivery: what has to cross a link, and what has crossed it, however often its connections break.

Comes in: what is to be sent, what the other side has confirmed, what has arrived. Goes out: what to
send next on the present connection, and what came twice.

Invariants: while the link lives, a message arrives exactly once and in order, and a block is
delivered exactly once. Nothing is kept without bound.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

# of a block that arrives damaged: a source that changes under our hands never arrives whole
MAX_TRIES = 4
WINDOW_BLOCKS = 64  # in flight on a channel


@dataclass
class Outbox:
    """Messages, as bytes, that have not been confirmed, at most `limit`; the oldest has the number
    `_first`."""

    limit: int
    _waiting: deque[bytes] = field(default_factory=deque)
    _first: int = 1
    _sent: int = 0  # how many of those waiting went out on the present connection

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, body: bytes) -> bool:
        """False when it is full."""
        if len(self._waiting) >= self.limit:
            return False
        self._waiting.append(body)
        return True

    @property
    def has_more(self) -> bool:
        """There is something for the present connection."""
        return self._sent < len(self._waiting)

    def next(self) -> tuple[int, bytes] | None:
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
    """Blocks of one channel that were sent and not yet answered. An item is whatever the owner
    needs to send it again.

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
        number = self._next
        self._next += 1
        self._flying[number] = _Flying(item, nbytes)
        self._bytes += nbytes
        return number

    @property
    def has_again(self) -> bool:
        """A block must be sent once more."""
        return bool(self._again)

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
    """Which blocks of one channel have arrived: all up to `_floor`, and those in `_above`.

    A number given up by its sender leaves a hole; it is closed once the sender's window has passed
    it.
    """

    _floor: int = 0
    _above: set[int] = field(default_factory=set)

    def __contains__(self, number: int) -> bool:
        return number <= self._floor or number in self._above

    def add(self, number: int) -> None:
        if number == self._floor + 1 and not self._above:
            self._floor = number
            return
        self._above.add(number)
        self._floor = max(self._floor, max(self._above) - WINDOW_BLOCKS)
        while self._floor + 1 in self._above:
            self._floor += 1
        self._above = {n for n in self._above if n > self._floor}
