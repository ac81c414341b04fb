"""Supervisor: agents follow each other with the same command; what the last one said is the end."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from keepstep.model.launch import RUN, Predecessor
from keepstep.model.units import MS_NS
from keepstep.runtime.agent.supervisor import (
    PREDECESSOR,
    REPORT,
    SIGNALS,
    SUPERVISOR,
    TOLD_BY_AN_AGENT,
    AgentReport,
    _Supervisor,
    predecessor_of,
)

AGENT = """
import os, pathlib, signal, sys
from keepstep.runtime.agent.supervisor import PREDECESSOR, SUPERVISOR, AgentReport
lives = pathlib.Path(sys.argv[1])
with lives.open("a") as file:
    about = os.environ.get(PREDECESSOR), os.environ[SUPERVISOR], os.getppid(), os.getpid()
    file.write(" ".join(map(str, about)) + "\\n")
report = AgentReport(os.environ)
"""
DIE = "os.kill(os.getpid(), signal.SIGKILL)\n"


@pytest.fixture(autouse=True)
def signals_stay_as_they_are() -> object:
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def run(room: Path, program: str) -> tuple[int, list[list[str]]]:
    """The exit code, and of each agent's life: which one it followed, its supervisor, its parent,
    its process."""
    supervisor = _Supervisor([], dict(os.environ))
    supervisor._command = [sys.executable, "-c", AGENT + program, str(room / "lives")]
    code = supervisor.run()
    return code, [line.split() for line in (room / "lives").read_text().splitlines()]


def test_the_command_is_the_same_with_the_same_words() -> None:
    supervisor = _Supervisor(["run", "--nproc-per-node", "2", "train.py"], {})
    assert supervisor._command[-4:] == ["run", "--nproc-per-node", "2", "train.py"]


def test_an_agent_that_ends_by_itself_says_how(tmp_path: Path) -> None:
    code, lives = run(tmp_path, "sys.exit(70)")
    assert code == 70 and [life[:3] for life in lives] == [["None", *[str(os.getpid())] * 2]]


def test_a_killed_one_is_followed_by_one_that_knows(tmp_path: Path) -> None:
    code, lives = run(
        tmp_path,
        f"report.take_part(7)\nif PREDECESSOR not in os.environ:\n    {DIE}report.say_last_word(0)",
    )
    first, second = lives
    assert code == 0 and predecessor_of({PREDECESSOR: second[0]}) == Predecessor(
        (int(first[3]),), 7
    )


def test_one_that_dies_of_an_error_in_the_midst_of_the_job_is_followed(tmp_path: Path) -> None:
    program = "report.take_part(7)\nif PREDECESSOR not in os.environ:\n    raise OSError(24)"
    code, (first, second) = run(tmp_path, f"{program}\nreport.say_last_word(0)")
    assert code == 0
    assert predecessor_of({PREDECESSOR: second[0]}) == Predecessor((int(first[3]),), 7)


def test_one_that_stays_stopped_is_killed_and_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepstep.runtime.agent.supervisor.LOOK_NS", MS_NS)
    program = "if PREDECESSOR not in os.environ:\n    os.kill(os.getpid(), signal.SIGSTOP)"
    code, (first, second) = run(tmp_path, program)
    assert code == 0
    assert predecessor_of({PREDECESSOR: second[0]}) == Predecessor((int(first[3]),), -1)


def test_who_dies_before_it_takes_part_hands_on_what_it_was_told(tmp_path: Path) -> None:
    """Else the ranks of the first live on, and the last attempt is not known to have ended."""
    program = f"""
lives_before = len(lives.read_text().splitlines()) - 1
if lives_before == 0:
    report.take_part(7)
if lives_before < 2:
    {DIE}report.say_last_word(0)"""
    code, (first, second, third) = run(tmp_path, program)
    told = Predecessor((int(first[3]), int(second[3])), 7)
    assert code == 0 and predecessor_of({PREDECESSOR: third[0]}) == told


def test_an_agent_hears_nothing_of_what_another_one_told_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank, or what it has started, starts another run."""
    for name in TOLD_BY_AN_AGENT:
        monkeypatch.setenv(name, "7:7:7")
    names = sorted(TOLD_BY_AN_AGENT - {SUPERVISOR, RUN, REPORT})
    code, _ = run(tmp_path, f"report.say_last_word(len(set({names!r}) & os.environ.keys()))")
    assert code == 0


def test_the_first_agent_follows_nobody() -> None:
    assert predecessor_of({}) is None


def test_nobody_follows_a_last_word(tmp_path: Path) -> None:
    code, lives = run(tmp_path, f"report.say_last_word(3)\n{DIE}")
    assert code == 3 and len(lives) == 1


def test_what_dies_again_and_again_is_given_up_and_its_ranks_are_ended(tmp_path: Path) -> None:
    """A rank outlives its agent: nobody would watch it."""
    rank = (
        "import subprocess\n"
        "environ = {**os.environ, 'KEEPSTEP_AGENT': str(os.getpid())}\n"
        "command = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "process = subprocess.Popen(command, env=environ, start_new_session=True)\n"
        "pathlib.Path(sys.argv[1] + '-rank').write_text(str(process.pid))\n"
    )
    code, lives = run(tmp_path, rank + DIE)
    assert code == 128 + signal.SIGKILL and len(lives) == 3
    state = Path(f"/proc/{(tmp_path / 'lives-rank').read_text()}/stat")
    assert not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_a_signal_is_passed_on_and_nobody_follows(tmp_path: Path) -> None:
    """The agent has its supervisor signalled, and dies of what is passed on."""
    program = "os.kill(os.getppid(), signal.SIGTERM)\nsignal.sigwait([signal.SIGUSR1])"
    code, lives = run(tmp_path, program)
    assert code == 128 + signal.SIGTERM and len(lives) == 1


TOLD_TO_END = """
def told_to_end():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    os.kill(os.getppid(), signal.SIGTERM)
    signal.sigwait([signal.SIGTERM])
"""


def test_one_that_is_killed_while_a_signal_ends_it_is_followed_to_end_the_job_in_its_place(
    tmp_path: Path,
) -> None:
    """The other nodes may not have heard of the signal."""
    program = f"""{TOLD_TO_END}
if PREDECESSOR not in os.environ:
    report.take_part(7)
    told_to_end()
    {DIE}report.say_last_word(143)"""
    code, (first, second) = run(tmp_path, program)
    assert code == 128 + signal.SIGTERM
    told = Predecessor((int(first[3]),), 7, signal.SIGTERM)
    assert predecessor_of({PREDECESSOR: second[0]}) == told


def test_the_signal_is_handed_on_until_somebody_has_ended_the_job(tmp_path: Path) -> None:
    """Nobody sends it twice."""
    program = f"""{TOLD_TO_END}
report.take_part(7)
if PREDECESSOR not in os.environ:
    told_to_end()
{DIE}"""
    code, (first, *followers) = run(tmp_path, program)
    assert code == 128 + signal.SIGTERM and len(followers) == 2
    told = [predecessor_of({PREDECESSOR: life[0]}) for life in followers]
    lives = [first, followers[0]]
    assert told == [Predecessor((int(life[3]),), 7, signal.SIGTERM) for life in lives]


def test_without_a_supervisor_a_report_is_for_nobody() -> None:
    report = AgentReport({})
    report.take_part(1)
    report.say_last_word(3)
    assert {SUPERVISOR, PREDECESSOR, REPORT} & set(os.environ) == set()
