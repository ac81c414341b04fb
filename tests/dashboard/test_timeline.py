"""A journal becomes runs and recoveries."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.economics.journal_kinds import is_failure
from keepstep.dashboard.sentences import recovery_title, stage_words
from keepstep.dashboard.timeline import between_ns, runs_of
from keepstep.model.events import Event
from keepstep.model.failure import Cause, Failure
from keepstep.model.units import MS_NS, S_NS

BOOT_NS = 1_700_000_000 * S_NS


def at(ms: int, who: str, kind: str, why: str = "", /, **data: Any) -> Event:
    return Event(BOOT_NS + ms * MS_NS, ms * MS_NS, who, kind, why or kind, data)


def begins(ms: int = 0) -> list[Event]:
    return [
        at(ms, "keeper", "keeper-started", "keeper 7 has /m", adopted_slots=0),
        at(ms + 1, "keeper", "rank-joined"),
        at(ms + 2, "keeper", "restore-offered", source="fresh", step=-1),
        at(ms + 3, "keeper", "resumed", source="fresh", step=-1, lost_steps=0, epoch=1),
    ]


def killed(ms: int) -> list[Event]:
    return [
        at(ms, "agent", "rank-exited", "rank 1 was killed", rank=1, code=-9),
        at(ms + 1, "keeper", "rank-left", "rank 1 is gone", rank=1, expected=False),
        at(ms + 2, "agent", "rank-exited", "rank 0 exited with code 1", rank=0, code=1),
    ]


def comes_back(ms: int, source: str = "memory", step: int = 24, lost: int = 1) -> list[Event]:
    return [
        at(ms, "agent", "ranks-restarted"),
        at(ms + 1000, "keeper", "rank-joined", rank=0),
        at(ms + 1010, "keeper", "rank-joined", rank=1),
        at(ms + 1011, "keeper", "restore-offered", source=source, step=step),
        at(ms + 1020, "rank 0", "loaded"),
        at(ms + 1030, "rank 1", "loaded"),
        at(ms + 1031, "keeper", "resumed", source=source, step=step, lost_steps=lost, epoch=2),
        at(ms + 1050, "rank 1", "next-step", step=step + 1),
        at(ms + 1060, "rank 0", "next-step", step=step + 1),
    ]


def ends(ms: int, ok: bool = True) -> list[Event]:
    return [
        at(ms, "keeper", "job-over", "all 2 ranks ended well", ok=ok),
        at(ms + 1, "keeper", "keeper-ended"),
    ]


def test_a_recovery_is_measured_from_the_first_sign_to_the_last_ranks_next_step() -> None:
    [story] = runs_of([*begins(), *killed(5000), *comes_back(5100), *ends(9000)])
    [recovery] = story.recoveries
    assert (recovery.outcome, recovery.source, recovery.step, recovery.lost_steps) == (
        "resumed",
        "memory",
        24,
        1,
    )
    assert [(s.name, s.took_ns // MS_NS) for s in recovery.stages] == [
        ("noticed", 0),
        ("restarted", 100),
        ("joined", 1010),
        ("offered", 1),
        ("loaded", 19),
        ("resumed", 1),
        ("next step", 29),
    ]
    assert recovery.stages[0].event.why == "rank 1 was killed"
    assert recovery.took_ns == sum(s.took_ns for s in recovery.stages) == 1160 * MS_NS
    assert (recovery.refused, recovery.setbacks) == ((), ())
    assert (story.lost_steps, story.end, story.ended_well) == (1, "all 2 ranks ended well", True)


def test_a_run_without_failure_has_no_recovery() -> None:
    well = [
        at(4000, "agent", "rank-exited", code=0),
        at(4001, "keeper", "rank-left", expected=True),
        at(4002, "keeper", "rank-bye", ok=True),
    ]
    [story] = runs_of([*well, *ends(5000)])
    assert story.recoveries == ()


def test_sources_that_were_not_used_are_named_and_older_damage_is_not() -> None:
    scrubbed = at(3000, "keeper", "damaged", "scrub: slot 2 damaged", rank=0)
    way = comes_back(5100, source="store", step=9, lost=15)
    refused = [
        at(6105, "rank 0", "damaged", "slot 1 damaged"),
        at(6112, "keeper", "restore-failed", "rank 1 cannot use it"),
    ]
    [story] = runs_of([*begins(), scrubbed, *killed(5000), *way[:3], *refused, *way[3:]])
    [recovery] = story.recoveries
    assert recovery.refused == ("slot 1 damaged", "rank 1 cannot use it")
    assert (recovery.source, recovery.lost_steps) == ("store", 15)
    assert story.end is None


def test_a_rank_that_dies_while_restoring_is_a_setback_and_not_a_second_recovery() -> None:
    first_try = [
        at(5100, "agent", "ranks-restarted"),
        at(6000, "keeper", "rank-joined"),
        at(6010, "agent", "rank-exited", "rank 0 again", code=-9),
    ]
    [story] = runs_of([*begins(), *killed(5000), *first_try, *comes_back(6100)])
    [recovery] = story.recoveries
    assert recovery.setbacks == ("rank 0 again",)
    assert [s.name for s in recovery.stages] == [
        "noticed",
        "restarted",
        "joined",
        "offered",
        "loaded",
        "resumed",
        "next step",
    ]
    assert recovery.stages[1].event.mono_ns == 6100 * MS_NS


def test_what_a_verdict_about_the_program_rests_on_is_told() -> None:
    failed = [
        Failure(
            Cause.CRASH, 1, host, "0", 7, "ValueError: no", place="train.py:9 in step", files="/e"
        )
        for host in ("a", "b")
    ]
    found = at(
        5050,
        "agent",
        "recurrence",
        "the program is at fault",
        finding="code",
        failures=[f.to_json() for f in failed],
    )
    [story] = runs_of([*begins(), *killed(5000), found, *ends(5100, ok=False)])
    [failure] = story.recoveries
    assert (
        failure.evidence[1]
        == "rank 1 on b, device 0 in step 7: ValueError: no, train.py:9 in step; more in /e"
    )
    assert [(s.link, s.name) for s in failure.stages][-2:] == [
        ("diagnosis", "recurred"),
        ("closed", "ended"),
    ]


def test_a_failure_that_nothing_followed() -> None:
    [pending] = runs_of([*begins(), *killed(5000)])
    assert [(r.outcome, r.step) for r in pending.recoveries] == [("pending", None)]
    [ended] = runs_of([*begins(), *killed(5000), *ends(9000, ok=False)])
    [failure] = ended.recoveries
    assert [(s.name, s.took_ns // MS_NS) for s in failure.stages] == [
        ("noticed", 0),
        ("ended", 4000),
    ]
    assert (failure.outcome, ended.ended_well) == ("ended", False)


def test_without_a_witness_the_way_back_begins_with_the_next_keeper() -> None:
    adopted = at(20_000, "keeper", "keeper-started", "keeper 8 has /m", adopted_slots=8)
    [story] = runs_of([*begins(), *[at(3000, "rank 0", "torn")], adopted, *comes_back(20_100)[1:]])
    [recovery] = story.recoveries
    assert [s.name for s in recovery.stages] == [
        "joined",
        "offered",
        "loaded",
        "resumed",
        "next step",
    ]
    assert recovery.outcome == "resumed"


def test_a_fresh_start_after_a_failure_is_a_recovery_that_lost_everything() -> None:
    [story] = runs_of(
        [*begins(), *killed(5000), *comes_back(5100, source="fresh", step=-1, lost=4)]
    )
    assert [(r.source, r.lost_steps) for r in story.recoveries] == [("fresh", 4)]


def test_a_fresh_start_in_empty_memory_is_a_run_and_a_store_continues_one() -> None:
    first = [*begins(), *killed(5000), *ends(9000, ok=False)]
    later = [
        at(60_000, "keeper", "keeper-started", "keeper 9 has /m", adopted_slots=0),
        *comes_back(60_010, source="store", step=9)[1:],
    ]
    second = [at(90_000, "agent", "job-started"), *begins(90_001), *ends(95_000)]
    story, other = runs_of([*first, *later, *second])
    assert list(story.events) == [*first, *later]
    assert [r.outcome for r in story.recoveries] == ["resumed"]
    assert story.end is None
    assert list(other.events) == second


def test_a_run_that_lost_its_machine_has_no_last_word_and_still_ends_there() -> None:
    first, second = [*begins(), at(5000, "keeper", "persisted", step=9)], begins(90_000)
    assert [list(s.events) for s in runs_of([*first, *second])] == [first, second]


def test_nobody_said_anything() -> None:
    assert runs_of([]) == []


def test_a_reboot_between_two_events_is_measured_by_the_wall_clock() -> None:
    before, after = (
        Event(BOOT_NS, 900 * S_NS, "a", "k", "w"),
        Event(BOOT_NS + 500 * S_NS, 10 * S_NS, "a", "k", "w"),
    )
    assert between_ns(before, after) == 500 * S_NS
    # the wall clock was set, the machine stayed up
    stepped = Event(BOOT_NS + 30 * S_NS, 901 * S_NS, "a", "k", "w")
    assert between_ns(before, stepped) == 1 * S_NS
    assert between_ns(stepped, before) == 0


# -- the user's own absence


def plain(ms: int, pid: int, **told: Any) -> list[Event]:
    """One rank that no agent looks after, from its first word to its first step."""
    source = "memory" if told else "fresh"
    return [
        at(ms, "keeper", "rank-joined", rank=0, pid=pid, **told),
        at(ms + 10, "keeper", "restore-offered", source=source, step=5),
        at(ms + 100, "keeper", "resumed", source=source, step=5, lost_steps=0, epoch=pid),
        at(ms + 300, "rank 0", "next-step", step=6, duration_ns=200 * MS_NS),
    ]


def interrupted(ms: int) -> list[Event]:
    bye = at(ms, "keeper", "rank-bye", "rank 0 says goodbye: interrupted", rank=0, ok=False)
    return [bye, at(ms + 50, "keeper", "rank-left", "rank 0 is gone", rank=0, expected=True)]


def test_nobody_recovers_while_the_user_is_away() -> None:
    events = [begins()[0], *plain(10, 1), *interrupted(5000), *plain(65_050, 2, goes_on=False)]
    [story] = runs_of(events)
    [recovery] = story.recoveries
    assert [(s.link, s.name, s.took_ns // MS_NS) for s in recovery.stages] == [
        ("fact", "noticed", 0),
        ("fact", "gone", 50),
        ("away", "away", 60_000),
        ("action", "joined", 0),
        ("action", "offered", 10),
        ("action", "resumed", 90),
        ("closed", "next step", 200),
    ]
    assert (recovery.took_ns, recovery.away_ns) == (350 * MS_NS, 60_000 * MS_NS)
    told = recovery_title(1, recovery).text
    assert "in 350.0 ms after 60.00 s away" in told
    assert "until somebody started one" in stage_words(recovery.stages[2]).text


def test_what_a_launcher_starts_again_is_no_absence() -> None:
    back = plain(10_000, 2, goes_on=True)
    [story] = runs_of([begins()[0], *plain(10, 1), *interrupted(5000)[1:], *back])
    assert [r.away_ns for r in story.recoveries] == [0] * len(story.recoveries)
    [story] = runs_of([begins()[0], *plain(10, 1), *interrupted(5000), *back])
    [recovery] = story.recoveries
    assert (recovery.away_ns, recovery.took_ns) == (0, 5300 * MS_NS)


def test_an_absence_in_which_one_of_two_ranks_lives_is_none() -> None:
    other = at(20, "keeper", "rank-joined", rank=1, pid=9)
    [story] = runs_of([*plain(10, 1), other, *interrupted(5000), *plain(65_050, 2, goes_on=False)])
    assert [r.away_ns for r in story.recoveries] == [0]


def test_with_agents_an_absence_is_what_is_between_their_last_and_first_words() -> None:
    agent = at(1, "agent", "job-started")
    left = [*interrupted(5000), at(5100, "agent", "job-ended", ok=False)]
    again = [at(65_100, "agent", "job-started"), *plain(66_000, 2, goes_on=False)]
    [story] = runs_of([begins()[0], agent, *plain(10, 1), *left, *again])
    [recovery] = story.recoveries
    assert (recovery.away_ns, recovery.took_ns) == (60_000 * MS_NS, 1300 * MS_NS)
    # an agent that was killed says no last word
    [story] = runs_of([begins()[0], agent, *plain(10, 1), *left[:2], *again])
    [recovery] = story.recoveries
    assert (recovery.away_ns, recovery.took_ns) == (60_050 * MS_NS, 1250 * MS_NS)
    # another one that takes over from it was started at once
    takes_over = at(65_100, "agent", "job-started", takes_over=True)
    [story] = runs_of([begins()[0], agent, *plain(10, 1), *left[:2], takes_over, *again[1:]])
    assert [r.away_ns for r in story.recoveries] == [0]
    # an agent that lives starts them again, be it late
    [story] = runs_of([begins()[0], agent, *plain(10, 1), *left[:2], *again[1:]])
    assert [r.away_ns for r in story.recoveries] == [0]


# -- several nodes


def joins_attempt(ms: int) -> list[Event]:
    """A node that starts under `keepstep run`: the agent finds its keeper before it
    says its first word about the job."""
    return [
        at(ms, "keeper", "keeper-started", "keeper 7 has /m", adopted_slots=0),
        at(ms + 1, "agent", "keeper-listens"),
        at(ms + 3, "agent", "job-started"),
        at(ms + 4, "agent", "nodes-awaited"),
        at(ms + 5, "agent", "attempt-formed"),
        at(ms + 6, "keeper", "mesh"),
    ]


def hears(ms: int, source: str, step: int, lost: int, epoch: int) -> list[Event]:
    """What a node that does not lead writes down."""
    return [
        at(ms, "keeper", "rank-joined"),
        at(ms + 10, "keeper", "offer", source=source, step=step),
        at(ms + 20, "keeper", "fetched", rank=1, step=step),
        at(ms + 30, "rank 1", "loaded"),
        at(ms + 40, "keeper", "go", source=source, step=step, lost_steps=lost, epoch=epoch),
    ]


def test_a_lost_node_seen_from_one_that_does_not_lead() -> None:
    start = [*joins_attempt(0), *hears(10, "fresh", -1, 0, 1)]
    lost = at(5000, "keeper", "node-lost", "node 2 does not answer: away for 10.0 s", node=2)
    met = [
        at(5100, "agent", "attempt-formed"),
        at(5101, "keeper", "mesh"),
        at(5110, "agent", "ranks-restarted"),
    ]
    [story] = runs_of(
        [*start, lost, *met, *hears(6000, "memory", 41, 1, 2), at(6100, "rank 1", "next-step")]
    )
    [recovery] = story.recoveries
    assert (recovery.outcome, recovery.source, recovery.step, recovery.lost_steps) == (
        "resumed",
        "memory",
        41,
        1,
    )
    assert [(s.name, s.took_ns // MS_NS) for s in recovery.stages] == [
        *(("noticed", 0), ("met", 100), ("restarted", 10), ("joined", 890), ("offered", 10)),
        *(("fetched", 10), ("loaded", 10), ("resumed", 10), ("next step", 60)),
    ]
    assert story.lost_steps == 1


def test_a_replacement_begins_with_a_recovery() -> None:
    [story] = runs_of([*joins_attempt(0), *hears(10, "memory", 41, 0, 2)])
    [recovery] = story.recoveries
    assert (recovery.outcome, recovery.step, recovery.setbacks) == ("resumed", 41, ())
    assert [s.name for s in recovery.stages][:2] == ["met", "joined"]


def test_a_source_that_could_not_be_fetched_is_named() -> None:
    failed = at(
        5500,
        "keeper",
        "fetch-failed",
        "step 42 of rank 1 cannot be had from memory: node 0: no link",
        rank=1,
    )
    [story] = runs_of(
        [
            *joins_attempt(0),
            *hears(10, "fresh", -1, 0, 1),
            *killed(5000),
            failed,
            *hears(6000, "memory", 41, 1, 2),
        ]
    )
    assert [r.refused for r in story.recoveries] == [(failed.why,)]


def test_a_permission_that_is_said_again_is_no_recovery() -> None:
    start = [
        *joins_attempt(0),
        *hears(10, "fresh", -1, 0, 1),
        *killed(5000),
        *hears(6000, "memory", 41, 1, 2),
    ]
    # or another node's, in a journal they share
    again = at(6100, "keeper", "go", source="memory", step=41, lost_steps=1, epoch=2)
    [story] = runs_of([*start, again, *ends(9000)])
    assert [(r.outcome, r.lost_steps) for r in story.recoveries] == [("resumed", 1)]


KINDS = [
    "keeper-started",
    "keeper-ended",
    "job-started",
    "job-over",
    "resumed",
    "rank-left",
    "rank-exited",
    "rank-joined",
    "next-step",
    "damaged",
]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(KINDS),
            st.sampled_from([0, 3]),
            st.sampled_from(["fresh", "memory", "store"]),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_no_event_is_lost_and_no_failure_goes_untold(
    words: list[tuple[str, int, str, bool]],
) -> None:
    events = [
        at(
            i,
            "keeper",
            kind,
            adopted_slots=adopted,
            source=source,
            step=i,
            lost_steps=1,
            expected=flag,
            ok=flag,
            code=0 if flag else 1,
        )
        for i, (kind, adopted, source, flag) in enumerate(words)
    ]
    runs = runs_of(events)
    assert [event for run in runs for event in run.events] == events
    for run in runs:
        assert all(run.events)
        if any(map(is_failure, run.events)):
            assert run.recoveries
        for recovery in run.recoveries:
            assert recovery.took_ns >= 0
            assert all(stage.event in run.events for stage in recovery.stages)


# -- what is found by suspicion


def links(way: list[Event]) -> list[list[tuple[str, int]]]:
    [story] = runs_of([*begins(), *way])
    return [
        [(s.name, s.took_ns // MS_NS) for s in recovery.stages[:3]] for recovery in story.recoveries
    ]


def test_a_hang_begins_with_the_first_suspicion_that_no_step_refuted() -> None:
    refuted = [at(1000, "agent", "suspicion"), at(1500, "rank 1", "skipped", step=3)]
    hang = [
        at(3000, "agent", "suspicion"),
        at(3500, "agent", "suspicion"),
        at(60_000, "agent", "diagnosis", kind="hang"),
    ]
    assert links([*refuted, *hang, *comes_back(61_000)]) == [
        [("suspicion", 0), ("diagnosis", 57_000), ("restarted", 1000)]
    ]


def test_a_death_has_nothing_to_do_with_an_old_suspicion() -> None:
    suspected = at(3000, "agent", "suspicion")
    assert links([suspected, *killed(60_000), *comes_back(60_100)]) == [
        [("noticed", 0), ("restarted", 100), ("joined", 1010)]
    ]
    assert links([suspected, *killed(3010), *comes_back(3100)]) == [
        [("suspicion", 0), ("noticed", 10), ("restarted", 90)]
    ]


def test_what_is_suspected_when_the_plan_is_made_is_no_link() -> None:
    late = at(5150, "agent", "suspicion")
    assert links([*killed(5000), comes_back(5100)[0], late, *comes_back(5100)[1:]])[0][1] == (
        "restarted",
        100,
    )


def test_only_what_ends_training_is_an_incident() -> None:
    slow = [at(3000, "agent", "diagnosis", kind="slow")]
    assert links(slow) == []
    [[stage]] = links([*slow, at(9000, "agent", "plan", rung="swap")])
    assert stage == ("plan", 0)


def test_an_agents_last_word_is_an_end_though_the_memory_is_kept() -> None:
    stopped = at(6000, "agent", "job-ended", "preempted by SIGTERM (15)", ok=False, exit_code=143)
    [story] = runs_of([*begins(), *killed(5000), stopped])
    assert story.end == "preempted by SIGTERM (15)" and story.ended_well is False
    [goes_on] = runs_of([*begins(), *killed(5000), stopped, *comes_back(7000)])
    assert goes_on.end is None
