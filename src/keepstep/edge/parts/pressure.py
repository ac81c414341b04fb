"""Pressure: for how long processes had to wait for memory and for the quota of their control group,
and how often cores were slowed down for their heat, as the kernel counts.

Canary: the machine's own memory, which is never none.
"""

from __future__ import annotations

from keepstep.edge.doctor.host import Host, table_of, whole
from keepstep.edge.parts.probe import PartLook, Targets
from keepstep.edge.probes import cgroups, hindrance
from keepstep.model.parts import PressureReading

CORES = "/sys/devices/system/cpu"
HEAT = "thermal_throttle/core_throttle_count"


def probe_pressure(host: Host, targets: Targets, cursor: int) -> PartLook:
    """See `Probe`."""
    memory = table_of(host.text("/proc/meminfo"))
    total, available = (_kib(memory.get(name)) for name in ("MemTotal", "MemAvailable"))
    if not total:
        return PartLook(blind="/proc/meminfo tells of no memory")
    quota = cgroups.find_file(targets.pid, "cpu", in_v1="cpu.stat", in_v2="cpu.stat")
    pressure = cgroups.find_file(
        targets.pid, "memory", in_v1="memory.pressure", in_v2="memory.pressure"
    )
    heats = [host.number(f"{CORES}/{name}/{HEAT}") for name in host.names(CORES)]
    counted = [heat for heat in heats if heat is not None]
    reading = PressureReading(
        stall_ns=hindrance.read_stall_ns(pressure or host.place(hindrance.MACHINE_PRESSURE)),
        available_ratio=None if available is None else available / total,
        periods=None if quota is None else cgroups.read_field(quota, "nr_periods"),
        throttled=None if quota is None else cgroups.read_field(quota, "nr_throttled"),
        heat=sum(counted) if counted else None,
    )
    return PartLook((reading,))


def _kib(text: str | None) -> int | None:
    return None if text is None else whole(text.partition(" ")[0])
