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


def shown(program: str, leads: bool = True, nice: int = 0, says: str = "") -> list[list[str]]:
    """Nice value, whether in idle time, and the session's nice value, at each `show()`. `says`:
    what it warns of.

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
    assert says in done.stderr and (says or not done.stderr), done.stderr
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


AS_NOBODY = """
import ctypes, subprocess, sys, time
from pathlib import Path
from keepstep.edge.os import priority
os.setgid(65534); os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, as after exec: /proc/self is its own
"""
# Of all unprivileged users together the kernel takes one change in a tenth of a second.
one_after_the_other = pytest.mark.xdist_group("unprivileged sessions")
another_user = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: another user is played")


@by_session
@another_user
@one_after_the_other
@pytest.mark.parametrize("leads", [True, False])
def test_without_privilege_a_session_computes_in_idle_time_and_is_back_behind_it(
    leads: bool,
) -> None:
    """The change back comes at once, and the kernel takes one in a tenth of a second."""
    idle = "19" if leads else "0"
    program = AS_NOBODY + "with in_idle_time():\n    show()\nshow()"
    assert shown(program, leads) == [["0", "False", idle], ["0", "False", "0"]]


@by_session
@another_user
@one_after_the_other
def test_without_privilege_a_session_loses_patience() -> None:
    program = f"""{AS_NOBODY}
def group():
    return AUTOGROUP.read_text().split()[-1]
with in_idle_time(patience_s=0.05):
    end_s = time.monotonic() + 10
    while group() != "5" and time.monotonic() < end_s:
        time.sleep(0.01)
    show()
show()
"""
    assert shown(program) == [["0", "False", "5"], ["0", "False", "0"]]


@by_session
@another_user
@one_after_the_other
def test_a_session_that_cannot_change_says_so_and_one_that_cannot_come_back_ends() -> None:
    """It would train at the end of the queue from then on."""
    busy = """
class Busy:
    refuses, nice = False, "0"
    def read_text(self):
        return f"/autogroup-1 nice {Busy.nice}"
    def write_text(self, text):
        if Busy.refuses:
            raise BlockingIOError(11, "another one has changed just now")
        Busy.nice = text
priority.AUTOGROUP = Busy()
priority.CHANGE_PAUSE_S = 0.001
"""
    at_first = "Busy.refuses = True\nwith in_idle_time():\n    show()\nshow()"
    assert shown(AS_NOBODY + busy + at_first, says="keeps its priority") == [
        ["0", "False", "0"],
        ["0", "False", "0"],
    ]
    at_last = """
try:
    with in_idle_time():
        Busy.refuses = True
except BlockingIOError:
    print("ends")
"""
    assert shown(AS_NOBODY + busy + at_last) == [["ends"]]


PLACE = """
child = os.fork()
if not child:
    os.setsid()
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    time.sleep(60)
def threads():
    return [int(thread) for thread in os.listdir(f"/proc/{child}/task")]
while len(threads()) < 2:
    time.sleep(0.01)
def show_child():
    nices = {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads()}
    print(len(threads()), *nices, Path(f"/proc/{child}/autogroup").read_text().split()[-1])
for nice in (15, 2):
    end_s = time.monotonic() + 10
    while time.monotonic() < end_s:
        try:
            priority.place_child(child, nice, 2)
            break
        except BlockingIOError:
            time.sleep(0.02)
    show_child()
os.kill(child, 9)
os.waitpid(child, 0)
priority.place_child(child, 2, 2)
"""
IMPORTS = (
    "import threading, time\nfrom pathlib import Path\nfrom keepstep.edge.os import priority\n"
)


@by_session
@pytest.mark.skipif(os.geteuid() != 0, reason="taking one's place again needs privilege")
def test_a_child_is_moved_back_and_forth_with_all_its_threads() -> None:
    assert shown(IMPORTS + PLACE, nice=5) == [["2", "15", "15"], ["2", "2", "2"]]


@by_session
@another_user
@one_after_the_other
def test_without_privilege_a_child_is_moved_as_a_session_and_never_for_good() -> None:
    assert shown(AS_NOBODY + IMPORTS + PLACE, nice=5) == [["2", "5", "15"], ["2", "5", "2"]]


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
