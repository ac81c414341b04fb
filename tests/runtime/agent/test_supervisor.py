"""Supervisor: agents follow each other with the same command; what the last one said is the end."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from keepstep.runtime.agent.supervisor import (
    LAST_WORD,
    RESTARTED_AGENT,
    SIGNALS,
    SUPERVISOR,
    _Supervisor,
    say_last_word,
)

AGENT = """
import os, pathlib, signal, sys
from keepstep.runtime.agent.supervisor import RESTARTED_AGENT, SUPERVISOR, say_last_word
lives = pathlib.Path(sys.argv[1])
with lives.open("a") as file:
    file.write(f"{os.environ.get(RESTARTED_AGENT)} {os.environ[SUPERVISOR]} {os.getppid()}\\n")
"""
DIE = "os.kill(os.getpid(), signal.SIGKILL)\n"


@pytest.fixture(autouse=True)
def signals_stay_as_they_are() -> object:
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def run(room: Path, program: str) -> tuple[int, list[list[str]]]:
    """The exit code, and of each agent's life: whether it followed another one, its supervisor, its
    parent."""
    supervisor = _Supervisor([], dict(os.environ))
    supervisor._command = [sys.executable, "-c", AGENT + program, str(room / "lives")]
    code = supervisor.run()
    return code, [line.split() for line in (room / "lives").read_text().splitlines()]


def test_the_command_is_the_same_with_the_same_words() -> None:
    supervisor = _Supervisor(["run", "--nproc-per-node", "2", "train.py"], {})
    assert supervisor._command[-4:] == ["run", "--nproc-per-node", "2", "train.py"]


def test_an_agent_that_ends_by_itself_says_how(tmp_path: Path) -> None:
    code, lives = run(tmp_path, "sys.exit(70)")
    assert code == 70 and lives == [["None", str(os.getpid()), str(os.getpid())]]


def test_a_killed_one_is_followed_by_one_that_knows(tmp_path: Path) -> None:
    code, lives = run(tmp_path, f"if RESTARTED_AGENT not in os.environ:\n    {DIE}")
    assert code == 0 and [life[0] for life in lives] == ["None", "1"]


def test_nobody_follows_a_last_word(tmp_path: Path) -> None:
    code, lives = run(tmp_path, f"say_last_word(os.environ, 3)\n{DIE}")
    assert code == 3 and len(lives) == 1


def test_what_dies_again_and_again_is_given_up(tmp_path: Path) -> None:
    code, lives = run(tmp_path, DIE)
    assert code == 128 + signal.SIGKILL and len(lives) == 3


def test_a_signal_is_passed_on_and_nobody_follows(tmp_path: Path) -> None:
    """The agent has its supervisor signalled, and dies of what is passed on."""
    program = "os.kill(os.getppid(), signal.SIGTERM)\nsignal.sigwait([signal.SIGUSR1])"
    code, lives = run(tmp_path, program)
    assert code == 128 + signal.SIGTERM and len(lives) == 1


def test_without_a_supervisor_a_last_word_is_for_nobody() -> None:
    say_last_word({}, 3)
    reader, writer = os.pipe()
    os.close(reader)
    say_last_word({LAST_WORD: str(writer)}, 3)
    os.close(writer)
    assert {SUPERVISOR, RESTARTED_AGENT, LAST_WORD} & set(os.environ) == set()
