"""Priority: giving way counts also where the kernel schedules by session; nobody moves up."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from keepstep.edge.os.priority import AUTOGROUP, give_way_in_thread

SHOW = """
import os
from keepstep.edge.os.priority import AUTOGROUP, give_way, in_idle_time
def show():
    group = AUTOGROUP.read_text().split()[-1] if AUTOGROUP.exists() else "none"
    print(os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0) == os.SCHED_IDLE, group)
"""
by_session = pytest.mark.skipif(
    not AUTOGROUP.exists(), reason="this kernel does not schedule by session (no autogroup)"
)


def shown(program: str, leads: bool = True, nice: int = 0) -> list[list[str]]:
    """Nice value, whether in idle time, and the session's nice value, at each `show()`.

    In a new session, which the program leads or a shell: the one that the tests run in may stand
    outside of what the kernel schedules by session.
    """
    command = ["nice", "-n", str(nice), sys.executable, "-c", SHOW + program]
    done = subprocess.run(
        command if leads else ["sh", "-c", '"$@"; exit $?', "sh", *command],
        start_new_session=True,
        capture_output=True,
        text=True,
        check=True,
    )
    return [line.split() for line in done.stdout.splitlines()]


@by_session
def test_who_leads_a_session_gives_way_as_a_session() -> None:
    assert shown("give_way(7); show()") == [["7", "False", "7"]]


@by_session
def test_anothers_session_stays_as_it_is() -> None:
    assert shown("give_way(7); show()", leads=False) == [["7", "False", "0"]]


def test_nobody_moves_up_by_giving_way() -> None:
    assert shown("give_way(7); show()", nice=12)[0][0] == "12"


@by_session
def test_no_session_moves_up_by_giving_way() -> None:
    assert shown("AUTOGROUP.write_text('12'); give_way(7); show()") == [["7", "False", "12"]]


@by_session
@pytest.mark.skipif(os.geteuid() != 0, reason="taking one's place again needs privilege")
def test_a_session_has_after_idle_time_what_it_had_before() -> None:
    program = "AUTOGROUP.write_text('12')\nwith in_idle_time():\n    show()\nshow()"
    assert shown(program) == [["0", "True", "19"], ["0", "False", "12"]]


@by_session
@pytest.mark.skipif(os.geteuid() != 0, reason="taking one's place again needs privilege")
def test_idle_time_ends() -> None:
    program = "with in_idle_time():\n    show()\nshow()"
    assert shown(program) == [["0", "True", "19"], ["0", "False", "0"]]


@by_session
@pytest.mark.skipif(os.geteuid() != 0, reason="taking one's place again needs privilege")
def test_who_never_gets_a_core_loses_patience() -> None:
    program = """
with in_idle_time(patience_s=0.01):
    while os.sched_getscheduler(0) == os.SCHED_IDLE or os.getpriority(os.PRIO_PROCESS, 0) == 0:
        pass
    show()
show()
"""
    assert [line[:2] for line in shown(program)] == [["5", "False"], ["0", "False"]]


def test_a_thread_gives_way_alone_and_on_top_of_what_its_process_has() -> None:
    found: list[int] = []

    def work() -> None:
        give_way_in_thread(3)
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    mine = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [min(19, mine + 3)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == mine
