"""Own file: what somebody else has put in its place is neither written to nor waited for."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep.edge.os.journal import FileJournal
from keepstep.edge.os.own_file import append_to_own, check_own_directory

EVE = 65534


def listens(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def leads_elsewhere(path: Path) -> None:
    (path.parent / "theirs").write_text("theirs")
    path.symlink_to(path.parent / "theirs")


IN_THE_WAY: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a link": leads_elsewhere,
    "a link to nothing": lambda path: path.symlink_to(path.parent / "nowhere"),
    "a directory": os.mkdir,
    "a socket": listens,
}


def append(path: Path, raw: bytes) -> None:
    fd = append_to_own(path)
    try:
        os.write(fd, raw)
    finally:
        os.close(fd)


def test_it_is_for_its_owner_alone_and_grows(tmp_path: Path) -> None:
    path = tmp_path / "log"
    before = os.umask(0)
    try:
        append(path, b"one ")
        path.chmod(0o666)  # as an earlier version left it
        append(path, b"two")
    finally:
        os.umask(before)
    assert path.read_bytes() == b"one two" and path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("what", IN_THE_WAY)
@pytest.mark.timeout(20)
def test_what_is_no_file_is_refused_at_once(what: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    IN_THE_WAY[what](path)
    with pytest.raises(OSError, match="log"):
        append_to_own(path)
    assert not (tmp_path / "nowhere").exists()
    journal = FileJournal(path, "rank 0")
    journal.record("job-ended", "nothing is lost but this file")
    journal.close()
    assert what != "a link" or (tmp_path / "theirs").read_text() == "theirs"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: two users are played")
def test_another_users_file_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("theirs")
    os.chown(path, EVE, EVE)
    path.chmod(0o666)
    with pytest.raises(PermissionError, match="expected a file of user 0, found one of user 65534"):
        append_to_own(path)
    assert path.read_text() == "theirs" and path.stat().st_mode & 0o777 == 0o666


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_that_a_stranger_has_made_is_nobodys_journal(tmp_path: Path) -> None:
    theirs = tmp_path / "job"
    theirs.mkdir()
    os.chown(theirs, EVE, EVE)
    with pytest.raises(PermissionError, match="directory of user"):
        check_own_directory(theirs)
    journal = FileJournal(theirs / "journal.jsonl", "test")
    journal.record("kind", "why")
    journal.close()
    assert list(theirs.iterdir()) == []


def test_a_link_to_a_directory_is_none_and_an_open_one_is_closed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(NotADirectoryError):
        check_own_directory(tmp_path / "link")
    mine = tmp_path / "mine"
    mine.mkdir()
    mine.chmod(0o777)
    check_own_directory(mine)
    assert mine.stat().st_mode & 0o777 == 0o755
