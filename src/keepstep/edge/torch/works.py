"""Works: one collective as its caller holds it, on the CPU and on a device.

    CPU      private copies -> gloo -> the caller's tensors, when it is over: `Work`
    device   the caller's own tensors -> NCCL; over when the device says so: `QueuedWork`. One that
             the caller waits for at once is on the caller's own stream (`CallersStream`)
    neither  nothing is to come, or a peer is lost: `over`

A future of a device has to be NCCL's own. It is done when the collective has been *queued*, and
makes whoever uses its value wait on the device (torch's `ivalue_inl.h`, "devices"). A future made
here and set from a callback would run what hangs on it on a stream of its own, and let the caller's
go on with tensors that are not there yet.

Moves bytes, decides nothing: `membership.py` says when. Invariant: what a collective of one life of
the group has received on the CPU never reaches the caller's tensors after that life.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from keepstep.edge.torch.first_line import first_line
from keepstep.edge.torch.membership import Membership
from keepstep.edge.torch.untraced import untraced

Tensors = Any  # a tensor, a list of tensors, or a list of lists of them


@untraced
class Work(dist.Work):
    """One collective: ends when the transport has ended it or when a peer is lost, whichever comes
    first."""

    def __init__(self, outputs: Tensors) -> None:
        super().__init__()
        self._outputs = outputs
        self._ended: Future[list[torch.Tensor]] = Future()
        # An exception that Python sets is to C++ a value: DDP's reducer took it for tensors and the
        # process died of SIGSEGV. One that a callback raises is an error to both.
        self._future = self._ended.then(lambda ended: ended.value())
        self._lock = threading.Lock()
        self._over = False
        self._error: RuntimeError | None = None
        self._members: Membership | None = None  # once it has begun

    def run(
        self,
        inner: Any,
        act: Callable[[Any, Tensors, Tensors], Any],
        inputs: Tensors,
        members: Membership,
    ) -> None:
        self._members = members
        with torch.no_grad():
            private = each(torch.clone, self._outputs)
            given = each(torch.clone, inputs)
        try:
            under_way = act(inner, private, given)
        except RuntimeError as error:
            self._failed(error, members)
            return

        def ended(look: Callable[[], Any]) -> None:
            try:
                look()
            except RuntimeError as error:
                self._failed(error, members)
                return
            members.end(self)
            self._succeed(private, given, under_way)

        try:
            future = under_way.get_future()
        except RuntimeError:
            # gloo's scattered sums and its sends have none: they can only be waited for
            threading.Thread(
                target=ended, args=(under_way.wait,), name="keepstep-work", daemon=True
            ).start()
        else:
            future.add_done_callback(lambda done: ended(done.value))

    def _succeed(self, private: Tensors, *kept: Any) -> None:
        with self._lock:
            if self._over:
                return
            with torch.no_grad():
                for mine, theirs in zip(flat(self._outputs), flat(private), strict=True):
                    mine.copy_(theirs)
            self._over = True
        self._ended.set_result(flat(self._outputs))

    def _failed(self, error: RuntimeError, members: Membership) -> None:
        if members.failed(self, told_in_short(error)):
            return  # whoever watches will say which peer it was, and that ends the work
        members.end(self)
        with self._lock:
            if self._over:
                return
            self._over, self._error = True, error
        self._ended.set_exception(error)

    def finish(self) -> None:
        """With nothing in it, when nothing is to come or a peer is lost."""
        with self._lock:
            if self._over:
                return
            self._over = True
        self._ended.set_result(flat(self._outputs))

    def wait(self, timeout: timedelta | None = None) -> bool:
        members = None if self._over else self._members
        try:
            with nullcontext() if members is None else members.waiting():
                self._future.wait()
        except RuntimeError as error:
            raise self._error or error from None  # as the transport said it
        return True

    def get_future(self) -> Future[list[torch.Tensor]]:
        return self._future

    def is_completed(self) -> bool:
        return self._over

    def is_success(self) -> bool:
        return self._over and self._error is None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return flat(self._outputs)


class CallersStream:
    """A collective for which NCCL hands back nothing: it was called to be waited for (torch 2.8 on:
    `asyncOp` is false), and so queued on the caller's own stream, where all that the caller orders
    next is behind it. `end`: an event behind it there; None in a CUDA graph's capture, which runs
    nothing."""

    def __init__(self, end: Any, outputs: Tensors, device: torch.device) -> None:
        self._end, self._outputs, self._device = end, outputs, device

    def is_completed(self) -> bool:
        return bool(self._inner.is_completed())

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def get_future(self) -> Future[list[torch.Tensor]]:
        return _over_future(self._outputs, self._device)

    def result(self) -> list[torch.Tensor]:
        return flat(self._outputs)


class EndEvent:
    """Over when a collective is, as the device has it. `inner`: NCCL's work; `mark`: an event
    behind all that is on the current stream.

    What NCCL's work says itself is no use: it counts as completed also when its communicator has
    failed, and cannot be asked whether that is why (torch 2.11 has no form for the error in Python
    and raises TypeError, error or none). What hangs on its future runs at once, on a stream that is
    behind its end event."""

    def __init__(self, inner: Any, mark: Callable[[], Any]) -> None:
        self.event: Any = None
        inner.get_future().add_done_callback(lambda done: self._set(mark()))

    def _set(self, event: Any) -> None:
        self.event = event

    def query(self) -> bool:
        return self.event is not None and bool(self.event.query())


@untraced
class QueuedWork(dist.Work):
    """A collective that has been queued on a device. `inner`: NCCL's, which orders whoever waits
    behind the collective's end event, and never blocks the trainer for it; or what stands for it.
    `end`: over when it is; None in a CUDA graph's capture."""

    def __init__(self, inner: Any, end: Any, members: Membership) -> None:
        super().__init__()
        self._inner = inner
        self._end = end
        self._members = members

    def has_ended(self) -> bool:
        """See `Queued`."""
        try:
            return self._end is not None and bool(self._end.query())
        except RuntimeError:  # the device has failed
            return False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises what NCCL raises, but not when a peer is lost, or somebody will say so: then the
        body runs on, worthless."""
        try:
            with self._members.waiting():
                return bool(self._inner.wait() if timeout is None else self._inner.wait(timeout))
        except RuntimeError as error:
            if not self._members.broke(told_in_short(error)):
                raise
            return True

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future[list[torch.Tensor]]:
        found: Future[list[torch.Tensor]] = self._inner.get_future()
        return found

    def is_completed(self) -> bool:
        return bool(self._inner.is_completed())

    def result(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = self._inner.result()
        return found


@untraced
class OverWork(dist.Work):
    """Nothing comes of it: its outputs stay as they are."""

    def __init__(self, outputs: Tensors, device: torch.device) -> None:
        super().__init__()
        self._future = _over_future(outputs, device)

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._future.wait()
        return True

    def get_future(self) -> Future[list[torch.Tensor]]:
        return self._future


def _over_future(outputs: Tensors, device: torch.device) -> Future[list[torch.Tensor]]:
    """Done; on a device in the order of the caller's stream."""
    future: Future[list[torch.Tensor]] = (
        Future() if device.type == "cpu" else Future(devices=[device])
    )
    future.set_result(flat(outputs))
    return future


class Together:
    """Several of a transport's works as one, for `Work`. Like gloo's sends it has no future."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def get_future(self) -> Any:
        raise RuntimeError("it can only be waited for")

    def wait(self) -> None:
        for work in self._works:
            work.wait()


SOURCE_PLACE = re.compile(r"^\[\S+:\d+\] ")


def told_in_short(error: Exception) -> str:
    """What a transport says, without advice that helps nobody here, and without the place in
    torch's own source that it begins with."""
    said = first_line(error).partition(". This is typically")[0]
    return SOURCE_PLACE.sub("", said)


def each(act: Callable[[torch.Tensor], torch.Tensor], tensors: Tensors) -> Tensors:
    if tensors is None or isinstance(tensors, torch.Tensor):
        return None if tensors is None else act(tensors)
    return [each(act, inner) for inner in tensors]


def flat(tensors: Tensors) -> list[torch.Tensor]:
    if tensors is None:
        return []
    return (
        [tensors]
        if isinstance(tensors, torch.Tensor)
        else [t for inner in tensors for t in flat(inner)]
    )
