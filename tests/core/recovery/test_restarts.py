"""Restarts: what follows from exits, signals and other nodes' words, told in one sentence, within
the budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.recovery.restart_budget import RestartBudget
from keepstep.core.recovery.restarts import (
    CODE_AT_FAULT,
    CODE_REFUSED,
    EARLY_NS,
    PERSIST_WITHIN_NS,
    STOP_WITHIN_NS,
    Restarts,
)
from keepstep.model.failure import Cause, Failure, parse_budget
from keepstep.model.parts import PartPolicy
from keepstep.model.restarts import (
    AllEndedWell,
    AttemptWanted,
    AwaitOthers,
    End,
    Event,
    Exit,
    LeaveWanted,
    MeetingLost,
    PartSick,
    Progressed,
    RanksExited,
    RanksStarted,
    RanksUndead,
    RegroupLate,
    Reported,
    RestartAll,
    RestoreRefused,
    SignalRanks,
    SignalReceived,
    Stopped,
    Tell,
    TimeUp,
)
from keepstep.model.signals import SIGHUP, SIGINT, SIGTERM
from keepstep.model.units import S_NS

KILLED = -9
NOT_ABLE = "not all ranks of this node have said that they can stay in their process"


def started(world_size: int = 2, max_restarts: int = 100, has_store: bool = True) -> Restarts:
    restarts = Restarts(world_size, max_restarts, has_store)
    restarts.handle(RanksStarted(0))
    return restarts


def exits(at_s: float, *found: tuple[int, int], step: int | None = None) -> RanksExited:
    return RanksExited(tuple(Exit(rank, code) for rank, code in found), round(at_s * S_NS), step)


def test_a_killed_rank_restarts_all_and_says_why() -> None:
    action = started().handle(exits(12.3, (1, KILLED)))
    fact = "rank 1 was killed by SIGKILL (9) 12.3 s after start"
    why = f"{fact}; restarting all 2 ranks (restart 1 of 100)"
    assert action == RestartAll(why, fact, Failure(Cause.KILLED, 1), refused=NOT_ABLE)


def test_memory_is_promised_from_the_first_step_on() -> None:
    restarts = started()
    for step, promised in ((None, False), (4, True), (None, True)):
        action = restarts.handle(exits(1.0, (1, KILLED), step=step))
        assert isinstance(action, RestartAll)
        assert (" from memory" in action.why) == promised
        restarts.handle(RanksStarted(0))


def test_the_error_files_message_is_in_the_sentence() -> None:
    action = started().handle(RanksExited((Exit(0, 1, "ValueError: no"),), S_NS))
    assert isinstance(action, RestartAll) and action.why.startswith(
        "rank 0 exited with code 1 (ValueError: no) 1.0 s after start"
    )


def test_an_error_of_several_lines_leaves_the_sentence_on_one() -> None:
    message = "ValueError: rank 1 only\nwith two lines\n"
    action = started().handle(RanksExited((Exit(0, 1, message),), S_NS))
    assert isinstance(action, RestartAll) and action.why.startswith(
        "rank 0 exited with code 1 (ValueError: rank 1 only) 1.0 s after start"
    )


def test_ranks_may_end_one_after_the_other() -> None:
    restarts = started()
    assert restarts.handle(exits(5, (0, 0))) is None
    action = restarts.handle(exits(7, (1, 0)))
    assert isinstance(action, AwaitOthers) and action.why.startswith(
        "all 2 ranks ended well 7.0 s after the start"
    )
    end = restarts.handle(AllEndedWell("all", 8 * S_NS))
    assert isinstance(end, End) and (end.ok, end.exit_code, end.cause) == (True, 0, None)


def test_a_failure_after_another_rank_ended_well_is_a_failure() -> None:
    restarts = started()
    restarts.handle(exits(5, (0, 0)))
    assert isinstance(restarts.handle(exits(7, (1, 1))), RestartAll)
    restarts.handle(RanksStarted(8 * S_NS))
    assert restarts.handle(exits(9, (1, 0))) is None, "rank 0 runs again and is waited for"


def test_a_kill_explains_the_errors_noticed_with_it() -> None:
    action = started(3).handle(exits(5, (0, 1), (1, KILLED), (2, 0)))
    assert isinstance(action, RestartAll) and action.why.startswith("rank 1 was killed")


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_budget_is_kept(budget: int) -> None:
    restarts = started(max_restarts=budget)
    for life in range(budget):
        assert isinstance(restarts.handle(exits(life, (0, KILLED))), RestartAll)
        restarts.handle(RanksStarted(life * S_NS))
    action = restarts.handle(exits(budget, (0, KILLED)))
    assert isinstance(action, End) and action.exit_code == 1
    assert action.cause == Exit(0, KILLED) and f"all {budget} restarts are used up" in action.why


def crash_loop(lives: list[RanksExited]) -> list[type]:
    """What follows from each life's end, every life beginning at 0."""
    restarts = started()
    actions = []
    for life in lives:
        restarts.handle(RanksStarted(0))
        actions.append(type(restarts.handle(life)))
    return actions


