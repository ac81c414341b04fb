"""Diagnosis: who is named, on what evidence, and who never is."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.detection.deadlines import derive
from keepstep.core.detection.diagnosis import (
    BROKEN_DEVICE,
    CASCADE,
    ExitFacts,
    cause_of,
    diagnose,
    explain_exit,
)
from keepstep.model.diagnosis import (
    DEADLY,
    Diagnosis,
    Evidence,
    Strength,
    evidence_from_text,
    evidence_to_text,
)
from keepstep.model.failure import Cause
from keepstep.model.snapshot import Phase
from keepstep.model.units import S_NS

LIMITS = derive()
SECOND = S_NS


def seen(
    rank: int, stalled_s: float = 0.1, quiet_s: float | None = None, **changes: Any
) -> Evidence:
    """A rank that entered collective 100 in step 10, and waits there quietly unless told
    otherwise."""
    quiet_s = stalled_s if quiet_s is None else quiet_s
    fresh = Evidence(
        **{
            "rank": rank,
            "node": rank // 2,
            "phase": Phase.STEP,
            "has_page": True,
            "completed_step": 9,
            "step": 10,
            "collective": 100,
        },
        **{
            "state": "asleep",
            "wchan": "futex_do_wait",
            "cpu_ratio": 0.0,
            "stalled_ns": int(stalled_s * S_NS),
        },
        **{
            "quiet_ns": int(quiet_s * S_NS),
            "stopped_ns": 0,
            "late_ns": 10 * S_NS,
            "asleep_ns": 120 * S_NS,
            "busy_ns": 600 * S_NS,
        },
    )
    return replace(fresh, **changes)


def waiting(count: int, stalled_s: float, but: Evidence) -> list[Evidence]:
    return [but if rank == but.rank else seen(rank, stalled_s) for rank in range(count)]


def verdict_of(evidence: list[Evidence], world_size: int | None = None) -> Diagnosis:
    found = diagnose(evidence, len(evidence) if world_size is None else world_size, LIMITS)
    assert len(found) == 1, found
    return found[0]


# -- hangs


@pytest.mark.parametrize(
    ("culprit", "kind", "strength"),
    [
        (seen(2, 8, state="stopped", stopped_ns=6 * S_NS), "stopped", Strength.FACT),
        (seen(2, 8, state="frozen", stopped_ns=6 * S_NS), "stopped", Strength.FACT),
        (seen(2, 130, collective=99), "deadlocked", Strength.ABSENCE),
        (seen(2, 130, completed_step=8, step=9), "deadlocked", Strength.ABSENCE),
        (
            seen(2, 130, has_page=False, completed_step=-1, collective=0),
            "deadlocked",
            Strength.ABSENCE,
        ),
        (seen(2, 130, collective=99, state="uninterruptible"), "slow", Strength.ABSENCE),
        (seen(2, 601, collective=99, state="uninterruptible"), "unkillable", Strength.ABSENCE),
        (seen(2, 130, 20, collective=99), "slow", Strength.ABSENCE),
        (seen(2, 130, 0, collective=99, state="running", cpu_ratio=1.0), "slow", Strength.ABSENCE),
        (seen(2, 601, 0, collective=99, state="running", cpu_ratio=1.0), "hang", Strength.ABSENCE),
        (seen(2, 601, 0, state="running", cpu_ratio=1.0), "hang", Strength.STATISTICS),
        (seen(2, 601, state="uninterruptible"), "unkillable", Strength.STATISTICS),
        (seen(2, 130, waits=False), "deadlocked", Strength.STATISTICS),
        (seen(2, 130, stack="another"), "deadlocked", Strength.STATISTICS),
    ],
)
def test_the_odd_one_of_four_is_named(culprit: Evidence, kind: str, strength: Strength) -> None:
    found = verdict_of(waiting(4, culprit.stalled_ns / S_NS, culprit))
    assert (found.kind, found.culprit, found.node, found.strength, found.scope) == (
        kind,
        2,
        1,
        strength,
        "rank",
    )
    assert found.is_deadly is (kind in DEADLY) and "rank 2" in found.why


def test_the_sentence_holds_its_numbers() -> None:
    culprit = seen(2, 130, 125, collective=99)
    assert verdict_of(waiting(4, 130, culprit)).why == (
        "rank 2 is stuck in step 10, step: no progress for 130.00 s (limit 120 s), no "
        "processor time and no byte moved for 125.00 s, "
        "asleep in futex_do_wait; it has entered collective 99, the others 100"
    )


@pytest.mark.parametrize(
    ("state", "says"), [("stopped", "stopped by a signal"), ("frozen", "frozen by its cgroup")]
)
def test_what_stopped_a_rank_is_told(state: str, says: str) -> None:
    found = verdict_of(waiting(4, 8, seen(2, 8, state=state, stopped_ns=6 * S_NS)))
    assert found.why.startswith(f"rank 2 is {says} in step 10: ")


@pytest.mark.parametrize(
    ("ranks", "world_size", "says"),
    [
        (4, 4, "all 4 ranks look alike"),
        (1, 1, "no other rank runs to compare with"),
        (1, 4, "3 ranks are not heard of"),
        (4, 8, "4 ranks are not heard of"),
    ],
)
def test_why_nobody_is_named_is_told(ranks: int, world_size: int, says: str) -> None:
    found = verdict_of([seen(rank, 130) for rank in range(ranks)], world_size)
    assert found.culprit is None and f"quiet, and {says}" in found.why


def test_counts_of_a_pipelines_stages_are_not_compared() -> None:
    """Rank 2 enters 5 collectives a step, the others 10: that it is at a lower number is no sign of
    anything."""
    stages = [
        seen(rank, 130, collective=1000, counted_steps=100, counted=1000) for rank in range(4)
    ]
    stages[2] = replace(stages[2], collective=500, counted=500)
    assert verdict_of(stages).culprit is None
    stages[2] = replace(stages[2], collective=998, counted=998)
    assert verdict_of(stages).culprit == 2
    stages[1] = replace(stages[1], state="uninterruptible", collective=500, counted=500)
    assert verdict_of(stages).culprit == 1 and "stuck in the kernel" in verdict_of(stages).why


def test_of_two_equals_only_one_that_does_not_wait_is_named() -> None:
    assert verdict_of([seen(0, 130, waits=True), seen(1, 130, waits=False)]).culprit == 1
    assert verdict_of([seen(0, 130, 0), seen(1, 130)]).culprit is None, (
        "with NCCL it is the waiting one that burns the processor"
    )


def test_nobody_in_particular() -> None:
    assert verdict_of([seen(rank, 130) for rank in range(4)]).kind == "slow"
    found = verdict_of([seen(rank, 601) for rank in range(4)])
    assert (found.kind, found.scope, found.culprit) == ("hang", "job", None)


def test_all_that_compute_are_evaluating_unless_the_user_knows_better() -> None:
    evidence = [seen(rank, 7200, 0, state="running", cpu_ratio=1.0) for rank in range(4)]
    assert verdict_of(evidence).kind == "slow"
    assert diagnose(evidence, 4, derive(hang_after_s=7000))[0].kind == "hang"


def test_the_only_rank_has_nobody_to_be_compared_with() -> None:
    """It may export the model for an hour, and nobody waits."""
    assert verdict_of([seen(0, 7200, 0, state="running", cpu_ratio=1.0)]).kind == "slow"
    done = [seen(rank, 7200, phase=Phase.DONE, state="gone") for rank in (1, 2, 3)]
    assert verdict_of([seen(0, 7200, 0, state="running", cpu_ratio=1.0), *done]).kind == "slow"
    assert verdict_of([seen(0, 601)]).kind == "hang"


def test_ranks_of_nodes_not_heard_of_may_be_at_fault_as_well() -> None:
    evidence = waiting(4, 130, seen(2, 130, collective=99))
    found = verdict_of(evidence, world_size=8)
    assert (found.kind, found.culprit) == ("slow", None) and "4 ranks are not heard of" in found.why
    stopped = waiting(4, 130, seen(2, 130, state="stopped", stopped_ns=6 * S_NS))
    assert verdict_of(stopped, world_size=8).culprit == 2, "a fact needs no comparison"


def test_who_is_waited_for_and_moves_is_not_late() -> None:
    assert diagnose(waiting(4, 130, seen(2, 3, 0, collective=99)), 4, LIMITS) == []


def test_the_most_patient_phase_counts_for_all() -> None:
    """Rank 0 evaluates alone; the others wait in the next step's first collective, and their own
    limits are long over."""
    evaluating = seen(
        0,
        300,
        0,
        phase=Phase.EVALUATE,
        completed_step=9,
        collective=99,
        late_ns=60 * S_NS,
        asleep_ns=600 * S_NS,
        busy_ns=1800 * S_NS,
    )
    assert verdict_of(waiting(4, 300, evaluating)).kind == "slow"


@pytest.mark.parametrize(
    "explains",
    [
        seen(2, 700, state="traced"),  # a debugger
        seen(2, 700, state="gone"),  # its exit is being dealt with
        seen(2, 700, state="stopped", stopped_ns=S_NS),  # and will be named in time
    ],
)
def test_what_explains_the_stall_protects_the_others(explains: Evidence) -> None:
    assert diagnose(waiting(4, 700, explains), 4, LIMITS) == []


def test_who_has_ended_well_is_not_waited_for() -> None:
    done = seen(3, 700, phase=Phase.DONE, state="gone", completed_step=20)
    assert diagnose([*(seen(rank) for rank in range(3)), done], 4, LIMITS) == []


def test_a_job_that_never_told_of_itself_is_not_judged() -> None:
    evidence = [
        seen(rank, 7200, has_page=False, completed_step=-1, step=-1, collective=0)
        for rank in range(2)
    ]
    assert diagnose(evidence, 2, LIMITS) == []


def test_several_stopped_ranks_are_all_named() -> None:
    evidence = [seen(rank, 8, state="stopped", stopped_ns=7 * S_NS) for rank in (1, 2)]
    assert [v.culprit for v in diagnose([seen(0, 8), *evidence], 3, LIMITS)] == [1, 2]


evidences = st.builds(
    seen,
    rank=st.just(0),
    stalled_s=st.sampled_from([0, 5, 30, 130, 700]),
    quiet_s=st.just(0),
    state=st.sampled_from(["running", "asleep", "stopped", "frozen", "uninterruptible", "unknown"]),
    collective=st.integers(98, 100),
    completed_step=st.integers(8, 9),
    waits=st.sampled_from([True, False, None]),
    stopped_ns=st.sampled_from([0, 3 * S_NS, 8 * S_NS]),
    has_page=st.booleans(),
    stack=st.sampled_from(["", "a", "b"]),
)


@st.composite
def jobs(draw: Any) -> list[Evidence]:
    drawn = draw(st.lists(evidences, min_size=1, max_size=6))
    quiet = [draw(st.integers(0, e.stalled_ns)) for e in drawn]
    return [
        replace(
            e,
            rank=rank,
            quiet_ns=q,
            stopped_ns=min(e.stopped_ns, e.stalled_ns) if e.state in ("stopped", "frozen") else 0,
        )
        for rank, (e, q) in enumerate(zip(drawn, quiet, strict=True))
    ]


@given(jobs(), st.randoms(use_true_random=False))
def test_the_same_evidence_in_any_order_gives_the_same_verdict(
    evidence: list[Evidence], rng: random.Random
) -> None:
    shuffled = evidence_from_text(evidence_to_text(evidence))
    rng.shuffle(shuffled)
    assert diagnose(shuffled, len(evidence), LIMITS) == diagnose(evidence, len(evidence), LIMITS)


@given(jobs())
def test_nobody_is_condemned_before_the_limit_of_what_it_does(evidence: list[Evidence]) -> None:
    for verdict in diagnose(evidence, len(evidence), LIMITS):
        named = [e for e in evidence if verdict.culprit in (None, e.rank)]
        if verdict.is_deadly and verdict.kind != "stopped":
            assert all(
                e.quiet_ns >= 120 * S_NS or e.stalled_ns >= 600 * S_NS
                for e in named
                if verdict.culprit is not None
            )
        if verdict.kind == "stopped":
            assert all(
                e.state in ("stopped", "frozen") and e.stopped_ns >= LIMITS.stopped_ns
                for e in named
            )


@given(jobs())
def test_nobody_ahead_is_ever_named(evidence: list[Evidence]) -> None:
    for verdict in diagnose(evidence, len(evidence), LIMITS):
        if verdict.culprit is not None and verdict.kind != "stopped":
            named = evidence[verdict.culprit]
            least = min((e.has_page, e.completed_step, e.collective) for e in evidence)
            assert not named.has_page or (True, named.completed_step, named.collective) == least


def test_evidence_that_is_none_is_refused() -> None:
    for text in ('[{"rank": 1}]', "[1]", "{", '[{"phase": 77}]'):
        with pytest.raises(ValueError):
            evidence_from_text(text)
    assert evidence_from_text("") == []


# -- exits


@pytest.mark.parametrize(
    ("facts", "kind", "says"),
    [
        (
            ExitFacts(1, 0, -9, step=7),
            "crash",
            "was killed by SIGKILL (9) in step 7, from outside; whether memory ran out is "
            "not known",
        ),
        (ExitFacts(1, 0, -9, oom_kills=0), "crash", "from outside; nothing ran out of memory"),
        (
            ExitFacts(1, 0, -9, oom_kills=1),
            "oom",
            "its cgroup ran out of memory (1 killed there since it began)",
        ),
        (ExitFacts(1, 0, 137, oom_kills=2), "oom", "(2 killed there since it began)"),
        (
            ExitFacts(1, 0, -9, oom_kills=0, machine_oom_kills=1),
            "oom",
            "when the machine ran out of memory",
        ),
        (ExitFacts(1, 0, -11), "crash", "died of SIGSEGV (11), by its own fault"),
        (ExitFacts(1, 0, -7), "crash", "full shared memory (/dev/shm) does that"),
        (ExitFacts(1, 0, -6), "crash", "died of SIGABRT (6), by its own fault"),
        (ExitFacts(1, 0, -15), "preempted", "was ended by SIGTERM (15), from outside"),
        (ExitFacts(1, 0, 143), "preempted", "was ended by SIGTERM (15), from outside"),
        (ExitFacts(1, 0, 1, "ValueError: x"), "crash", "exited with code 1: ValueError: x"),
        (ExitFacts(1, 0, 1, "ValueError: x\ny"), "crash", "exited with code 1: ValueError: x"),
        (ExitFacts(1, 0, 1), "crash", "without a word why"),
        (
            ExitFacts(1, 0, 1, "torch.OutOfMemoryError: CUDA out of memory."),
            "oom",
            "ran out of memory and exited with code 1",
        ),
        (
            ExitFacts(1, 0, 1, "StoreError: s3://b: Connect timeout"),
            "no-state",
            "rank 1 has nothing to resume from and exited with code 1",
        ),
        (ExitFacts(1, 0, 0, phase=Phase.DONE, peers_running=3), "ended", "rank 1 ended well"),
        (ExitFacts(1, 0, 0, step=7, phase=Phase.STEP), "ended", "rank 1 ended well in step 7"),
        (
            ExitFacts(1, 0, 0, step=7, phase=Phase.STEP, peers_running=3),
            "premature-exit",
            "before it was done, while 3 others run",
        ),
    ],
)
def test_an_exit_is_explained(facts: ExitFacts, kind: str, says: str) -> None:
    found = explain_exit(facts)
    assert (
        (found.kind, found.culprit, found.scope) == (kind, 1, "rank")
        and says in found.why
        and found.why.startswith("rank 1 ")
    )


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        (ExitFacts(1, 0, -9, oom_kills=0), Cause.KILLED),
        (ExitFacts(1, 0, 137), Cause.KILLED),
        (ExitFacts(1, 0, -15), Cause.KILLED),
        (ExitFacts(1, 0, -34), Cause.KILLED),
        (ExitFacts(1, 0, -9, oom_kills=1), Cause.OOM),
        (ExitFacts(1, 0, 1, "RuntimeError: CUDA out of memory"), Cause.OOM),
        (
            ExitFacts(
                1,
                0,
                1,
                "KeeperError: memory holds nothing, and the store cannot be read: Connect timeout",
            ),
            Cause.STATE,
        ),
        (ExitFacts(1, 0, 1, "ValueError: no StoreError: here"), Cause.CRASH),
        (ExitFacts(1, 0, 1, "PeerLost: rank 2 is lost"), Cause.UNKNOWN),
        (ExitFacts(1, 0, -11), Cause.CRASH),
        (ExitFacts(1, 0, 134), Cause.CRASH),
        (ExitFacts(1, 0, 1), Cause.CRASH),
        (ExitFacts(1, 0, 0, phase=Phase.FORWARD, peers_running=1), Cause.CRASH),
        (ExitFacts(1, 0, 1, f"RuntimeError: {BROKEN_DEVICE[0]}"), Cause.DEVICE),
        (ExitFacts(1, 0, 1, f"RuntimeError: {CASCADE[0]}"), Cause.UNKNOWN),
    ],
)
def test_an_exit_is_charged_to_one_cause(facts: ExitFacts, cause: Cause) -> None:
    assert cause_of(explain_exit(facts)) is cause


@pytest.mark.parametrize("text", CASCADE)
def test_a_survivors_error_names_nobody(text: str) -> None:
    found = explain_exit(
        ExitFacts(1, 0, 1, f"RuntimeError: [..] {text} [10.0.0.7]:1234", oom_kills=1)
    )
    assert (found.kind, found.culprit, found.scope, found.strength) == (
        "unknown",
        None,
        "job",
        Strength.TEXT,
    )
