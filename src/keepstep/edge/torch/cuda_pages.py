"""CUDA pages: page-locking by the CUDA runtime, as torch hands it on.

Comes in: ranges of host memory. Goes out: calls of CUDA on the device of this rank's state.

Every call names the device. CUDA gives a thread that has chosen none device 0, and makes a context
there that costs hundreds of MB: slots are made and closed on threads of our own, which have not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

PORTABLE = 1  # cudaHostRegisterPortable: locked for all of this process's devices


class CudaPages:
    """See `PageLocker`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, nbytes: int) -> str | None:
        return self._call(lambda cuda: cuda.cudaHostRegister(address, nbytes, PORTABLE))

    def unregister(self, address: int) -> str | None:
        return self._call(lambda cuda: cuda.cudaHostUnregister(address))

    def _call(self, call: Callable[[Any], Any]) -> str | None:
        # torch raises AttributeError where its build lacks a call, RuntimeError for an error of the
        # device from before.
        try:
            with torch.cuda.device(self._device):
                cuda = torch.cuda.cudart()
                code = call(cuda)
                if int(code) == 0:
                    return None
                self._forget_error()
                return f"{cuda.cudaGetErrorString(code)} (error {int(code)})"
        except (AttributeError, RuntimeError) as error:
            return str(error).partition("\n")[0]

    def _forget_error(self) -> None:
        """CUDA keeps a refusal as this thread's last error, and torch would raise it behind the
        program's next kernel. It looks behind one of ours instead, and clears it by that."""
        try:
            torch.empty(1, device=self._device).fill_(1)
        except RuntimeError:
            return
