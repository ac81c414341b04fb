"""Groups over NCCL, one rank alone: whether a caller sees a collective's result on its own stream,
and when a collective counts as over. Skipped without CUDA and NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.futures import Future

import keepstep
from keepstep.edge.torch.membership import membership
from keepstep.edge.torch.process_groups import TorchGroups
from keepstep.edge.torch.works import QueuedWork
from keepstep.model.device import UNTESTED_NCCL
from keepstep.model.units import S_NS
from tests.runtime.fakes import FakeExecutor

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_nccl_available()), reason="no CUDA device here"
)
COUNT = 1 << 26
LONG = 100_000_000  # cycles


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    monkeypatch.setenv(UNTESTED_NCCL, "1")
    found = torch.device("cuda", 0)
    torch.cuda.set_device(found)
    # of a group that torch 2.11 has taken down without a word to it
    membership._queued.clear()
    keepstep.init_process_group(device_id=found, rank=0, world_size=1, store=dist.HashStore())
    yield found
    dist.destroy_process_group()
    membership.device = None


def wrong_results(way: str) -> int:
    """How often of 20 times a caller that has waited sees another value than was sent."""
    x, out = (torch.zeros(COUNT, device="cuda") for _ in range(2))
    wrong = 0
    for number in range(1, 21):
        torch.cuda._sleep(LONG)
        x.fill_(float(number))
        work = dist.all_gather_into_tensor(out, x, async_op=True)
        assert work is not None
        work.wait() if way == "wait" else work.get_future().wait()
        seen = out[-1].clone()
        torch.cuda.synchronize()
        wrong += seen.item() != float(number)
    return wrong


@pytest.mark.parametrize("way", ["wait", "future"])
def test_a_caller_that_has_waited_sees_the_result(device: torch.device, way: str) -> None:
    assert wrong_results(way) == 0


def test_with_a_bare_future_it_would_not(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the test above could not fail."""

    def bare(self: QueuedWork) -> Future[Any]:
        own: Future[Any] = Future()
        self._inner.get_future().add_done_callback(lambda done: own.set_result(done.value()))
        return own

    monkeypatch.setattr(QueuedWork, "get_future", bare)
    assert wrong_results("future") > 0


def test_a_collective_is_over_when_the_device_says_so(device: torch.device) -> None:
    x = torch.zeros(COUNT, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * LONG)
    mark_before = membership.mark()
    work = dist.all_reduce(x, async_op=True)
    assert isinstance(work, QueuedWork) and not work.has_ended()
    membership.lose("rank 1 was killed")
    assert membership.stands(mark_before) and not membership.stands(membership.mark())
    torch.cuda.synchronize()
    assert work.has_ended() and not membership.stands(membership.mark())


def test_what_torch_is_told_of_the_group(device: torch.device) -> None:
    group = dist.group.WORLD
    assert group is not None and dist.get_backend() == "keepstep_nccl"
    assert group.bound_device_id == device
    assert group._get_backend(device).name() == "nccl"
    assert group._get_backend(torch.device("cpu")).name() == "gloo"
    dist.barrier(device_ids=[0])
    host = torch.ones(3)
    dist.all_reduce(host)  # what is on the host goes by gloo
    assert host.tolist() == [1, 1, 1]


def test_a_device_that_waits_for_nobody_is_free_after_an_abort(device: torch.device) -> None:
    groups = TorchGroups(membership, FakeExecutor(), [], False)
    assert groups.has_device
    dist.all_reduce(torch.ones(8, device="cuda"))
    membership.lose("rank 1 was killed")
    assert groups.abort(20 * S_NS) == []
    assert groups.look_at_device(20 * S_NS).is_well
    assert groups.look_at_device(20 * S_NS).is_well
    groups.close()
