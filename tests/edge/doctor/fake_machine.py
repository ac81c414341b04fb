"""A machine laid out as files below a directory, without any defect until a test plants one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from keepstep.core.doctor.examination import Examination, examine
from keepstep.edge.doctor.host import Host, Space
from keepstep.edge.doctor.machine import read_machine
from keepstep.model.machine_facts import MachineFacts
from keepstep.model.units import GIB

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max file size             unlimited            unlimited            bytes
Max core file size        0                    unlimited            bytes
Max processes             96365                96365                processes
Max open files            65536                524288               files
Max locked memory         unlimited            unlimited            bytes
Max address space         unlimited            unlimited            bytes
"""
MEMINFO = """\
MemTotal:       67108864 kB
MemFree:        33554432 kB
MemAvailable:   50331648 kB
SwapTotal:       8388608 kB
SwapFree:        8388608 kB
CommitLimit:    41943040 kB
Committed_AS:    2097152 kB
HugePages_Total:       0
HugePages_Free:        0
Hugepagesize:       2048 kB
"""
MOUNTS = """\
1 0 8:1 / / rw,relatime - ext4 /dev/sda1 rw
2 1 0:5 / /dev/shm rw,nosuid,nodev,noexec - tmpfs shm rw,size=33554432k
3 1 8:2 / /mnt/my\\040store rw - ext4 /dev/sdb1 rw
"""
STATUS = """\
Name:\tkeepstep
SigBlk:\t0000000000000000
SigIgn:\t0000000001001000
CapEff:\t0000000000000000
"""
MORE_STAT = " 1 1 0 -1 4194560 1 0 0 0 11 7 0 0 20 0 1 0 4711\n"  # behind the parent
SMI = (
    "0, Enabled, Default, 4, 81920, 0, Not Active, No, No\n"
    "1, Enabled, Default, 4, 81920, 0, Not Active, No, No\n"
)
FILES = {
    "/proc/meminfo": MEMINFO,
    "/proc/loadavg": "0.50 0.40 0.30 2/700 4711\n",
    "/proc/self/mountinfo": MOUNTS,
    "/proc/self/limits": LIMITS,
    "/proc/self/status": STATUS,
    "/proc/self/cgroup": "0::/job\n",
    "/proc/self/autogroup": "/autogroup-1 nice 0\n",
    "/proc/1/comm": "systemd\n",
    "/proc/1/stat": f"1 (systemd) S 0{MORE_STAT}",
    "/proc/1/cmdline": "/sbin/init\0",
    "/proc/sys/kernel/hostname": "node1\n",
    "/proc/sys/kernel/pid_max": "4194304\n",
    "/proc/sys/kernel/threads-max": "500000\n",
    "/proc/sys/kernel/sched_autogroup_enabled": "1\n",
    "/proc/sys/kernel/yama/ptrace_scope": "0\n",
    "/proc/sys/kernel/numa_balancing": "0\n",
    "/proc/sys/vm/overcommit_memory": "0\n",
    "/proc/sys/vm/zone_reclaim_mode": "0\n",
    "/proc/sys/net/core/somaxconn": "4096\n",
    "/proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n",
    "/proc/sys/net/netfilter/nf_conntrack_count": "10\n",
    "/proc/sys/net/netfilter/nf_conntrack_max": "262144\n",
    "/proc/driver/nvidia/version": (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  590.86.15  Thu Jan 23\n"
    ),
    "/proc/driver/nvidia/gpus/0000:18:00.0/information": "Model: any\n",
    "/proc/driver/nvidia/gpus/0000:2a:00.0/information": "Model: any\n",
    "/dev/nvidiactl": "",
    "/dev/nvidia-uvm": "",
    "/dev/nvidia0": "",
    "/sys/kernel/mm/transparent_hugepage/defrag": "always defer [madvise] never\n",
    "/sys/devices/system/node/node0/cpulist": "0-3\n",
    "/sys/devices/system/node/node1/cpulist": "4-7\n",
    "/sys/devices/system/clocksource/clocksource0/current_clocksource": "tsc\n",
    "/sys/devices/system/clocksource/clocksource0/available_clocksource": "tsc hpet acpi_pm\n",
    "/sys/fs/cgroup/job/memory.max": "max\n",
    "/sys/fs/cgroup/job/memory.current": "1073741824\n",
    "/sys/fs/cgroup/job/pids.max": "max\n",
    "/sys/fs/cgroup/job/pids.current": "40\n",
    "/sys/fs/cgroup/job/cpu.max": "max 100000\n",
    "/sys/fs/cgroup/job/cpu.stat": "usage_usec 1\nnr_periods 0\nnr_throttled 0\n",
    "/sys/class/net/bonding_masters": "",
}
INTERFACES = {"lo": ("0x9", "unknown", 65536, -1), "eth0": ("0x1003", "up", 1500, 100_000)}


