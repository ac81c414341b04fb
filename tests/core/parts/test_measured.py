"""Readings as other exporters tell them: names, labels, and no number that was not read."""

from __future__ import annotations

import pytest

from keepstep.core.parts.judgement import Judgement
from keepstep.core.parts.measured import numbers_of
from keepstep.model.parts import (
    BEAT,
    ClockReading,
    GpuReading,
    KernelLine,
    NicReading,
    PartReading,
    PlaceReading,
    PortReading,
    PressureReading,
    ProbeAnswer,
)
from keepstep.model.units import S_NS
from tests.core.parts.test_kernel_log import TABLE

NIC = "node_network_"
PORT = "node_infiniband_"


@pytest.mark.parametrize(
    ("reading", "numbers"),
    [
        (
            NicReading("eth0", True, 2, 30, 3, 7, 1, 2, 3, 4),
            {
                f"{NIC}up": 1,
                f"{NIC}carrier_changes_total": 2,
                f"{NIC}receive_errs_total": 1,
                f"{NIC}transmit_errs_total": 2,
                f"{NIC}receive_drop_total": 3,
                f"{NIC}transmit_drop_total": 4,
            },
        ),
        (NicReading("eth0", False, None, 30, 3, 7), {f"{NIC}up": 0}),
        (
            PortReading("mlx5_0", 1, 4, 1, 2, 3, 4, 5, 6, 7, 8, 9),
            {
                f"{PORT}state_id": 4,
                f"{PORT}link_downed_total": 1,
                f"{PORT}link_error_recovery_total": 2,
                f"{PORT}symbol_error_total": 3,
                f"{PORT}port_errors_received_total": 4,
                f"{PORT}port_discards_transmitted_total": 5,
                f"{PORT}port_packets_transmitted_total": 6,
                f"{PORT}out_of_sequence_packets_received_total": 7,
                f"{PORT}packet_sequence_errors_total": 8,
                f"{PORT}local_ack_timeout_errors_total": 9,
            },
        ),
        (PortReading("mlx5_0", 1, None), {}),
        (
            PlaceReading("eth0", 1, "", True, 5, 9),
            {"node_filesystem_avail_bytes": 5, "node_filesystem_size_bytes": 9},
        ),
        (PlaceReading("eth0", 1, "gone", False, None, None), {}),
        (KernelLine(1, "NVRM: Xid (PCI:0000:3B:00): 79, pid=1"), {"DCGM_FI_DEV_XID_ERRORS": 79}),
        (KernelLine(1, "the user wrote: NVRM: Xid (PCI:0000:3B:00): 79, pid=1"), {}),
        (GpuReading("0000:3b:00", temperature_c=50), {"DCGM_FI_DEV_GPU_TEMP": 50}),
        (
            PressureReading(2 * S_NS, None, None, None, None),
            {"node_pressure_memory_waiting_seconds_total": 2},
        ),
        (ClockReading(1, 1, 1), {}),
    ],
)
def test_a_reading_is_told_by_the_names_of_others(
    reading: PartReading, numbers: dict[str, float]
) -> None:
    found = list(numbers_of(reading))
    assert {number.name: number.value for number in found} == numbers
    assert len(found) == len(numbers)
    labels = {
        NicReading: ("device", "eth0"),
        PortReading: ("device,port", "mlx5_0,1"),
        PlaceReading: ("mountpoint", "eth0"),
        KernelLine: ("pci_bus_id", "0000:3b:00"),
        GpuReading: ("pci_bus_id", "0000:3b:00"),
    }
    for number in found:
        assert (number.label, number.of) == labels.get(type(reading), ("", ""))


def test_the_last_xid_of_each_gpu_stays_while_the_log_is_read() -> None:
    judgement = Judgement(TABLE, 0)

    def hear(at_ns: int, *lines: tuple[str, int], blind: str = "") -> dict[str, float]:
        readings = tuple(
            KernelLine(at_ns, f"NVRM: Xid (PCI:0000:{bus}:00): {code}, pid=1")
            for bus, code in lines
        )
        judgement.hear(ProbeAnswer(BEAT, at_ns, 0, ""))
        judgement.hear(ProbeAnswer("kernel", at_ns, 0, blind, readings))
        return {number.of: number.value for number in judgement.numbers(at_ns)}

    assert hear(10 * S_NS) == {}
    assert hear(20 * S_NS, ("3b", 13), ("3b", 79)) == {"0000:3b:00": 79}
    assert hear(30 * S_NS, ("c1", 48)) == {"0000:3b:00": 79, "0000:c1:00": 48}
    assert hear(40 * S_NS, blind="no log") == {}
    assert hear(50 * S_NS, ("3b", 31)) == {"0000:3b:00": 31, "0000:c1:00": 48}
