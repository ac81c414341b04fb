"""A GPU explains a slow rank only where it is that rank's, is slowed down, and others' are not."""

from __future__ import annotations

import pytest

from keepstep.core.detection.slowed_part import slowed_cpu, slowed_gpu, throttled_device
from keepstep.core.parts.gpus import Gpus
from keepstep.model.parts import GpuReading, PartHealth
from keepstep.model.units import S_NS


def gpus(*slow: bool) -> tuple[PartHealth, ...]:
    """One for each, by the order of their addresses, told in another."""
    parts = [PartHealth(f"gpu 0000:{n:02x}", "bad", "why", slows=s) for n, s in enumerate(slow)]
    return (PartHealth("nic eth0", "bad"), *reversed(parts))


@pytest.mark.parametrize(
    ("place", "devices", "slow", "found"),
    [
        (0, ("0", "1"), (True, False), "gpu 0000:00"),
        (1, ("0", "1"), (True, False), None),
        (1, ("1", "0"), (True, False), "gpu 0000:00"),
        (0, ("0", "1"), (True, True), None),  # that of its peer as well
        (0, ("0", "7"), (True, True), "gpu 0000:00"),  # of its peer's nothing is known
        (0, ("GPU-8a5e", "1"), (True, False), None),
        (0, ("GPU-8a5e",), (True,), "gpu 0000:00"),  # there is no other
        (0, (), (True, False), None),
        (0, ("2",), (True, False), None),
        (0, ("9" * 9,), (True, False), None),
        (0, ("0",), (), None),
    ],
)
def test_the_gpu_of_a_rank(
    place: int, devices: tuple[str, ...], slow: tuple[bool, ...], found: str | None
) -> None:
    gpu = slowed_gpu(place, len(devices) or 1, devices, gpus(*slow))
    assert (None if gpu is None else gpu.part) == found


@pytest.mark.parametrize(
    ("reading", "says"),
    [
        (GpuReading("0", temperature_c=92, margin_c=0, reasons=0x40), "by its heat in 6 of 6"),
        (GpuReading("0", temperature_c=70, margin_c=20, reasons=0x80), "by the power brake in 6"),
        (GpuReading("0", temperature_c=89, margin_c=2, reasons=0), "2 degrees are left"),
        (GpuReading("0", temperature_c=70, margin_c=20, reasons=0x04), ""),  # the usual power cap
        (GpuReading("0", temperature_c=70, margin_c=20, uncorrected=None, reasons=0x01), ""),
    ],
)
def test_what_nvml_reads_of_a_throttled_gpu_is_in_the_verdict(
    reading: GpuReading, says: str
) -> None:
    judge = Gpus()
    [gpu] = [judge.add([reading], look * 10 * S_NS) for look in range(6)][-1]
    assert gpu.slows == bool(says)
    found = throttled_device(3, gpu)
    assert found.cause == "throttled" and found.why.startswith("rank 3: its device is throttled")
    if says:
        assert says in found.why and f"(it is at {reading.temperature_c} C)" in found.why
        assert "cheapest: look at fans" in found.why


def test_errors_of_a_gpu_do_not_slow_it() -> None:
    judge = Gpus()
    judge.add([GpuReading("0", uncorrected=0)], 0)
    [gpu] = judge.add([GpuReading("0", uncorrected=4)], 10 * S_NS)
    assert gpu.health == "bad" and not gpu.slows


def test_processors_that_are_slowed_down() -> None:
    hot = PartHealth("cpu", "bad", slows=True)
    assert slowed_cpu((*gpus(True), hot)) == hot
    assert slowed_cpu((*gpus(True), PartHealth("cpu", "bad", "its quota ran out"))) is None
