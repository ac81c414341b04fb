"""What keepers measure of their copies, report, and the leading one tells."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.detection.links import LONG, SlowLinks
from keepstep.model.events import INFO, WARNING
from keepstep.model.links import LinkCount, LinkRow, LinkSample
from keepstep.model.messages.peers import LinkReport
from keepstep.model.units import MIB, MS_NS, S_NS
from keepstep.runtime.replication.link_watch import (
    LEAST_BUSY_NS,
    LEAST_BYTES,
    LOOK_NS,
    DamageWatch,
    LinkMeter,
    LinkWatch,
)
from tests.runtime.fakes import FakeJournal


def count(mib: int, busy_ms: int, resent: int = 0) -> LinkCount:
    return LinkCount(mib * MIB, busy_ms * MS_NS, mib * MIB + resent, resent, 0)


def test_what_grew_since_the_last_look_is_reported() -> None:
    meter = LinkMeter()
    assert meter.look({(1, 1): count(100, 900)}, 0) == (), "from when on nobody knows"
    rows = meter.look({(1, 1): count(104, 1000, 7)}, S_NS)
    assert rows == (LinkRow(1, LinkSample(4 * MIB, 100 * MS_NS, 4 * MIB + 7, 7, 0)),)
    assert meter.look({(1, 1): count(104, 1000, 7)}, 2 * S_NS) == ()


def test_little_is_kept_until_it_is_enough() -> None:
    meter, found = LinkMeter(), []
    for look in range(12):
        found += meter.look({(1, 1): count(look, 10 * look)}, look * S_NS)
    assert [row.sample.busy_ns for row in found] == [50 * MS_NS, 50 * MS_NS]
    assert sum(row.sample.nbytes for row in found) == 10 * MIB


def test_streams_beside_each_other_take_as_long_as_the_busiest() -> None:
    meter = LinkMeter()
    meter.look({(1, 1): count(0, 0), (1, 3): count(0, 0), (2, 1): count(0, 0)}, 0)
    rows = meter.look({(1, 1): count(8, 100), (1, 3): count(6, 80), (2, 1): count(1, 60)}, S_NS)
    assert [(row.node, row.sample.nbytes // MIB, row.sample.busy_ns) for row in rows] == [
        (1, 14, 100 * MS_NS),
        (2, 1, 60 * MS_NS),
    ]


def test_a_connection_that_begins_anew_is_in_no_sample() -> None:
    meter = LinkMeter()
    meter.look({(1, 1): count(100, 1000)}, 0)
    assert meter.look({(1, 1): count(50, 600)}, S_NS) == ()
    assert meter.look({}, 2 * S_NS) == ()
    assert meter.look({(1, 1): count(70, 700)}, 3 * S_NS) == ()
    assert len(meter.look({(1, 1): count(90, 800)}, 4 * S_NS)) == 1


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=60))
def test_nothing_is_reported_twice_or_forgotten(grows: list[tuple[int, int]]) -> None:
    """Against the sum: what was reported and what is still kept are all there was."""
    meter, mib, busy_ms, reported = LinkMeter(), 0, 0, []
    meter.look({(1, 1): count(0, 0)}, 0)
    for look, (more_mib, more_ms) in enumerate(grows, start=1):
        mib, busy_ms = mib + more_mib, busy_ms + more_ms
        rows = meter.look({(1, 1): count(mib, busy_ms)}, look * S_NS)
        reported += [row.sample for row in rows]
        assert all(row.sample.nbytes >= LEAST_BYTES for row in rows)
        assert all(row.sample.busy_ns >= LEAST_BUSY_NS for row in rows)
    last = meter.look({(1, 1): count(mib + 1, busy_ms + 1000)}, 10**3 * S_NS)
    reported += [row.sample for row in last]
    assert sum(sample.nbytes for sample in reported) == (mib + 1) * MIB
    assert sum(sample.busy_ns for sample in reported) == (busy_ms + 1000) * MS_NS


def test_a_look_is_taken_every_two_seconds() -> None:
    meter = LinkMeter()
    assert meter.is_due(LOOK_NS)
    meter.look({}, LOOK_NS)
    assert not meter.is_due(2 * LOOK_NS - 1) and meter.is_due(2 * LOOK_NS)


# -- the leader


def test_a_slow_sender_is_told_once_and_again_when_it_is_over() -> None:
    journal, draw, now_ns = FakeJournal(), random.Random(1), 0
    watch = LinkWatch([None] * 3, journal)

    def report(times: int, slow: int | None = None) -> None:
        nonlocal now_ns
        for _ in range(times):
            now_ns += LOOK_NS
            for sender in range(3):
                mib = draw.uniform(95, 105) / (3 if sender == slow else 1)
                rows = tuple(
                    LinkRow(node, LinkSample(round(mib * MIB), 100 * MS_NS))
                    for node in range(3)
                    if node != sender
                )
                watch.receive(sender, LinkReport(1, rows), now_ns)
            watch.tick(now_ns, 10 * now_ns // LOOK_NS)  # ten steps between two looks

    report(70)
    assert journal.kinds == ["link-unknown", "link-known"]
    journal.events.clear()
    report(LONG, slow=2)
    [told] = journal.of("slow-link")
    assert told.data["side"] == "sender" and told.data["nodes"] == [2]
    assert told.data["cells"] == [[2, 0], [2, 1]] and told.data["cause"] == "speed"
    assert told.why.startswith("node 2 sends slowly: ")
    # 100 MiB in 0.1 s for ten steps, and now a third of that in as long: 3.3 MiB take 10 ms a step
    assert told.data["remedy"] == "observe"
    assert 4 * MS_NS < told.data["left_ns"] < 30 * MS_NS
    assert "a spare in the place of node 2 costs about 60.00 s once (assumed" in told.why
    assert "cheapest by hand: keepstep preflight" in told.why
    report(LONG)
    assert journal.kinds == ["slow-link", "slow-link-over"]


def steady(watch: LinkWatch, seconds: int, now_ns: int, senders: Iterable[int] = (0, 1)) -> int:
    """Both nodes send each other copies, or one of them does."""
    for _ in range(0, seconds * S_NS, LOOK_NS):
        now_ns += LOOK_NS
        for sender in senders:
            row = LinkRow(1 - sender, LinkSample(100 * MIB, 100 * MS_NS))
            watch.receive(sender, LinkReport(1, (row,)), now_ns)
        watch.tick(now_ns)
    return now_ns


def test_a_node_whose_keeper_tells_nothing_more_is_unknown_within_30_s_and_told_once() -> None:
    journal = FakeJournal()
    watch = LinkWatch([None] * 2, journal)
    now_ns = steady(watch, 140, S_NS)
    assert [(e.kind, e.data["doubt"]) for e in journal.events] == [
        ("link-unknown", "learning"),
        ("link-known", "learning"),
    ]
    assert journal.levels == [INFO, INFO], "it is so at each start"
    journal.events.clear()
    now_ns = steady(watch, 30, now_ns, senders=(0,))
    [told] = journal.of("link-unknown")
    assert told.data["doubt"] == "unheard" and "node 1 told nothing" in told.why
    assert journal.levels[-1] == WARNING
    now_ns = steady(watch, 300, now_ns, senders=(0,))
    assert journal.kinds == ["link-unknown"]
    steady(watch, 30, now_ns)
    assert journal.kinds == ["link-unknown", "link-known"]


def test_where_nobody_copies_any_more_that_is_no_trouble() -> None:
    journal = FakeJournal()
    watch = LinkWatch([None] * 2, journal)
    now_ns = steady(watch, 140, S_NS)
    journal.events.clear()
    steady(watch, 60, now_ns, senders=())
    assert [e.data["doubt"] for e in journal.events] == ["unheard"]
    assert journal.levels[-1] == INFO


def test_a_mesh_of_which_nothing_is_measured_is_unknown_and_one_node_has_no_links() -> None:
    journal, alone = FakeJournal(), FakeJournal()
    watch, one = LinkWatch([None] * 2, journal), LinkWatch([None], alone)
    steady(watch, 30, S_NS, senders=())
    steady(one, 30, S_NS, senders=())
    assert [e.data["doubt"] for e in journal.of("link-unknown")] == ["samples"]
    assert alone.events == []


def test_a_judge_that_sees_no_slow_link_any_more_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    journal = FakeJournal()
    watch = LinkWatch([None] * 2, journal, canary_every_ns=60 * S_NS)
    now_ns = steady(watch, 300, S_NS)
    assert journal.kinds == ["link-unknown", "link-known"] and watch.slow == []
    journal.events.clear()
    with monkeypatch.context() as broken:
        broken.setattr(SlowLinks, "news", lambda self: [])
        now_ns = steady(watch, 90, now_ns)
    [told] = journal.events
    assert (told.kind, told.data["doubt"]) == ("link-unknown", "blind")
    assert "does not see a slow one that is planted" in told.why
    steady(watch, 120, now_ns)
    assert journal.kinds == ["link-unknown", "link-known"]


def test_one_that_is_blind_from_the_beginning_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SlowLinks, "news", lambda self: [])
    journal = FakeJournal()
    steady(LinkWatch([None] * 2, journal), 4, S_NS)
    assert [e.data["doubt"] for e in journal.events] == ["blind"]


def test_reports_are_judged_together() -> None:
    """With a thousand nodes there are hundreds a second."""
    journal = FakeJournal()
    watch = LinkWatch([None] * 3, journal)
    watch.tick(0)
    judged = 0

    def news() -> list[object]:
        nonlocal judged
        judged += 1
        return []

    watch._links.news = news  # type: ignore[method-assign, assignment]
    for number in range(1000):
        row = LinkRow(1, LinkSample(MIB, 100 * MS_NS))
        watch.receive(0, LinkReport(1, (row,)), number * MS_NS)
        watch.tick(number * MS_NS)
    assert judged <= 1
    watch.tick(LOOK_NS * 10)
    assert judged in (1, 2)


def test_damage_is_told_once_a_minute_and_one_by_chance_is_not() -> None:
    journal = FakeJournal()
    damage = DamageWatch(journal)
    damage.look({1: 7, 2: 1}, 0)
    assert journal.events == [], "what was before nobody has looked"
    damage.look({1: 9, 2: 1}, 10 * S_NS)
    assert journal.events == []
    damage.look({1: 17, 2: 2}, 20 * S_NS)
    [told] = journal.of("link-damages")
    assert told.data == {"node": 1, "count": 10} and "between here and node 1" in told.why
    damage.look({1: 30, 2: 2}, 70 * S_NS)
    assert len(journal.events) == 1
    damage.look({1: 60, 2: 2}, 81 * S_NS)
    assert [event.data["count"] for event in journal.of("link-damages")] == [10, 30]
    damage.look({1: 60, 2: 2}, 200 * S_NS)
    assert len(journal.events) == 2