EARLY_S, LATE_S = EARLY_NS / S_NS - 1, EARLY_NS / S_NS + 1


@pytest.mark.parametrize("code", [1, -11])
def test_a_program_that_crashes_at_the_same_step_is_not_restarted_for_ever(code: int) -> None:
    assert crash_loop([exits(LATE_S, (0, code), step=s) for s in (7, 7, 7)]) == [
        RestartAll,
        RestartAll,
        End,
    ]
    assert crash_loop([exits(LATE_S, (0, code), step=s) for s in (7, 6, 7)]) == [
        RestartAll,
        RestartAll,
        End,
    ], "a step done again is not new"
    assert End not in crash_loop([exits(EARLY_S, (0, code), step=s) for s in range(10)]), (
        "each life got further"
    )


def early_crash(error: str, step: int | None = None) -> RanksExited:
    failure = Failure(Cause.CRASH, 0, step=step, error=error)
    return RanksExited((Exit(0, 1, error, failure),), at_ns=2 * S_NS)


def test_the_same_error_before_any_step_is_not_tried_a_third_time() -> None:
    missing = "ModuleNotFoundError: No module named 'x'"
    assert crash_loop([early_crash(missing)] * 2) == [RestartAll, End]
    other = [early_crash(missing), early_crash("OSError: no"), early_crash(missing)]
    assert crash_loop(other) == [RestartAll, RestartAll, End], "three are too many in any case"
    assert crash_loop([early_crash(missing, 4), early_crash(missing)]) == [RestartAll, RestartAll]
    assert crash_loop([early_crash("")] * 2) == [RestartAll, RestartAll], "nobody knows why"


def test_without_steps_only_early_crashes_count() -> None:
    assert crash_loop([exits(EARLY_S, (0, 1))] * 3) == [RestartAll, RestartAll, End]
    assert End not in crash_loop([exits(LATE_S, (0, 1))] * 10)


def test_kills_from_outside_say_nothing_about_the_program() -> None:
    assert End not in crash_loop([exits(EARLY_S, (0, KILLED), step=7)] * 20)


def test_a_store_that_does_not_answer_is_asked_by_one_life_after_the_other() -> None:
    away = Failure(
        Cause.STATE,
        0,
        step=-1,
        error="KeeperError: memory holds nothing, and the store cannot be read",
        completed_step=7,
    )
    ends = crash_loop([RanksExited((Exit(0, 1, away.error, away),), round(EARLY_S * S_NS), 7)] * 21)
    assert ends == [RestartAll] * 20 + [End]


def test_an_interrupt_stops_the_ranks_and_then_the_job() -> None:
    restarts = started()
    action = restarts.handle(SignalReceived(SIGINT, 3 * S_NS))
    assert isinstance(action, SignalRanks)
    assert (action.signum, action.within_ns, action.exit_code) == (SIGINT, STOP_WITHIN_NS, 130)
    assert restarts.handle(exits(4, (0, 1))) is None, "a failure while stopping restarts nothing"
    end = restarts.handle(exits(4, (1, 1)))
    assert isinstance(end, End) and (end.ok, end.exit_code, end.cause) == (False, 130, None)
    assert end.why.startswith("interrupted by SIGINT (2) 3.0 s after start")


def test_ranks_that_do_not_stop_are_not_waited_for() -> None:
    restarts = started()
    restarts.handle(SignalReceived(SIGINT, S_NS))
    end = restarts.handle(TimeUp())
    assert isinstance(end, End) and end.exit_code == 130 and not end.is_told
    assert "2 ranks did not leave" in end.why


