"""Device: what a process says and is told about the GPU that its collectives run on, and the
environment in which a process may outlive a peer there.

`STAYING` is what torch and NCCL have to be told before the first group is built. Sources: torch
2.13's `ProcessGroupNCCL.hpp`; NVIDIA's requirements for restarts in a process (NVRx); torchft's
groups. Tried with two ranks on one device, over sockets: docs/gpu.md.
"""

from __future__ import annotations

from dataclasses import dataclass

# Set to 1: `keepstep.init_process_group(device_id=...)` builds groups over NCCL, which nobody has
# tried over NVLink, InfiniBand or several devices.
UNTESTED_NCCL = "KEEPSTEP_UNTESTED_NCCL_GROUPS"


@dataclass(frozen=True, slots=True)
class DeviceAnswer:
    """What came of waiting for a device until it had nothing to do: nothing to tell, or that it had
    not by then, or what CUDA says."""

    is_late: bool = False
    error: str = ""

    @property
    def is_well(self) -> bool:
        return not self.is_late and not self.error


@dataclass(frozen=True, slots=True)
class StayingVariable:
    """`is_needed`: with another value a process cannot stay; else it is a default."""

    name: str
    value: str
    why: str
    is_needed: bool = False


STAYING = (
    StayingVariable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "0",
        "torch's watchdog neither ends the process nor aborts a communicator by itself: an aborted "
        "collective ends like a good one, so what had ended must be looked at before",
        is_needed=True,
    ),
    StayingVariable(
        "TORCH_NCCL_BLOCKING_WAIT",
        "0",
        "a wait that blocks the trainer aborts by itself when it is late",
        is_needed=True,
    ),
    StayingVariable(
        "TORCH_NCCL_RETHROW_CUDA_ERRORS",
        "0",
        "a CUDA error that the watchdog sees would end the process from its thread",
        is_needed=True,
    ),
    StayingVariable(
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
        "480",
        "a watchdog that is held up by an abort must not end the process before the abort has "
        "its time",
    ),
    StayingVariable(
        "NCCL_NVLS_ENABLE",
        "0",
        "NVLink SHARP's multicast memory is not given back by an abort",
    ),
    StayingVariable(
        "TORCH_NCCL_USE_COMM_NONBLOCKING",
        "1",
        "building a communicator can be given up when a peer dies meanwhile",
    ),
    StayingVariable(
        "TORCH_NCCL_NONBLOCKING_TIMEOUT",
        "60",
        "and is given up after a minute, not after half an hour",
    ),
)
