"""The lease on removing, searched: persisters whose clocks run at different rates and which stand
still between any two steps, over a store that only says who was first."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.recovery.removal_lease import LEASE_NS, RENEW_NS, RemovalLease
from keepstep.model.removal import RemovalRecord
from keepstep.model.units import S_NS

RATES = st.floats(0.95, 1.05)
PAUSES = st.sampled_from([0, S_NS, 5 * S_NS, 30 * S_NS, 57 * S_NS, 61 * S_NS, 500 * S_NS])


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

    def __init__(self, name: str, epoch: int, rate: float, store: Records) -> None:
        self.epoch, self.rate, self.store = epoch, rate, store
        self.lease = RemovalLease(name)
        self.next = self.ask
        self.asked_ns = 0
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
        self.removes = self.lease.holds(self.store.newest(), now_ns)
        return self.ask


@settings(max_examples=400)
@given(
    st.lists(st.tuples(st.integers(1, 3), RATES), min_size=2, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), PAUSES), max_size=120),
)
def test_never_two_at_one_instant_and_never_one_of_yesterday(
    removers: list[tuple[int, float]], steps: list[tuple[int, int]]
) -> None:
    store = Records()
    all_ = [Remover(f"{at}", epoch, rate, store) for at, (epoch, rate) in enumerate(removers)]
    now_ns = 0
    for at, pause_ns in steps:
        now_ns += pause_ns
        one = all_[at % len(all_)]
        if not one.step(now_ns):
            continue
        newest = store.newest()
        assert newest is not None and newest.epoch == one.epoch
        assert all(record.epoch <= one.epoch for record in store.records.values())
        for other in all_:
            if other is not one:
                assert not other.lease.holds(newest, other.clock(now_ns))


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