@dataclass
class FakeMachine:
    """`spaces`: of file systems by path; what is not named has plenty. `names`: what resolves."""

    root: Path
    spaces: dict[str, Space] = field(default_factory=dict)
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    calls: dict[str, Any] = field(default_factory=dict)
    smi: str | OSError = SMI

    def __post_init__(self) -> None:
        for path, text in FILES.items():
            self.write(path, text)
        for name, (flags, state, mtu, speed) in INTERFACES.items():
            self.interface(name, flags, state, mtu, speed)
        for number, vendor in enumerate(("0x10de", "0x10de", "0x8086")):
            self.write(f"/sys/bus/pci/devices/{number}/vendor", f"{vendor}\n")
            self.write(f"/sys/bus/pci/devices/{number}/class", "0x030200\n")
        for path, mode in (("/dev/shm", 0o1777), ("/tmp", 0o1777), ("/home/me", 0o755)):
            (self.root / path[1:]).mkdir(parents=True)
            (self.root / path[1:]).chmod(mode)
        tool = self.root / "bin" / "nvidia-smi"
        tool.parent.mkdir()
        tool.touch(mode=0o755)
        self.names = {"node1": ("10.0.0.7",), "localhost": ("127.0.0.1", "::1")}
        self.environ = {"HOME": "/home/me", "TMPDIR": "/tmp", "PATH": str(tool.parent)}

    def write(self, path: str, text: str) -> Path:
        """A file of the machine."""
        file = self.root / path[1:]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def change(self, path: str, old: str, new: str) -> None:
        """Part of a file of the machine."""
        text = (self.root / path[1:]).read_text()
        assert old in text
        self.write(path, text.replace(old, new))

    def interface(self, name: str, flags: str, state: str, mtu: int, speed: int) -> None:
        below = f"/sys/class/net/{name}"
        told = {"flags": flags, "operstate": state, "mtu": mtu, "speed": speed}
        told |= {"statistics/rx_packets": 10**6, "statistics/rx_errors": 0}
        for fact, value in told.items():
            self.write(f"{below}/{fact}", f"{value}\n")

    def process(self, pid: int, state: str = "S", parent: int = 1, cmdline: str = "x\0") -> None:
        self.write(f"/proc/{pid}/stat", f"{pid} (a (name) S 9) {state} {parent}{MORE_STAT}")
        self.write(f"/proc/{pid}/cmdline", cmdline)
        (self.root / f"proc/{pid}/root").symlink_to(self.root)

    @property
    def host(self) -> Host:
        return replace(
            Host(
                root=self.root,
                wait_s=60.0,
                now_s=lambda: 0.0,
                pause=lambda seconds: None,
                space=self._space,
                addresses=lambda name: self.names.get(name, ()),
                clock_synchronised=lambda: True,
                pidfd_refusal=lambda: "",
                output=self._output,
                cpus=lambda: 8,
            ),
            **self.calls,
        )

    def facts(self, nodes: int = 1, store: str | None = None) -> MachineFacts:
        return read_machine(self.host, self.environ, nodes, store)

    def examine(self, nodes: int = 1, store: str | None = None) -> Examination:
        facts = self.facts(nodes, store)
        # of the machine that the tests run on
        software = replace(facts.software, kernel="6.8.0", torch="2.9.0", torch_cuda="12.8")
        return examine(replace(facts, software=software))

    def _space(self, path: Path) -> Space:
        inside = "/" + str(path.relative_to(self.root))
        return self.spaces.get(inside, Space(32 * GIB, 30 * GIB, 10**6))

    def _output(self, command: Sequence[str], within_s: float) -> str:
        if isinstance(self.smi, OSError):
            raise self.smi
        return self.smi
