"""Groups over a device's queue: which tensors a collective works on, what an error is, what torch
is told, and what a process must be told before it may stay. The device is a fake."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from keepstep.edge.torch import membership as module
from keepstep.edge.torch.at_once import LATE, all_within
from keepstep.edge.torch.groups import TorchGroup, init_process_group
from keepstep.edge.torch.membership import Membership
from keepstep.edge.torch.process_groups import TorchGroups
from keepstep.edge.torch.transports import nccl_backend, stay_environment
from keepstep.edge.torch.works import EndEvent, QueuedWork
from keepstep.errors import ConfigError
from keepstep.model.device import STAYING, UNTESTED_NCCL
from keepstep.model.units import MS_NS, S_NS
from tests.edge.torch.fake_device import FakeDevice, FakeNccl
from tests.runtime.fakes import FakeExecutor

WITHIN = timedelta(seconds=10)
CPU = torch.device("cpu")  # stands for the device


class Queue:
    """A group on a fake device."""

    def __init__(self) -> None:
        self.device = FakeDevice(random.Random(0).randrange)
        self.nccl = FakeNccl(self.device)
        self.members = Membership()
        self.members.device = CPU
        self.members.watched = True
        self.members.begin_body()
        self.builds: list[FakeNccl] = []
        self.group = TorchGroup(
            dist.HashStore(), 0, 2, WITHIN, "g", self.members, build=self._build
        )

    def _build(self, *_: Any) -> Any:
        self.builds.append(self.nccl if not self.builds else FakeNccl(self.device))
        return self.builds[-1]

    def sum(self, value: float = 1.0) -> tuple[torch.Tensor, Any]:
        tensor = torch.full((3,), value)
        return tensor, self.group.allreduce([tensor])


@pytest.fixture
def queue() -> Queue:
    return Queue()


def test_a_collective_works_on_the_caller_s_own_tensor_and_nobody_waits_for_it(
    queue: Queue,
) -> None:
    tensor, work = queue.sum()
    assert isinstance(work, QueuedWork) and work.result()[0] is tensor
    assert work.wait() and tensor.tolist() == [1, 1, 1], "the trainer has not waited"
    queue.device.synchronize()
    assert tensor.tolist() == [2, 2, 2] and work.has_ended()


@pytest.mark.parametrize("way", ["wait", "future"])
def test_one_that_is_waited_for_at_once_is_on_the_caller_s_stream(queue: Queue, way: str) -> None:
    """NCCL hands back nothing for it. Seen on a device, torch 2.11: it was asked to wait."""
    tensor, options = torch.ones(3), c10d.AllreduceOptions()
    options.asyncOp = False
    work = queue.group.allreduce([tensor], options)
    assert isinstance(work, QueuedWork) and not work.has_ended() and work.result()[0] is tensor
    if way == "wait":
        assert work.wait()
    else:
        assert work.get_future().wait()[0] is tensor
    seen = torch.zeros(3)
    queue.device.current.order(lambda: seen.copy_(tensor))
    queue.device.synchronize()
    assert seen.tolist() == [2, 2, 2] and work.has_ended()


def test_its_future_is_nccl_s_own(queue: Queue) -> None:
    _, work = queue.sum()
    assert type(work.get_future()).__name__ == "FakeNcclFuture"


@pytest.mark.parametrize("ended", [0, 1, 2, 3])
def test_what_had_ended_when_a_peer_was_lost_stands_and_what_had_not_does_not(
    queue: Queue, ended: int
) -> None:
    marks = [queue.members.mark()]
    for number in range(3):
        if number == ended:
            queue.nccl.is_peer_lost = True
        queue.sum()
        marks.append(queue.members.mark())
        while queue.device.run_one():
            pass
    queue.members.lose("rank 1 was killed")
    queue.group.abort()
    queue.device.synchronize()
    assert [queue.members.stands(mark) for mark in marks] == [n <= ended for n in range(4)]
    assert queue.members.is_worthless == (ended < 3)


def test_one_that_is_queued_behind_the_notice_is_worthless(queue: Queue) -> None:
    before = queue.members.mark()
    queue.members.lose("rank 1 was killed")
    _, work = queue.sum()
    assert not isinstance(work, QueuedWork) and work.wait()
    assert queue.members.is_worthless and queue.members.stands(before)
    inner = queue.nccl.allreduce([torch.ones(1)], None)
    racing = QueuedWork(inner, EndEvent(inner, queue.nccl.end_on_stream), queue.members)
    queue.members.queued(racing)  # it was on its way when the notice came
    assert not queue.members.stands(queue.members.mark())


def test_what_was_denied_once_is_denied_in_the_next_life(queue: Queue) -> None:
    mark = queue.members.mark()
    assert queue.members.stands(mark)
    queue.members.lose("rank 1 was killed")
    assert queue.members.regroup(dist.HashStore(), 1, threading.Event())
    assert not queue.members.stands(mark) and queue.members.stands(queue.members.mark())
    assert len(queue.builds) == 2
    tensor, work = queue.sum()
    work.wait()
    queue.device.synchronize()
    assert tensor.tolist() == [2, 2, 2]


def test_what_has_ended_is_not_kept(queue: Queue) -> None:
    for _ in range(50):
        queue.sum()
        queue.device.synchronize()
    queue.sum()
    assert len(queue.members._queued) == 1


def test_an_error_as_it_is_queued_waits_for_who_says_which_peer_that_was(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "NOTICE_WITHIN_S", 0.01)
    told: list[str] = []
    queue.members.on_error = told.append
    queue.nccl.is_aborted = True
    _, work = queue.sum()
    assert work.wait() and told == ["NCCL communicator was aborted"]
    assert queue.members.is_worthless
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(20)
    assert queue.members.is_lost, "nobody has said anything"


def test_without_a_watch_the_error_is_the_caller_s(queue: Queue) -> None:
    queue.members.watched = False
    queue.nccl.is_aborted = True
    with pytest.raises(RuntimeError, match="communicator was aborted"):
        queue.sum()


def test_an_error_in_a_wait_is_the_lost_peer_s(queue: Queue) -> None:
    _, work = queue.sum()

    def fails(*_: Any) -> bool:
        raise RuntimeError("NCCL error: remote process exited")

    work._inner.wait = fails
    queue.members.lose("rank 1 was killed")
    assert work.wait() and queue.members.is_worthless
    queue.members.watched = False
    queue.members._lost.clear()
    with pytest.raises(RuntimeError, match="remote process exited"):
        work.wait()


def test_a_collective_whose_communicator_has_failed_has_not_ended(queue: Queue) -> None:
    """NCCL's work counts as completed then. Seen on a device: it tells no error either."""
    queue.nccl.is_peer_lost = True
    _, work = queue.sum()
    assert work.is_completed() and not work.has_ended()
    with pytest.raises(TypeError):
        work._inner.exception()


