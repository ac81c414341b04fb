"""Counters of processes killed for want of memory: found for a real process, read from files of
both kinds, unknown without one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keepstep.edge.probes import cgroups, memory


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n", 2),
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n", 5),
        ("oom_kill_disable 0\nunder_oom 0\n", None),  # a kernel before 4.13
        ("oom_kill many\n", None),
        ("", None),
    ],
)
def test_what_a_counter_says(tmp_path: Path, text: str, count: int | None) -> None:
    (tmp_path / "events").write_text(text)
    assert memory.read_counter(tmp_path / "events") == count


def test_no_file_counts_nothing(tmp_path: Path) -> None:
    assert memory.read_counter(None) is None and memory.read_counter(tmp_path / "nothing") is None


def test_a_living_process_has_a_counter_where_cgroups_are_mounted() -> None:
    found = memory.find_counter(os.getpid())
    if found is None:
        pytest.skip("this machine shows no memory cgroup")
    assert memory.read_counter(found) is not None


def test_a_dead_process_has_none() -> None:
    assert memory.find_counter(2**22 + 1) is None


@pytest.mark.parametrize(
    ("cgroup", "mount", "file"),
    [
        ("0::/job/7\n", "cgroup2 {} cgroup2 rw,nosuid 0 0\n", "job/7/memory.events"),
        ("4:memory:/job/7\n0::/\n", "cgroup {} cgroup rw,memory 0 0\n", "job/7/memory.oom_control"),
        # inside a container
        ("4:cpu,memory:/job/7\n", "cgroup {} cgroup rw,cpu,memory 0 0\n", "memory.oom_control"),
        # another namespace's path
        ("0::/../other\n", "cgroup2 {} cgroup2 rw 0 0\n", "memory.events"),
    ],
)
def test_where_the_counter_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, mount: str, file: str
) -> None:
    root = tmp_path / "cgroup"
    (root / file).parent.mkdir(parents=True)
    (root / file).write_text("oom_kill 1\n")
    (tmp_path / "mounts").write_text("proc /proc proc rw 0 0\n" + mount.format(root))
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "cgroup").write_text(cgroup)
    monkeypatch.setattr(cgroups, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(cgroups, "PROC", tmp_path / "proc")
    assert memory.find_counter(7) == root / file
