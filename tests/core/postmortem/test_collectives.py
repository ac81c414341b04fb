"""Who did not enter which collective."""

from __future__ import annotations

import pytest

from keepstep.core.postmortem.collectives import Collectives
from keepstep.core.postmortem.exits import SeenExit, seen_exit
from keepstep.core.postmortem.line import parse_line


def timed_out(rank: int, seq: int, group: str = "PG ID 0 PG GUID 0(default_pg)") -> str:
    return (
        f"[rank{rank}]:[E314 09:26:53.1 ProcessGroupNCCL.cpp:685] [{group} Rank {rank}] Watchdog "
        f"caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, NumelIn=1)"
    )


def queued(rank: int, last: int, group: str = "PG ID 0 PG GUID 0(default_pg)") -> str:
    return (
        f"[rank{rank}]:[E314 09:26:53.1 ProcessGroupNCCL.cpp:1746] [{group} Rank {rank}] Received "
        f"a dump signal. Last enqueued NCCL work: {last}, last completed NCCL work: {last}."
    )


def heard(*texts: str) -> Collectives:
    found = Collectives()
    for text in texts:
        line = parse_line(text)
        found.hear(line, line.rank)
    return found


def test_who_entered_fewer_is_who_is_missing() -> None:
    found = heard(timed_out(0, 42), timed_out(1, 42), queued(2, 41), timed_out(3, 42))
    missed = found.missed({0, 1, 2, 3})
    assert missed is not None
    assert (missed.missing, missed.seq, missed.op) == ((2,), 42, "ALLREDUCE")
    assert missed.waiting == (0, 1, 3)


@pytest.mark.parametrize(("behind", "missing"), [(41, (2,)), (40, None), (9, None)])
def test_who_timed_out_where_its_peers_have_passed(behind: int, missing: object) -> None:
    """Its own watchdog timed out one collective before theirs. Numbers further apart may be of
    groups that nobody tells apart."""
    missed = heard(*(timed_out(r, 42) for r in (0, 1, 3)), timed_out(2, behind)).missed(
        {0, 1, 2, 3}
    )
    assert (missed and missed.missing) == missing
    assert missed is None or missed.waiting == (0, 1, 3)


def test_who_says_nothing_where_all_others_wait() -> None:
    missed = heard(*(timed_out(r, 42) for r in (0, 1, 3))).missed({0, 1, 2, 3})
    assert missed is not None and missed.missing == (2,)


def test_nobody_where_all_wait_in_the_same() -> None:
    assert heard(*(timed_out(r, 42) for r in range(4))).missed({0, 1, 2, 3}) is None
    assert heard().missed({0, 1}) is None


def test_old_watchdogs_tell_no_number_and_bars_stand_before_others() -> None:
    old = "  what():  [Rank %d] Watchdog caught collective operation timeout: WorkNCCL(OpType=X, "
    bar = "10/99 [00:39<00:53, 1.8s/it][rank1]:[E3 P.cpp:6] [Rank 1] Watchdog caught collective "
    found = heard(old % 0, bar + "operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE", old % 3)
    missed = found.missed({0, 1, 2, 3})
    assert missed is not None and (missed.missing, missed.waiting) == ((2,), (0, 1, 3))


def test_groups_count_by_themselves() -> None:
    """A number of one group says nothing about another's."""
    tp = "PG ID 2 PG GUID 7(tp)"
    found = heard(timed_out(0, 9000, tp), queued(1, 8999, tp), queued(2, 50), queued(3, 50))
    missed = found.missed({0, 1, 2, 3})
    assert missed is not None and (missed.missing, missed.group) == ((1,), "2")


@pytest.mark.parametrize(
    ("text", "missing", "seq"),
    [
        (
            "\t     [5, 6] finished collective #76, but didn't join collective #77 (count from 1)",
            (5, 6),
            77,
        ),
        ("[Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 5000 ms", (2, 3), None),
    ],
)
def test_who_is_named_by_torch(text: str, missing: tuple[int, ...], seq: int | None) -> None:
    missed = heard(timed_out(0, 77), text).missed(set(range(8)))
    assert missed is not None and (missed.missing, missed.seq) == (missing, seq)


BLOCK = """Root Cause (first observed failure):
[0]:
  time      : 2026-11-23_21:31:28
  host      : node7
  rank      : 11 (local_rank: 3)
"""


def exit_in(text: str, before: str) -> SeenExit | None:
    return seen_exit(parse_line(text), before)


def test_the_launchers_summary() -> None:
    found = exit_in("  exitcode  : -9 (pid: 19466)  (SIGKILL)", BLOCK)
    assert found is not None
    assert (found.code, found.rank, found.local, found.host, found.pid) == (
        -9,
        11,
        3,
        "node7",
        19466,
    )
    assert found.is_first
    other = exit_in("  exitcode  : 1 (pid: 5)", BLOCK + "  exitcode : -9\n[1]:\n  rank      : 2 (l")
    assert other is not None and (other.rank, other.is_first) == (2, False)


def test_the_line_of_an_elastic_agent_and_of_ours() -> None:
    agent = exit_in("E failed (exitcode: -11) local_rank: 2 (pid: 7) of binary: python", "")
    assert agent is not None and (agent.code, agent.local, agent.pid, agent.rank) == (
        -11,
        2,
        7,
        None,
    )
    ours = exit_in(
        "keepstep agent: gave up: rank 2 was killed by SIGKILL (9) 2.9 s after start", ""
    )
    assert ours is not None and (ours.code, ours.rank, ours.is_first) == (-9, 2, True)
    assert exit_in("the exitcode  : of nothing", "") is None