@pytest.mark.parametrize("signum", [SIGTERM, SIGHUP])
def test_a_preemption_stops_the_ranks_and_gives_the_keeper_time_to_write(signum: int) -> None:
    restarts = started()
    stop = restarts.handle(SignalReceived(signum, S_NS))
    assert (
        isinstance(stop, SignalRanks) and stop.signum == SIGTERM and "goes to the store" in stop.why
    )
    end = restarts.handle(exits(3, (0, -15), (1, -15)))
    assert (
        isinstance(end, End)
        and (end.ok, end.exit_code) == (False, 128 + signum)
        and end.why.startswith("preempted")
    )
    assert end.within_ns == PERSIST_WITHIN_NS and end.is_told


def test_without_a_store_a_preemption_stops_at_once() -> None:
    action = started(has_store=False).handle(SignalReceived(SIGTERM, S_NS))
    assert isinstance(action, SignalRanks) and "no store" in action.why


def test_a_second_signal_leaves_at_once() -> None:
    restarts = started()
    restarts.handle(SignalReceived(SIGTERM, S_NS))
    assert restarts.handle(SignalReceived(SIGHUP, S_NS)) is None, (
        "a closing terminal sends it twice"
    )
    end = restarts.handle(SignalReceived(SIGINT, 2 * S_NS))
    assert isinstance(end, End) and (end.exit_code, end.within_ns) == (130, 0)


def test_a_rank_that_does_not_die_ends_the_job() -> None:
    restarts = started()
    restarts.handle(exits(1, (1, KILLED)))
    end = restarts.handle(RanksUndead((0,)))
    assert isinstance(end, End) and end.exit_code == 1 and "rank 0 hangs in the kernel" in end.why


# -- several nodes


def test_ranks_of_a_node_that_is_not_the_first() -> None:
    restarts = Restarts(2, 5, False)
    restarts.handle(RanksStarted(0, first_rank=4))
    assert restarts.handle(exits(1, (4, 0))) is None
    assert isinstance(restarts.handle(exits(2, (5, 0))), AwaitOthers)


def test_what_fails_elsewhere_restarts_here_and_uses_the_budget() -> None:
    restarts = started(max_restarts=1)
    action = restarts.handle(AttemptWanted("node 1 is lost", S_NS))
    assert action == RestartAll(
        "node 1 is lost; restarting all 2 ranks from memory (restart 1 of 1)",
        "node 1 is lost",
        refused=NOT_ABLE,
    )
    assert restarts.handle(AttemptWanted("and again", S_NS)) is None, (
        "it is on its way to the next attempt"
    )
    restarts.handle(RanksStarted(2 * S_NS))
    end = restarts.handle(AttemptWanted("node 1 is lost", 3 * S_NS))
    assert isinstance(end, End) and end.exit_code == 1 and "all 1 restarts are used up" in end.why


def test_a_program_that_fails_now_here_now_there_at_one_step_is_wrong() -> None:
    restarts = started()
    crash = Failure(Cause.CRASH, 5, completed_step=7)
    here = exits(LATE_S, (0, 1), step=7)
    there = AttemptWanted("rank 5 exited with code 1", round(LATE_S * S_NS), crash, 7, decided=True)
    followed = []
    for life in (here, there, here):
        restarts.handle(RanksStarted(0))
        followed.append(restarts.handle(life))
    assert [type(action) for action in followed] == [RestartAll, RestartAll, End]
    assert [action.failure for action in followed if isinstance(action, RestartAll)] == [
        Failure(Cause.CRASH, 0, completed_step=7),
        None,
    ], "who hears of a crash does not repeat it"


def test_lost_nodes_say_nothing_about_the_program() -> None:
    restarts = started()
    for _ in range(10):
        restarts.handle(RanksStarted(0))
        assert isinstance(
            restarts.handle(AttemptWanted("node 1 is lost", S_NS, completed_step=7)), RestartAll
        )


def test_a_failure_elsewhere_restarts_a_node_whose_ranks_ended_well() -> None:
    restarts = started()
    restarts.handle(exits(5, (0, 0), (1, 0)))
    assert isinstance(
        restarts.handle(AttemptWanted("rank 5 exited with code 1", 6 * S_NS)), RestartAll
    )


