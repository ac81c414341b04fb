"""Groups: process groups that can be built anew under the objects that use them, so that DDP and
FSDP go on after a peer was lost.

    torch's call -> private buffers -> gloo -> the caller's tensors
    and at any moment: lost -> everything ends

What gloo does when a peer dies was tried out (torch 2.13): only the peer's ring neighbours notice,
the others wait for their timeout, `abort` wakes nobody, and a failed sum leaves partial ones in the
buffer. So a collective is never waited for beyond the notice that a peer is lost; the inner group
is *abandoned*: forgotten with the buffers its threads may still write to, which is why they are
private.

For tensors on the CPU only. Groups over NCCL end otherwise (a collective is enqueued, its buffers
are on the device, its communicators are aborted), and none of that has been proven on a device:
what is not on the CPU is refused.

Moves bytes, decides nothing: `membership.py` says when. Invariant: what a collective of one life of
the group has received never reaches the caller's tensors after that life.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as c10d  # the options have no public home
import torch.distributed as dist
from torch.futures import Future

from keepstep.edge.torch.first_line import first_line
from keepstep.edge.torch.membership import Membership, membership
from keepstep.errors import ConfigError

BACKEND = "keepstep"
SAFE_WAY = "call torch.distributed.init_process_group: all start anew from memory when one is lost"

Tensors = Any  # a tensor, a list of tensors, or a list of lists of them


def register() -> None:
    """Make `keepstep` a backend of `torch.distributed`; as often as you like."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def init_process_group(**given: Any) -> None:
    """`torch.distributed.init_process_group` with groups that outlive the loss of a rank: gloo, for
    tensors on the CPU.

    given: what torch's takes, but for `backend`. Used in its place; everything of
    `torch.distributed` works as before. A rank that is started into a running job meets nobody
    here: what it does in collectives until `keepstep.protect` has brought its state is done alone.

    Raises ConfigError when `device_id` is given, and so does a collective on tensors of a device:
    with torch's own groups all ranks start anew from memory when one is lost. With torch 2.6 it
    raises always: what that does with groups written in Python hangs now and then.
    """
    if torch.__version__.startswith("2.6."):
        raise ConfigError(
            "keepstep.init_process_group: expected torch 2.7 or later, found "
            f"{torch.__version__}; {SAFE_WAY}"
        )
    if given.get("device_id") is not None:
        raise _not_on(given["device_id"])
    register()
    membership.muted = os.environ.get("KEEPSTEP_REJOIN") == "1"
    dist.init_process_group(BACKEND, **given)


def _create(options: Any, _: Any) -> TorchGroup:
    return TorchGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
        membership,
    )


