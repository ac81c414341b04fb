"""Groups over gloo, two ranks in one process: what a collective that failed is to those who wait
for it, in Python and in C++."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.futures import Future

from keepstep.edge.torch import groups as module_of_groups
from keepstep.edge.torch import membership as module
from keepstep.edge.torch.entered import group_number
from keepstep.edge.torch.groups import TorchGroup, Work, init_process_group
from keepstep.edge.torch.membership import Membership
from keepstep.errors import ConfigError
from keepstep.model.step_work import GroupEntries

WITHIN = timedelta(seconds=30)
LOST = "Connection (closed|reset) by peer"


def zeros(count: int = 2) -> torch.Tensor:
    return torch.zeros(count)


def as_cpp_has_it(work: Work) -> Future[list[torch.Tensor]]:
    """The future that DDP's reducer reads: C++ asks the work for it and drops what Python has put
    around it."""
    return dist.Work.get_future(work)


# with a future of the transport's, and without: those are waited for on a thread
COLLECTIVES: dict[str, Callable[[TorchGroup], Work]] = {
    "allreduce": lambda group: group.allreduce([zeros()]),
    "allreduce_coalesced": lambda group: group.allreduce_coalesced([zeros(), zeros()]),
    "broadcast": lambda group: group.broadcast([zeros()], 1),
    "reduce": lambda group: group.reduce([zeros()]),
    "allgather": lambda group: group.allgather([[zeros(), zeros()]], [zeros()]),
    "allgather_base": lambda group: group._allgather_base(zeros(4), zeros()),
    "allgather_coalesced": lambda group: group.allgather_into_tensor_coalesced(
        [zeros(4)], [zeros()]
    ),
    "reduce_scatter_base": lambda group: group._reduce_scatter_base(zeros(), zeros(4)),
    "reduce_scatter_coalesced": lambda group: group.reduce_scatter_tensor_coalesced(
        [zeros()], [zeros(4)]
    ),
    "alltoall_base": lambda group: group.alltoall_base(zeros(4), zeros(4), [], []),
    "gather": lambda group: group.gather([[zeros(), zeros()]], [zeros()]),
    "recv": lambda group: group.recv([zeros()], 1),
    "barrier": lambda group: group.barrier(),
}
each_collective = pytest.mark.parametrize("collective", COLLECTIVES.values(), ids=COLLECTIVES)


@pytest.fixture
def members() -> Membership:
    return Membership()


@pytest.fixture
def groups(members: Membership) -> Iterator[list[TorchGroup]]:
    """Rank 0's group, whose membership is `members`, and rank 1's."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(
            lambda rank: TorchGroup(
                store, rank, 2, WITHIN, "g", members if rank == 0 else Membership()
            ),
            range(2),
        )
    found = list(made)
    yield found
    for group in found:
        group.abort()


@each_collective
def test_a_peer_that_is_lost_is_an_error_to_python_and_to_cpp(
    groups: list[TorchGroup], collective: Callable[[TorchGroup], Work]
) -> None:
    under_way = collective(groups[0])
    future = under_way.get_future()
    chained = future.then(lambda done: done.value())
    groups[1].abort()
    later = collective(groups[0])
    for work in (under_way, later):
        with pytest.raises(RuntimeError, match=f"^[^\n]*{LOST}"):
            work.wait()
        assert work.is_completed() and not work.is_success()
    for ended in (future, chained, later.get_future(), as_cpp_has_it(under_way)):
        for look in (ended.wait, ended.value):
            with pytest.raises(RuntimeError, match=LOST):
                look()


@each_collective
def test_with_a_watch_it_ends_with_nothing_in_it(
    groups: list[TorchGroup],
    members: Membership,
    collective: Callable[[TorchGroup], Work],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "NOTICE_WITHIN_S", 0.01)
    members.watched = True
    work = collective(groups[0])
    groups[1].abort()
    assert work.wait() and work.is_success() and members.is_worthless
    for future in (work.get_future(), as_cpp_has_it(work)):
        assert all(not tensor.any() for tensor in future.value())


def test_a_future_is_over_before_its_work_has_been_waited_for(groups: list[TorchGroup]) -> None:
    for _ in range(50):
        works = [group.allreduce([torch.ones(2)]) for group in groups]
        futures = [work.get_future() for work in works]
        for work, future in zip(works, futures, strict=True):
            work.wait()
            assert future.value()[0].tolist() == [2.0, 2.0]


def test_collectives_and_messages_are_counted_for_their_group(
    groups: list[TorchGroup], members: Membership
) -> None:
    for work in [group.allreduce([torch.ones(2)]) for group in groups]:
        work.wait()
    sent, received = groups[0].send([torch.ones(2)], 1), groups[1].recv([zeros()], 0)
    assert sent.wait() and received.wait()
    number = group_number("g", ())
    assert members.entered_by_group == (GroupEntries(number, 1, 1),) and members.entered == 2


def test_groups_of_the_same_name_and_of_other_members_have_other_numbers() -> None:
    numbers = [group_number(name, ranks) for name in "01" for ranks in ([], [0, 1], [0, 2])]
    assert len(set(numbers)) == 6 and all(0 < number < 1 << 48 for number in numbers)


def test_torchs_groups_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Membership()
    monkeypatch.setattr(module_of_groups, "membership", found)
    init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        pair, other = dist.new_group([0]), dist.new_group([0])
        for group in (None, pair, other, pair):
            dist.all_reduce(torch.ones(2), group=group)
        entered = [counts for _, *counts in found.entered_by_group]
        assert entered == [[1, 0], [2, 0], [1, 0]]
        names = [dist.group.WORLD.group_name, pair.group_name, other.group_name]
        ranks = [[], [0], [0]]
        numbers = [group_number(*both) for both in zip(names, ranks, strict=True)]
        assert [number for number, *_ in found.entered_by_group] == numbers
    finally:
        dist.destroy_process_group()


def test_what_was_made_with_a_destroyed_group_does_not_go_on_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its sums would be of one rank, and nobody would know."""
    found = Membership()
    monkeypatch.setattr(module_of_groups, "membership", found)
    init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    dist.destroy_process_group()
    init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert not found.is_worthless
        with pytest.raises(RuntimeError, match="was destroyed; make what was made with it"):
            model(torch.ones(1, 2)).sum().backward()
        dist.all_reduce(torch.ones(2))  # the new one's
    finally:
        dist.destroy_process_group()


def test_what_has_not_been_proven_on_a_device_is_refused(members: Membership) -> None:
    group = TorchGroup(dist.HashStore(), 0, 1, WITHIN, "one", members)
    with pytest.raises(
        ConfigError, match=r"found meta; .* call torch\.distributed\.init_process_gro"
    ):
        group.allreduce([torch.zeros(2, device="meta")])
    with pytest.raises(ConfigError, match="found cuda:0; groups over NCCL"):
        init_process_group(device_id=torch.device("cuda:0"))
    assert not dist.is_initialized()


def test_a_torch_with_which_groups_hang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.6.0+cpu")
    with pytest.raises(ConfigError, match=r"expected torch 2\.7 or later, found 2\.6\.0\+cpu"):
        init_process_group()
    assert not dist.is_initialized()
