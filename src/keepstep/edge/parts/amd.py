"""AMD: AMD's GPUs, as their kernel driver shows them in /sys; what `amd-smi` reads, too.

Goes out: a reading for each device of the driver amdgpu. Why a clock is what it is, and links, are
not read.

Canary: at least one tells a temperature that a running chip can have.
"""

from __future__ import annotations

from keepstep.edge.doctor.host import Host, table_of, whole
from keepstep.edge.parts.probe import PartLook, Targets
from keepstep.model.parts import GpuReading

DRM = "/sys/class/drm"
DRIVER = "/sys/module/amdgpu"
AMD = "0x1002"
PLAUSIBLE_MC = range(5_000, 130_000)  # millidegrees


def probe_amd(host: Host, targets: Targets, cursor: int) -> PartLook:
    """See `Probe`."""
    cards = [f"{DRM}/{name}/device" for name in host.names(DRM) if name[4:].isdecimal()]
    found = [_read(host, card) for card in cards if host.text(f"{card}/vendor") == AMD]
    if not any(each.temperature_c is not None for each in found):
        return PartLook(blind=f"no GPU of {len(found)} tells a temperature")
    return PartLook(tuple(found))


def _read(host: Host, card: str) -> GpuReading:
    sensors = [f"{card}/hwmon/{name}" for name in host.names(f"{card}/hwmon")]
    milli = next((n for s in sensors if (n := host.number(f"{s}/temp1_input")) is not None), None)
    limit = next((n for s in sensors if (n := host.number(f"{s}/temp1_crit")) is not None), None)
    if milli not in PLAUSIBLE_MC:
        milli = None
    used = host.number(f"{card}/gpu_busy_percent")
    errors = table_of(host.text(f"{card}/ras/umc_err_count"))
    slot = next(
        (
            line.partition("=")[2]
            for line in (host.text(f"{card}/uevent") or "").splitlines()
            if line.startswith("PCI_SLOT_NAME=")
        ),
        card,
    )
    return GpuReading(
        bus=slot.lower().partition(".")[0],
        temperature_c=None if milli is None else milli // 1000,
        margin_c=None if milli is None or limit is None else (limit - milli) // 1000,
        clock_mhz=_clock(host.text(f"{card}/pp_dpm_sclk")),
        used_ratio=None if used is None else used / 100,
        uncorrected=whole(errors.get("ue")),
        corrected=whole(errors.get("ce")),
    )


def _clock(table: str | None) -> int | None:
    """Of lines such as `1: 1700Mhz *`, the one with the star."""
    for line in (table or "").splitlines():
        if line.rstrip().endswith("*"):
            return whole(line.partition(":")[2].strip().lower().partition("mhz")[0])
    return None