def test_a_muted_group_takes_what_it_gives_for_all(queue: Queue) -> None:
    queue.members.muted = True
    output = torch.zeros(6)
    assert queue.group._allgather_base(output, torch.ones(3)).wait()
    assert output.tolist() == [1] * 6


def test_a_barrier_goes_where_its_caller_names_a_device(queue: Queue) -> None:
    called: list[Any] = []
    queue.nccl.barrier = lambda opts: called.append(opts) or queue.nccl.allreduce([], opts)  # type: ignore[attr-defined]
    options = dist.BarrierOptions()
    options.device = CPU
    assert isinstance(queue.group.barrier(options), QueuedWork)
    assert len(called) == 1


def test_torch_is_told_what_moves_the_bytes() -> None:
    members = Membership()
    members.device = torch.device("cuda", 0)
    members.muted = True  # connects nothing
    group = TorchGroup(dist.HashStore(), 0, 1, WITHIN, "g", members)
    assert group.getBackendName() == "keepstep_nccl"
    names = {d: group._get_backend(torch.device(d)).name() for d in ("cpu", "cuda")}
    assert names == {"cpu": "gloo", "cuda": "nccl"}
    shown = group._get_backend(torch.device("cuda"))
    assert not shown.supports_splitting and not shown.supports_coalescing
    plain = TorchGroup(dist.HashStore(), 0, 1, WITHIN, "g", _muted())
    assert plain.getBackendName() == "keepstep"
    assert plain._get_backend(CPU).name() == "gloo"


def _muted() -> Membership:
    members = Membership()
    members.muted = True
    return members


# -- what a process must be told


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in STAYING:
        monkeypatch.setenv(variable.name, "")
        monkeypatch.delenv(variable.name)


def test_what_is_not_set_is_set(clean: None) -> None:
    os.environ["NCCL_NVLS_ENABLE"] = "1"  # a choice that a process can stay with
    stay_environment()
    found = {variable.name: os.environ[variable.name] for variable in STAYING}
    assert found == {**{v.name: v.value for v in STAYING}, "NCCL_NVLS_ENABLE": "1"}


@pytest.mark.parametrize("name", [v.name for v in STAYING if v.is_needed])
def test_what_a_process_cannot_stay_with_is_refused_with_the_reason(clean: None, name: str) -> None:
    os.environ[name] = "3"
    with pytest.raises(ConfigError, match=f"expected {name}=0, found '3': "):
        stay_environment()


def test_a_device_is_refused_without_the_switch_and_with_it_taken(
    clean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="have run on one device alone: call torch"):
        init_process_group(device_id=device)
    monkeypatch.setenv(UNTESTED_NCCL, "1")
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    with pytest.raises(ConfigError, match="a wait that blocks the trainer"):
        init_process_group(device_id=device)
    assert not dist.is_initialized() and module.membership.device is None


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_a_torch_without_nccl_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="expected a torch with NCCL, found"):
        nccl_backend(dist.HashStore(), 0, 1, WITHIN)


# -- aborting all at once


def test_aborts_that_wait_for_each_other_end_because_all_have_begun() -> None:
    barrier = threading.Barrier(3)
    waits: dict[str, Callable[[], object]] = dict.fromkeys("abc", barrier.wait)
    assert all_within(waits, 20 * S_NS) == []


def test_who_fails_and_who_is_late_are_told_by_name() -> None:
    never = threading.Event()

    def fails() -> None:
        raise RuntimeError("unhandled cuda error\nand pages about it")

    acts: dict[str, Callable[[], object]] = {
        "tp": fails,
        "dp": lambda: None,
        "pp": never.wait,
    }
    assert all_within(acts, 200 * MS_NS) == [
        "tp: unhandled cuda error",
        f"pp {LATE} 200.0 ms",
    ]
    never.set()


def test_every_group_of_the_process_is_aborted(queue: Queue) -> None:
    groups = TorchGroups(queue.members, FakeExecutor(), [], False)
    assert groups.has_device
    queue.nccl.is_peer_lost = True
    queue.sum()
    groups.lose("rank 1 was killed")
    assert groups.abort(10 * S_NS) == [] and queue.nccl.is_aborted
    queue.device.synchronize()
    assert groups.abort(10 * S_NS) == [], "once more, with nothing left to abort"
    groups.close()
