"""Drawn: which schedule, pace and plan are drawn from what a drill tells."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.prediction.drawn import Resumption, draw, source_of
from benchmarks.prediction.record import Begun, Record
from keepstep.errors import ConfigError
from keepstep.model.events import Event
from keepstep.model.snapshot import Phase
from keepstep.model.units import MS_NS, S_NS

SHAPE = {
    "nodes": 1,
    "nproc": 2,
    "policy": "copies:2",
    "store": False,
    "persist_every": 0,
    "link_dead_s": 3.0,
    "grace_s": 30.0,
    "step_ms": 30.0,
}
STEP_NS = 100 * MS_NS
AT_MS = {"step": 0, "forward": 0, "backward": 40, "update": 70}


def said(at_ns: int, kind: str, **data: Any) -> Event:
    return Event(at_ns, at_ns, "keeper", kind, "", data)


def a_step(rank: int, pid: int, step: int, began_ns: int) -> list[Begun]:
    """Stalls of 2 ms; 1 ms after this step's begin the one before is captured: 2 ms to the seal and
    2 ms from there."""
    found = [Begun(rank, pid, phase, step, began_ns + ms * MS_NS) for phase, ms in AT_MS.items()]
    found[0] = found[0]._replace(stall_ns=2 * MS_NS, payload_bytes=1000)
    found[2] = found[2]._replace(captured_step=step - 1, capture_ns=4 * MS_NS)
    return [
        *found,
        Begun(rank, pid, "capture", step - 1, began_ns + MS_NS),
        Begun(rank, pid, "seal", step - 1, began_ns + 3 * MS_NS),
    ]


def a_record(
    faults: list[tuple[dict[str, Any], dict[str, int]]],
    *,
    resumed: tuple[int, ...] = (),
    steps: int = 20,
) -> Record:
    """Two ranks train from 1 s on. `faults`: each with when it was "about to" be done, was done
    ("did"), ended ("ended"), in ns. `resumed`: all go on from the step that was done 200 ms before
    then, one step lost."""
    phases = [
        begun
        for rank in (0, 1)
        for step in range(steps)
        for begun in a_step(rank, 10 + rank, step, S_NS + step * STEP_NS)
    ]
    journal = [said(S_NS, "resumed", step=-1, source="fresh", lost_steps=0, epoch=1)]
    for epoch, at_ns in enumerate(resumed, 2):
        journal.append(
            said(
                at_ns,
                "resumed",
                step=(at_ns - S_NS) // STEP_NS - 2,
                source="memory",
                lost_steps=1,
                epoch=epoch,
            )
        )
    notes = [
        {"fault": n, "what": what, "mono_ns": at_ns}
        for n, (_, noted) in enumerate(faults)
        for what, at_ns in noted.items()
    ]
    usual = {
        "rank": 0,
        "step": 0,
        "phase": "forward",
        "where": "",
        "after_ms": None,
        "nodes": [],
        "for_ms": None,
    }
    return Record(
        SHAPE,
        [usual | fault for fault, _ in faults],
        notes,
        phases,
        [],
        [[*journal, said(10 * S_NS, "job-over")]],
    )


def at(step: float) -> int:
    return S_NS + int(step * STEP_NS)


def test_a_strike_is_told_by_the_phase_it_fell_in_counted_from_the_last_resumption() -> None:
    record = a_record(
        [
            ({"kind": "kill", "rank": 1}, {"did": at(4.45)}),
            ({"kind": "keeper-kill"}, {"did": at(12) + 2 * MS_NS}),
        ],
        resumed=(at(8),),
    )
    first, second = draw(record).strikes
    assert (first.kind, first.rank, first.resumed) == ("kill", 1, True)
    # step 4 is the fifth of a job that begins with 0
    assert (first.phase, first.step, first.since_ns) == (Phase.BACKWARD, 5, 5 * MS_NS)
    # the step before is what is being captured
    assert (second.resumed, second.step) == (True, 11 - 6)
    assert (second.phase, second.since_ns) == (Phase.CAPTURE, MS_NS)


def test_who_kills_where_a_seal_begins_holds_the_seal_up() -> None:
    record = a_record([({"kind": "torn", "phase": "seal"}, {"did": at(6) + 3 * MS_NS + 400_000})])
    (torn,) = draw(record).strikes
    assert (torn.phase, torn.since_ns) == (Phase.SEAL, 0)


def test_what_follows_at_once_is_told_by_the_strike_before() -> None:
    record = a_record(
        [
            ({"kind": "keeper-kill"}, {"did": at(4.9)}),
            ({"kind": "kill", "rank": 1}, {"did": at(4.9) + 7 * MS_NS}),
        ]
    )
    second = draw(record).strikes[1]
    assert (second.resumed, second.phase, second.since_ns, second.gap_ns) == (
        False,
        None,
        7 * MS_NS,
        7 * MS_NS,
    )


def test_a_node_is_lost_when_it_leaves_the_network_and_a_rank_stops_as_long_as_it_did() -> None:
    lost = ({"kind": "kill-node", "nodes": [0], "rank": 0}, {"about to": at(3.5), "did": at(5)})
    stopped = ({"kind": "stop", "rank": 1}, {"did": at(7), "ended": at(7) + 300 * MS_NS})
    first, second = draw(a_record([lost, stopped])).strikes
    assert (first.phase, first.since_ns) == (Phase.BACKWARD, 10 * MS_NS)
    assert second.for_ns == 300 * MS_NS


def test_what_could_not_be_done_is_left_out_and_said() -> None:
    found = draw(
        a_record(
            [({"kind": "full", "step": 4}, {"about to": at(4)}), ({"kind": "kill"}, {"did": at(6)})]
        )
    )
    assert [s.kind for s in found.strikes] == ["kill"] and found.left_out == ("full at step 4",)


def test_resumptions_are_told_by_the_strikes_before_them() -> None:
    record = a_record(
        [({"kind": "kill"}, {"did": at(4)}), ({"kind": "kill"}, {"did": at(14)})],
        resumed=(at(7), at(17)),
    )
    record.journals[0].append(said(at(16), "fetched", rank=0, sources=[1]))  # type: ignore[attr-defined]
    found = draw(record)
    assert found.seen == (Resumption(1, 5, "own memory", 1), Resumption(2, 15, "copies", 1))
    assert found.settled and not draw(a_record([({"kind": "kill"}, {"did": at(4)})])).settled


@pytest.mark.parametrize(
    ("policy", "source", "fetched", "expected"),
    [
        ("copies:2", "memory", False, "own memory"),
        ("copies:3", "memory", True, "copies"),
        ("parity:3", "memory", True, "parity"),
        ("rs:2+2", "memory", True, "parity"),
        ("copies:2", "store", True, "store"),
        ("none", "fresh", False, "fresh"),
    ],
)
def test_sources_have_names(policy: str, source: str, fetched: bool, expected: str) -> None:
    assert source_of(policy, source, fetched) == expected


def test_the_pace_is_what_was_measured() -> None:
    pace = draw(a_record([])).plan.pace
    assert set(pace.forward_ns) == {40 * MS_NS} and set(pace.stall_ns) == {2 * MS_NS}
    assert set(pace.collective_ns) == {20 * MS_NS} and pace.rest_ns == (
        10 * MS_NS,
    )  # 30 ms, of which the job sleeps a third of its step_ms
    assert set(pace.update_ns) == {28 * MS_NS}
    assert (set(pace.capture_ns), set(pace.copy_ns), set(pace.seal_ns)) == (
        {MS_NS},
        {2 * MS_NS},
        {2 * MS_NS},
    )


def test_a_step_that_is_done_again_is_measured_by_itself() -> None:
    """Between its update and the step after it a survivor waited for the others: no step took so
    long."""
    record = a_record([], steps=4)
    again = [
        line._replace(mono_ns=line.mono_ns + 9 * S_NS) for line in record.phases if line.step >= 2
    ]
    journal = [
        *record.journals[0],
        said(at(85), "resumed", step=1, source="memory", lost_steps=2, epoch=2),
    ]
    found = draw(Record(record.shape, [], [], [*record.phases, *again], [], [journal])).plan.pace
    assert max(found.update_ns) == 28 * MS_NS


def test_what_follows_a_failure_is_measured_of_each_and_of_all() -> None:
    record = a_record(
        [
            ({"kind": "kill", "rank": 1}, {"did": at(4)}),
            ({"kind": "kill", "rank": 0}, {"did": at(14)}),
        ],
        resumed=(at(9), at(18)),
    )
    for kill_ns, rank, pid, took_ms in ((at(4), 1, 50, 300), (at(14), 0, 51, 90)):
        exited_ns = kill_ns + 5 * MS_NS
        record.journals[0].extend(  # type: ignore[attr-defined]
            [
                said(exited_ns, "rank-exited", rank=rank),
                said(exited_ns + MS_NS, "ranks-restarted", pids=[pid]),
                said(exited_ns + MS_NS + took_ms * MS_NS, "rank-joined", rank=rank, pid=pid),
            ]
        )
    found = draw(record)
    assert [s.aftermath.rank_start_ns for s in found.strikes] == [(300 * MS_NS,), (90 * MS_NS,)]
    assert [s.aftermath.notice_ns for s in found.strikes] == [(5 * MS_NS,)] * 2
    assert found.plan.pace.failures.rank_start_ns == (90 * MS_NS, 300 * MS_NS)


def test_copies_take_as_long_as_they_took() -> None:
    """Two nodes of one rank each: 1000 bytes, all committed 10 ms after the last seal."""
    one = a_record([])
    committed = [(1, step, at(step + 1) + 13 * MS_NS) for step in range(5)]
    record = Record(
        {**one.shape, "nodes": 2, "nproc": 1}, [], [], one.phases, committed, one.journals
    )
    assert set(draw(record).plan.wires.measured_bytes_per_s) == {100_000}


def test_what_a_fault_cut_off_counts_for_as_long_as_it_lasted() -> None:
    """The same, and a generation that was not committed 60 ms after its seal, when a node was lost:
    the slowest is at least as slow."""
    one = a_record(
        [
            (
                {"kind": "kill-node", "nodes": [1]},
                {"about to": at(6) + 63 * MS_NS, "did": at(6) + 65 * MS_NS},
            )
        ],
        resumed=(at(9),),
    )
    committed = [(1, step, at(step + 1) + 13 * MS_NS) for step in range(5)]
    record = Record(
        {**one.shape, "nodes": 2, "nproc": 1},
        one.faults,
        one.notes,
        one.phases,
        committed,
        one.journals,
    )
    rates = draw(record).plan.wires.measured_bytes_per_s
    assert set(rates) == {100_000, 1000 * S_NS // (60 * MS_NS)} and rates.count(100_000) == round(
        20 * 5 / 6
    )


def test_a_record_goes_through_json() -> None:
    record = a_record([({"kind": "kill", "rank": 1}, {"did": at(4)})], resumed=(at(8),))
    assert draw(Record.from_json(json.loads(json.dumps(record.to_json())))) == draw(record)


def test_a_job_that_did_not_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected the record of a job that trained"):
        draw(a_record([], steps=0))
