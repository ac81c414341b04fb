"""Device marks: timing events of CUDA's, used again and again.

See `ports.DeviceMarks`. An event is made once and recorded each time that it is given out; making
one is some microseconds, and recording one, too. None is recorded while the stream is captured into
a CUDA graph: it would be a node of the graph, and its time that of each replay.

Nothing here waits for the device or makes a context on it: where the program has not used the
device by its first step, there are no marks (`device_marks`).
"""

from __future__ import annotations

from typing import Any

import torch

from keepstep.model.units import MS_NS
from keepstep.ports import DeviceMarks


class CudaMarks:
    """On that device, else on the thread's current one. stream: on which, else the thread's."""

    def __init__(self, cuda: Any = torch.cuda, device: object = None, stream: Any = None) -> None:
        """cuda: torch's module of that name, or what stands for it."""
        self._cuda, self._device, self._stream = cuda, device, stream
        self._spare: list[Any] = []

    def make(self) -> Any | None:
        if self._cuda.is_current_stream_capturing():
            return None
        event = self._spare.pop() if self._spare else self._cuda.Event(enable_timing=True)
        event.record(self._stream or self._cuda.current_stream(self._device))
        return event

    def is_over(self, mark: Any) -> bool:
        return bool(mark.query())

    def between_ns(self, earlier: Any, later: Any) -> int:
        return max(0, int(earlier.elapsed_time(later) * MS_NS))

    def take_back(self, mark: Any) -> None:
        self._spare.append(mark)


def device_marks() -> DeviceMarks | None:
    """On this thread's device; None where the program uses none."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return CudaMarks(device=torch.device("cuda", torch.cuda.current_device()))
