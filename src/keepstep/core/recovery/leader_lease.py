"""Leadership: which agent coordinates, by a lease on one register that all of them can swap.

Comes in: that it is time to look (`Due`), what the register answered (`Found`), an order somebody
wants given (`Wish`). Goes out: what to ask of the register next, who coordinates now, and whether
the order may go out. The register (`ports.KV`) is atomic and has no clock, and no two clocks are
compared: the coordinator renews by a swap every third of the lease, and whoever has seen the same
word for a whole lease of its own time swaps it for its own, with the next epoch (Gray & Cheriton,
Leases, SOSP 1989, with the judge at the other end; the epoch is the sequencer of Burrows, Chubby,
OSDI 2006). Who has nothing to lose in the present round waits longer, so that those who have come
first.

A coordinator trusts its lease from when it *asked* for the renewal and gives up a tenth before the
end, the others count from when they *read* it: no two lead at one instant while clocks run within 5
% of each other's rate. What no clock can promise (a process that stands still between the decision
and the deed, a virtual machine that is put to sleep) the epoch catches: each order is given by a
renewal made for it, which the register refuses to a coordinator of yesterday.

Invariant: the epoch in the register only grows, and a new coordinator always has a larger one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from enum import Enum

from keepstep.model.units import human_ns

RENEWALS = 3  # in a lease
BYSTANDERS = 4  # leases that somebody waits who is not in the round


@dataclass(frozen=True, slots=True)
class Word:
    """What the register says. `who` is one life of an agent, `name` how people call it; `beat`
    makes every word a new one."""

    epoch: int
    who: str
    name: str
    beat: int = 0

    def to_text(self) -> str:
        return json.dumps(asdict(self))


def word_from_text(text: str) -> Word:
    """The inverse of `Word.to_text`."""
    return Word(**json.loads(text))


# -- what happens


@dataclass(frozen=True, slots=True)
class Due:
    """A third of the lease is over. `name`: how this agent is called now; `seated`: it is in the
    present round."""

    name: str
    seated: bool


@dataclass(frozen=True, slots=True)
class Found:
    """What is in the register, by the answer to what was asked at `asked_ns`. None: nothing yet."""

    word: Word | None
    asked_ns: int


@dataclass(frozen=True, slots=True)
class Wish:
    """An order for all agents, for the coordinator to give."""

    order: str


# -- what to do


@dataclass(frozen=True, slots=True)
class Look:
    """Read the register."""


@dataclass(frozen=True, slots=True)
class Swap:
    expected: Word | None
    word: Word


class Role(Enum):
    LEADS = "leads"
    FOLLOWS = "follows"


@dataclass(frozen=True, slots=True)
class Now:
    """Who coordinates from now on."""

    role: Role
    epoch: int
    why: str


@dataclass(frozen=True, slots=True)
class Order:
    """It may go out."""

    epoch: int
    order: str


@dataclass(frozen=True, slots=True)
class Refused:
    epoch: int
    order: str
    why: str


Event = Due | Found | Wish
Question = Look | Swap
Action = Look | Swap | Now | Order | Refused


class Leadership:
    """One agent's part. Every question is answered by one `Found` before the next event."""

    def __init__(self, who: str, lease_ns: int) -> None:
        self.who, self.lease_ns = who, lease_ns
        self.renew_ns = lease_ns // RENEWALS
        self.trusted_ns = lease_ns - lease_ns // 10
        self._looked = False
        self._seen: Word | None = None
        self._seen_ns = 0  # since when this very word was seen
        self.epoch = 0  # the newest that is known; 0 before anybody has led
        self._asked: Swap | None = None  # not known yet whether it took effect
        self._asked_ns = 0
        self._until_ns = 0  # the lease, while this agent leads
        self._wish: Order | None = None

    @property
    def leads(self) -> bool:
        """By the register's last word; whether the lease still runs is another question."""
        return self._seen is not None and self._seen.who == self.who

    def may_order(self, now_ns: int) -> bool:
        return self.leads and now_ns < self._until_ns

    def refusal(self, epoch: int) -> str | None:
        """Why an order of this epoch does not count; None when it does."""
        if epoch >= self.epoch:
            return None
        by = f", which is {self._seen.name}'s" if self._seen else ""
        return f"refused: it is of epoch {epoch}, and the newest is {self.epoch}{by}"

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        if isinstance(event, Due):
            return [self._due(event, now_ns)]
        if isinstance(event, Found):
            return self._found(event, now_ns)
        if self._seen is None or not self.leads:
            return [
                Refused(
                    self.epoch,
                    event.order,
                    f"refused: this agent does not coordinate in epoch {self.epoch}",
                )
            ]
        self._wish = Order(self.epoch, event.order)
        return [self._renewal(self._seen, self._seen.name, now_ns)]

    def _due(self, event: Due, now_ns: int) -> Question:
        if self._asked is not None:
            return self._asked  # with the time of the first question: it may have taken effect then
        if self._seen is not None and self.leads:
            return self._renewal(self._seen, event.name, now_ns)
        patience_ns = self.lease_ns * (1 if event.seated else BYSTANDERS)
        nobody = self._seen is None and event.seated
        if self._looked and (nobody or now_ns - self._seen_ns >= patience_ns):
            return self._ask(Word(self.epoch + 1, self.who, event.name), now_ns)
        return Look()

    def _renewal(self, seen: Word, name: str, now_ns: int) -> Swap:
        return self._asked or self._ask(replace(seen, name=name, beat=seen.beat + 1), now_ns)

    def _ask(self, word: Word, now_ns: int) -> Swap:
        self._asked, self._asked_ns = Swap(self._seen, word), now_ns
        return self._asked

    def _found(self, event: Found, now_ns: int) -> list[Action]:
        before, led, known = self._seen, self.leads, self.epoch
        waited_ns = now_ns - self._seen_ns
        # the register was away: this says nothing about the coordinator
        slow = now_ns - event.asked_ns > self.renew_ns
        if not self._looked or event.word != before or slow:
            self._looked, self._seen_ns = True, now_ns
        if self._asked is not None and event.word == self._asked.word:
            self._until_ns = self._asked_ns + self.trusted_ns
        self._asked, self._seen = None, event.word
        actions: list[Action] = []
        if event.word is not None and event.word.epoch > known:
            self.epoch = event.word.epoch
            actions.append(self._now(event.word, before, led, waited_ns))
        return actions + self._granted(now_ns)

    def _now(self, word: Word, before: Word | None, led: bool, waited_ns: int) -> Now:
        if word.who != self.who:
            since = "; this agent did until now" if led else ""
            return Now(
                Role.FOLLOWS, word.epoch, f"{word.name} coordinates, epoch {word.epoch}{since}"
            )
        since = (
            f"{before.name} had not renewed its lease for {human_ns(waited_ns)}"
            if before
            else "nobody did before"
        )
        return Now(Role.LEADS, word.epoch, f"{word.name} coordinates, epoch {word.epoch}: {since}")

    def _granted(self, now_ns: int) -> list[Action]:
        """What has become of the wish, after the renewal that was made for it."""
        if self._wish is None:
            return []
        order, self._wish = self._wish, None
        why = self.refusal(order.epoch)
        if why is None and not self.may_order(now_ns):
            why = "refused: the lease had run out when its renewal was answered"
        return [order] if why is None else [Refused(order.epoch, order.order, why)]
