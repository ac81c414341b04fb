"""Halt: all ranks stand behind one step, and know that they do. What the keeper that leads decides
of it.

    one asks: behind step n  ->  all are told  ->  each stands there when it comes by, and says what
    it has seen  ->  each hears what all have seen, and agrees  ->  all have agreed: go

No collective of the program's, and nobody waits who has not come to step n. A rank that is past the
step when it hears of it, whose loop is over, or which has stood for too long says that it leaves:
then the halt is void, all go on, and whoever asked asks again, for a later step. So ranks that take
different numbers of steps, or none, train on.

Comes in: what ranks say. Goes out: orders to all of them, the same to each. A *place* is a step,
and which stop at it: 0 in front of its body, 1 behind it.

Invariant: of one place either every rank that hears its end hears `go`, or every one hears `void`:
`go` is said once all have agreed, and who has agreed leaves no more by itself. That holds whoever
leads: a leader that takes over hears from each rank what it said last, and a rank that has heard
`go` goes on saying that it agrees until all train anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from keepstep.model.messages.keeper_rank import HaltOrder, HaltWord
from keepstep.model.units import counted

BEFORE, BEHIND = 0, 1  # the body of a step
SEEN_CHARACTERS = 4000  # in one order: it has to fit into a packet, of up to 12 bytes each

ASKS_PER_MARGIN = 3
WIDEST_MARGIN = 6

Place = tuple[int, int]


def next_halt(step: int, every: int, void: int, asks: int) -> int:
    """Behind which step a rank that has completed `step - 1`, and is at the end of `step`, asks all
    to stand: a multiple of `every` that nobody is likely to be past. Later with each halt that has
    come to nothing, and with orders that do not come: words to other nodes take their time."""
    widen = min(void + asks // ASKS_PER_MARGIN, WIDEST_MARGIN)
    return -(-(step + (1 << widen)) // every) * every


class KeptWords:
    """What the keeper of a node says again to a leader that takes over: of each of its ranks the
    last word about a place where it stands, or stood."""

    def __init__(self) -> None:
        self._words: dict[int, HaltWord] = {}

    def said(self, word: HaltWord) -> None:
        """By a rank here."""
        before = self._words.get(word.rank)
        is_of_same = before is not None and _place(before) == _place(word)
        if word.says in ("stands", "agrees") or (word.says == "leaves" and is_of_same):
            self._words[word.rank] = word

    def ordered(self, order: HaltOrder) -> None:
        """This is handed on to the ranks here: who hears that a place is void stands there no
        more."""
        if order.orders == "void":
            place = order.epoch, order.step, order.turn
            self._words = {r: word for r, word in self._words.items() if _place(word) != place}

    def gone(self, rank: int) -> None:
        self._words.pop(rank, None)

    def all(self) -> list[HaltWord]:
        return [*self._words.values()]


def _place(word: HaltWord) -> tuple[int, int, int]:
    return word.epoch, word.step, word.turn


@dataclass
class Halts:
    """Of one mesh, epoch after epoch."""

    world_size: int = 0  # as its ranks say
    epoch: int = -1
    _open: Place | None = None
    _seen: dict[int, str] = field(default_factory=dict)  # by rank, of those that stand there
    _agreed: set[int] = field(default_factory=set)
    _over: dict[Place, HaltOrder] = field(default_factory=dict)  # what has become of a place
    _gone: set[int] = field(default_factory=set)

    def hear(self, word: HaltWord) -> list[HaltOrder]:
        """One rank's word. Said again it has the same answer."""
        self.came(word.rank)
        if word.epoch > self.epoch or word.world_size != self.world_size:
            self._begin(word.epoch, word.world_size)
        place = (word.step, word.turn)
        if word.epoch < self.epoch:
            return []
        if place in self._over:
            return [self._over[place]]
        if self._gone and word.says != "leaves":
            return [self._void(place, f"{counted(len(self._gone), 'rank')} has left")]
        match word.says:
            case "asks":
                return self._asked(place)
            case "stands" | "agrees":
                return self._stands(place, word)
            case "leaves":
                return [self._void(place, f"rank {word.rank} does not stand there")]

    def gone(self, rank: int) -> list[HaltOrder]:
        """It has ended, or nobody can tell it anything: until it comes again nobody is to wait for
        it."""
        self._gone.add(rank)
        if self._open is None:
            return []
        return [self._void(self._open, f"rank {rank} has left")]

    def came(self, rank: int) -> None:
        """It is there, perhaps in another life."""
        self._gone.discard(rank)

    def _begin(self, epoch: int, world_size: int) -> None:
        self.epoch, self.world_size, self._open = epoch, world_size, None
        self._seen, self._agreed, self._over = {}, set(), {}

    def _asked(self, place: Place) -> list[HaltOrder]:
        if self._open is None:
            self._open = place
        return [HaltOrder(self.epoch, *self._open, "halt")]

    def _stands(self, place: Place, word: HaltWord) -> list[HaltOrder]:
        orders: list[HaltOrder] = []
        if self._open is None or (place < self._open and not self._seen):
            self._open = place
            orders.append(HaltOrder(self.epoch, *place, "halt"))
        if place != self._open:
            return [self._void(place, f"the ranks meet behind step {self._open[0]}")]
        is_news = word.rank not in self._seen
        self._seen[word.rank] = word.seen
        if word.says == "agrees":
            self._agreed.add(word.rank)
        if len(self._agreed) == self.world_size:
            return [self._end(place, HaltOrder(self.epoch, *place, "go"))]
        is_told = word.says == "stands" or is_news
        if len(self._seen) == self.world_size and is_told:
            orders += self._told(place)
        return orders

    def _told(self, place: Place) -> Iterator[HaltOrder]:
        """What all have seen, in as many orders as it takes."""
        first, texts, characters = 0, list[str](), 0
        for rank in range(self.world_size):
            text = self._seen[rank]
            if texts and characters + len(text) > SEEN_CHARACTERS:
                yield HaltOrder(self.epoch, *place, "tell", tuple(texts), first)
                first, texts, characters = rank, [], 0
            texts.append(text)
            characters += len(text)
        yield HaltOrder(self.epoch, *place, "tell", tuple(texts), first)

    def _void(self, place: Place, why: str) -> HaltOrder:
        void = HaltOrder(self.epoch, *place, "void", why=why)
        return self._end(place, void)

    def _end(self, place: Place, order: HaltOrder) -> HaltOrder:
        self._over[place] = order
        if place == self._open:
            self._open, self._seen, self._agreed = None, {}, set()
        return order
