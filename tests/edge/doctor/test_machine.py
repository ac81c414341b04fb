"""Defects that are planted into a machine's files, and what the doctor then names."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep.core.doctor.defect import Grade
from keepstep.edge.doctor.host import Space
from keepstep.edge.os.processes import KEEPER_MODULE
from keepstep.model.units import GIB, MIB
from tests.edge.doctor.fake_machine import FakeMachine

Plant = Callable[[FakeMachine], object]

KEEPER = f"python\0-m\0{KEEPER_MODULE}\0" + json.dumps({"job": "lost", "arena_dir": "/dev/shm"})
SYNCED = {"clock_synchronised": lambda: False}


def limit(name: str, old: str, new: str) -> Plant:
    def plant(machine: FakeMachine) -> None:
        line = f"{name:<26}{old:<21}"
        machine.change("/proc/self/limits", line, f"{name:<26}{new:<21}")

    return plant


def memory(old: str, new: str) -> Plant:
    return lambda machine: machine.change("/proc/meminfo", old, new)


def file(path: str, text: str) -> Plant:
    return lambda machine: machine.write(path, text)


def variable(name: str, value: str) -> Plant:
    return lambda machine: machine.environ.update({name: value})


def space(path: str, total: int, free: int) -> Plant:
    return lambda machine: machine.spaces.update({path: Space(total, free, 10**6)})


def smi(old: str, new: str) -> Plant:
    def plant(machine: FakeMachine) -> None:
        assert isinstance(machine.smi, str)
        machine.smi = machine.smi.replace(old, new)

    return plant


def fallen(machine: FakeMachine) -> None:
    gpu = machine.root / "proc/driver/nvidia/gpus/0000:2a:00.0"
    (gpu / "information").unlink()
    gpu.rmdir()


def not_loaded(machine: FakeMachine) -> None:
    (machine.root / "proc/driver/nvidia/version").unlink()


def zombies(machine: FakeMachine) -> None:
    for pid in range(100, 105):
        machine.process(pid, "Z", 1)


def open_to_all(machine: FakeMachine) -> None:
    (machine.root / "dev/shm").chmod(0o777)


def no_arena(machine: FakeMachine) -> None:
    (machine.root / "dev/shm").rmdir()


def another_users(machine: FakeMachine) -> None:
    (machine.root / "dev/shm" / f"keepstep-{os.getuid()}").mkdir(mode=0o755)


def later(machine: FakeMachine) -> None:
    machine.calls["wall_s"] = lambda: (machine.root / "tmp").stat().st_ctime - 7200
    machine.write("/tmp/later", "")


def file_in_the_way(machine: FakeMachine) -> None:
    machine.write("/home/me/.local/state/keepstep", "")


PLANTED: list[tuple[str, Grade, Plant]] = [
    ("arena-writable", Grade.BROKEN, no_arena),
    (
        "arena-in-memory",
        Grade.WARNING,
        lambda m: m.change("/proc/self/mountinfo", "tmpfs shm", "ext4 shm"),
    ),
    ("arena-size", Grade.BROKEN, space("/dev/shm", 64 * MIB, 64 * MIB)),
    ("arena-free", Grade.BROKEN, space("/dev/shm", 32 * GIB, MIB)),
    ("arena-owner", Grade.BROKEN, open_to_all),
    ("arena-owner", Grade.BROKEN, another_users),
    ("state-directory", Grade.BROKEN, file_in_the_way),
    ("temporary-directory", Grade.WARNING, space("/tmp", 32 * GIB, 100 * MIB)),
    ("temporary-directory", Grade.BROKEN, variable("TMPDIR", "/proc/meminfo")),
    ("store-directory", Grade.BROKEN, variable("KEEPSTEP_STORE", "/proc/meminfo/store")),
    ("store-directory", Grade.WARNING, variable("KEEPSTEP_STORE", "/dev/shm/store")),
    ("memory-available", Grade.WARNING, memory("50331648", "1048576")),
    ("memory-cgroup", Grade.WARNING, file("/sys/fs/cgroup/job/memory.max", f"{8 * GIB}\n")),
    ("swap", Grade.WARNING, memory("SwapFree:        8388608", "SwapFree:        4194304")),
    ("overcommit", Grade.WARNING, file("/proc/sys/vm/overcommit_memory", "2\n")),
    (
        "huge-page-defrag",
        Grade.WARNING,
        file("/sys/kernel/mm/transparent_hugepage/defrag", "[always] defer madvise never\n"),
    ),
    (
        "reserved-huge-pages",
        Grade.WARNING,
        memory("HugePages_Free:        0", "HugePages_Free:    16384"),
    ),
    ("numa", Grade.WARNING, file("/proc/sys/vm/zone_reclaim_mode", "1\n")),
    ("numa", Grade.WARNING, file("/proc/sys/kernel/numa_balancing", "1\n")),
    ("open-files", Grade.WARNING, limit("Max open files", "65536", "1024")),
    ("file-size", Grade.BROKEN, limit("Max file size", "unlimited", "1048576")),
    ("address-space", Grade.BROKEN, limit("Max address space", "unlimited", "1048576")),
    ("processor-time", Grade.BROKEN, limit("Max cpu time", "unlimited", "3600")),
    ("core-dumps", Grade.WARNING, limit("Max core file size", "0", "unlimited")),
    ("cgroup-pids", Grade.BROKEN, file("/sys/fs/cgroup/job/pids.max", "100\n")),
    ("kernel-tasks", Grade.WARNING, file("/proc/sys/kernel/pid_max", "800\n")),
    ("cpu-quota", Grade.WARNING, file("/sys/fs/cgroup/job/cpu.max", "200000 100000\n")),
    (
        "cpu-quota",
        Grade.WARNING,
        file("/sys/fs/cgroup/job/cpu.stat", "nr_periods 100\nnr_throttled 50\n"),
    ),
    ("cores", Grade.WARNING, lambda m: m.calls.update(cpus=lambda: 1)),
    ("load", Grade.WARNING, file("/proc/loadavg", "40.0 9.0 9.0 2/700 1\n")),
    ("init", Grade.WARNING, file("/proc/1/comm", "sleep\n")),
    ("init", Grade.WARNING, zombies),
    (
        "ignored-signals",
        Grade.BROKEN,
        lambda m: m.change("/proc/self/status", "SigIgn:\t0000000001001000", "SigIgn:\t10000"),
    ),
    (
        "ignored-signals",
        Grade.WARNING,
        lambda m: m.change("/proc/self/status", "SigBlk:\t0000000000000000", "SigBlk:\t4000"),
    ),
    ("pidfd", Grade.BROKEN, lambda m: m.calls.update(pidfd_refusal=lambda: "not implemented")),
    ("autogroup", Grade.WARNING, lambda m: (m.root / "proc/self/autogroup").unlink()),
    ("ptrace", Grade.WARNING, file("/proc/sys/kernel/yama/ptrace_scope", "1\n")),
    ("orphaned-keepers", Grade.WARNING, lambda m: m.process(77, cmdline=KEEPER)),
    ("clock-synchronised", Grade.WARNING, lambda m: m.calls.update(SYNCED)),
    (
        "clock-source",
        Grade.WARNING,
        file("/sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n"),
    ),
    ("clock-right", Grade.BROKEN, lambda m: m.calls.update(wall_s=lambda: 0.0)),
    ("clock-right", Grade.WARNING, later),
    ("localhost", Grade.BROKEN, lambda m: m.names.pop("localhost")),
    ("loopback", Grade.BROKEN, lambda m: m.interface("lo", "0x8", "down", 65536, -1)),
    ("host-name", Grade.WARNING, lambda m: m.names.pop("node1")),
    ("interfaces", Grade.WARNING, lambda m: m.interface("eth0", "0x1003", "up", 576, 10_000)),
    (
        "interfaces",
        Grade.WARNING,
        file("/sys/class/net/eth0/statistics/rx_errors", "100000\n"),
    ),
    ("chosen-interfaces", Grade.BROKEN, variable("GLOO_SOCKET_IFNAME", "ib0")),
    ("ports", Grade.WARNING, file("/proc/sys/net/ipv4/ip_local_port_range", "60000 60999\n")),
    ("backlog", Grade.WARNING, file("/proc/sys/net/core/somaxconn", "16\n")),
    (
        "tracked-connections",
        Grade.WARNING,
        file("/proc/sys/net/netfilter/nf_conntrack_count", "262000\n"),
    ),
    ("gpu-driver", Grade.BROKEN, not_loaded),
    ("gpu-driver", Grade.BROKEN, fallen),
    (
        "gpu-torch",
        Grade.BROKEN,
        lambda m: m.change("/proc/driver/nvidia/version", "590.86.15", "470.82.01"),
    ),
    ("gpu-files", Grade.BROKEN, lambda m: (m.root / "dev/nvidia-uvm").unlink()),
    ("gpu-choice", Grade.BROKEN, variable("CUDA_VISIBLE_DEVICES", "0,5")),
    ("gpu-tool", Grade.BROKEN, lambda m: setattr(m, "smi", OSError("version mismatch"))),
    ("gpu-health", Grade.BROKEN, smi("81920, 0, Not Active", "81920, 3, Not Active")),
    ("gpu-health", Grade.WARNING, smi("Not Active, No, No", "Not Active, Yes, No")),
    ("gpu-settings", Grade.WARNING, smi("Enabled", "Disabled")),
    ("gpu-settings", Grade.WARNING, smi("Default, 4,", "Default, 40000,")),
    ("options", Grade.BROKEN, variable("KEEPSTEP_STOER", "/x")),
    ("options", Grade.BROKEN, variable("KEEPSTEP_SLOTS", "many")),
    ("internal-variables", Grade.WARNING, variable("KEEPSTEP_AGENT", "17")),
    ("option-packages", Grade.BROKEN, variable("KEEPSTEP_STORE", "gs://bucket/run")),
    ("secret", Grade.WARNING, variable("KEEPSTEP_SECRET", "abababababababababab")),
    ("secret", Grade.BROKEN, variable("KEEPSTEP_ENCRYPT", "1")),
    ("rank-variables", Grade.BROKEN, variable("RANK", "0")),
    ("debugging-variables", Grade.WARNING, variable("CUDA_LAUNCH_BLOCKING", "1")),
]


def test_a_sane_machine_is_silent(machine: FakeMachine) -> None:
    found = machine.examine(store="/mnt/my store")
    assert {result.check: result.defects for result in found.results if result.defects} == {}


@pytest.mark.parametrize(
    ("check", "grade", "plant"),
    PLANTED,
    ids=[f"{number}-{check}" for number, (check, _, _) in enumerate(PLANTED)],
)
def test_what_is_planted_is_named_and_nothing_else(
    check: str, grade: Grade, plant: Plant, machine: FakeMachine
) -> None:
    plant(machine)
    found = machine.examine()
    named = {result.check: result.defects for result in found.results if result.defects}
    assert set(named) == {check}, named
    assert {defect.grade for defect in named[check]} == {grade}
    assert all(defect.found and defect.why and defect.fix for defect in named[check])
    assert not any("\n" in f"{d.found}{d.why}{d.fix}" for d in named[check])


def test_a_secret_is_in_no_fact(machine: FakeMachine) -> None:
    secret = "a-secret-that-nobody-may-read"
    machine.environ |= {"KEEPSTEP_SECRET": secret, "KEEPSTEP_STORE": "s3://key:hunter2@bucket/x"}
    assert secret not in repr(machine.facts()) and secret not in repr(machine.examine())
    assert "hunter2" not in repr(machine.examine())
    machine.environ["KEEPSTEP_SECRET"] = "too-short"
    assert "too-short" not in repr(machine.facts())


def test_nothing_is_left_and_nothing_made(machine: FakeMachine) -> None:
    def everything() -> list[Path]:
        return sorted(machine.root.rglob("*"))

    before = everything()
    machine.examine(nodes=2, store="/mnt/my store/below")
    assert everything() == before


def test_a_machine_without_any_file_is_no_error(tmp_path: Path) -> None:
    empty = FakeMachine(tmp_path / "full")
    empty.root = tmp_path / "empty"
    empty.root.mkdir()
    found = empty.examine()
    assert found.of_grade(Grade.UNKNOWN) and not found.is_fit
