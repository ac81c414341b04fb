"""Groups: process groups that can be built anew under the objects that use them, so that DDP and
FSDP go on after a peer was lost.

    torch's call, on the CPU      -> private buffers -> gloo -> the caller's tensors
    torch's call, on the device   -> the caller's tensors, queued by NCCL
    and at any moment: lost -> everything ends

What gloo does when a peer dies was tried out (torch 2.13): only the peer's ring neighbours notice,
the others wait for their timeout, `abort` wakes nobody, and a failed sum leaves partial ones in the
buffer. So a collective is never waited for beyond the notice that a peer is lost; the inner group
is *abandoned*: forgotten with the buffers its threads may still write to, which is why they are
private.

Groups over NCCL end otherwise: a collective is queued, works on the caller's tensors, and ends when
the device says so or its communicator is aborted. **That has run on one device alone**, so it is
refused, unless `KEEPSTEP_UNTESTED_NCCL_GROUPS=1` says that somebody wants to try.

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

from keepstep.edge.torch.attempts import with_own_store
from keepstep.edge.torch.entered import group_number
from keepstep.edge.torch.membership import Membership, membership
from keepstep.edge.torch.transports import Building, GroupLife, ShownBackend, stay_environment
from keepstep.edge.torch.untraced import untraced
from keepstep.edge.torch.works import (
    CallersStream,
    EndEvent,
    OverWork,
    QueuedWork,
    Tensors,
    Together,
    Work,
    flat,
    told_in_short,
)
from keepstep.errors import ConfigError
from keepstep.model.device import UNTESTED_NCCL

BACKEND = "keepstep"
BACKEND_WITH_NCCL = "keepstep_nccl"  # as `get_backend` tells where a device's tensors go to NCCL
DESTROYED = "make what was made with it (DistributedDataParallel, FSDP, a DeviceMesh) anew"
SAFE_WAY = "call torch.distributed.init_process_group: all start anew from memory when one is lost"


def register() -> None:
    """Make `keepstep` and `keepstep_nccl` backends of `torch.distributed`; as often as you like."""
    for name in (BACKEND, BACKEND_WITH_NCCL):
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, _create, extended_api=True, devices=["cpu", "cuda"])


def init_process_group(**given: Any) -> None:
    """`torch.distributed.init_process_group` with groups that outlive the loss of a rank: gloo, for
    tensors on the CPU.

    Used in its place; everything of `torch.distributed` works as before, but that a collective of a
    group that was destroyed raises RuntimeError. A rank that is started into a running job meets
    nobody here: what it does in collectives until `keepstep.protect` has brought its state is done
    alone.

    Args:
        given: what torch's takes, but for `backend`.

    Raises:
        ConfigError: `device_id` is given; so does a collective on tensors of a device: with
            torch's own groups all ranks start anew from memory when one is lost. With torch 2.6
            always: what that does with groups written in Python hangs now and then.

    Where KEEPSTEP_UNTESTED_NCCL_GROUPS is 1, `device_id` is taken, and tensors on that device go to
    NCCL. That has run on one device alone: docs/gpu.md.
    """
    if torch.__version__.startswith("2.6."):
        raise ConfigError(
            "keepstep.init_process_group: expected torch 2.7 or later, found "
            f"{torch.__version__}; {SAFE_WAY}"
        )
    device = given.get("device_id")
    if device is not None and os.environ.get(UNTESTED_NCCL) != "1":
        raise _not_on(device)
    register()
    membership.muted = os.environ.get("KEEPSTEP_REJOIN") == "1"
    if device is None:
        dist.init_process_group(BACKEND, **with_own_store(given))
        return
    stay_environment()
    membership.device = torch.device("cuda", device) if isinstance(device, int) else device
    dist.init_process_group(BACKEND_WITH_NCCL, **with_own_store(given))
    # Torch has told it to an object that it drops for ours.
    dist.distributed_c10d._get_default_group().bound_device_id = membership.device


def _create(options: Any, _: Any) -> TorchGroup:
    return TorchGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.group_id,
        membership,
        ranks=options.global_ranks_in_group,
    )


@untraced
class TorchGroup(dist.ProcessGroup):
    """What `torch.distributed` sees: one of these for the life of the process, whatever happens to
    the peers."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        members: Membership,
        build: Callable[..., Building] = Building,
        ranks: Sequence[int] = (),
    ) -> None:
        """build: makes a life of it, of store, rank, size, timeout and device. Raises RuntimeError
        when not all members come. ranks: its members' in the job, none for all of them."""
        super().__init__(rank, size)
        self._number = group_number(name, ranks)
        self._rank, self._size, self._timeout = rank, size, timeout
        self._name, self._members, self._build = name, members, build
        self.store = store  # in which the members of this life have met
        self._description = ""
        self._inner: GroupLife | None = None
        self._is_destroyed = False
        self._building: Building | None = None
        self._shown = {"cpu": ShownBackend(rank, size, "gloo")}
        if members.device is not None:
            self._shown[members.device.type] = ShownBackend(rank, size, "nccl")
        members.add_group(self)
        if not members.muted:
            self._inner = self._built(store)

    def _built(self, store: Any) -> GroupLife:
        """Raises RuntimeError when not all come."""
        building = self._building = self._build(
            store, self._rank, self._size, self._timeout, self._members.device
        )
        try:
            return building.made()
        finally:
            if self._building is building:
                self._building = None

    # -- what torch asks

    def getBackendName(self) -> str:
        return BACKEND if self._members.device is None else BACKEND_WITH_NCCL

    def _get_backend(self, device: torch.device) -> ShownBackend:
        """Raises RuntimeError for a kind of device that the group has none for, as torch does."""
        shown = self._shown.get(device.type)
        if shown is None:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return shown

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self._shown]

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
        """See `Regroupable`."""
        before: list[Any]
        before, self._inner = [self._inner, self._building], None
        try:
            for index in range(len(before)):
                if before[index] is not None:
                    before[index].abort()
        finally:
            _drop_aside(before)

    def shutdown(self) -> None:
        self._members.remove_group(self)
        self._inner, self._is_destroyed = None, True

    # -- another life

    def rebuild(self, store: Any, attempt: int, given_up: threading.Event) -> None:
        """Forget the present peers' connections and find the new ones'. Blocks until all are there
        or `given_up` is set."""
        before: list[Any]
        before, self._inner = [self._inner], None
        _drop_aside(before)
        prefix = dist.PrefixStore(f"keepstep/{attempt}/{self._name}", store)
        made: list[Any] = []

        # gloo cannot be interrupted: a thread of its own is left behind when a peer dies meanwhile
        def make() -> None:
            try:
                made.append(self._built(prefix))
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
        self._inner, self.store = made[0], prefix

    # -- collectives: `outputs` first, as torch has it

    def allreduce(self, tensors: Tensors, opts: Any = None, *_: Any) -> dist.Work:
        tensors, opts = _listed(tensors), _options(opts, c10d.AllreduceOptions)
        act = lambda inner, out, _: inner.allreduce(out, opts)  # noqa: E731
        return self._collective(tensors, None, act, is_sum=True)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        opts = opts or c10d.AllreduceCoalescedOptions()
        return self._collective(
            tensors, None, lambda inner, out, _: inner.allreduce_coalesced(out, opts), is_sum=True
        )

    def broadcast(self, tensors: Tensors, opts: Any = None, *_: Any) -> dist.Work:
        tensors = _listed(tensors)
        if not isinstance(opts, c10d.BroadcastOptions):
            root, opts = int(opts or 0), c10d.BroadcastOptions()
            opts.rootRank = root
        return self._collective(tensors, None, lambda inner, out, _: inner.broadcast(out, opts))

    def reduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        opts = opts or c10d.ReduceOptions()
        return self._collective(
            _listed(tensors), None, lambda inner, out, _: inner.reduce(out, opts)
        )

    def allgather(self, outputs: Tensors, inputs: Tensors, opts: Any = None, *_: Any) -> dist.Work:
        opts = _options(opts, c10d.AllgatherOptions)
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._collective(
            outputs, inputs, lambda inner, out, into: inner.allgather(out, into, opts), _to_each
        )

    def _allgather_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, *_: Any
    ) -> dist.Work:
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
    ) -> dist.Work:
        opts = _options(opts, c10d.AllgatherOptions)
        act = lambda inner, out, into: inner.allgather_into_tensor_coalesced(out, into, opts)  # noqa: E731
        return self._collective(outputs, inputs, act, _all(_to_each_part))

    all_gather_single_coalesced = allgather_into_tensor_coalesced  # as newer callers have it

    def reduce_scatter(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, *_: Any
    ) -> dist.Work:
        opts = _options(opts, c10d.ReduceScatterOptions)
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._collective(
            outputs,
            inputs,
            lambda inner, out, into: inner.reduce_scatter(out, into, opts),
            self._own_of_each,
            is_sum=True,
        )

    def _reduce_scatter_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, *_: Any
    ) -> dist.Work:
        opts = _options(opts, c10d.ReduceScatterOptions)
        return self._collective(
            output,
            input,
            lambda inner, out, into: inner._reduce_scatter_base(out, into, opts),
            self._own_part,
            is_sum=True,
        )

    reduce_scatter_single = _reduce_scatter_base  # as newer callers have it

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        opts = _options(opts, c10d.ReduceScatterOptions)
        act = lambda inner, out, into: inner.reduce_scatter_tensor_coalesced(out, into, opts)  # noqa: E731
        return self._collective(outputs, inputs, act, _all(self._own_part), is_sum=True)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # as newer callers have it

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
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
    ) -> dist.Work:
        opts = _options(opts, c10d.AllToAllOptions)
        out_split, in_split = list(output_split or ()), list(input_split or ())
        act = lambda inner, out, into: inner.alltoall_base(out, into, out_split, in_split, opts)  # noqa: E731
        return self._collective(output, input, act, _copy_flat)

    all_to_all_single = alltoall_base  # as newer callers have it

    def gather(self, outputs: Tensors, inputs: Tensors, opts: Any = None, *_: Any) -> dist.Work:
        opts = _options(opts, c10d.GatherOptions)
        inputs = _listed(inputs)
        return self._collective(
            outputs, inputs, lambda inner, out, into: inner.gather(out, into, opts), _to_each
        )

    def scatter(self, outputs: Tensors, inputs: Tensors, opts: Any = None, *_: Any) -> dist.Work:
        opts = _options(opts, c10d.ScatterOptions)
        outputs = _listed(outputs)
        own = self._own_of_each if inputs else None
        return self._collective(
            outputs, inputs, lambda inner, out, into: inner.scatter(out, into, opts), own
        )

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> dist.Work:
        return self._collective(
            [],
            _listed(tensors),
            lambda inner, _, into: inner.send(into, to, tag),
            is_message=True,
        )

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work:
        return self._collective(
            _listed(tensors),
            None,
            lambda inner, out, _: inner.recv(out, source, tag),
            is_message=True,
        )

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        return self._collective(
            _listed(tensors),
            None,
            lambda inner, out, _: inner.recv_anysource(out, tag),
            is_message=True,
        )

    def exchange(
        self,
        receives: Sequence[tuple[torch.Tensor, int | None]],
        sends: Sequence[tuple[torch.Tensor, int]],
        tag: int,
    ) -> dist.Work:
        """What `recv` and `send` do, of many tensors in one work, on the CPU. Each with whom it is
        from (None: anybody), or for. It does not count among the collectives that all enter."""

        def received(inner: Any, tensor: torch.Tensor, peer: int | None) -> Any:
            if peer is None:
                return inner.recv_anysource([tensor], tag)
            return inner.recv([tensor], peer, tag)

        def act(inner: Any, out: Tensors, into: Tensors) -> Together:
            works = [received(inner, t, peer) for t, (_, peer) in zip(out, receives, strict=True)]
            works += [inner.send([t], peer, tag) for t, (_, peer) in zip(into, sends, strict=True)]
            return Together(works)

        outputs, inputs = [t for t, _ in receives], [t for t, _ in sends]
        return self._collective(outputs, inputs, act, is_of_all=False)

    def barrier(self, opts: Any = None, *_: Any) -> dist.Work:
        """On the device where the caller names it, as `torch.distributed.barrier` does in a group
        with a device; else on the CPU."""
        opts = _options(opts, c10d.BarrierOptions)
        device = opts.device
        if device is None and opts.device_ids:
            device = self._members.device
        return self._collective([], None, lambda inner, *_: inner.barrier(opts), None, device)

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
        device: torch.device | None = None,
        is_sum: bool = False,
        is_of_all: bool = True,
        is_message: bool = False,
    ) -> dist.Work:
        """`alone` is what a muted group does: as if all others had given what this one gives.
        `device`: where there are no tensors that say it. `is_sum`: of what all give. `is_of_all`:
        who has entered fewer is behind. `is_message`: it is of two ranks, and counts as well."""
        members, inner = self._members, self._inner
        device = device or _device_of(outputs, inputs)
        is_queued = members.device is not None and device.type == members.device.type
        if device.type != "cpu" and not is_queued:
            raise _not_on(device)
        if is_of_all:
            members.enter(self._number, is_message)
        if members.muted:
            if alone is not None:
                with torch.no_grad():
                    alone(outputs, inputs)
            return OverWork(outputs, device)
        if self._is_destroyed and not members.is_lost:
            raise RuntimeError(f"process group {self._name!r} was destroyed; {DESTROYED}")
        if inner is None or members.is_lost:
            members.spoil()
            return OverWork(outputs, device)  # worthless: the step is given up
        if is_queued:
            return self._queued(inner, act, outputs, inputs, device)
        work = Work(outputs)
        if members.begin(work):
            if is_sum:
                members.on_give(flat(outputs if inputs is None else inputs))
            work.run(inner.group, act, inputs, members)
        else:
            members.spoil()
            work.finish()
        return work

    def _queued(
        self,
        inner: GroupLife,
        act: Callable[[Any, Tensors, Tensors], Any],
        outputs: Tensors,
        inputs: Tensors,
        device: torch.device,
    ) -> dist.Work:
        """The caller's own tensors: what is queued behind the collective finds the result there.
        Raises what NCCL raises where nobody will say that a peer is lost."""
        members, is_captured = self._members, _is_captured(device)
        is_told, event = members.on_order(), None
        try:
            try:
                with members.waiting():  # where it is queued on the caller's own stream
                    under_way = act(inner.group, outputs, inputs)
            except RuntimeError as error:
                if not members.broke(told_in_short(error)):
                    raise
                return OverWork(outputs, device)
            end: Any = None
            if under_way is None:
                end = event = None if is_captured else inner.end_on_stream()
                under_way = CallersStream(end, outputs, device)
            elif not is_captured:
                end = EndEvent(under_way, inner.end_on_stream)
                event = end.event
            work = QueuedWork(under_way, end, members)
            if not is_captured:
                members.queued(work)
            return work
        finally:  # whatever was raised: it is over, and not under way for ever
            if is_told:
                members.on_queued(event)


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


def _drop_aside(held: list[Any]) -> None:
    """Let go of the last references, on a thread of its own: gloo waits there for whatever is under
    way, and from a machine that has vanished nothing comes for as long as the group's timeout."""
    threading.Thread(target=held.clear, name="keepstep-drop", daemon=True).start()


def _is_captured(device: torch.device) -> bool:
    """Whether what is queued now goes into the program's CUDA graph and does not run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _device_of(*tensors: Tensors) -> torch.device:
    """Of the first of them; without any, the CPU."""
    found = [t for some in tensors for t in flat(some)]
    return found[0].device if found else torch.device("cpu")


def _not_on(device: object) -> ConfigError:
    return ConfigError(
        f"keepstep.init_process_group: expected tensors on the CPU, found {device}; groups over "
        f"NCCL that outlive a rank have run on one device alone: {SAFE_WAY}"
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
