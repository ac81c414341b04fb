"""Limits: of files, processes, sizes and time, that this process hands down to a job.

Comes in: resource limits and control groups. Goes out: defects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from keepstep.core.doctor.defect import Defect, DoctorCheck, broken, silence, warning
from keepstep.model.machine_facts import UNLIMITED, MachineFacts, ProcessLimit
from keepstep.model.units import GIB, human_bytes

FEWEST_FILES = 256  # a keeper's and an agent's sockets, slots and pidfds
MIN_FILES = 4096
WANTED = 65536
FEWEST_PROCESSES = 256  # threads count: torch starts one a core, in every rank
MIN_PROCESSES = 4096
MIN_PIDS_LEFT = 1024
FEWEST_PIDS_LEFT = 128
MAX_PIDS_RATIO = 0.8
MAX_CORE_BYTES = GIB
MAX_THROTTLED_RATIO = 0.05


def open_files(facts: MachineFacts) -> Iterator[Defect]:
    """Whether a rank can open what it needs."""
    limit = facts.limits.open_files
    if limit is None:
        yield silence("the limit of open files")
    elif limit.soft < MIN_FILES:
        grade = broken if limit.soft < FEWEST_FILES else warning
        yield grade(
            f"a process may have {limit.soft} files open",
            "slots, connections and DataLoader's workers take one for each tensor and peer",
            _raise_limit("n", "nofile", limit, MIN_FILES),
        )


def processes(facts: MachineFacts) -> Iterator[Defect]:
    """Whether this user may start the job's threads."""
    limit = facts.limits.processes
    if limit is None:
        yield silence("the limit of processes")
    elif limit.soft < MIN_PROCESSES and not facts.processes.is_root:  # root has none
        grade = broken if limit.soft < FEWEST_PROCESSES else warning
        yield grade(
            f"this user may have {limit.soft} processes and threads",
            "torch starts a thread a core in every rank, and DataLoader its workers",
            _raise_limit("u", "nproc", limit, MIN_PROCESSES),
        )


def locked_memory(facts: MachineFacts) -> Iterator[Defect]:
    """Whether RDMA can register memory."""
    devices = facts.network.rdma_devices
    if devices:
        yield from _unless_unlimited(
            facts.limits.locked_bytes,
            "locked memory",
            lambda most: (
                f"a process may lock {human_bytes(most)}, and there is {', '.join(devices)}"
            ),
            "NCCL registers its buffers with RDMA devices, which locks them, and fails",
            "ulimit -l unlimited; for good: memlock unlimited in /etc/security/limits.conf, "
            "LimitMEMLOCK=infinity in the service, docker run --ulimit memlock=-1",
        )


def file_size(facts: MachineFacts) -> Iterator[Defect]:
    """Whether slots and checkpoints of any size can be made."""
    return _unless_unlimited(
        facts.limits.file_bytes,
        "file sizes",
        lambda most: f"a file may have {human_bytes(most)}",
        "a slot is one file of a rank's whole state, and so are its checkpoints",
        "ulimit -f unlimited",
    )


def address_space(facts: MachineFacts) -> Iterator[Defect]:
    """Whether address space is limited."""
    return _unless_unlimited(
        facts.limits.address_bytes,
        "address space",
        lambda most: f"a process may map {human_bytes(most)}",
        "CUDA and slots map far more than they use, and fail",
        "ulimit -v unlimited",
    )


def processor_time(facts: MachineFacts) -> Iterator[Defect]:
    """Whether the kernel kills processes that compute for long."""
    return _unless_unlimited(
        facts.limits.cpu_s,
        "processor time",
        lambda most: f"a process may compute for {most} s",
        "the kernel ends ranks and keepers then, and again after every restart",
        "ulimit -t unlimited",
    )


def _unless_unlimited(
    limit: ProcessLimit | None, of: str, found: Callable[[int], str], why: str, fix: str
) -> Iterator[Defect]:
    """Any limit of this is too low. `found`: what there is, in words."""
    if limit is None:
        yield silence(f"the limit of {of}")
    elif limit.soft != UNLIMITED:
        yield broken(found(limit.soft), why, fix)