class TorchGroup(dist.ProcessGroup):
    """What `torch.distributed` sees: one of these for the life of the process, whatever happens to
    the peers."""

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, name: str, members: Membership
    ) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._timeout, self._name, self._members = (
            rank,
            size,
            timeout,
            name,
            members,
        )
        self._description = ""
        self._inner: Any = None
        if not members.muted:
            self._inner = _transport(store, rank, size, timeout)
        members.add_group(self)

    # -- what torch asks

    def getBackendName(self) -> str:
        return BACKEND

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    # torch keeps a group's name in its backends, and these are ours to change.

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def _set_sequence_number_for_group(self) -> None:
        pass

    def abort(self) -> None:
        self._inner = None

    def shutdown(self) -> None:
        self._members.remove_group(self)
        self._inner = None

    # -- another life

    def rebuild(self, store: Any, attempt: int, given_up: threading.Event) -> None:
        """Forget the present peers' sockets and find the new ones'. Blocks until all are there or
        `given_up` is set."""
        before, self._inner = [self._inner], None
        threading.Thread(target=_drop, args=(before,), name="keepstep-drop", daemon=True).start()
        prefix = dist.PrefixStore(f"keepstep/{attempt}/{self._name}", store)
        made: list[Any] = []

        # it cannot be interrupted: a thread of its own is left behind when a peer dies meanwhile
        def make() -> None:
            try:
                made.append(_transport(prefix, self._rank, self._size, self._timeout))
            except RuntimeError as error:
                made.append(error)
            finally:
                done.set()

        done = _Either(given_up)
        threading.Thread(target=make, name=f"keepstep-group-{self._name}", daemon=True).start()
        if not done.wait():
            return
        if isinstance(made[0], RuntimeError):
            raise made[0]
        self._inner = made[0]

    # -- collectives: `outputs` first, as torch has it

    def allreduce(self, tensors: Tensors, opts: Any = None, *_: Any) -> Work:
        tensors, opts = _listed(tensors), _options(opts, c10d.AllreduceOptions)
        return self._collective(tensors, None, lambda inner, out, _: inner.allreduce(out, opts))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        opts = opts or c10d.AllreduceCoalescedOptions()
        return self._collective(
            tensors, None, lambda inner, out, _: inner.allreduce_coalesced(out, opts)
        )

    def broadcast(self, tensors: Tensors, opts: Any = None, *_: Any) -> Work:
        tensors = _listed(tensors)
        if not isinstance(opts, c10d.BroadcastOptions):
            root, opts = int(opts or 0), c10d.BroadcastOptions()
            opts.rootRank = root
        return self._collective(tensors, None, lambda inner, out, _: inner.broadcast(out, opts))

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:
        opts = opts or c10d.ReduceOptions()
        return self._collective(
            _listed(tensors), None, lambda inner, out, _: inner.reduce(out, opts)
        )

    def allgather(self, outputs: Tensors, inputs: Tensors, opts: Any = None, *_: Any) -> Work:
        opts = _options(opts, c10d.AllgatherOptions)
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._collective(
            outputs, inputs, lambda inner, out, into: inner.allgather(out, into, opts), _to_each
        )

    def _allgather_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, *_: Any
    ) -> Work:
        opts = _options(opts, c10d.AllgatherOptions)
        return self._collective(
            output,
            input,
            lambda inner, out, into: inner._allgather_base(out, into, opts),
            _to_each_part,
        )

    all_gather_single = _allgather_base  # as newer callers have it

    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        opts = _options(opts, c10d.AllgatherOptions)
        act = lambda inner, out, into: inner.allgather_into_tensor_coalesced(out, into, opts)  # noqa: E731
        return self._collective(outputs, inputs, act, _all(_to_each_part))

    all_gather_single_coalesced = allgather_into_tensor_coalesced  # as newer callers have it

    def reduce_scatter(self, outputs: Tensors, inputs: Tensors, opts: Any = None, *_: Any) -> Work:
        opts = _options(opts, c10d.ReduceScatterOptions)
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._collective(
            outputs,
            inputs,
            lambda inner, out, into: inner.reduce_scatter(out, into, opts),
            self._own_of_each,
        )

    def _reduce_scatter_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, *_: Any
    ) -> Work:
        opts = _options(opts, c10d.ReduceScatterOptions)
        return self._collective(
            output,
            input,
            lambda inner, out, into: inner._reduce_scatter_base(out, into, opts),
            self._own_part,
        )

    reduce_scatter_single = _reduce_scatter_base  # as newer callers have it

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        opts = _options(opts, c10d.ReduceScatterOptions)
        act = lambda inner, out, into: inner.reduce_scatter_tensor_coalesced(out, into, opts)  # noqa: E731
        return self._collective(outputs, inputs, act, _all(self._own_part))

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # as newer callers have it

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        opts = opts or c10d.AllToAllOptions()
        return self._collective(
            outputs,
            inputs,
            lambda inner, out, into: inner.alltoall(out, into, opts),
            _all(_copy_flat),
        )

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split: Sequence[int],
        input_split: Sequence[int],
        opts: Any = None,
        *_: Any,
    ) -> Work:
        opts = _options(opts, c10d.AllToAllOptions)
        out_split, in_split = list(output_split or ()), list(input_split or ())
        act = lambda inner, out, into: inner.alltoall_base(out, into, out_split, in_split, opts)  # noqa: E731
        return self._collective(output, input, act, _copy_flat)

    all_to_all_single = alltoall_base  # as newer callers have it

    def gather(self, outputs: Tensors, inputs: Tensors, opts: Any = None, *_: Any) -> Work:
        opts = _options(opts, c10d.GatherOptions)
        inputs = _listed(inputs)
        return self._collective(
            outputs, inputs, lambda inner, out, into: inner.gather(out, into, opts), _to_each
        )

    def scatter(self, outputs: Tensors, inputs: Tensors, opts: Any = None, *_: Any) -> Work:
        opts = _options(opts, c10d.ScatterOptions)
        outputs = _listed(outputs)
        own = self._own_of_each if inputs else None
        return self._collective(
            outputs, inputs, lambda inner, out, into: inner.scatter(out, into, opts), own
        )

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> Work:
        return self._collective(
            [], _listed(tensors), lambda inner, _, into: inner.send(into, to, tag)
        )

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Work:
        return self._collective(
            _listed(tensors), None, lambda inner, out, _: inner.recv(out, source, tag)
        )

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        return self._collective(
            _listed(tensors), None, lambda inner, out, _: inner.recv_anysource(out, tag)
        )

    def barrier(self, opts: Any = None, *_: Any) -> Work:
        opts = _options(opts, c10d.BarrierOptions)
        return self._collective([], None, lambda inner, *_: inner.barrier(opts))

    def _own_of_each(self, outputs: Tensors, inputs: Tensors) -> None:
        for output, parts in zip(outputs, inputs, strict=True):
            output.copy_(parts[self._rank])

    def _own_part(self, output: torch.Tensor, input: torch.Tensor) -> None:
        output.reshape(-1).copy_(input.reshape(-1).chunk(self._size)[self._rank])

    # -- one way for all of them

    def _collective(
        self,
        outputs: Tensors,
        inputs: Tensors,
        act: Callable[[Any, Tensors, Tensors], Any],
        alone: Callable[[Tensors, Tensors], None] | None = None,
    ) -> Work:
        """`alone` is what a muted group does: as if all others had given what this one gives."""
        members, inner = self._members, self._inner
        if (device := _device_of(outputs)).type != "cpu":
            raise _not_on(device)
        members.enter()
        work = Work(outputs)
        if members.muted:
            if alone is not None:
                with torch.no_grad():
                    alone(outputs, inputs)
            work.finish()
        elif inner is None or not members.begin(work):
            members.spoil()
            work.finish()  # worthless: the step is given up
        else:
            work.run(inner, act, inputs, members)
        return work


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

    def run(
        self,
        inner: Any,
        act: Callable[[Any, Tensors, Tensors], Any],
        inputs: Tensors,
        members: Membership,
    ) -> None:
        with torch.no_grad():
            private = _each(torch.clone, self._outputs)
            given = _each(torch.clone, inputs)
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
                for mine, theirs in zip(_flat(self._outputs), _flat(private), strict=True):
                    mine.copy_(theirs)
            self._over = True
        self._ended.set_result(_flat(self._outputs))

    def _failed(self, error: RuntimeError, members: Membership) -> None:
        # advice that helps nobody here
        told = first_line(error).partition(". This is typically")[0]
        if members.failed(self, told):
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
        self._ended.set_result(_flat(self._outputs))

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
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
        return _flat(self._outputs)


