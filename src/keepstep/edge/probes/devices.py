"""Devices: which GPU is which rank's, as far as that can be known from outside of the rank.

By the convention that all launchers share: rank r of a node uses the r-th device that its processes
see. NVIDIA's driver lists those of the machine in /proc; without one, a rank has no device of its
own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/gpus")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(environ: Mapping[str, str], driver: Path = DRIVER) -> list[str]:
    """Names of the devices in the order in which ranks take them: indices, or what the variable
    says."""
    try:
        count = len(os.listdir(driver))
    except OSError:
        return []
    if VISIBLE not in environ:
        return [str(number) for number in range(count)]
    return [name.strip() for name in environ[VISIBLE].split(",") if name.strip()]
