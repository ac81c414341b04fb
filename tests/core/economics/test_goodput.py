"""Where the time went: parts that never overlap, whose sum is the whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.economics.goodput import Account, Ledger, Recovered, StepTempo, account
from keepstep.core.economics.journal_kinds import (
    BACK,
    CLOSING,
    ON_THE_WAY,
    OPENING,
    READY,
    REFUTING,
)
from keepstep.model.events import Event
from keepstep.model.units import MS_NS, S_NS

WALL_NS = 1_700_000_000 * S_NS


def at(ms: int, kind: str, who: str = "keeper", host: int = 0, /, **data: Any) -> Event:
    """`host`: its monotonic clock began that many hours later than that of host 0."""
    return Event(WALL_NS + ms * MS_NS, (ms + 3_600_000 * (1 - host)) * MS_NS, who, kind, kind, data)


def starts(ms: int = 0, took_ms: int = 1000) -> list[Event]:
    """Two ranks that can train `took_ms` later."""
    joined = [at(ms + 500, "rank-joined", rank=rank, pid=10 + rank) for rank in (0, 1)]
    ready = [at(ms + took_ms - 10 * rank, "slots-made", f"rank {rank}") for rank in (0, 1)]
    go = at(ms + took_ms - 100, "resumed", step=-1, source="fresh", lost_steps=0, epoch=1)
    return [at(ms, "job-started", "agent"), *joined, go, *reversed(ready)]


def dies(ms: int, completed: int = 9, rank: int = 1) -> list[Event]:
    left = at(
        ms + 5, "rank-left", rank=rank, pid=10 + rank, expected=False, completed_step=completed
    )
    return [at(ms, "rank-exited", "agent", rank=rank, code=-9), left]


def comes_back(ms: int, step: int, lost: int, step_ms: int = 100, epoch: int = 2) -> list[Event]:
    """Both ranks have trained again since `ms`, and say so when their first step is done."""
    go = at(ms - 50, "resumed", step=step, source="memory", lost_steps=lost, epoch=epoch)
    words = [
        at(ms + step_ms, "next-step", f"rank {r}", step=step + 1, duration_ns=step_ms * MS_NS)
        for r in (0, 1)
    ]
    return [
        at(ms - 900, "ranks-restarted", "agent"),
        at(ms - 100, "rank-joined", rank=0, pid=20),
        go,
        *words,
    ]


def ends(ms: int, exits_ms: int = 0) -> list[Event]:
    byes = [at(ms - r, "rank-bye", rank=r, ok=True) for r in (1, 0)]
    return [
        *byes,
        at(ms + exits_ms, "job-ended", "agent", ok=True),
        at(ms + exits_ms + 1, "job-over", ok=True),
    ]


def parts_ms(found: Account) -> dict[str, int]:
    """The parts that are not empty."""
    assert sum(found.parts().values()) == found.wall_ns
    return {name: ns // MS_NS for name, ns in found.parts().items() if ns}


def test_a_run_without_failure() -> None:
    found = account([*starts(), *ends(11_000, exits_ms=3000)])
    assert parts_ms(found) == {"starting": 1000, "productive": 10_000, "idle": 3001}
    assert found.goodput_ratio == 10_000 / 14_001


def test_a_killed_rank_costs_the_way_back_and_the_steps_done_again() -> None:
    # 10 steps in 1000 ms, then dead; back 1000 ms later with 2 steps to do again, of 100 ms each
    events = [*starts(), *dies(2000), *comes_back(3000, step=7, lost=2), *ends(9000)]
    assert parts_ms(account(events)) == {
        "starting": 1000,
        "recovering": 1000,
        "redone": 200,
        "productive": 6800,
        "idle": 1,
    }


def test_a_hang_is_detected_from_its_beginning() -> None:
    diagnosis = {"kind": "hang", "culprit": 1}
    suspected = [
        *starts(),
        at(7000, "suspicion", "agent", rank=1, stalled_ns=2000 * MS_NS),
        at(9000, "diagnosis", "agent", **diagnosis),
    ]
    rest = [*comes_back(12_000, step=39, lost=0), *ends(13_000)]
    expected = {
        "starting": 1000,
        "productive": 5000,
        "detecting": 4000,
        "recovering": 3000,
        "idle": 1,
    }
    assert parts_ms(account([*suspected, *rest])) == expected
    told = at(9000, "diagnosis", "agent", **diagnosis, stalled_ns=4000 * MS_NS)
    assert parts_ms(account([*starts(), told, *rest])) == expected


def test_a_suspicion_that_a_step_refutes_costs_nothing() -> None:
    false = [at(3000, "suspicion", "agent", rank=1), at(3500, "skipped", "rank 1", step=20)]
    late = [
        *starts(),
        *false,
        at(9000, "diagnosis", "agent", kind="hang"),
        *comes_back(9000 + 1000, 40, 0),
        *ends(11_000),
    ]
    assert account(late).detecting_ns == 0
    over = [
        *starts(),
        at(3000, "suspicion", "agent"),
        at(3500, "suspicion-over", "agent"),
        *dies(4000),
        *comes_back(5000, 29, 0),
    ]
    assert account(over).detecting_ns == 0
    slow = [
        *starts(),
        at(3000, "diagnosis", "agent", kind="slow"),
        *ends(5000),
    ]
    assert parts_ms(account(slow)) == {"starting": 1000, "productive": 4000, "idle": 1}


def test_a_second_failure_on_the_way_back_is_no_second_incident() -> None:
    events = [
        *starts(),
        *dies(2000),
        at(2500, "ranks-restarted"),
        *dies(2600, rank=0),
        *comes_back(4000, step=8, lost=1),
        *ends(5000),
    ]
    assert parts_ms(account(events)) == {
        "starting": 1000,
        "recovering": 2000,
        "redone": 100,
        "productive": 1900,
        "idle": 1,
    }
    ledger = entered(events)
    assert ledger.recovered() == (Recovered("crash", 2100 * MS_NS, 1),)


def test_what_is_lost_twice_is_redone_once_each_time() -> None:
    # After the first return steps 5 to 9 are to be done again; the rank dies after 5 and 6, and 6
    # is lost: 6 to 9 are left.
    events = [*starts(), *dies(2000), *comes_back(3000, step=4, lost=5), *dies(3200, completed=6)]
    events += [*comes_back(4200, step=5, lost=1, epoch=3), *ends(9000)]
    assert parts_ms(account(events))["redone"] == 2 * 100 + 4 * 100


def test_survivors_that_stay_in_their_process() -> None:
    """They are told, join again, and meet the new rank when all may train."""
    told = [
        at(2020, "lost-notice", "rank 0", rank=1),
        at(2021, "plan", "agent", rung="regroup"),
    ]
    suspected = [at(1990, "suspicion", "agent", rank=0), at(2022, "suspicion", "agent", rank=0)]
    joined = [at(2030, "rank-respawned", "agent", rank=1), at(2040, "rank-joined", rank=0, pid=10)]
    regrouped = at(2420, "regrouped", "rank 0", rank=0, attempt=1, duration_ns=420 * MS_NS)
    words = [at(2500 + r, "next-step", f"rank {r}", step=10) for r in (0, 1)]
    go = at(2400, "resumed", step=9, source="memory", lost_steps=0, epoch=2)
    events = [
        *starts(),
        suspected[0],
        *dies(2000),
        *told,
        suspected[1],
        *joined,
        go,
        regrouped,
        *words,
        *ends(3000),
    ]
    assert parts_ms(account(events)) == {
        "starting": 1000,
        "productive": 990 + 580,
        "detecting": 10,
        "recovering": 420,
        "idle": 1,
    }
    assert entered(events).recovered() == (Recovered("crash", 511 * MS_NS, 0),)


def test_a_step_that_was_under_way_when_the_failure_came_is_no_return() -> None:
    late = at(2030, "next-step", "rank 0", step=10)
    events = [*starts(), *dies(2000), late, *comes_back(3000, step=8, lost=1), *ends(4000)]
    assert parts_ms(account(events))["recovering"] == 1000
    assert len(entered(events).recovered()) == 1


def test_nothing_is_known_of_a_silence_that_a_launch_ended() -> None:
    events = [*starts(), at(5000, "persisted", step=40), *starts(60_000), *ends(63_000)]
    assert parts_ms(account(events)) == {"starting": 2000, "productive": 6000, "idle": 55_001}


def test_a_keeper_that_is_replaced_stops_nobody() -> None:
    events = [
        *starts(),
        at(5000, "keeper-started"),
        at(5010, "rank-attached", rank=0),
        at(5020, "rank-attached", rank=1),
        *ends(9000),
    ]
    assert parts_ms(account(events)) == {"starting": 1000, "productive": 8000, "idle": 1}


def test_ranks_that_come_back_without_a_witness() -> None:
    """Another launcher killed them while no keeper lived."""
    events = [
        *starts(),
        at(5000, "rank-joined", rank=0, pid=20),
        *comes_back(6000, step=39, lost=0)[2:],
        *ends(9000),
    ]
    assert parts_ms(account(events)) == {
        "starting": 1000,
        "recovering": 1000,
        "productive": 7000,
        "idle": 1,
    }
    assert entered(events).recovered() == (Recovered("unknown", 1100 * MS_NS, 0),)


def plain(ms: int, pid: int, epoch: int, **told: Any) -> list[Event]:
    """A rank that no agent looks after can train 500 ms after it has come."""
    return [
        at(ms, "rank-joined", rank=0, pid=pid, **told),
        at(ms + 500, "resumed", step=9, source="memory", lost_steps=0, epoch=epoch),
    ]


def test_nobody_recovers_while_the_user_is_away() -> None:
    bye = at(5000, "rank-bye", rank=0, ok=False)
    left = at(5100, "rank-left", rank=0, pid=1, expected=True)
    first = [at(0, "keeper-started"), *plain(500, 1, 1), bye, left]
    now = (WALL_NS + 9000 * MS_NS, (9000 + 3_600_000) * MS_NS, "")
    assert parts_ms(account(first, now=now)) == {
        "starting": 1000,
        "productive": 4000,
        "recovering": 100,
        "idle": 3900,
    }
    away = [*first, *plain(65_100, 2, 2, goes_on=False), *ends(70_000)]
    assert parts_ms(account(away)) == {
        "starting": 1000,
        "productive": 4000 + 4400,
        "recovering": 600,
        "idle": 60_001,
    }
    assert entered(away).recovered() == (Recovered("crash", 600 * MS_NS, 0),)
    restarted = [*first, *plain(65_100, 2, 2, goes_on=True), *ends(70_000)]
    assert parts_ms(account(restarted))["recovering"] == 60_600


def test_a_lost_keeper_does_not_hide_that_the_user_was_away() -> None:
    left = at(5000, "rank-left", rank=0, pid=1, expected=False)
    first = [at(0, "keeper-started"), *plain(500, 1, 1), left]
    keeper = at(64_000, "keeper-started", adopted_slots=3)
    events = [*first, keeper, *plain(65_000, 2, 2, goes_on=False), *ends(70_000)]
    found = parts_ms(account(events))
    assert found["idle"] == 59_001 and found["recovering"] == 1500


def test_an_incident_that_ends_the_job_was_not_recovered() -> None:
    events = [
        *starts(),
        *dies(2000),
        at(4000, "job-ended", "agent", ok=False),
        at(4500, "job-over", ok=False),
    ]
    assert parts_ms(account(events)) == {
        "starting": 1000,
        "productive": 1000,
        "recovering": 2000,
        "idle": 500,
    }
    assert entered(events).recovered() == ()


def test_the_trainer_waited_as_long_as_the_rank_that_waited_longest_in_all_its_lives() -> None:
    summary = {
        "stall_ns_per_step": 10 * MS_NS,
        "captured_steps": 20,
        "skipped_steps": 4,
        "torn_steps": 1,
    }
    left = at(
        2005, "rank-left", rank=1, pid=11, expected=False, completed_step=9, stall_ns=70 * MS_NS
    )
    first = [*starts(), at(2000, "rank-exited", "agent", rank=1, code=-9), left]
    rest = [
        at(2900, "rank-joined", rank=1, pid=21),
        *comes_back(3000, step=9, lost=0)[2:],
        at(8999, "summary", "rank 1", **summary),
    ]
    found = account([*first, *rest, *ends(9000)])
    assert found.stalled_ns == (70 + 25 * 10) * MS_NS
    assert found.productive_ns == 7000 * MS_NS - found.stalled_ns
    again = at(
        9000, "rank-left", rank=1, pid=21, expected=True, completed_step=68, stall_ns=251 * MS_NS
    )
    # the same life told twice
    assert account([*first, *rest, again, *ends(9000)]).stalled_ns == (70 + 251) * MS_NS


def test_who_waits_for_the_store_is_not_productive() -> None:
    """A training of 1 s, whose last checkpoint took 7 s: 8 s until the goodbye."""
    summary = {"stall_ns_per_step": 0, "captured_steps": 20, "waited_ns": 7000 * MS_NS}
    found = account([*starts(), at(8999, "summary", "rank 1", **summary), *ends(9000)])
    assert found.stalled_ns == 7000 * MS_NS
    without = account([*starts(), at(8999, "summary", "rank 1"), *ends(9000)])
    assert found.productive_ns == without.productive_ns - 7000 * MS_NS


def test_a_running_job_is_told_up_to_now_with_what_its_pages_say() -> None:
    now = (WALL_NS + 6000 * MS_NS, (6000 + 3_600_000) * MS_NS)
    events = [*starts(), *dies(2000), *comes_back(3000, step=7, lost=2)]
    tempos = [
        StepTempo(0, 20, completed_step=31, step_ns=1, stall_ns=30 * MS_NS),
        StepTempo(1, 21, 31, 1, 40 * MS_NS),
    ]
    found = account(events, tempos, now)
    # 10 steps in the first second, 24 in the last three: 4000 ms / 34 a step
    assert found.redone_ns == 2 * 4000 * MS_NS // 34
    assert (found.wall_ns, found.stalled_ns) == (6000 * MS_NS, 40 * MS_NS)
    assert found.productive_ns == 4000 * MS_NS - found.redone_ns - found.stalled_ns


def test_two_machines_that_were_switched_on_at_different_times_are_one_line() -> None:
    here = [
        *starts(),
        at(5000, "node-lost", node=1),
        *comes_back(8000, step=39, lost=0),
        *ends(9000),
    ]
    there = [
        at(4990, "lost-notice", "rank 1", 1, rank=0),
        at(7951, "go", "keeper", 1, step=39, lost_steps=0, epoch=2),
    ]
    assert parts_ms(account([*there, *here])) == {
        "starting": 1000,
        "productive": 4990,
        "recovering": 3010,
        "idle": 1,
    }


def test_a_silence_longer_than_the_training_began_with_it() -> None:
    told = at(2000, "diagnosis", "agent", kind="hang", stalled_ns=60 * S_NS)
    events = [*starts(), told, *comes_back(3000, step=-1, lost=0)[2:], *ends(4000)]
    assert parts_ms(account(events)) == {
        "starting": 1000,
        "detecting": 1000,
        "recovering": 1000,
        "productive": 1000,
        "idle": 1,
    }
    assert entered(events).recovered() == (Recovered("hang", 2100 * MS_NS, 0),)


def test_a_first_step_did_not_begin_before_the_leave_to_train() -> None:
    step = at(3000, "next-step", "rank 0", step=10, duration_ns=60 * S_NS)
    events = [
        *starts(),
        *dies(2000),
        at(2900, "resumed", step=9, source="memory", lost_steps=0, epoch=2),
        step,
        *ends(4000),
    ]
    assert parts_ms(account(events)) == {
        "starting": 1000,
        "productive": 2100,
        "recovering": 900,
        "idle": 1,
    }


def test_one_suspicion_is_the_beginning_of_one_incident() -> None:
    go = [
        at(ms, "resumed", step=9, source="memory", lost_steps=0, epoch=epoch)
        for ms, epoch in ((3000, 2), (6000, 3))
    ]
    events = [
        *starts(),
        at(1900, "suspicion", "agent"),
        *dies(2000),
        go[0],
        *dies(5000),
        go[1],
        *ends(7000),
    ]
    assert parts_ms(account(events)) == {
        "starting": 1000,
        "productive": 3900,
        "detecting": 100,
        "recovering": 2000,
        "idle": 1,
    }


def test_what_another_node_says_later_about_the_same_return_is_not_lost_again() -> None:
    late = [at(2990, "rank-joined", rank=2, pid=22), at(2995, "go", step=7, lost_steps=2, epoch=2)]
    events = [*starts(), *dies(2000), *comes_back(3000, step=7, lost=2)[:3], *late, *ends(4000)]
    assert sum(r.lost_steps for r in entered(events).recovered()) == 2


def test_words_that_come_a_little_late_take_no_time_back() -> None:
    events = [
        *starts(),
        *dies(2000),
        at(1990, "lost-notice", "rank 0", rank=1),
        *comes_back(3000, step=9, lost=0),
        *ends(4000),
    ]
    ledger = entered(events)
    assert parts_ms(ledger.account()) == {
        "starting": 1000,
        "productive": 2000,
        "recovering": 1000,
        "idle": 1,
    }
    early = at(1500, "rank-exited", "agent", rank=0, code=-9)
    ledger = entered([*starts(), at(1900, "skipped", "rank 0"), early])
    assert parts_ms(ledger.account()) == {"starting": 1000, "productive": 900}


def test_a_recovery_is_told_of_when_nothing_can_lengthen_it() -> None:
    ledger = entered([*starts(), *dies(2000), *comes_back(3000, step=8, lost=1)])
    place = ledger.axis.place
    assert ledger.recovered(place(WALL_NS + 4 * S_NS, (4 + 3600) * S_NS)) == ()
    assert ledger.recovered(place(WALL_NS + 20 * S_NS, (20 + 3600) * S_NS)) == (
        Recovered("crash", 1100 * MS_NS, 1),
    )


def test_nothing_was_said() -> None:
    assert account([]).goodput_ratio is None
    assert account([], [StepTempo(0, 1, 5, 7, 9)], (WALL_NS, 5, "")).wall_ns == 0


def entered(events: list[Event]) -> Ledger:
    ledger = Ledger()
    for event in events:
        ledger.add(event)
    return ledger


KINDS = [
    *sorted(BACK | OPENING | CLOSING | ON_THE_WAY | READY | REFUTING),
    *(
        "rank-exited",
        "rank-left",
        "rank-bye",
        "node-lost",
        "lost-notice",
        "suspicion",
        "diagnosis",
        "plan",
    ),
    *("rank-attached", "summary", "persisted", "something-new"),
]
SMALL_NS = st.integers(-5 * MS_NS, 3000 * MS_NS)
DATA = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(
            ("step", "completed_step", "lost_steps", "captured_steps"), st.integers(-1, 30)
        ),
        **dict.fromkeys(("rank", "pid", "epoch", "code"), st.integers(0, 3)),
        **dict.fromkeys(("expected", "ok", "goes_on"), st.booleans()),
        **dict.fromkeys(("stalled_ns", "stall_ns", "stall_ns_per_step", "duration_ns"), SMALL_NS),
        "kind": st.sampled_from(["hang", "crash", "slow"]),
        "foreign": st.none() | st.text(max_size=3),
    },
)
EVENTS = st.lists(
    st.builds(
        lambda ms, kind, who, host, data: at(ms, kind, who, host, **data),
        st.integers(0, 20_000),
        st.sampled_from(KINDS),
        st.sampled_from(["keeper", "agent", "rank 0", "rank 1", "rank x"]),
        st.integers(0, 1),
        DATA,
    ),
    max_size=40,
)
TEMPOS = st.lists(
    st.builds(
        StepTempo,
        st.integers(0, 3),
        st.integers(0, 3),
        st.integers(-1, 99),
        SMALL_NS.map(abs),
        SMALL_NS.map(abs),
    ),
    max_size=4,
)


@given(EVENTS, TEMPOS, st.none() | st.integers(0, 30_000))
def test_whatever_a_journal_says_the_parts_are_the_whole(
    events: list[Event], tempos: list[StepTempo], now_ms: int | None
) -> None:
    now = None if now_ms is None else (WALL_NS + now_ms * MS_NS, (now_ms + 3_600_000) * MS_NS)
    found = account(events, tempos, now)
    assert sum(found.parts().values()) == found.wall_ns
    assert min(found.parts().values()) >= 0
    times = [e.wall_ns for e in events]
    latest_ns = max([*times, *([] if now is None else [now[0]])], default=0)
    assert found.wall_ns == (max(0, latest_ns - min(times)) if times else 0)


@given(EVENTS, st.randoms(use_true_random=False))
def test_the_order_in_which_lines_are_found_does_not_matter(
    events: list[Event], random: Any
) -> None:
    distinct = list({e.wall_ns: e for e in events}.values())
    mixed = random.sample(distinct, len(distinct))
    assert account(mixed) == account(distinct)


@given(EVENTS)
def test_a_journal_that_breaks_off_tells_what_it_told_until_then(events: list[Event]) -> None:
    """As it grows, the ledger says what the account of all lines so far says."""
    ledger, told = Ledger(), []
    for event in sorted(events, key=lambda e: e.wall_ns):
        ledger.add(event)
        told.append(event)
        assert ledger.account() == account(told)
        recovered = ledger.recovered()
        assert all(r.took_ns >= 0 for r in recovered)
        assert sum(r.took_ns for r in recovered) <= ledger.account().wall_ns


@given(st.lists(st.integers(-8, 8), min_size=1, max_size=40))
def test_a_wall_clock_that_is_set_changes_nothing_within_one_boot(hours: list[int]) -> None:
    """hours: what it is set to by, from event to event."""
    true = [*starts(), *dies(11_000), *comes_back(13_000, 9, 0), *ends(20_000)]
    set_ns = [hours[i % len(hours)] * 3600 * S_NS if i else 0 for i in range(len(true))]
    told = [
        replace(e, wall_ns=e.wall_ns + by_ns, boot="b")
        for e, by_ns in zip(true, set_ns, strict=True)
    ]
    assert account(told) == account(true)


def test_a_loss_that_nobody_knows_is_redone_as_far_as_it_is_certain_and_counted() -> None:
    """Ten steps of 100 ms; after the way back at least three of the five are done again."""
    back = at(2900, "resumed", step=4, source="store", lost_steps=None, lost_at_least=3, epoch=1000)
    said = at(2950, "go", step=4, source="store", lost_steps=None, lost_at_least=3, epoch=1000)
    first = at(3100, "next-step", "rank 0", step=5, duration_ns=100 * MS_NS)
    events = [*starts(), at(2000, "rank-exited", "agent", rank=1, code=-9), back, said, first]
    spent = account([*events, at(5000, "job-over", "agent", ok=True)])
    assert spent.unknown_losses == 1
    assert 0 < spent.redone_ns <= spent.productive_ns
    known = [
        replace(e, data={**e.data, "lost_steps": 3}) if e in (back, said) else e for e in events
    ]
    sure = account([*known, at(5000, "job-over", "agent", ok=True)])
    assert sure == replace(spent, unknown_losses=0)
