"""A device that is none: streams, events, futures, collectives and page-locked copies over tensors
of the host, in an order that a test draws.

What is ordered runs when the test says so. Of all streams any may be next; on each, what was
ordered first. Nothing else is promised, as CUDA promises nothing else. Some streams are slow, as
drawn: else a copy that is ordered early would be over early, whatever is forgotten. A copy runs in
two halves, so that something may come between them. A collective runs when its peer is there; with
the peer lost it hangs, and stops whatever is behind it, until it is aborted: then it ends, like a
good one, and leaves garbage. All that is as torch and CUDA document it, or as torch's headers have
it: `ivalue_inl.h` for futures, `CUDAEvent.h`, NCCL's `ncclCommAbort`.

`choose(n)` draws one of n; `stuck` is called where the host waits for a device that hangs, for
somebody else to do something about it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from keepstep.edge.torch.copy_stream import DeviceLook
from keepstep.edge.torch.digests import DigestPiece

Op = Callable[[], None]
GARBAGE = float("nan")
OP_NS = 1000


class FakeHang(Exception):
    """The host waits for a device that will never come."""


class FakeStream:
    """See `torch.cuda.Stream`."""

    def __init__(self, device: FakeDevice, name: str) -> None:
        self.device, self.name = device, name
        self.is_slow = device.choose(3) == 0
        self.ops: deque[tuple[Callable[[], bool], Op]] = deque()  # may it run, and what it does

    def order(self, op: Op, may: Callable[[], bool] = lambda: True) -> None:
        self.ops.append((may, op))

    def wait_event(self, event: FakeEvent) -> None:
        record = event.record_number  # of this moment: later ones are nothing to it
        self.order(lambda: None, lambda: event.reached >= record)

    def wait_stream(self, other: FakeStream) -> None:
        event = FakeEvent(self.device)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        event = FakeEvent(self.device)
        event.record(self)
        event.synchronize()


class FakeEvent:
    """See `torch.cuda.Event`. One that was never recorded is over."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.record_number = self.reached = 0
        self.at_ns = 0

    def record(self, stream: FakeStream | None = None) -> None:
        stream = stream or self.device.current
        self.record_number += 1
        number = self.record_number

        def reach() -> None:
            self.reached, self.at_ns = number, self.device.now_ns

        stream.order(reach)

    def query(self) -> bool:
        return self.reached >= self.record_number

    def synchronize(self) -> None:
        self.device.run_until(self.query)

    def elapsed_time(self, end: FakeEvent) -> float:
        """Milliseconds."""
        assert self.query() and end.query(), "asked too early"
        return (end.at_ns - self.at_ns) / 1e6


