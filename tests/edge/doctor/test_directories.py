"""What kind of place a directory is, and what is left of looking at it: nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.edge.doctor.directories import read_directory, read_mounts
from tests.edge.doctor.fake_machine import FakeMachine


def test_a_directory_is_on_the_deepest_mount_above_it(machine: FakeMachine) -> None:
    mounts = read_mounts(machine.host)
    assert [mount.at for mount in mounts] == ["/", "/dev/shm", "/mnt/my store"]
    kinds = {
        path: read_directory(machine.host, path, mounts).filesystem
        for path in ("/dev/shm", "/dev", "/dev/shm/a/b", "/mnt")
    }
    assert kinds == {"/dev/shm": "tmpfs", "/dev": "ext4", "/dev/shm/a/b": "tmpfs", "/mnt": "ext4"}
    assert "noexec" in read_directory(machine.host, "/dev/shm", mounts).options


def test_a_hidden_directory_may_be_a_mount(machine: FakeMachine) -> None:
    machine.change("/proc/self/mountinfo", " /dev/shm ", " /.memory ")
    (machine.root / ".memory").mkdir()
    mounts = read_mounts(machine.host)
    assert read_directory(machine.host, "/.memory", mounts).filesystem == "tmpfs"
    assert read_directory(machine.host, "/", mounts).filesystem == "ext4"


def test_of_two_mounts_in_one_place_the_later_counts(machine: FakeMachine) -> None:
    above = "9 0 8:9 / /dev/shm ro - xfs /dev/sdz1 ro"
    machine.change("/proc/self/mountinfo", "3 1 8:2", f"{above}\n3 1 8:2")
    found = read_directory(machine.host, "/dev/shm", read_mounts(machine.host))
    assert found.filesystem == "xfs" and "ro" in found.options


def test_a_missing_directory_is_judged_by_what_is_above_it(machine: FakeMachine) -> None:
    found = read_directory(machine.host, "/home/me/a/b", [])
    assert (found.is_there, found.nearest, found.refusal) == (False, "/home/me", "")
    assert found.filesystem is None
    machine.write("/home/me/a", "")
    assert "is no directory" in read_directory(machine.host, "/home/me/a/b", []).refusal
    assert not (machine.root / "home/me/a/b").exists()


def test_what_cannot_be_written_is_refused_with_the_reason(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(dir: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert read_directory(machine.host, "/tmp", []).refusal == "Read-only file system"


def test_where_nobody_can_make_files_is_refused(machine: FakeMachine) -> None:
    """`run` refused what `doctor` had called fit."""
    machine.change("/proc/self/mountinfo", " /dev/shm rw", " /proc rw")
    machine.change("/proc/self/mountinfo", "tmpfs shm", "proc proc")
    found = read_directory(machine.host, "/proc/nowhere/store", read_mounts(machine.host))
    assert "is proc, in which nobody can make files" in found.refusal


def test_nothing_stays_in_a_directory_that_was_tried(machine: FakeMachine) -> None:
    assert read_directory(machine.host, "/tmp", []).refusal == ""
    assert list((machine.root / "tmp").iterdir()) == []
