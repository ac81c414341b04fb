"""A machine without any defect, and the same machine with some of its facts changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from keepstep.core.doctor.defect import Defect
from keepstep.core.doctor.examination import examine
from keepstep.model.machine_facts import (
    UNLIMITED,
    CgroupFacts,
    ClockFacts,
    DirectoryFacts,
    GpuFacts,
    GpuHealth,
    LimitFacts,
    MachineFacts,
    MemoryFacts,
    NetworkFacts,
    NetworkInterface,
    ProcessFacts,
    ProcessLimit,
    ResolvedName,
    SoftwareFacts,
    WantedFacts,
)
from keepstep.model.units import GIB

FREE = ProcessLimit(UNLIMITED, UNLIMITED)


def directory(path: str, filesystem: str, gib: int) -> DirectoryFacts:
    return DirectoryFacts(
        path=path,
        nearest=path,
        refusal="",
        filesystem=filesystem,
        options=frozenset({"rw", "nosuid"}),
        total_bytes=gib * GIB,
        free_bytes=gib * GIB * 9 // 10,
        free_files=1 << 20,
        owner=0,
        mode=0o1777,
    )


GPU = GpuHealth(
    index=0,
    persistence=True,
    compute_mode="Default",
    used_bytes=4 << 20,
    total_bytes=80 * GIB,
    uncorrected_errors=0,
    remap_pending=False,
    remap_failed=False,
    is_hot=False,
)
ETHERNET = NetworkInterface("eth0", True, False, 1500, 100_000, 10**7, 3)
LOOPBACK = NetworkInterface("lo", True, True, 65536, None, 10**7, 0)

# Eight cores, two GPUs, several nodes.
SANE = MachineFacts(
    arena=directory("/dev/shm", "tmpfs", 128),
    state=directory("/home/me/.local/state/keepstep", "ext4", 500),
    temporary=directory("/tmp", "ext4", 500),
    store=directory("/mnt/store", "nfs4", 9000),
    memory=MemoryFacts(
        total_bytes=256 * GIB,
        available_bytes=200 * GIB,
        swapped_bytes=0,
        commit_limit_bytes=128 * GIB,
        committed_bytes=20 * GIB,
        huge_pages_bytes=0,
        overcommit=0,
        defrag="madvise",
        numa_nodes=2,
        zone_reclaim=0,
        numa_balancing=0,
    ),
    cgroup=CgroupFacts(200 * GIB, 20 * GIB, 1 << 20, 100, 8.0, 0.0),
    limits=LimitFacts(
        open_files=ProcessLimit(65536, 65536),
        processes=ProcessLimit(96365, 96365),
        locked_bytes=FREE,
        file_bytes=FREE,
        address_bytes=FREE,
        cpu_s=FREE,
        core_bytes=ProcessLimit(0, UNLIMITED),
    ),
    processes=ProcessFacts(
        is_root=False,
        cpus=8,
        load=0.4,
        tasks=800,
        pid_max=4194304,
        threads_max=192730,
        zombies=1,
        zombies_of_init=0,
        init="systemd",
        ignored_signals=frozenset({"SIGPIPE"}),
        blocked_signals=frozenset(),
        has_autogroup=True,
        may_nice_session=True,
        ptrace_scope=0,
        may_trace=False,
        pidfd_refusal="",
        keepers=(),
    ),
    clock=ClockFacts(True, "tsc", ("tsc", "hpet"), 1_800_000_000.0, ("/tmp/a", 1_799_999_999.0)),
    network=NetworkFacts(
        host=ResolvedName("node1", ("10.0.0.7",), 0.001),
        localhost=ResolvedName("localhost", ("127.0.0.1", "::1"), 0.001),
        interfaces=(ETHERNET, LOOPBACK),
        ports=(32768, 60999),
        backlog=4096,
        tracked=100,
        tracked_max=262144,
        rdma_devices=("mlx5_0",),
    ),
    gpus=GpuFacts(
        on_bus=2,
        driver="570.86.15",
        of_driver=2,
        refused_files=(),
        has_tool=True,
        tool_error="",
        gpus=(GPU, replace(GPU, index=1)),
    ),
    software=SoftwareFacts(
        system="Linux",
        kernel="6.8.0-45-generic",
        python=(3, 11),
        is_64_bit=True,
        asserts=True,
        torch="2.9.0",
        torch_cuda="12.8",
        packages=frozenset({"numpy", "cryptography"}),
        has_user_name=True,
    ),
    wanted=WantedFacts(
        nodes=2,
        user=1000,
        problems=(),
        internal=(),
        user_dir_refusal="",
        store="/mnt/store",
        store_package=None,
        redundancy="auto",
        metrics_port=None,
        block_mac="auto",
        encrypt=False,
        secret_characters=14,
        left=(),
        environ={},
    ),
)


def with_facts(changes: dict[str, Any], facts: MachineFacts = SANE) -> MachineFacts:
    """The machine with other facts, by name: `memory.overcommit`."""
    for name, value in changes.items():
        group, _, fact = name.partition(".")
        below = replace(getattr(facts, group), **{fact: value}) if fact else value
        facts = replace(facts, **{group: below})
    return facts


def found_by(check: str, facts: MachineFacts) -> list[Defect]:
    """What one check finds."""
    results = {result.check: result.defects for result in examine(facts).results}
    return list(results[check])


def only_defect(changes: dict[str, Any], check: str) -> Defect:
    """What the change makes that check find, and no other one."""
    found = [
        (result.check, defect)
        for result in examine(with_facts(changes)).results
        for defect in result.defects
    ]
    assert [name for name, _ in found] == [check], found
    return found[0][1]