class FakeDevice:
    """One device, and torch's `cuda` module for it."""

    def __init__(
        self, choose: Callable[[int], int], stuck: Callable[[], bool] = lambda: False
    ) -> None:
        self.choose, self.stuck = choose, stuck
        self.now_ns = 0
        self.is_capturing = False
        self.streams: list[FakeStream] = []
        self.current = self.new_stream("trainer")
        self.pages = FakePages()

    # -- as `torch.cuda` has it

    def Stream(self, device: object = None, priority: int = 0) -> FakeStream:
        return self.new_stream("own")

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> FakeEvent:
        return FakeEvent(self)

    def current_stream(self, device: object = None) -> FakeStream:
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing

    def synchronize(self, device: object = None) -> None:
        self.run_until(lambda: not any(stream.ops for stream in self.streams))

    # -- what runs

    def new_stream(self, name: str) -> FakeStream:
        self.streams.append(FakeStream(self, f"{name} {len(self.streams)}"))
        return self.streams[-1]

    def ready(self) -> list[FakeStream]:
        return [stream for stream in self.streams if stream.ops and stream.ops[0][0]()]

    def run_one(self) -> bool:
        """One of what may run; whether there was any."""
        ready = self.ready()
        if not ready:
            return False
        quick = [stream for stream in ready if not stream.is_slow]
        if quick and self.choose(30):
            ready = quick
        _, op = ready[self.choose(len(ready))].ops.popleft()
        self.now_ns += OP_NS
        op()
        return True

    def run_until(self, holds: Callable[[], bool]) -> None:
        """The host waits."""
        while not holds():
            if not self.run_one() and not self.stuck():
                raise FakeHang

    # -- copies to the host

    def copy_each(self, to: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """`_foreach_copy_` with `non_blocking`. To memory that is not locked the host waits."""
        for host, source in zip(to, sources, strict=True):
            is_to_host = self.pages.is_host(host)
            for half in range(2):
                self.current.order(lambda h=host, s=source, n=half: self._half(h, s, n))  # type: ignore[misc]
            if is_to_host and not self.pages.is_locked(host.data_ptr()):
                self.current.synchronize()

    def clear(self, tensor: torch.Tensor) -> None:
        self.current.order(lambda: tensor.zero_())

    def digest(self, piece: DigestPiece) -> None:
        self.current.order(piece.add)

    def look(self, stretch: DeviceLook) -> None:
        self.current.order(stretch.look)

    def _half(self, host: torch.Tensor, source: torch.Tensor, half: int) -> None:
        flat = source.detach().contiguous().view(-1).view(torch.uint8)
        middle = flat.numel() // 2
        begin, end = (0, middle) if half == 0 else (middle, flat.numel())
        self.pages.write(host.data_ptr() + begin, flat[begin:end].numpy().tobytes())


class FakePages:
    """Locked pages as a device knows them: by the address, and for ever what was mapped there when
    they were locked. See `PageLocker`."""

    def __init__(self) -> None:
        self._locked: dict[int, tuple[int, mmap.mmap, int]] = {}  # end, the file, where in it
        self.hosts: set[tuple[int, int]] = set()

    def register(self, address: int, nbytes: int) -> str | None:
        if any(begin < address + nbytes and address < end for begin, end in self._ranges()):
            return "part or all of the requested memory range is already mapped (error 712)"
        path, begin, offset = mapped_at(address)
        fd = os.open(path, os.O_RDWR)
        try:
            held = mmap.mmap(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)
        self._locked[address] = (address + nbytes, held, address - begin + offset)
        return None

    def unregister(self, address: int) -> str | None:
        return None if self._locked.pop(address, None) is not None else "invalid"

    def _ranges(self) -> list[tuple[int, int]]:
        return [(begin, end) for begin, (end, _, _) in self._locked.items()]

    def is_locked(self, address: int) -> bool:
        return any(begin <= address < end for begin, (end, _, _) in self._locked.items())

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Whether a device would have to cross the bus to it: what is in none of `hosts` stands for
        memory of the device."""
        return any(begin <= tensor.data_ptr() < end for begin, end in self.hosts)

    def write(self, address: int, data: bytes) -> None:
        for begin, (end, held, at) in self._locked.items():
            if begin <= address < end:
                where = at + address - begin
                held[where : where + len(data)] = data
                return
        # A device would write over whatever lies there now: here that would be Python's own memory.
        assert mapped_at(address)[0], "a copy arrives where no file is mapped any more"
        ctypes.memmove(address, data, len(data))


def mapped_at(address: int) -> tuple[str, int, int]:
    """The file that is mapped there (empty: none), from which address, and at which offset."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, _, offset, _, _, *path = line.split(maxsplit=5)
        begin, end = (int(word, 16) for word in where.split("-"))
        if begin <= address < end:
            return "".join(path), begin, int(offset, 16)
    return "", 0, 0


# -- collectives


class FakeNcclFuture:
    """The future of a collective: done when that is queued. Who waits for it, or hangs something on
    it, has it ordered behind the end (`synchronizeWithCurrentStreams`); a callback runs at once, on
    a stream of its own."""

    def __init__(self, device: FakeDevice, event: FakeEvent, value: Any) -> None:
        self._device, self._event, self._value = device, event, value

    def wait(self) -> Any:
        self._device.current.wait_event(self._event)
        return self._value

    def value(self) -> Any:
        return self._value

    def done(self) -> bool:
        return True

    def then(self, callback: Callable[[Any], Any]) -> FakeNcclFuture:
        own = self._device.new_stream("pool")
        own.wait_event(self._event)
        with self._device.stream(own):
            value = callback(self)
            event = FakeEvent(self._device)
            event.record()
        return FakeNcclFuture(self._device, event, value)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.then(callback)


class FakeNcclWork:
    """See `ProcessGroupNCCL::WorkNCCL`. Completed is also what has failed, and its error is none
    that Python could be told."""

    def __init__(self, nccl: FakeNccl, device: FakeDevice, end: FakeEvent, outputs: Any) -> None:
        self._nccl, self._device, self._end, self._outputs = nccl, device, end, outputs

    def is_completed(self) -> bool:
        return self._nccl.is_peer_lost or self._nccl.is_aborted or self._end.query()

    def exception(self) -> None:
        raise TypeError("Unable to convert function return value to a Python type!")

    def wait(self, timeout: object = None) -> bool:
        self._device.current.wait_event(self._end)
        return True

    def get_future(self) -> FakeNcclFuture:
        return FakeNcclFuture(self._device, self._end, self._outputs)

    def result(self) -> Any:
        return self._outputs


class FakeNccl:
    """One communicator with one peer, which gives as much as this rank does. Stands for a transport
    and for what builds one."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._stream = device.new_stream("nccl")
        self.is_peer_lost = self.is_aborted = False

    @property
    def group(self) -> FakeNccl:
        return self

    def made(self) -> FakeNccl:
        return self

    def abort(self) -> None:
        self.is_aborted = True

    def end_on_stream(self) -> FakeEvent:
        event = FakeEvent(self._device)
        event.record()
        return event

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> FakeNcclWork | None:
        """As torch 2.8 and later have it: on the caller's stream, and with nothing in return, where
        `asyncOp` is false."""
        if self.is_aborted:
            raise RuntimeError("NCCL communicator was aborted")
        is_async = getattr(opts, "asyncOp", True)
        stream = self._stream if is_async else self._device.current
        if is_async:
            stream.wait_stream(self._device.current)

        def reduce() -> None:
            for tensor in tensors:
                tensor.copy_(torch.full_like(tensor, GARBAGE) if self.is_aborted else 2 * tensor)

        def may() -> bool:
            return self.is_aborted or not self.is_peer_lost

        stream.order(reduce, may)
        if not is_async:
            return None
        end = FakeEvent(self._device)
        end.record(stream)
        return FakeNcclWork(self, self._device, end, tensors)
