"""The lease on removing, searched: persisters whose clocks run at different rates and which stand
still between any two steps, over a store that only says who was first."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.recovery.removal_lease import LEASE_NS, RENEW_NS, RemovalLease
from keepstep.model.removal import RemovalRecord
from keepstep.model.units import S_NS

RATES = 0.951, 1.049
PAUSES = [pause_s * S_NS for pause_s in (0, 0, 1, 19, 31, 52, 54, 56, 58, 61, 64)]


@dataclass
class Records:
    """A store."""

    records: dict[int, RemovalRecord] = field(default_factory=dict)

    def newest(self) -> RemovalRecord | None:
        return self.records[max(self.records)] if self.records else None

    def put(self, record: RemovalRecord) -> bool:
        return self.records.setdefault(record.number, record) is record


class Remover:
    """Asks in the order in which a persister does; each `step` may come after any pause."""

    def __init__(self, name: str, epoch: int, rate: float, announces: bool, store: Records) -> None:
        self.announces = announces
        self.epoch, self.rate, self.store = epoch, rate, store
        self.lease = RemovalLease(name)
        self.next = self.ask
        self.asked_ns = 0
        self.checked: RemovalRecord | None = None
        self.removes = False  # from now on until it looks again

    def clock(self, now_ns: int) -> int:
        return round(now_ns * self.rate)

    def step(self, now_ns: int) -> bool:
        """Whether it may remove at this very moment."""
        self.next = self.next(self.clock(now_ns))  # type: ignore[assignment]
        return self.next == self.ask and self.removes

    def ask(self, now_ns: int) -> object:
        self.removes = False
        self.asked_ns = now_ns
        return self.look

    def look(self, now_ns: int) -> object:
        found = self.store.newest()
        if self.lease.holds(found, self.asked_ns) and self.lease.is_fresh(self.asked_ns):
            return self.check
        announced = self.lease.announcement(found, self.epoch, now_ns) if self.announces else None
        if announced is not None:
            self.store.put(announced)
            return self.ask
        if self.lease.refusal(found, self.epoch, now_ns):
            return self.ask
        self.record = self.lease.following(found, self.epoch)
        return self.put

    def put(self, now_ns: int) -> object:
        if not self.store.put(self.record):
            return self.ask
        self.lease.taken(self.record, self.asked_ns)
        return self.check

    def check(self, now_ns: int) -> object:
        self.checked = self.store.newest()
        self.removes = self.lease.holds(self.checked, now_ns)
        return self.ask

    def may_still_remove(self, now_ns: int) -> bool:
        """It has looked, and what it removes takes a while."""
        return self.removes and self.lease.holds(self.checked, self.clock(now_ns))


@pytest.mark.parametrize("block", range(10))
def test_never_two_at_one_instant_and_never_one_of_yesterday(block: int) -> None:
    removed = 0
    for seed in range(1000 * block, 1000 * (block + 1)):
        removed += search(Random(seed))
    assert removed > 1000


def search(random: Random) -> int:
    """How often somebody may remove."""
    removers = [
        (random.randint(1, 2), random.uniform(*RATES), random.random() < 0.5)
        for _ in range(random.randint(2, 3))
    ]
    turns = [
        (random.randrange(3), random.choice(PAUSES), random.choice([1, 2, 4, 6])) for _ in range(15)
    ]
    removed = 0
    store = Records()
    all_ = [Remover(f"{at}", *about, store) for at, about in enumerate(removers)]
    now_ns = 0
    steps = [(at, pause * (not n)) for at, pause, count in turns for n in range(count)]
    for at, pause_ns in steps:
        now_ns += pause_ns
        one = all_[at % len(all_)]
        if not one.step(now_ns):
            continue
        removed += 1
        newest = store.newest()
        assert newest is not None and newest.epoch == one.epoch
        assert all(record.epoch <= one.epoch for record in store.records.values())
        for other in all_:
            if other is not one:
                assert not other.may_still_remove(now_ns)
    return removed


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 2 * LEASE_NS))
def test_of_who_has_not_given_it_back_it_is_taken_a_lease_after_it_was_seen(
    mine: int, theirs: int, waited_ns: int
) -> None:
    lease, found = RemovalLease("me"), RemovalRecord(7, theirs, "they", is_held=True)
    first = lease.refusal(found, mine, 100)
    assert first
    later = lease.refusal(found, mine, 100 + waited_ns)
    assert bool(later) is (theirs > mine or waited_ns < LEASE_NS)
    assert lease.refusal(found, mine, 100 + LEASE_NS) == "" or theirs > mine
    other = RemovalRecord(8, theirs, "they", is_held=True)
    assert lease.refusal(other, mine, 100 + LEASE_NS), "renewed: counted anew"


@given(st.integers(1, 5), st.integers(1, 5))
def test_what_was_given_back_is_for_who_leads_in_no_older_epoch(mine: int, theirs: int) -> None:
    found = RemovalRecord(7, theirs, "they", is_held=False)
    assert bool(RemovalLease("me").refusal(found, mine, 0)) is (theirs > mine)


def test_who_stands_still_for_most_of_a_lease_has_it_no_more() -> None:
    lease = RemovalLease("me")
    record = lease.following(None, 3)
    assert record == RemovalRecord(1, 3, "me", is_held=True)
    lease.taken(record, 10)
    assert lease.holds(record, 10 + 53 * S_NS) and not lease.holds(record, 10 + 54 * S_NS)
    assert lease.is_fresh(9 + RENEW_NS) and not lease.is_fresh(10 + RENEW_NS)
    assert not lease.holds(RemovalRecord(2, 3, "they", is_held=True), 11)
    assert lease.given_back() == RemovalRecord(2, 3, "me", is_held=False)
    assert lease.given_back() is None and not lease.holds(record, 11)


@given(st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_a_new_epoch_is_announced_once_and_waits_for_who_may_be_removing(
    mine: int, theirs: int, is_held: bool
) -> None:
    lease = RemovalLease("me")
    assert lease.announcement(None, mine, 0) == RemovalRecord(1, mine, "me", is_held=False)
    found = RemovalRecord(7, theirs, "they", is_held)
    said = lease.announcement(found, mine, 0)
    assert said == (RemovalRecord(8, mine, "me", is_held) if mine > theirs else None)
    if said is not None:
        assert bool(lease.refusal(said, mine, LEASE_NS - 1)) is is_held
        assert not lease.refusal(said, mine, LEASE_NS)
        assert bool(RemovalLease("another").refusal(said, mine, 0)) is is_held
        assert lease.announcement(said, mine, 0) is None
