"""Leadership: which agent coordinates, by a lease on one register that all of them can swap.

Comes in: that it is time to look (`LookDue`), what the register answered (`RegisterFound`), an
order somebody wants given (`OrderWanted`). Goes out: what to ask of the register next, who
coordinates now, and whether the order may go out. The register (`ports.KV`) is atomic and has no
clock, and no two clocks are compared: the coordinator renews by a swap every third of the lease,
and whoever has seen the same lease for a whole lease of its own time swaps it for its own, with the
next term (Gray & Cheriton, Leases, SOSP 1989, with the judge at the other end; the term is the
sequencer of Burrows, Chubby, OSDI 2006). An agent that is not in the present attempt waits longer,
so that those in it come first.

A coordinator trusts its lease from when it *asked* for the renewal and gives up a tenth before the
end, the others count from when they *read* it: no two lead at one instant while clocks run within 5
% of each other's rate. What no clock can promise (a process that stands still between the decision
and the deed, a virtual machine that is put to sleep) the term catches: each order is given by a
renewal made for it, which the register refuses to a coordinator of an older term.

Invariant: the term in the register only grows, and a new coordinator always has a larger one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

from keepstep.model.bounds import Count, Text
from keepstep.model.units import human_ns

RENEWALS_PER_LEASE = 3  # in a lease
BYSTANDER_LEASES = 4  # leases that somebody waits who is not in the attempt


@dataclass(frozen=True, slots=True)
class Lease:
    """What the register says: who leads. `holder` is one life of an agent, `name` how people call
    it; `beat` makes every text a new one."""

    KIND: ClassVar[str] = "lease"
    term: Count
    holder: Text
    name: Text
    beat: Count = 0


# -- what happens


@dataclass(frozen=True, slots=True)
class LookDue:
    """A third of the lease is over. `name`: how this agent is called now; `seated`: it is in the
    present attempt."""

    name: str
    seated: bool


@dataclass(frozen=True, slots=True)
class RegisterFound:
    """What is in the register, by the answer to what was asked at `asked_ns`. None: nothing yet."""

    lease: Lease | None
    asked_ns: int


@dataclass(frozen=True, slots=True)
class OrderWanted:
    """An order for all agents, for the coordinator to give."""

    order: str


# -- what to do


@dataclass(frozen=True, slots=True)
class ReadRegister:
    """Read the register."""


@dataclass(frozen=True, slots=True)
class SwapRegister:
    expected: Lease | None
    lease: Lease


class Role(Enum):
    LEADS = "leads"
    FOLLOWS = "follows"


@dataclass(frozen=True, slots=True)
class LeaderKnown:
    """Who coordinates from now on."""

    role: Role
    term: int
    why: str


@dataclass(frozen=True, slots=True)
class OrderGranted:
    """It may go out."""

    term: int
    order: str


@dataclass(frozen=True, slots=True)
class OrderRefused:
    term: int
    order: str
    why: str


Event = LookDue | RegisterFound | OrderWanted
Question = ReadRegister | SwapRegister
Action = ReadRegister | SwapRegister | LeaderKnown | OrderGranted | OrderRefused


class Leadership:
    """One agent's part. Every question is answered by one `RegisterFound` before the next event."""

    def __init__(self, who: str, lease_ns: int) -> None:
        self.who, self.lease_ns = who, lease_ns
        self.renew_ns = lease_ns // RENEWALS_PER_LEASE
        self.trusted_ns = lease_ns - lease_ns // 10
        self._looked = False
        self._seen: Lease | None = None
        self._seen_ns = 0  # since when this very lease was seen
        self.term = 0  # the newest that is known; 0 before anybody has led
        self._asked: SwapRegister | None = None  # not known yet whether it took effect
        self._asked_ns = 0
        self._until_ns = 0  # the lease, while this agent leads
        self._wish: OrderGranted | None = None

    @property
    def leads(self) -> bool:
        """By the register's last lease; whether the lease still runs is another question."""
        return self._seen is not None and self._seen.holder == self.who

    @property
    def lease(self) -> Lease | None:
        """What the register said last."""
        return self._seen

    def may_order(self, now_ns: int) -> bool:
        return self.leads and now_ns < self._until_ns

    def refusal(self, term: int) -> str | None:
        """Why an order of this term does not count; None when it does."""
        if term >= self.term:
            return None
        by = f", which is {self._seen.name}'s" if self._seen else ""
        return f"refused: it is of term {term}, and the newest is {self.term}{by}"

    def handle(self, event: Event, now_ns: int) -> list[Action]:
        if isinstance(event, LookDue):
            return [self._due(event, now_ns)]
        if isinstance(event, RegisterFound):
            return self._found(event, now_ns)
        if self._seen is None or not self.leads:
            return [
                OrderRefused(
                    self.term,
                    event.order,
                    f"refused: this agent does not coordinate in term {self.term}",
                )
            ]
        self._wish = OrderGranted(self.term, event.order)
        return [self._renewal(self._seen, self._seen.name, now_ns)]

    def _due(self, event: LookDue, now_ns: int) -> Question:
        if self._asked is not None:
            return self._asked  # with the time of the first question: it may have taken effect then
        if self._seen is not None and self.leads:
            return self._renewal(self._seen, event.name, now_ns)
        patience_ns = self.lease_ns * (1 if event.seated else BYSTANDER_LEASES)
        nobody = self._seen is None and event.seated
        if self._looked and (nobody or now_ns - self._seen_ns >= patience_ns):
            return self._ask(Lease(self.term + 1, self.who, event.name), now_ns)
        return ReadRegister()

    def _renewal(self, seen: Lease, name: str, now_ns: int) -> SwapRegister:
        return self._asked or self._ask(replace(seen, name=name, beat=seen.beat + 1), now_ns)

    def _ask(self, lease: Lease, now_ns: int) -> SwapRegister:
        self._asked, self._asked_ns = SwapRegister(self._seen, lease), now_ns
        return self._asked

    def _found(self, event: RegisterFound, now_ns: int) -> list[Action]:
        before, led, known = self._seen, self.leads, self.term
        waited_ns = now_ns - self._seen_ns
        # the register was away: this says nothing about the coordinator
        slow = now_ns - event.asked_ns > self.renew_ns
        if not self._looked or event.lease != before or slow:
            self._looked, self._seen_ns = True, now_ns
        if self._asked is not None and event.lease == self._asked.lease:
            self._until_ns = self._asked_ns + self.trusted_ns
        self._asked, self._seen = None, event.lease
        actions: list[Action] = []
        if event.lease is not None and event.lease.term > known:
            self.term = event.lease.term
            actions.append(self._now(event.lease, before, led, waited_ns))
        return actions + self._granted(now_ns)

    def _now(self, lease: Lease, before: Lease | None, led: bool, waited_ns: int) -> LeaderKnown:
        if lease.holder != self.who:
            since = "; this agent did until now" if led else ""
            return LeaderKnown(
                Role.FOLLOWS, lease.term, f"{lease.name} coordinates, term {lease.term}{since}"
            )
        since = (
            f"{before.name} had not renewed its lease for {human_ns(waited_ns)}"
            if before
            else "nobody did before"
        )
        return LeaderKnown(
            Role.LEADS, lease.term, f"{lease.name} coordinates, term {lease.term}: {since}"
        )

    def _granted(self, now_ns: int) -> list[Action]:
        """What has become of the wish, after the renewal that was made for it."""
        if self._wish is None:
            return []
        order, self._wish = self._wish, None
        why = self.refusal(order.term)
        if why is None and not self.may_order(now_ns):
            why = "refused: the lease had run out when its renewal was answered"
        return [order] if why is None else [OrderRefused(order.term, order.order, why)]
