"""Limits that a job runs into."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.core.doctor.defect import Grade
from keepstep.model.machine_facts import UNLIMITED, ProcessLimit
from keepstep.model.units import GIB, MIB
from tests.core.doctor.sane_machine import found_by, only_defect, with_facts


def at_most(number: int, hard: int = UNLIMITED) -> ProcessLimit:
    return ProcessLimit(number, hard)


@pytest.mark.parametrize(
    ("changes", "check", "grade", "words"),
    [
        ({"limits.open_files": at_most(1024)}, "open-files", Grade.WARNING, "ulimit -n 65536;"),
        ({"limits.open_files": at_most(100)}, "open-files", Grade.BROKEN, "100 files open"),
        (
            {"limits.open_files": at_most(1024, hard=2048)},
            *("open-files", Grade.WARNING, "ulimit -n 65536 as root"),
        ),
        (
            {"limits.open_files": at_most(1024, hard=20_000)},
            *("open-files", Grade.WARNING, "ulimit -n 20000;"),
        ),
        ({"limits.processes": at_most(1000)}, "processes", Grade.WARNING, "ulimit -u 65536"),
        ({"limits.processes": at_most(100)}, "processes", Grade.BROKEN, "100 processes"),
        ({"limits.locked_bytes": at_most(8 * MIB)}, "locked-memory", Grade.BROKEN, "mlx5_0"),
        ({"limits.file_bytes": at_most(GIB)}, "file-size", Grade.BROKEN, "1.0 GiB"),
        ({"limits.address_bytes": at_most(GIB)}, "address-space", Grade.BROKEN, "-v unlimited"),
        ({"limits.cpu_s": at_most(3600)}, "processor-time", Grade.BROKEN, "3600 s"),
        ({"limits.core_bytes": at_most(UNLIMITED)}, "core-dumps", Grade.WARNING, "256.0 GiB"),
        ({"limits.core_bytes": at_most(2 * GIB)}, "core-dumps", Grade.WARNING, "up to 2.0 GiB"),
        ({"cgroup.pids_limit": 1000}, "cgroup-pids", Grade.WARNING, "100 of 1000"),
        ({"cgroup.pids_limit": 200}, "cgroup-pids", Grade.BROKEN, "--pids-limit=-1"),
        ({"processes.tasks": 180_000}, "kernel-tasks", Grade.WARNING, "180000 of at most 192730"),
        ({"cgroup.cpu_cores": 2.5}, "cpu-quota", Grade.WARNING, "OMP_NUM_THREADS=2"),
        ({"cgroup.throttled_ratio": 0.5}, "cpu-quota", Grade.WARNING, "50% of its periods"),
    ],
)
def test_a_defect_is_named(changes: dict[str, Any], check: str, grade: Grade, words: str) -> None:
    defect = only_defect(changes, check)
    assert defect.grade is grade and words in f"{defect.found} {defect.why} {defect.fix}"


@pytest.mark.parametrize(
    ("fact", "check"),
    [
        ("limits.open_files", "open-files"),
        ("limits.processes", "processes"),
        ("limits.locked_bytes", "locked-memory"),
        ("limits.file_bytes", "file-size"),
        ("limits.address_bytes", "address-space"),
        ("limits.cpu_s", "processor-time"),
        ("limits.core_bytes", "core-dumps"),
        ("cgroup.pids_used", "cgroup-pids"),
        ("processes.pid_max", "kernel-tasks"),
    ],
)
def test_what_cannot_be_read_is_said_to_be_unknown(fact: str, check: str) -> None:
    assert only_defect({fact: None}, check).grade is Grade.UNKNOWN


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"limits.processes": at_most(100), "processes.is_root": True}, "processes"),
        ({"limits.locked_bytes": at_most(64), "network.rdma_devices": ()}, "locked-memory"),
        ({"cgroup.pids_limit": UNLIMITED, "cgroup.pids_used": None}, "cgroup-pids"),
        ({"cgroup.cpu_cores": None}, "cpu-quota"),
    ],
)
def test_what_is_in_order_is_not_named(changes: dict[str, Any], check: str) -> None:
    assert found_by(check, with_facts(changes)) == []
