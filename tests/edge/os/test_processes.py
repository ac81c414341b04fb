"""The job directory and its keeper: ours alone, one at a time, outliving whoever started it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from keepstep.config import Settings, resolve
from keepstep.core.wire.conversations import AGENT_WITH_KEEPER
from keepstep.edge.net.unix_socket import Mailbox
from keepstep.edge.os import processes
from keepstep.edge.os.keeper_settings import write_keeper_settings
from keepstep.edge.os.processes import ensure_keeper
from keepstep.errors import KeeperError
from keepstep.model.messages.keeper_agent import AgentHere, JobEnded
from tests.pidfds import ends


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "arena").mkdir()
    return resolve(
        {
            "job": "j",
            "arena_dir": tmp_path / "arena",
            "state_dir": tmp_path / "state",
            "grace_s": 20,
        },
        {},
        "unused",
    )


@pytest.fixture
def keeper(settings: Settings) -> Iterator[Mailbox]:
    box = ensure_keeper(settings, AGENT_WITH_KEEPER)
    yield box
    end(box, settings)


def end(box: Mailbox, settings: Settings) -> None:
    """The keeper goes, and all it kept, when the agent says that the job is over."""
    pidfd = os.pidfd_open(box.peer()[0])
    box.send(AgentHere(os.getpid()))
    box.send(JobEnded(True, "the test is over"))
    assert ends(pidfd, 20), "the keeper does not go"
    os.close(pidfd)
    box.close()
    assert list(settings.arena_dir.iterdir()) == [], "the keeper left something behind"


def test_the_keeper_is_nobody_s_child_and_of_its_own_session(keeper: Mailbox) -> None:
    pid, uid = keeper.peer()
    process = psutil.Process(pid)
    assert uid == os.getuid()
    assert process.ppid() != os.getpid() and os.getsid(pid) == pid != os.getsid(0)
    assert process.cwd() == "/"
    assert not any("torch" in m.path for m in process.memory_maps())


def test_a_living_keeper_is_found_not_doubled(keeper: Mailbox, settings: Settings) -> None:
    second = ensure_keeper(settings, AGENT_WITH_KEEPER)
    assert second.peer()[0] == keeper.peer()[0]
    second.close()


def test_modules_are_found_from_its_directory_as_from_here(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["src", "", "/else/where", "."]))
    box = ensure_keeper(settings, AGENT_WITH_KEEPER)
    places = psutil.Process(box.peer()[0]).environ()["PYTHONPATH"].split(os.pathsep)
    assert places == [str(tmp_path / "src"), "/else/where", str(tmp_path)]
    end(box, settings)


def test_a_keeper_that_ends_at_once_is_told_with_its_last_word(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "KEEPER_MODULE", "no_such_module")
    settings.journal_path.parent.mkdir(parents=True)
    settings.journal_path.with_name("keeper.log").write_text("of another life\n")
    with pytest.raises(
        KeeperError, match=r"its last line: .*No module named '?no_such_module'?; its"
    ):
        ensure_keeper(settings, AGENT_WITH_KEEPER, timeout_s=2.0)


def test_a_killed_keeper_has_a_successor(settings: Settings) -> None:
    first = ensure_keeper(settings, AGENT_WITH_KEEPER)
    pid = first.peer()[0]
    os.kill(pid, signal.SIGKILL)
    assert first.recv(20) is None
    first.close()
    second = ensure_keeper(settings, AGENT_WITH_KEEPER)
    while second.peer()[0] == pid:
        # The kernel closes a dying process's descriptors one by one: its listener may still take a
        # connection after this one is gone. Such a connection ends without a word, too.
        assert second.recv(20) is None
        second.close()
        second = ensure_keeper(settings, AGENT_WITH_KEEPER)
    end(second, settings)


@pytest.mark.timeout(60)
def test_a_log_that_cannot_be_written_is_told_and_the_keeper_starts(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """In a shared state directory anybody may have put something in its place."""
    place = settings.journal_path.with_name("keeper.log")
    place.parent.mkdir(parents=True)
    os.mkfifo(place)
    end(ensure_keeper(settings, AGENT_WITH_KEEPER), settings)
    told = caplog.messages[0]
    assert f"the keeper's log {place} cannot be written" in told and "[KS5225]" in told


def test_what_a_keeper_was_told_is_this_users_alone(settings: Settings) -> None:
    settings.job_dir.mkdir(parents=True)
    before = os.umask(0)
    try:
        write_keeper_settings(settings)
    finally:
        os.umask(before)
    assert (settings.job_dir / "keeper.json").stat().st_mode & 0o777 == 0o600
