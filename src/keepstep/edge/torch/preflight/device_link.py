"""Device link: how fast bytes go to the device and back, whether they are the same, and whether its
products are, bit for bit.

It has run on one H200 and one H100; where else it has not, `docs/gpu.md` says.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from keepstep.model.units import S_NS


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """Bytes a second to and from pinned memory, the slowest device's; products in floating-point
    operations a second. `wrong`: what is wrong, empty: nothing."""

    to_device: tuple[int, ...]
    from_device: tuple[int, ...]
    products: tuple[int, ...]
    wrong: str


def device_count() -> int:
    """How many devices torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def measure_devices(size_bytes: int, samples: int, size: int) -> DeviceFigures:
    """Every device in turn. size: of the matrices. Raises RuntimeError, as torch does."""
    measured = [_measure(index, size_bytes, samples, size) for index in range(device_count())]
    return DeviceFigures(
        _slowest([each.to_device for each in measured]),
        _slowest([each.from_device for each in measured]),
        _slowest([each.products for each in measured]),
        next((each.wrong for each in measured if each.wrong), ""),
    )


def _measure(index: int, size_bytes: int, samples: int, size: int) -> DeviceFigures:
    device = torch.device("cuda", index)
    host = torch.randint(256, (size_bytes,), dtype=torch.uint8).pin_memory()
    there = torch.empty_like(host, device=device)
    landed = torch.empty_like(host).pin_memory()
    to = [_speed(device, size_bytes, lambda: there.copy_(host)) for _ in range(samples)]
    back = [_speed(device, size_bytes, lambda: landed.copy_(there)) for _ in range(samples)]
    wrong = "" if torch.equal(host, landed) else f"device {index} gave back other bytes"
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    reference, speeds = left @ right, []
    for _ in range(samples):
        torch.cuda.synchronize(device)
        begun_ns = time.perf_counter_ns()
        product = left @ right
        torch.cuda.synchronize(device)
        speeds.append(2 * size**3 * S_NS // max(1, time.perf_counter_ns() - begun_ns))
        if differing(reference, product):
            wrong = wrong or f"device {index} gave two results for one matrix product"
    return DeviceFigures(tuple(to), tuple(back), tuple(speeds), wrong)


def differing(one: Any, other: Any) -> int:
    """How many elements of two float32 tensors differ in their bits and are not both NaN."""
    unequal = one.view(torch.int32) != other.view(torch.int32)
    return int((unequal & ~(one.isnan() & other.isnan())).sum())


def _speed(device: torch.device, size_bytes: int, copy: Any) -> int:
    torch.cuda.synchronize(device)
    begun_ns = time.perf_counter_ns()
    copy()
    torch.cuda.synchronize(device)
    return size_bytes * S_NS // max(1, time.perf_counter_ns() - begun_ns)


def _slowest(of_devices: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The samples of the device with the lowest median."""
    return min(of_devices, key=lambda values: sorted(values)[len(values) // 2], default=())
