"""NVML: NVIDIA's GPUs, as their driver's library tells of them.

Comes in: the module `pynvml` (the package nvidia-ml-py, an extra), or one that looks like it. Goes
out: a reading for each GPU that answers. What a model or a driver does not tell is None. One that
is lost gives no reading. Never changes a setting.

Canary: at least one GPU tells a temperature that a running chip can have.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from keepstep.edge.doctor.host import Host
from keepstep.edge.parts.probe import PartLook, Targets
from keepstep.model.parts import GpuReading

DRIVER = "/proc/driver/nvidia/version"
NOT_INSTALLED = "nvidia-ml-py is not installed (pip install 'keepstep[nvml]')"
PLAUSIBLE_C = range(5, 130)
# NVML's own numbers
GPU_SENSOR, SLOWDOWN_THRESHOLD = 0, 1
SM_CLOCK = 1
CORRECTED, UNCORRECTED, SINCE_LOAD = 0, 1, 0
MOST_LINKS = 18
LINK_COUNTERS = (0, 1, 2, 3)  # replays, recoveries, checksum errors of flits and of data


def probe_nvml(host: Host, targets: Targets, cursor: int) -> PartLook:
    """See `Probe`."""
    try:
        import pynvml
    except ImportError:
        return PartLook(blind=NOT_INSTALLED)
    return look(pynvml)


def look(nvml: ModuleType | Any) -> PartLook:
    """By that library."""
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        return PartLook(blind=f"NVML: {error}")
    found = [reading for index in range(count) if (reading := _read(nvml, index)) is not None]
    if not any(each.temperature_c in PLAUSIBLE_C for each in found):
        return PartLook(blind=f"no GPU of {count} tells a temperature")
    return PartLook(tuple(found))


def _read(nvml: Any, index: int) -> GpuReading | None:
    """None: it does not answer."""

    def ask(name: str, *arguments: Any) -> Any:
        """None where the GPU, the driver or the library has no such thing."""
        call: Callable[..., Any] | None = getattr(nvml, name, None)
        if call is None:
            return None
        try:
            return call(*arguments)
        except nvml.NVMLError:
            return None

    handle = ask("nvmlDeviceGetHandleByIndex", index)
    info = None if handle is None else ask("nvmlDeviceGetPciInfo", handle)
    if info is None:
        return None
    celsius = ask("nvmlDeviceGetTemperature", handle, GPU_SENSOR)
    slowdown = ask("nvmlDeviceGetTemperatureThreshold", handle, SLOWDOWN_THRESHOLD)
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if reasons is None:  # as drivers before 535 call it
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    used = ask("nvmlDeviceGetUtilizationRates", handle)
    rows = ask("nvmlDeviceGetRemappedRows", handle)
    links = [link for link in range(MOST_LINKS) if ask("nvmlDeviceGetNvLinkState", handle, link)]
    errors = [
        ask("nvmlDeviceGetNvLinkErrorCounter", handle, link, counter)
        for link in links
        for counter in LINK_COUNTERS
    ]
    if celsius is None and reasons is None:
        return None  # lost: nothing of it can be read any more
    return GpuReading(
        bus=_bus(info.busId),
        name=_text(ask("nvmlDeviceGetName", handle) or ""),
        temperature_c=celsius,
        margin_c=None if celsius is None or slowdown is None else slowdown - celsius,
        reasons=reasons,
        clock_mhz=ask("nvmlDeviceGetClockInfo", handle, SM_CLOCK),
        used_ratio=None if used is None else used.gpu / 100,
        uncorrected=ask("nvmlDeviceGetTotalEccErrors", handle, UNCORRECTED, SINCE_LOAD),
        corrected=ask("nvmlDeviceGetTotalEccErrors", handle, CORRECTED, SINCE_LOAD),
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
        links=len(links) or None,
        link_errors=sum(each for each in errors if each is not None) if links else None,
    )


def _bus(address: str | bytes) -> str:
    """`00000000:3B:00.0` as `0000:3b:00`."""
    domain, _, rest = _text(address).lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}"


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
