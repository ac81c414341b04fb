"""GPUs: NVIDIA's devices as PCI, the kernel module and `nvidia-smi` show them.

Comes in: /sys, /proc and one call of the tool, killed when it takes too long. Goes out: GpuFacts.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
from collections.abc import Mapping

from keepstep.edge.doctor.host import Host, whole
from keepstep.model.machine_facts import GpuFacts, GpuHealth
from keepstep.model.units import MIB

TOOL = "nvidia-smi"
PCI = "/sys/bus/pci/devices"
DRIVER = "/proc/driver/nvidia"
NVIDIA = "0x10de"
DISPLAY_CLASSES = ("0x0300", "0x0302")  # of PCI: with and without a screen
DEVICE_FILES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0")
FIELDS = (
    "index",
    "persistence_mode",
    "compute_mode",
    "memory.used",
    "memory.total",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_event_reasons.hw_thermal_slowdown",
    "remapped_rows.pending",
    "remapped_rows.failure",
)
OLD_NAMES = {
    "clocks_event_reasons.hw_thermal_slowdown": "clocks_throttle_reasons.hw_thermal_slowdown"
}
YES = {"Enabled": True, "Active": True, "Yes": True, "1": True}
NO = {"Disabled": False, "Not Active": False, "No": False, "0": False}


def read_gpus(host: Host, environ: Mapping[str, str]) -> GpuFacts:
    """Waits for the tool, up to `wait_s`, where there is a driver."""
    version = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", host.text(f"{DRIVER}/version") or "")
    tool = shutil.which(TOOL, path=environ.get("PATH")) if version else None
    said = _ask(host, tool) if tool else ""
    is_error = isinstance(said, OSError)
    refused = [path for path in DEVICE_FILES if not host.may(path, os.R_OK | os.W_OK)]
    return GpuFacts(
        on_bus=_on_bus(host),
        driver=version[1] if version else None,
        of_driver=len(host.names(f"{DRIVER}/gpus")),
        refused_files=tuple(refused) if version else (),
        has_tool=tool is not None,
        tool_error=str(said) if is_error else "",
        gpus=() if isinstance(said, OSError) else tuple(parse_table(said)),
    )


def parse_table(text: str) -> list[GpuHealth]:
    """The lines of the tool's table."""
    gpus = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != len(FIELDS) or not row[0].isdecimal():
            continue
        cells = [cell.strip() for cell in row]
        used, total = whole(cells[3]), whole(cells[4])
        gpus.append(
            GpuHealth(
                index=int(cells[0]),
                persistence=_flag(cells[1]),
                compute_mode=cells[2] if cells[2][:1].isalpha() else None,
                used_bytes=None if used is None else used * MIB,
                total_bytes=None if total is None else total * MIB,
                uncorrected_errors=whole(cells[5]),
                is_hot=_flag(cells[6]),
                remap_pending=_flag(cells[7]),
                remap_failed=_flag(cells[8]),
            )
        )
    return gpus


def _ask(host: Host, tool: str) -> str | OSError:
    """The tool's table, or why there is none. Drivers before 535 have another name for a field."""
    try:
        try:
            return host.output(_command(tool, FIELDS), host.wait_s)
        except OSError as error:
            if "not a valid field" not in str(error):
                raise
            old = tuple(OLD_NAMES.get(field, field) for field in FIELDS)
            return host.output(_command(tool, old), host.wait_s)
    except OSError as error:  # a TimeoutError is one
        return error


def _command(tool: str, fields: tuple[str, ...]) -> list[str]:
    return [tool, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]


def _on_bus(host: Host) -> int:
    return sum(
        host.text(f"{PCI}/{name}/vendor") == NVIDIA
        and (host.text(f"{PCI}/{name}/class") or "").startswith(DISPLAY_CLASSES)
        for name in host.names(PCI)
    )


def _flag(text: str) -> bool | None:
    return YES.get(text, NO.get(text))
