"""Limits of the process and of its control groups, of both versions."""

from __future__ import annotations

from keepstep.edge.doctor.limits import read_cgroups, read_limits
from keepstep.model.machine_facts import UNLIMITED, ProcessLimit
from keepstep.model.units import GIB
from tests.edge.doctor.fake_machine import FakeMachine


def test_resource_limits(machine: FakeMachine) -> None:
    found = read_limits(machine.host)
    assert found.open_files == ProcessLimit(65536, 524288)
    assert found.core_bytes == ProcessLimit(0, UNLIMITED)
    machine.write("/proc/self/limits", "")
    assert read_limits(machine.host).open_files is None


def test_no_limit_of_a_group(machine: FakeMachine) -> None:
    found = read_cgroups(machine.host)
    assert (found.memory_limit_bytes, found.pids_limit, found.cpu_cores) == (
        UNLIMITED,
        UNLIMITED,
        None,
    )
    assert found.memory_used_bytes is None and found.throttled_ratio == 0


def test_the_tightest_of_the_groups_above_counts(machine: FakeMachine) -> None:
    machine.write("/proc/self/cgroup", "0::/pod/job\n")
    below = "/sys/fs/cgroup/pod"
    machine.write(f"{below}/memory.max", f"{4 * GIB}\n")
    machine.write(f"{below}/memory.current", f"{3 * GIB}\n")
    machine.write(f"{below}/cpu.max", "150000 100000\n")
    machine.write(f"{below}/job/memory.max", f"{8 * GIB}\n")
    machine.write(f"{below}/job/memory.current", f"{GIB}\n")
    machine.write(f"{below}/job/cpu.max", "max 100000\n")
    found = read_cgroups(machine.host)
    assert (found.memory_limit_bytes, found.memory_used_bytes) == (4 * GIB, 3 * GIB)
    assert found.cpu_cores == 1.5


def test_a_container_sees_its_group_as_the_root(machine: FakeMachine) -> None:
    machine.write("/proc/self/cgroup", "0::/../../elsewhere\n")
    machine.write("/sys/fs/cgroup/memory.max", f"{2 * GIB}\n")
    machine.write("/sys/fs/cgroup/memory.current", "7\n")
    assert read_cgroups(machine.host).memory_limit_bytes == 2 * GIB


def test_groups_of_version_1(machine: FakeMachine) -> None:
    machine.write(
        "/proc/self/cgroup", "4:memory:/a\n3:cpu,cpuacct:/a\n2:pids:/\n1:name=systemd:/\n"
    )
    machine.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    machine.write("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", f"{GIB}\n")
    machine.write("/sys/fs/cgroup/memory/a/memory.usage_in_bytes", "5\n")
    machine.write("/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "50000\n")
    machine.write("/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000\n")
    machine.write("/sys/fs/cgroup/cpu,cpuacct/a/cpu.stat", "nr_periods 10\nnr_throttled 4\n")
    machine.write("/sys/fs/cgroup/pids/pids.max", "500\n")
    machine.write("/sys/fs/cgroup/pids/pids.current", "6\n")
    found = read_cgroups(machine.host)
    assert (found.memory_limit_bytes, found.memory_used_bytes) == (GIB, 5)
    assert (found.cpu_cores, found.throttled_ratio) == (0.5, 0.4)
    assert (found.pids_limit, found.pids_used) == (500, 6)


def test_version_1_without_a_limit(machine: FakeMachine) -> None:
    machine.write("/proc/self/cgroup", "4:memory:/\n3:cpu:/\n")
    machine.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    machine.write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    machine.write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    found = read_cgroups(machine.host)
    assert (found.memory_limit_bytes, found.cpu_cores) == (UNLIMITED, None)