class _Either:
    """Waits for its own `set` or for another event."""

    def __init__(self, other: threading.Event) -> None:
        self._own, self._other = threading.Event(), other

    def set(self) -> None:
        self._own.set()

    def wait(self) -> bool:
        """True when it was its own."""
        while not self._own.wait(0.02):
            if self._other.is_set():
                return False
        return True


def _transport(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """One life of a group. Raises RuntimeError when not all come."""
    group = dist.ProcessGroup(store, rank, size)
    kinds = dist.ProcessGroup.BackendType
    group._set_default_backend(kinds.GLOO)
    group._register_backend(
        torch.device("cpu"),
        kinds.GLOO,
        dist.ProcessGroupGloo(dist.PrefixStore("cpu", store), rank, size, timeout),
    )
    return group


def _drop(held: list[Any]) -> None:
    """Let go of the last reference, on a thread of its own: gloo waits there for whatever is under
    way, and from a machine that has vanished nothing comes for as long as the group's timeout."""
    held.pop()


def _device_of(tensors: Tensors) -> torch.device:
    """Of the first of them; without any, the CPU."""
    while isinstance(tensors, list | tuple) and tensors:
        tensors = tensors[0]
    return tensors.device if isinstance(tensors, torch.Tensor) else torch.device("cpu")


def _not_on(device: object) -> ConfigError:
    return ConfigError(
        f"keepstep.init_process_group: expected tensors on the CPU, found {device}; groups over "
        f"NCCL that outlive a rank have not been proven on a device: {SAFE_WAY}"
    )


def _options(opts: Any, kind: Any) -> Any:
    """torch calls with options, with an operation, or with nothing."""
    if isinstance(opts, kind):
        return opts
    made = kind()
    if opts is not None and hasattr(made, "reduceOp"):
        made.reduceOp = opts
    return made


def _listed(tensors: Tensors) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _each(act: Callable[[torch.Tensor], torch.Tensor], tensors: Tensors) -> Tensors:
    if tensors is None or isinstance(tensors, torch.Tensor):
        return None if tensors is None else act(tensors)
    return [_each(act, inner) for inner in tensors]


def _flat(tensors: Tensors) -> list[torch.Tensor]:
    if tensors is None:
        return []
    return (
        [tensors]
        if isinstance(tensors, torch.Tensor)
        else [t for inner in tensors for t in _flat(inner)]
    )


def _to_each(outputs: Tensors, inputs: Tensors) -> None:
    for many, one in zip(outputs, inputs, strict=False):
        for output in many:
            output.copy_(one)


def _to_each_part(output: torch.Tensor, input: torch.Tensor) -> None:
    output.view(-1, input.numel()).copy_(input.reshape(1, -1))


def _copy_flat(output: torch.Tensor, input: torch.Tensor) -> None:
    if output.numel() == input.numel():
        output.reshape(-1).copy_(input.reshape(-1))


def _all(one: Callable[[torch.Tensor, torch.Tensor], None]) -> Callable[[Tensors, Tensors], None]:
    def each(outputs: Tensors, inputs: Tensors) -> None:
        for output, input_ in zip(outputs, inputs, strict=True):
            one(output, input_)

    return each
