"""Machine facts: what `keepstep doctor` has read of a machine, before anybody judges it.

Values only. `edge/doctor` reads them, `core/doctor` judges them. None: it could not be read.
Invariant: nothing here is a secret, nor tells one; of the job's secret there is only its strength.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

UNLIMITED = 1 << 63  # of a limit that is none


@dataclass(frozen=True, slots=True)
class ProcessLimit:
    """A resource limit of this process (getrlimit(2)), UNLIMITED where there is none. `hard`: what
    it may be raised to."""

    soft: int
    hard: int


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """A directory that is asked for. `refusal`: why nothing can be written there, empty: it can.
    `nearest`: the path itself, or where it is missing, its nearest ancestor that is there, to which
    the rest refers. `mode`: permission bits, with the sticky one. `options`: of the mount."""

    path: str
    nearest: str
    refusal: str
    filesystem: str | None
    options: frozenset[str]
    total_bytes: int | None
    free_bytes: int | None
    free_files: int | None
    owner: int | None
    mode: int | None

    @property
    def is_there(self) -> bool:
        """Whether the directory itself exists."""
        return self.path == self.nearest


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Of /proc/meminfo and /proc/sys/vm. `huge_pages_bytes`: reserved as huge pages and unused;
    `overcommit`: vm.overcommit_memory; `defrag`: what a page fault does where no huge page is
    free."""

    total_bytes: int | None
    available_bytes: int | None
    swapped_bytes: int | None
    commit_limit_bytes: int | None
    committed_bytes: int | None
    huge_pages_bytes: int | None
    overcommit: int | None
    defrag: str | None
    numa_nodes: int
    zone_reclaim: int | None
    numa_balancing: int | None


@dataclass(frozen=True, slots=True)
class CgroupFacts:
    """Limits of this process's control group and those above it, the tightest. `cpu_cores`: how
    many cores' time it gets, None: as much as there is. `throttled_ratio`: of its periods, those in
    which it had to wait."""

    memory_limit_bytes: int
    memory_used_bytes: int | None
    pids_limit: int
    pids_used: int | None
    cpu_cores: float | None
    throttled_ratio: float


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """Resource limits that this process hands down to all it starts."""

    open_files: ProcessLimit | None
    processes: ProcessLimit | None
    locked_bytes: ProcessLimit | None
    file_bytes: ProcessLimit | None
    address_bytes: ProcessLimit | None
    cpu_s: ProcessLimit | None
    core_bytes: ProcessLimit | None


@dataclass(frozen=True, slots=True)
class KeeperTrace:
    """A keeper's process of this user. `has_memory`: whether its job's directory is there."""

    pid: int
    job: str
    has_memory: bool


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What runs here, and what this process may do. `ignored_signals` and `blocked_signals` are
    handed down to all it starts. `pidfd_refusal`: why none can be opened, empty: they can."""

    is_root: bool
    cpus: int
    load: float | None
    tasks: int | None
    pid_max: int | None
    threads_max: int | None
    zombies: int
    zombies_of_init: int
    init: str | None
    ignored_signals: frozenset[str]
    blocked_signals: frozenset[str]
    has_autogroup: bool
    may_nice_session: bool
    ptrace_scope: int | None
    may_trace: bool
    pidfd_refusal: str
    keepers: tuple[KeeperTrace, ...]


@dataclass(frozen=True, slots=True)
class ClockFacts:
    """Clocks. `is_synchronised`: as the kernel was told by whoever disciplines it. `newest`: a file
    and when it was written, of those that keepstep's jobs and others wrote last."""

    is_synchronised: bool | None
    source: str | None
    sources: tuple[str, ...]
    wall_s: float
    newest: tuple[str, float] | None


@dataclass(frozen=True, slots=True)
class NetworkInterface:
    """One of /sys/class/net. `mbits`: its speed, None: it has none to tell."""

    name: str
    is_up: bool
    is_loopback: bool
    mtu: int
    mbits: int | None
    packets: int
    errors: int


@dataclass(frozen=True, slots=True)
class ResolvedName:
    """What a name leads to: addresses, none: nowhere. `took_s`: None: no answer came in time."""

    name: str
    addresses: tuple[str, ...]
    took_s: float | None


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """Names, interfaces, ports. `ports`: from which to which outgoing connections take theirs."""

    host: ResolvedName
    localhost: ResolvedName
    interfaces: tuple[NetworkInterface, ...] | None
    ports: tuple[int, int] | None
    backlog: int | None
    tracked: int | None
    tracked_max: int | None
    rdma_devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """What the driver's tool tells of one GPU. None: it does not say."""

    index: int
    persistence: bool | None
    compute_mode: str | None
    used_bytes: int | None
    total_bytes: int | None
    uncorrected_errors: int | None
    remap_pending: bool | None
    remap_failed: bool | None
    is_hot: bool | None


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """NVIDIA's devices. `on_bus`: those that PCI shows; `driver`: the kernel module's version;
    `of_driver`: those that the module has. `refused_files`: device files that are missing or that
    this user may not open. `tool_error`: why `nvidia-smi` said nothing; empty: it did, or nobody
    asked it."""

    on_bus: int
    driver: str | None
    of_driver: int
    refused_files: tuple[str, ...]
    has_tool: bool
    tool_error: str
    gpus: tuple[GpuHealth, ...]


@dataclass(frozen=True, slots=True)
class SoftwareFacts:
    """Versions. `torch_cuda`: of the CUDA that torch was built for, empty: for none, None: it
    cannot be read. `packages`: of those that options need, the ones that are there.
    `has_user_name`: whether Python can tell who runs it."""

    system: str
    kernel: str
    python: tuple[int, int]
    is_64_bit: bool
    asserts: bool
    torch: str | None
    torch_cuda: str | None
    packages: frozenset[str]
    has_user_name: bool


@dataclass(frozen=True, slots=True)
class LeftMemory:
    """Memory of a job without a living process, in bytes."""

    job: str
    bytes: int


@dataclass(frozen=True, slots=True)
class WantedFacts:
    """What is asked of this machine. `problems`: what is wrong with the options, a sentence each.
    `internal`: variables that only keepstep's own processes are to have. `secret_characters`: how
    many different ones it has, None: there is no secret. `environ`: what other libraries' variables
    say, of those in `edge/doctor/settings.py`."""

    nodes: int
    user: int
    problems: tuple[str, ...]
    internal: tuple[str, ...]
    user_dir_refusal: str
    store: str | None
    store_package: str | None
    redundancy: str
    metrics_port: int | None
    block_mac: str
    encrypt: bool
    secret_characters: int | None
    left: tuple[LeftMemory, ...]
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """All of it. `store`: the store's directory, None: there is none, or it is no directory."""

    arena: DirectoryFacts
    state: DirectoryFacts
    temporary: DirectoryFacts
    store: DirectoryFacts | None
    memory: MemoryFacts
    cgroup: CgroupFacts
    limits: LimitFacts
    processes: ProcessFacts
    clock: ClockFacts
    network: NetworkFacts
    gpus: GpuFacts
    software: SoftwareFacts
    wanted: WantedFacts
