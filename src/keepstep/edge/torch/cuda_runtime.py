"""CUDA runtime: the few calls that torch does not hand on, made in the libraries that it loads.

    own_stream          a stream that nobody else is given: torch's come from a pool of 32 in turn,
                        and a collective that gets the same one queues behind our copies
    relax_capture_mode  calls of this thread do not break a CUDA graph that another one captures
    place_on_bus        where a device is on the PCI bus
    written_by          a number in the host's memory, written by a stream as the device comes by

All are improvements: where the library is not found, or refuses, copies go the way they would
without. Runs on a device in `tests/gpu`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

NON_BLOCKING = 1  # cudaStreamNonBlocking: does not wait for the legacy default stream
LOWEST_PRIORITY = 0
# The highest there is. Torch's pool has down to -3, and NCCL's streams are from it: a stream with
# this priority was not seen to share one of the device's queues with them.
SPARED_PRIORITY = -5
RELAXED = 2  # cudaStreamCaptureModeRelaxed
PLACE_BYTES = 32  # 13 are told, with the end


@lru_cache(maxsize=1)
def _runtime() -> Any:
    """None where it is not to be had. By its name, so that it is the one in this process."""
    version = torch.version.cuda
    if version is None:
        return None
    try:
        return ctypes.CDLL(f"libcudart.so.{version.partition('.')[0]}")
    except OSError:
        return None


def own_stream(device: torch.device, priority: int = LOWEST_PRIORITY) -> Any:
    """A stream of that priority for the life of the process; else one of torch's pool."""
    runtime = _runtime()
    if runtime is not None:
        made = ctypes.c_void_p()
        with torch.cuda.device(device):
            try:
                code = runtime.cudaStreamCreateWithPriority(
                    ctypes.byref(made), NON_BLOCKING, priority
                )
            except AttributeError:
                code = -1
        if code == 0 and made.value:
            return torch.cuda.ExternalStream(made.value, device)
    return torch.cuda.Stream(device)


def relax_capture_mode() -> None:
    """For the calling thread, for good. Without it any other thread's capture in CUDA's default
    mode is broken by this one's queries and waits."""
    runtime = _runtime()
    if runtime is not None:
        try:
            runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED)))
        except AttributeError:
            return


def place_on_bus(device: torch.device) -> str | None:
    """Such as `0000:3B:00.0`."""
    runtime = _runtime()
    if runtime is None:
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    found = ctypes.create_string_buffer(PLACE_BYTES)
    try:
        code = runtime.cudaDeviceGetPCIBusId(found, PLACE_BYTES, index)
    except AttributeError:
        return None
    return found.value.decode("ascii", "replace") if code == 0 else None


def written_by(device: torch.device, address: int) -> Callable[[Any, int], bool] | None:
    """Has a stream write a number of 32 bits to that address, which is page-locked: behind all that
    was ordered there, and before what follows. Tells whether it will. None where the driver lacks
    that, or does not know the address."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        write, where = driver.cuStreamWriteValue32_v2, driver.cuMemHostGetDevicePointer_v2
    except (OSError, AttributeError):
        return None
    found = ctypes.c_uint64()
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).query()  # this thread has the device's context then
        if where(ctypes.byref(found), ctypes.c_void_p(address), 0) != 0:
            return None
    write.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    at = found.value
    return lambda stream, number: write(stream.cuda_stream, at, number, 0) == 0
