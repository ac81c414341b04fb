"""Copy stream: the order of copies from one device, and who waits for whom there.

    trainer's stream  --follow-->  copies  --mark-->  trainer's stream, an update: `lead`
                                             \\------->  a thread of the host: `wait`

The copies take turns on two streams, each turn behind the one before. What else leaves the device,
as the number of a `loss.item()`, gets the bus between two turns. On one stream it stood behind all
that was ordered, however small the pieces (seen on an H200: 151 ms for 8 GiB; with turns of 32 MiB
0.6 ms, at the same rate).

Nobody on the host waits in `follow`, `copy` and `lead`: they order, and the device waits. How long
it did is known later (`TimedWait`): two timed events around the wait, on the trainer's own stream.

Comes in: tensors on the device, memory of the host, moments. Goes out: calls of torch's `cuda`,
which is passed in, so that an order other than the hoped for can be tried without a device.
Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from keepstep.edge.torch.cuda_runtime import own_stream, relax_capture_mode
from keepstep.edge.torch.digests import DigestPiece
from keepstep.model.units import MS_NS


class Orders(Protocol):
    """What is ordered on the current stream."""

    def copy_each(self, to: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """In their order. The host waits only where its memory is not locked."""

    def clear(self, tensor: torch.Tensor) -> None: ...

    def digest(self, piece: DigestPiece) -> None: ...

    def look(self, stretch: DeviceLook) -> None: ...


class DeviceLook(Protocol):
    """Something to be looked at where it is."""

    def look(self) -> None: ...


class TorchOrders:
    """See `Orders`."""

    def copy_each(self, to: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """In one call: one a tensor costs the trainer ten times as much."""
        with torch.no_grad():
            torch._foreach_copy_(list(to), list(sources), non_blocking=True)

    def clear(self, tensor: torch.Tensor) -> None:
        tensor.zero_()

    def digest(self, piece: DigestPiece) -> None:
        with torch.no_grad():
            piece.add()

    def look(self, stretch: DeviceLook) -> None:
        with torch.no_grad():
            stretch.look()


class Landing:
    """A moment on the copy stream: over when everything that was ordered before is."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def is_over(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        """On the host. Raises RuntimeError when the device has failed."""
        self.event.synchronize()


class TimedWait:
    """A wait of the trainer's stream."""

    def __init__(self, began: Any, ended: Any) -> None:
        self._began, self._ended = began, ended

    def ns(self) -> int | None:
        """How long the device waited; None while it is not known."""
        if not self._ended.query():
            return None
        return int(self._began.elapsed_time(self._ended) * MS_NS)


class CopyStream:
    """Of one device. Used by one thread at a time."""

    def __init__(
        self, device: torch.device, cuda: Any = torch.cuda, copies: Orders | None = None
    ) -> None:
        """cuda: torch's module of that name, or what stands for it."""
        self._device, self._cuda, self._copies = device, cuda, copies or TorchOrders()
        make = own_stream if cuda is torch.cuda else cuda.Stream
        self._both = [make(device) for _ in range(2)]
        self._ended = [cuda.Event() for _ in self._both]
        self._turn = 0

    @property
    def _stream(self) -> Any:
        """Whose turn it is."""
        return self._both[self._turn]

    def take_turns(self) -> None:
        """What is ordered from here on is behind what was ordered before, on the other stream."""
        ended = self._ended[self._turn]
        ended.record(self._stream)
        self._turn = 1 - self._turn
        self._stream.wait_event(ended)

    @property
    def is_captured(self) -> bool:
        """Whether what the trainer orders now goes into a CUDA graph and does not run."""
        return bool(self._cuda.is_current_stream_capturing())

    def follow(self) -> None:
        """What is ordered from here on begins when all is over that the trainer has queued."""
        self._stream.wait_stream(self._cuda.current_stream(self._device))

    def copy(self, to: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        with self._ordered():
            self._copies.copy_each(to, sources)

    def clear(self, tensor: torch.Tensor) -> None:
        """Fill it with zeros."""
        with self._ordered():
            self._copies.clear(tensor)

    def digest(self, piece: DigestPiece) -> None:
        """Add it to its sums."""
        with self._ordered():
            self._copies.digest(piece)

    def look(self, stretch: DeviceLook) -> None:
        """Whether it is finite."""
        with self._ordered():
            self._copies.look(stretch)

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """From the host: there when this returns, and nothing that the trainer has queued is waited
        for."""
        with self._ordered():
            there = tensor.to(self._device)
            if self._device.type == "cuda":
                self._stream.synchronize()
        return there

    def mark(self) -> Landing:
        event = self._cuda.Event(blocking=True)  # else whoever waits burns a core
        event.record(self._stream)
        return Landing(event)

    def trainers_mark(self) -> Landing:
        """Of what the trainer has queued until now."""
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self._device))
        return Landing(event)

    def lead(self, landing: Landing) -> TimedWait:
        """What the trainer queues from here on waits for that on the device."""
        current = self._cuda.current_stream(self._device)
        began, ended = (self._cuda.Event(enable_timing=True) for _ in range(2))
        began.record(current)
        current.wait_event(landing.event)
        ended.record(current)
        return TimedWait(began, ended)

    @contextmanager
    def _ordered(self) -> Iterator[None]:
        with self._cuda.stream(self._stream):
            yield


_streams: dict[torch.device, CopyStream] = {}


def copy_stream(device: torch.device) -> CopyStream:
    """The process's own of that device."""
    if device not in _streams:
        _streams[device] = CopyStream(device)
    return _streams[device]


def begin_host_thread() -> None:
    """On a thread that waits for landings: see `relax_capture_mode`."""
    if torch.cuda.is_available():
        relax_capture_mode()