def test_a_job_that_others_gave_up_ends_with_their_code() -> None:
    end = started().handle(Stopped("node 1: gave up", 3))
    assert isinstance(end, End) and (end.ok, end.exit_code, end.why) == (
        False,
        3,
        "told to stop: node 1: gave up",
    )


def test_a_signal_to_another_node_is_one_to_this_one() -> None:
    restarts = started()
    stop = restarts.handle(Stopped("node 1: preempted", 143, SIGTERM))
    assert isinstance(stop, SignalRanks) and (stop.signum, stop.within_ns) == (
        SIGTERM,
        STOP_WITHIN_NS,
    )
    assert stop.why == "told to stop: node 1: preempted, and to 2 ranks here"
    assert restarts.handle(Stopped("node 1: preempted", 143, SIGTERM)) is None
    end = restarts.handle(exits(3, (0, -15), (1, -15)))
    assert isinstance(end, End) and (end.exit_code, end.within_ns) == (143, PERSIST_WITHIN_NS)


@pytest.mark.parametrize(
    "word",
    [
        Stopped("why", 143, SIGTERM),
        AllEndedWell("why", 0),
        MeetingLost("why"),
        SignalReceived(SIGTERM, 0),
    ],
)
def test_who_waits_for_the_others_still_listens(word: Event) -> None:
    end = Restarts(2, 5, False).handle(word)
    assert isinstance(end, End) and end.ok == isinstance(word, AllEndedWell)
    restarts = started()
    restarts.handle(exits(5, (0, 0), (1, 0)))
    end = restarts.handle(word)
    assert isinstance(end, End) and end.ok == isinstance(word, AllEndedWell | MeetingLost)


def test_without_a_meeting_point_training_goes_on_until_it_is_needed() -> None:
    restarts = started()
    assert restarts.handle(MeetingLost("the meeting point is gone")) is None
    end = restarts.handle(exits(5, (0, KILLED)))
    assert (
        isinstance(end, End)
        and end.exit_code == 1
        and end.why.endswith("after start; the meeting point is gone")
    )
    restarts = started()
    restarts.handle(MeetingLost("the meeting point is gone"))
    end = restarts.handle(exits(5, (0, 0), (1, 0)))
    assert isinstance(end, End) and end.ok


@pytest.mark.parametrize("have_begun", [True, False])
def test_who_had_ended_well_and_meets_nobody_any_more_has_ended_well(have_begun: bool) -> None:
    """The others wanted another attempt, or seemed to have gone, which they had."""
    restarts = started()
    assert isinstance(restarts.handle(exits(5, (0, 0), (1, 0))), AwaitOthers)
    assert isinstance(restarts.handle(AttemptWanted("node 1 is lost", 6)), RestartAll)
    if have_begun:
        restarts.handle(RanksStarted(7))
        restarts.handle(exits(8, (0, KILLED)))
    end = restarts.handle(MeetingLost("the meeting point is gone"))
    assert isinstance(end, End) and end.ok != have_begun


codes = st.sampled_from([0, 1, 2, -6, -9, -11, -15])
things = st.one_of(
    st.lists(st.tuples(st.integers(0, 2), codes), min_size=1, max_size=3),
    st.sampled_from(
        [
            SignalReceived(SIGTERM, 0),
            SignalReceived(SIGINT, 0),
            SignalReceived(SIGHUP, 0),
            TimeUp(),
            MeetingLost("lost"),
        ]
    ),
    st.sampled_from(
        [
            AttemptWanted("x", 0),
            AttemptWanted("x", 0, Failure(Cause.CRASH, 9)),
            Stopped("x", 1),
            Stopped("x", 143, SIGTERM),
        ]
    ),
    st.sampled_from([Progressed(3), Reported((Failure(Cause.HANG, 9, step=3),))]),
)


