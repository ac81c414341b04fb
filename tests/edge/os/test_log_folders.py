"""What lies in a directory of logs is found, and what is no log is named and not opened."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.edge.os import log_folders
from keepstep.edge.os.log_folders import MAX_DEPTH, OF_THE_KERNEL, find_logs


def test_links_pipes_sockets_and_devices_are_named(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("step 1\n")
    (tmp_path / "circle").symlink_to(tmp_path)
    (tmp_path / "itself").symlink_to("itself")
    (tmp_path / "nowhere").symlink_to("gone")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        found = find_logs(tmp_path)
    assert found.files == {"a.log": log}
    assert set(found.skipped) == {"circle", "itself", "nowhere", "pipe", "socket"}
    assert (found.skipped["pipe"], found.skipped["socket"]) == ("a pipe", "a socket")
    assert "link" in found.skipped["circle"]


def test_the_kernels_own_files_are_not_opened() -> None:
    """`/proc/kmsg` waits for ever."""
    found = find_logs(Path("/proc/self"))
    assert found.files == {} and found.skipped == {".": OF_THE_KERNEL}
    assert find_logs(Path("/proc/self/status")).files == {}


def test_a_directory_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.log").write_text("")
    scandir = os.scandir

    def refuse(path: Path) -> Iterator[Any]:
        if path.name == "closed":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    found = find_logs(tmp_path)
    assert list(found.files) == ["a.log"] and found.skipped == {"closed": "Permission denied"}


def test_folders_without_end_end(tmp_path: Path) -> None:
    deep = tmp_path
    for _ in range(MAX_DEPTH + 5):
        deep = deep / "d"
        deep.mkdir()
        (deep / "a.log").write_text("")
    found = find_logs(tmp_path)
    assert len(found.files) == MAX_DEPTH
    assert list(found.skipped.values()) == [f"folders deeper than {MAX_DEPTH}"]


def test_more_files_than_are_looked_at_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(5):
        (tmp_path / f"{i}.log").write_text("")
    assert not find_logs(tmp_path).is_cut
    monkeypatch.setattr(log_folders, "MAX_FILES", 4)
    found = find_logs(tmp_path)
    assert (len(found.files), found.is_cut) == (4, True)


class Entry:
    """As DirEntry, but for that."""

    def __init__(self, entry: os.DirEntry[str]) -> None:
        self.name, self.path, self.is_dir = entry.name, entry.path, entry.is_dir

    def __eq__(self, other: object) -> bool:
        raise AssertionError("a file was looked for among the folders")


def test_many_files_beside_many_folders_are_looked_through_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is asked to read a directory has not made it: with 100,000 of each it took hours."""
    for number in range(3):
        (tmp_path / f"d{number}").mkdir()
        (tmp_path / f"f{number}").touch()
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: [Entry(entry) for entry in scandir(path)])
    assert list(find_logs(tmp_path).files) == ["f0", "f1", "f2"]
