"""Memory: whether there is enough, and whether the kernel keeps what lies in it there.

Comes in: facts of the memory, its control group and the arena. Goes out: defects.
"""

from __future__ import annotations

from collections.abc import Iterator

from keepstep.core.doctor.defect import Defect, DoctorCheck, silence, warning
from keepstep.model.machine_facts import UNLIMITED, MachineFacts
from keepstep.model.units import MIB, human_bytes

MIN_AVAILABLE_RATIO = 0.10
MAX_SWAPPED_RATIO = 0.01
MIN_COMMIT_RATIO = 0.10
MAX_HUGE_RATIO = 0.25
STRICT_OVERCOMMIT = 2


def memory_available(facts: MachineFacts) -> Iterator[Defect]:
    """Whether other processes have left memory to train in."""
    total, available = facts.memory.total_bytes, facts.memory.available_bytes
    if total is None or available is None:
        yield silence("how much memory is available")
    elif available < total * MIN_AVAILABLE_RATIO:
        yield warning(
            f"{human_bytes(available)} of {human_bytes(total)} of memory is available",
            "the kernel kills the largest process when it runs out: a rank",
            "end what takes it (ps aux --sort=-rss | head), and keepstep clean",
        )


def memory_cgroup(facts: MachineFacts) -> Iterator[Defect]:
    """Whether the arena fits into what this container may use."""
    limit, used = facts.cgroup.memory_limit_bytes, facts.cgroup.memory_used_bytes
    total, arena = facts.memory.total_bytes, facts.arena.total_bytes
    if limit == UNLIMITED or (total is not None and limit >= total):
        return
    fix = (
        "give the container more memory (docker run --memory, Kubernetes resources.limits.memory, "
        "Slurm --mem)"
    )
    if arena is not None and arena > limit:
        yield warning(
            f"the control group may use {human_bytes(limit)}, and {facts.arena.path} holds "
            f"{human_bytes(arena)}",
            "snapshots count as the job's memory: it is killed before the arena is full",
            f"{fix}, or mount -o remount,size={limit // 2 // MIB}m {facts.arena.path}",
        )
    if used is None:
        yield silence("how much memory the control group uses")
    elif limit - used < limit * MIN_AVAILABLE_RATIO:
        yield warning(
            f"the control group uses {human_bytes(used)} of {human_bytes(limit)}",
            "the kernel kills a process in it when it runs out: a rank",
            fix,
        )


def swap(facts: MachineFacts) -> Iterator[Defect]:
    """Whether memory has been moved to a disk."""
    total, swapped = facts.memory.total_bytes, facts.memory.swapped_bytes
    if total is None or swapped is None:
        yield silence("how much memory is swapped out")
    elif swapped > total * MAX_SWAPPED_RATIO:
        yield warning(
            f"{human_bytes(swapped)} of memory is swapped out",
            "snapshots that lie on a disk are restored, and overwritten, at its speed",
            "swapoff -a, and no swap in /etc/fstab, on machines that train",
        )


def overcommit(facts: MachineFacts) -> Iterator[Defect]:
    """Whether memory can be reserved that is not used yet."""
    memory = facts.memory
    if memory.overcommit is None:
        yield silence("vm.overcommit_memory")
    elif memory.overcommit == STRICT_OVERCOMMIT:
        left = ""
        if memory.commit_limit_bytes is not None and memory.committed_bytes is not None:
            more = max(0, memory.commit_limit_bytes - memory.committed_bytes)
            left = f", and {human_bytes(more)} can be reserved yet"
        yield warning(
            f"vm.overcommit_memory is 2{left}",
            "CUDA, DataLoader's workers and slots reserve far more than they use, and fail",
            "sysctl -w vm.overcommit_memory=0",
        )


def huge_page_defrag(facts: MachineFacts) -> Iterator[Defect]:
    """Whether a page fault may wait for the kernel to move memory about."""
    if facts.memory.defrag == "always":
        yield warning(
            "transparent_hugepage/defrag is always",
            "any page fault may wait until memory is compacted: steps stall at random",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/defrag",
        )


def reserved_huge_pages(facts: MachineFacts) -> Iterator[Defect]:
    """Whether memory is set aside that nobody here uses."""
    total, reserved = facts.memory.total_bytes, facts.memory.huge_pages_bytes
    if total is None or reserved is None:
        yield silence("how much memory is reserved as huge pages")
    elif reserved > total * MAX_HUGE_RATIO:
        yield warning(
            f"{human_bytes(reserved)} is reserved as huge pages and unused",
            "neither the arena nor torch takes memory from there",
            "sysctl -w vm.nr_hugepages=0",
        )


def numa(facts: MachineFacts) -> Iterator[Defect]:
    """Whether the kernel leaves memory on several nodes where it is."""
    memory = facts.memory
    if memory.numa_nodes < 2:
        return
    if memory.zone_reclaim:
        yield warning(
            f"vm.zone_reclaim_mode is {memory.zone_reclaim} on {memory.numa_nodes} NUMA nodes",
            "the kernel frees pages of one node while another has free memory: captures stall",
            "sysctl -w vm.zone_reclaim_mode=0",
        )
    if memory.numa_balancing:
        yield warning(
            f"kernel.numa_balancing is {memory.numa_balancing} on {memory.numa_nodes} NUMA nodes",
            "the kernel unmaps pages to see who uses them: copies to and from GPUs stall",
            "sysctl -w kernel.numa_balancing=0",
        )


CHECKS = (
    DoctorCheck("memory-available", memory_available),
    DoctorCheck("memory-cgroup", memory_cgroup),
    DoctorCheck("swap", swap),
    DoctorCheck("overcommit", overcommit),
    DoctorCheck("huge-page-defrag", huge_page_defrag),
    DoctorCheck("reserved-huge-pages", reserved_huge_pages),
    DoctorCheck("numa", numa),
)