@given(
    st.lists(things, max_size=60),
    st.integers(0, 5),
    st.booleans(),
    st.one_of(st.none(), st.integers(-1, 3)),
)
def test_any_story_keeps_the_budget_and_ends_once(
    story: list[object], budget: int, has_store: bool, step: int | None
) -> None:
    """Played against a world that does what it is told: a restart starts all ranks, and a rank ends
    once a life."""
    restarts = started(3, budget, has_store)
    living, ordered, now_ns, ended = {0, 1, 2}, 0, 0, False
    for thing in story:
        now_ns += S_NS
        if isinstance(thing, list):
            found = {rank: code for rank, code in thing if rank in living}
            living -= set(found)
            event: Event = RanksExited(tuple(Exit(*f) for f in found.items()), now_ns, step)
            if not found:
                continue
        else:
            assert isinstance(
                thing,
                SignalReceived
                | TimeUp
                | MeetingLost
                | AttemptWanted
                | Stopped
                | Progressed
                | Reported,
            )
            event = thing
        action = restarts.handle(event)
        assert action is None or not ended, "nothing follows the end"
        if isinstance(action, RestartAll):
            ordered, living = ordered + 1, {0, 1, 2}
            restarts.handle(RanksStarted(now_ns))
        ended = ended or isinstance(action, End)
    assert ordered <= budget
    # Liveness: when all ranks are gone and every wait is over, the job has ended.
    last = (
        restarts.handle(RanksExited(tuple(Exit(rank, 0) for rank in sorted(living)), now_ns, step))
        if living and not ended
        else None
    )
    ended = (
        ended
        or isinstance(last, End)
        or isinstance(restarts.handle(AllEndedWell("all", now_ns)), End)
    )
    assert ended


# -- ranks that stay in their process


def test_ranks_that_can_stay_do() -> None:
    restarts = started(4)
    action = restarts.handle(RanksExited((Exit(2, KILLED),), S_NS, completed_step=7, able=True))
    fact = "rank 2 was killed by SIGKILL (9) 1.0 s after start"
    why = f"{fact}; starting what is missing, the others wait (restart 1 of 100)"
    assert len(why) <= 120, "it is told in one line"
    assert action == RestartAll(why, fact, Failure(Cause.KILLED, 2, completed_step=7), keep=True)


def test_restarts_in_vain_end_with_a_new_start_of_all_and_with_waits_and_a_new_step_forgives() -> (
    None
):
    restarts = started(4)
    kept, waits_s = [], []
    for step in (7, 7, 7, *[7] * 9, 8):
        action = restarts.handle(
            RanksExited((Exit(2, KILLED),), S_NS, completed_step=step, able=True)
        )
        assert isinstance(action, RestartAll)
        kept.append(action.keep)
        waits_s.append(action.wait_ns / S_NS)
        assert ("the restarts before this one brought no new step" in action.why) is bool(
            action.wait_ns
        )
        assert bool(action.refused) is not action.keep
        restarts.handle(RanksStarted(S_NS))
    assert kept == [True, True, *[False] * 10, True]
    assert waits_s == [0, 0, 0, 1, 2, 4, 8, 16, 32, 60, 60, 60, 0]


def test_all_nodes_wait_as_long_as_was_decided_for_them() -> None:
    restarts = started(4)
    for _ in range(9):
        word = AttemptWanted("node 1 is lost", S_NS, completed_step=7, decided=True, wait_ns=S_NS)
        action = restarts.handle(word)
        assert isinstance(action, RestartAll) and action.wait_ns == S_NS
        restarts.handle(RanksStarted(S_NS))
    action = restarts.handle(AttemptWanted("node 1 is lost", S_NS, completed_step=7, decided=True))
    assert isinstance(action, RestartAll) and not action.wait_ns


def test_ranks_that_die_while_the_others_wait_for_a_new_one_are_started_with_it() -> None:
    restarts = started(4)
    restarts.handle(RanksExited((Exit(2, KILLED),), S_NS, completed_step=7, able=True))
    assert (
        restarts.handle(
            RanksExited((Exit(3, KILLED), Exit(1, 0)), S_NS, completed_step=7, able=True)
        )
        is None
    )
    restarts.handle(RanksStarted(S_NS))
    assert isinstance(restarts.handle(exits(3, (0, KILLED), step=9)), RestartAll)


