"""Measured: what probes have read, as the numbers that others already collect.

Comes in: readings. Goes out: numbers under the names that dcgm-exporter and node-exporter give
them, with their labels, so that the same dashboards and alerts fit. What they have no name for is
not told. A number that is not there was not read. node-exporter's `mountpoint` is here the
directory that was probed, which may lie below it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from keepstep.core.parts.kernel_log import xid_of
from keepstep.model.parts import (
    GpuReading,
    KernelLine,
    NicReading,
    PartNumber,
    PartReading,
    PlaceReading,
    PortReading,
    PressureReading,
)
from keepstep.model.units import S_NS

XID = "DCGM_FI_DEV_XID_ERRORS"
LASTING = {XID}  # what is said once holds until something else is said


def numbers_of(reading: PartReading) -> Iterator[PartNumber]:
    """Of one reading."""
    match reading:
        case GpuReading():
            yield from _of_gpu(reading)
        case NicReading():
            yield from _of_nic(reading)
        case PortReading():
            yield from _of_port(reading)
        case PlaceReading():
            sizes = {
                "node_filesystem_avail_bytes": reading.free_bytes,
                "node_filesystem_size_bytes": reading.total_bytes,
            }
            yield from _known(sizes, "mountpoint", reading.path)
        case PressureReading(stall_ns=int(stall_ns)):
            yield PartNumber("node_pressure_memory_waiting_seconds_total", "", "", stall_ns / S_NS)
        case KernelLine():
            if (found := xid_of(reading.text)) is not None:
                yield PartNumber(XID, "pci_bus_id", found[0], float(found[1]))
        case _:
            pass


def _of_nic(reading: NicReading) -> Iterator[PartNumber]:
    values = {
        "node_network_up": reading.is_up,
        "node_network_carrier_changes_total": reading.changes,
        "node_network_receive_errs_total": reading.received_errors,
        "node_network_transmit_errs_total": reading.sent_errors,
        "node_network_receive_drop_total": reading.received_dropped,
        "node_network_transmit_drop_total": reading.sent_dropped,
    }
    yield from _known(values, "device", reading.name)


def _of_port(reading: PortReading) -> Iterator[PartNumber]:
    values = {
        "state_id": reading.state,
        "link_downed_total": reading.downed,
        "link_error_recovery_total": reading.recovered,
        "symbol_error_total": reading.symbol_errors,
        "port_errors_received_total": reading.received_errors,
        "port_discards_transmitted_total": reading.discards,
        "port_packets_transmitted_total": reading.packets,
        "out_of_sequence_packets_received_total": reading.out_of_sequence,
        "packet_sequence_errors_total": reading.sequence_errors,
        "local_ack_timeout_errors_total": reading.timeouts,
    }
    named = {f"node_infiniband_{name}": value for name, value in values.items()}
    yield from _known(named, "device,port", f"{reading.device},{reading.port}")


def _of_gpu(reading: GpuReading) -> Iterator[PartNumber]:
    used = reading.used_ratio
    values = {
        "DCGM_FI_DEV_GPU_TEMP": reading.temperature_c,
        "DCGM_FI_DEV_SM_CLOCK": reading.clock_mhz,
        "DCGM_FI_DEV_GPU_UTIL": None if used is None else used * 100,
        "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": reading.reasons,
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": reading.uncorrected,
        "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": reading.corrected,
        "DCGM_FI_DEV_ROW_REMAP_PENDING": reading.remap_pending,
        "DCGM_FI_DEV_ROW_REMAP_FAILURE": reading.remap_failed,
    }
    yield from _known(values, "pci_bus_id", reading.bus)


def _known(values: Mapping[str, float | None], label: str, of: str) -> Iterator[PartNumber]:
    """Those that were read, of the part with that label."""
    for name, value in values.items():
        if value is not None:
            yield PartNumber(name, label, of, float(value))
