"""Which tensors are replicas: what DistributedDataParallel and DTensors claim, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from keepstep.edge.torch.replicas import ReplicaFinder
from keepstep.edge.torch.state import Protected
from keepstep.model.replicas import Replicas

WORLD = 4


@pytest.fixture
def peers() -> Iterator[None]:
    """A group whose collectives reach nobody."""
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    yield
    dist.destroy_process_group()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


Found = tuple[Replicas | None, set[str]]


def found(world_size: int = WORLD, rank: int = 0, **stateful: Any) -> Found:
    """And the names of the tensors."""
    protected = Protected.of(stateful, lazy=True)
    state = protected.gather()
    finder = ReplicaFinder(rank, world_size)
    replicas = finder.find(protected, state)
    assert finder.find(protected, protected.gather()) is replicas, "it is kept"
    if replicas is None:
        return None, set()
    segments = state.layout.segments
    covered = {b for at, nbytes in replicas.spans for b in range(at, at + nbytes)}
    chosen = [segments[index] for index in replicas.segments]
    assert covered == {b for s in chosen for b in range(s.offset, s.end)}
    return replicas, {s.spec.name for s in chosen}


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_ddp_claims_parameters_and_their_optimizer_state_and_no_buffer(peers: None) -> None:
    model = DistributedDataParallel(network())
    replicas, names = found(model=model, optimizer=stepped(model), extra=torch.ones(3))
    assert replicas is not None and replicas.is_claimed and replicas.ranks == tuple(range(WORLD))
    parameters = [name for name, _ in model.module.named_parameters()]
    keys = ("exp_avg", "exp_avg_sq", "step")
    moments = {f"optimizer.state.{n}.{key}" for n in range(6) for key in keys}
    assert names == {*(f"model.{name}" for name in parameters), *moments}
    assert "1.running_mean" in dict(model.module.named_buffers())


def test_a_step_whose_gradients_no_rank_shares_is_not_compared(peers: None) -> None:
    """Within `no_sync`, as local SGD does; with the next shared one it is again."""
    model = DistributedDataParallel(network())
    optimizer = stepped(model)
    finder = ReplicaFinder(0, WORLD)
    protected = Protected.of({"model": model, "optimizer": optimizer}, lazy=True)
    with model.no_sync():
        model(torch.randn(4, 4))
    assert finder.find(protected, protected.gather()) is None
    model(torch.randn(4, 4))
    assert finder.find(protected, protected.gather()) is not None


def test_what_ddp_is_told_to_ignore_is_no_replica(peers: None) -> None:
    inner = network()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["0.weight"])
    model = DistributedDataParallel(inner)
    _, names = found(model=model, optimizer=stepped(model))
    assert "model.0.weight" not in names and "optimizer.state.0.exp_avg" not in names
    assert "model.0.bias" in names and "optimizer.state.1.exp_avg" in names


def test_a_hook_that_nobody_knows_claims_nothing(peers: None) -> None:
    model = DistributedDataParallel(network())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    replicas, _ = found(model=model)
    assert replicas is not None and replicas.is_claimed

    def average_now_and_then(state, bucket):  # type: ignore[no-untyped-def]
        return default_hooks.allreduce_hook(None, bucket)

    model = DistributedDataParallel(network())
    model.register_comm_hook(None, average_now_and_then)
    replicas, names = found(model=model)
    assert replicas is not None and not replicas.is_claimed and "model.0.weight" in names


def test_a_dtensor_is_shared_by_the_ranks_of_its_replicate_dimensions(peers: None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    local = torch.ones(2, 4)
    hybrid = DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)
    whole = DTensor.from_local(torch.ones(3), mesh, [Replicate(), Replicate()], run_check=False)
    replicas, names = found(hybrid=hybrid, whole=whole, plain=torch.ones(5))
    assert replicas is not None and replicas.is_claimed
    assert replicas.ranks == (0, 2), "one of each shard's replicas"
    assert names == {"hybrid", "whole"}


def test_sums_that_are_still_to_be_added_are_no_replicas(peers: None) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    tensor = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    assert found(tensor=tensor) == (None, set())


def test_where_nobody_claims_anything_parameters_and_moments_are_candidates() -> None:
    model = network()
    replicas, names = found(model=model, optimizer=stepped(model), extra=torch.ones(3))
    assert replicas is not None and not replicas.is_claimed
    assert len(names) == 6 + 18 and "extra" not in names


def test_one_rank_has_no_replicas() -> None:
    assert found(world_size=1, model=network()) == (None, set())


def test_a_group_is_of_the_same_tensors_in_the_same_places() -> None:
    one, _ = found(model=network())
    same, _ = found(model=network())
    other, _ = found(first=torch.ones(70), model=network())
    assert one is not None and same is not None and other is not None
    assert one.group == same.group != other.group