def test_who_does_not_find_its_peers_again_in_time_makes_all_start_anew() -> None:
    restarts = started(2)
    restarts.handle(RanksExited((Exit(1, KILLED),), S_NS, completed_step=7, able=True))
    assert restarts.handle(RegroupLate((0,), 60 * S_NS, 61 * S_NS)) is None, (
        "they have not been told to yet"
    )
    restarts.handle(RanksStarted(S_NS))
    action = restarts.handle(RegroupLate((0, 1), 60 * S_NS, 61 * S_NS))
    assert isinstance(action, RestartAll) and not action.keep
    assert action.fact == "rank 0 and 1 did not find its peers again within 60.0 s"


@pytest.mark.parametrize(("is_refused", "code"), [(True, CODE_REFUSED), (False, 1)])
def test_who_cannot_meet_the_others_as_it_was_started_says_so_by_its_code(
    is_refused: bool, code: int
) -> None:
    end = Restarts(2, 100, False).handle(MeetingLost("--nnodes: expected 2", is_refused))
    assert isinstance(end, End) and end.exit_code == code


def test_who_had_done_its_last_step_when_another_was_lost_is_not_waited_for() -> None:
    restarts = started(2)
    restarts.handle(RanksExited((Exit(1, KILLED),), S_NS, completed_step=7, able=True))
    restarts.handle(RanksStarted(S_NS))
    assert restarts.handle(RanksExited((Exit(0, 0),), S_NS, completed_step=8, able=True)) is None
    action = restarts.handle(RegroupLate((0,), 0, 2 * S_NS))
    assert (
        isinstance(action, RestartAll)
        and not action.keep
        and action.fact == "rank 0 does not look for its peers any more"
    )


@pytest.mark.parametrize("keep", [True, False])
def test_what_is_decided_for_all_nodes_holds_here(keep: bool) -> None:
    action = started().handle(AttemptWanted("node 1 says: so", S_NS, able=keep, decided=True))
    assert isinstance(action, RestartAll) and action.keep is keep


# -- budgets, and whose fault it is


def failed(
    at_s: float,
    rank: int,
    host: str,
    step: int,
    error: str = "ValueError: no",
    expendable: bool = False,
) -> RanksExited:
    failure = Failure(Cause.CRASH, rank, host, step=step, error=error)
    return RanksExited(
        (Exit(rank, 1, error, failure),), round(at_s * S_NS), step - 1, expendable=expendable
    )


def test_a_cause_that_has_used_up_its_budget_ends_the_job_with_the_numbers() -> None:
    restarts = Restarts(2, 100, True, RestartBudget(parse_budget("killed=2,refill=10")))
    restarts.handle(RanksStarted(0))
    counts = []
    for step in (3, 5, 7):
        action = restarts.handle(exits(1, (0, KILLED), step=step))
        counts.append(action.why.rpartition("(")[2] if isinstance(action, RestartAll) else action)
        restarts.handle(RanksStarted(0))
    end = counts.pop()
    assert counts == [
        "restart 1 of 100; killed 1 of 2)",
        "restart 2 of 100; killed 2 of 2, 2 new steps since the last)",
    ]
    assert isinstance(end, End) and end.exit_code == 1
    assert end.why.endswith(
        "the budget of this cause is used up: killed 3 of 2, 2 new steps since the last"
    )


def test_a_failure_that_follows_to_another_host_is_the_programs() -> None:
    restarts = started()
    assert isinstance(restarts.handle(failed(30, 0, "a", 8)), RestartAll)
    restarts.handle(RanksStarted(0))
    there = Failure(Cause.CRASH, 5, "b", step=8, error="ValueError: no", completed_step=7)
    end = restarts.handle(AttemptWanted("node 1 says so", 30 * S_NS, there, 7, decided=True))
    assert isinstance(end, End) and end.exit_code == CODE_AT_FAULT and end.finding is not None
    assert [f.host for f in end.finding.failures] == [
        "a",
        "b",
    ] and "on different hardware (a and b)" in end.why


def test_a_slow_node_leaves_its_place_and_no_budget_is_spent_on_it() -> None:
    restarts = started(max_restarts=2)
    action = restarts.handle(LeaveWanted("rank 1 has cost 60.00 s", 30 * S_NS, 700))
    assert isinstance(action, RestartAll)
    assert action.leave and not action.keep and action.failure is None and not action.wait_ns
    assert action.fact == "rank 1 has cost 60.00 s" and "restart 1 of 2" in action.why