def core_dumps(facts: MachineFacts) -> Iterator[Defect]:
    """Whether a crash waits for its memory to be written."""
    limit, total = facts.limits.core_bytes, facts.memory.total_bytes
    if limit is None:
        yield silence("the limit of core dumps")
    elif limit.soft > MAX_CORE_BYTES:
        size = "any size" if limit.soft == UNLIMITED else f"up to {human_bytes(limit.soft)}"
        ram = "" if total is None else f" of up to {human_bytes(total)}"
        yield warning(
            f"core dumps may have {size}",
            f"a rank that crashes is dead only when its memory{ram} is written: recovery waits",
            "ulimit -c 0",
        )


def cgroup_pids(facts: MachineFacts) -> Iterator[Defect]:
    """Whether the container may start the job's threads."""
    limit, used = facts.cgroup.pids_limit, facts.cgroup.pids_used
    if limit == UNLIMITED:
        return
    if used is None:
        yield silence("how many processes the control group has")
    elif limit - used < MIN_PIDS_LEFT:
        grade = broken if limit - used < FEWEST_PIDS_LEFT else warning
        yield grade(
            f"the control group has {used} of {limit} processes and threads",
            "torch starts a thread a core in every rank, and DataLoader its workers",
            "docker run --pids-limit=-1, podPidsLimit of the kubelet, TasksMax=infinity of the "
            "service",
        )


def kernel_tasks(facts: MachineFacts) -> Iterator[Defect]:
    """Whether the machine has process numbers left."""
    of = facts.processes
    if of.tasks is None or of.pid_max is None or of.threads_max is None:
        yield silence("how many processes and threads there are and may be")
        return
    most = min(of.pid_max, of.threads_max)
    if of.tasks > most * MAX_PIDS_RATIO:
        yield warning(
            f"the machine has {of.tasks} of at most {most} processes and threads",
            "nothing can be started when they run out: no rank, no keeper",
            "sysctl -w kernel.pid_max=4194304 kernel.threads-max=4194304",
        )


def cpu_quota(facts: MachineFacts) -> Iterator[Defect]:
    """Whether the container's share of the processors is the number of cores that it sees."""
    quota, cpus = facts.cgroup.cpu_cores, facts.processes.cpus
    fix = (
        "give the container whole cores (docker run --cpuset-cpus instead of --cpus, Kubernetes' "
        f"static CPU manager), or set OMP_NUM_THREADS={max(1, int(quota or 1))}"
    )
    if quota is not None and quota < cpus:
        yield warning(
            f"the control group gets {quota:g} cores' time on {cpus} cores",
            "torch starts a thread for each core it sees; when the share is used up all stop for "
            "up to 0.1 s, heartbeats too",
            fix,
        )
    elif facts.cgroup.throttled_ratio > MAX_THROTTLED_RATIO:
        yield warning(
            f"the control group was stopped in {facts.cgroup.throttled_ratio:.0%} of its periods",
            "steps and heartbeats stop for up to 0.1 s each time",
            fix,
        )


def _raise_limit(letter: str, item: str, limit: ProcessLimit, enough: int) -> str:
    """As far as this process may; where that is not `enough`, by root."""
    fix = f"ulimit -{letter} {min(WANTED, limit.hard)}"
    if limit.hard < enough:
        fix = f"ulimit -{letter} {WANTED} as root"
    return (
        f"{fix}; for good: * - {item} {WANTED} in /etc/security/limits.conf, docker run --ulimit "
        f"{item}={WANTED}"
    )


CHECKS = (
    DoctorCheck("open-files", open_files),
    DoctorCheck("processes", processes),
    DoctorCheck("locked-memory", locked_memory),
    DoctorCheck("file-size", file_size),
    DoctorCheck("address-space", address_space),
    DoctorCheck("processor-time", processor_time),
    DoctorCheck("core-dumps", core_dumps),
    DoctorCheck("cgroup-pids", cgroup_pids),
    DoctorCheck("kernel-tasks", kernel_tasks),
    DoctorCheck("cpu-quota", cpu_quota),
)