def test_the_last_restart_is_kept_for_a_failure() -> None:
    restarts = started(max_restarts=1)
    assert restarts.handle(exits(30, (0, KILLED), step=5)) is not None
    assert restarts.handle(LeaveWanted("slow", 31 * S_NS, 6)) is None, "the nodes meet"
    restarts.handle(RanksStarted(32 * S_NS))
    assert restarts.handle(LeaveWanted("slow", 90 * S_NS, 700)) is None


def test_a_node_whose_hardware_is_suspect_leaves_its_place_if_memory_can_do_without_it() -> None:
    for expendable in (True, False):
        restarts = started()
        restarts.handle(failed(30, 0, "a", 8, expendable=expendable))
        restarts.handle(RanksStarted(0))
        action = restarts.handle(failed(30, 0, "a", 8, expendable=expendable))
        assert isinstance(action, RestartAll) and action.leave is expendable
        assert action.finding is not None and action.finding.kind == "suspect"


@pytest.mark.parametrize(("hosts", "kind"), [(("b", "c"), "hardware"), (("a", "b"), "passing")])
def test_the_step_that_goes_well_elsewhere_says_that_it_was_the_hardware(
    hosts: tuple[str, ...], kind: str
) -> None:
    restarts = started()
    for _ in range(2):
        restarts.handle(failed(30, 0, "a", 8))
        restarts.handle(RanksStarted(0, hosts=hosts))
    assert restarts.awaited_step == 8 and restarts.handle(Progressed(8)) is None, (
        "others may complete the step in which one fails"
    )
    told = restarts.handle(Progressed(9))
    assert isinstance(told, Tell) and told.finding.kind == kind
    assert restarts.awaited_step is None and restarts.handle(Progressed(10)) is None


def test_without_other_hardware_the_third_failure_is_the_last_one() -> None:
    restarts = started()
    for _ in range(2):
        assert isinstance(restarts.handle(failed(30, 0, "a", 8)), RestartAll)
        restarts.handle(RanksStarted(0))
    end = restarts.handle(failed(30, 0, "a", 8))
    assert (
        isinstance(end, End)
        and end.exit_code == CODE_AT_FAULT
        and end.why.endswith("no other hardware was there to try it on")
    )
    assert end.finding is not None and len(end.finding.failures) == 3


def test_what_all_nodes_tell_counts_whoever_was_heard_first() -> None:
    """Node 1's rank failed; what was heard of it is that node 0's rank lost its peer."""
    there = Failure(Cause.CRASH, 5, "b", step=8, error="ValueError: no")
    restarts = started()
    restarts.handle(
        AttemptWanted(
            "lost a peer",
            S_NS,
            Failure(Cause.UNKNOWN, 0, "a", step=8, error="closed"),
            7,
            decided=True,
        )
    )
    assert restarts.handle(Reported((there,))) is None
    restarts.handle(RanksStarted(0))
    end = restarts.handle(failed(30, 0, "a", 8))
    assert isinstance(end, End) and end.exit_code == CODE_AT_FAULT
    restarts = started()
    restarts.handle(failed(30, 0, "a", 8))
    assert restarts.handle(Reported((there,))) is None, (
        "one event on two hosts has not been reproduced"
    )
    restarts.handle(RanksStarted(0))
    restarts.handle(AttemptWanted("lost a peer", S_NS, None, 7, decided=True))
    end = restarts.handle(Reported((there,)))
    assert isinstance(end, End) and end.exit_code == CODE_AT_FAULT


def test_an_error_about_a_peer_is_blamed_last() -> None:
    about_a_peer = Exit(0, 1, "Connection closed by peer", Failure(Cause.UNKNOWN, 0))
    action = started().handle(
        RanksExited((about_a_peer, Exit(1, 1, "ValueError", Failure(Cause.CRASH, 1))), S_NS)
    )
    assert isinstance(action, RestartAll) and action.why.startswith(
        "rank 1 exited with code 1 (ValueError)"
    )


def test_where_nobody_may_train_the_job_ends_without_a_restart() -> None:
    restarts = started()
    end = restarts.handle(RestoreRefused("memory is of 2 ranks"))
    assert isinstance(end, End) and (end.ok, end.exit_code) == (False, CODE_REFUSED)
    assert "memory is of 2 ranks" in end.why and restarts.restarts == 0
    assert restarts.handle(failed(1, 0, "a", 8)) is None


def test_what_more_nodes_could_resume_waits_for_them_and_blames_nobody() -> None:
    restarts = started(max_restarts=1)
    action = restarts.handle(RestoreRefused("memory is of 3 ranks", least=3))
    assert isinstance(action, RestartAll) and (action.least, action.keep) == (3, False)
    assert action.failure is None and "memory is of 3 ranks" in action.fact
    assert restarts.handle(RestoreRefused("memory is of 3 ranks", least=3)) is None
    restarts.handle(RanksStarted(0))
    end = restarts.handle(RestoreRefused("memory is of 3 ranks", least=3))
    assert isinstance(end, End) and end.exit_code == CODE_REFUSED


REFUSED = Exit(0, 1, "MemoryBudgetError: no", Failure(Cause.CRASH, 0, error="no"), True)


def test_what_keepstep_refuses_at_the_start_ends_the_job_at_once_with_its_sentence() -> None:
    end = started().handle(RanksExited((REFUSED,), S_NS))
    assert isinstance(end, End) and end.exit_code == CODE_REFUSED
    assert "MemoryBudgetError: no" in end.why and "program" not in end.why


def test_where_a_person_is_to_decide_the_job_ends_however_far_it_has_come() -> None:
    failure = Failure(Cause.CRASH, 1, "a", step=12, error="StoppedError: silent corruption")
    stopped = Exit(1, 1, "StoppedError: silent corruption", failure, is_stop=True)
    end = started().handle(RanksExited((stopped,), 30 * S_NS, 11))
    assert isinstance(end, End) and end.exit_code == CODE_REFUSED
    assert "a person is to decide: rank 1" in end.why


def test_what_keepstep_refuses_where_the_job_has_trained_is_tried_once_more() -> None:
    restarts = started()
    restarts.handle(exits(1, (1, KILLED), step=7))
    restarts.handle(RanksStarted(0))
    assert isinstance(restarts.handle(RanksExited((REFUSED,), S_NS, 7)), RestartAll)
    restarts.handle(RanksStarted(0))
    end = restarts.handle(RanksExited((REFUSED,), S_NS, 7))
    assert isinstance(end, End) and end.exit_code == CODE_REFUSED


def sick(policy: PartPolicy, expendable: bool = True) -> PartSick:
    return PartSick("gpu 0 is sick: it is hot", 20 * S_NS, policy, expendable, 5)


def test_a_node_with_a_sick_part_leaves_its_place_at_its_next_restart() -> None:
    restarts = started()
    assert restarts.handle(sick(PartPolicy.AVOID)) is None
    failure = RanksExited((Exit(0, KILLED),), 30 * S_NS, 7, able=True, expendable=True)
    action = restarts.handle(failure)
    assert isinstance(action, RestartAll) and action.leave and not action.keep


def test_nobody_leaves_whom_memory_needs() -> None:
    restarts = started()
    assert restarts.handle(sick(PartPolicy.LEAVE, expendable=False)) is None
    failure = RanksExited((Exit(0, KILLED),), 30 * S_NS, 7, able=True, expendable=False)
    action = restarts.handle(failure)
    assert isinstance(action, RestartAll) and not action.leave and action.keep


def test_a_node_may_be_told_to_leave_for_a_sick_part_now() -> None:
    restarts = started()
    action = restarts.handle(sick(PartPolicy.LEAVE))
    assert isinstance(action, RestartAll) and action.leave and not action.keep
    assert action.failure is None and action.why.startswith("gpu 0 is sick: it is hot; restarting")
    assert restarts.handle(sick(PartPolicy.LEAVE)) is None, "it is leaving already"


def test_a_job_may_end_for_a_sick_part() -> None:
    restarts = started()
    action = restarts.handle(sick(PartPolicy.STOP))
    assert isinstance(action, SignalRanks) and action.signum == SIGTERM and action.exit_code == 1
    assert "ends for a sick part" in action.why
    end = restarts.handle(exits(31, (0, -SIGTERM), (1, -SIGTERM)))
    assert isinstance(end, End) and end.exit_code == 1 and end.within_ns == PERSIST_WITHIN_NS
