"""How DDP groups gradients is the same in every life: kept with a snapshot, and made again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from keepstep.edge.torch.beside import BUCKETS, UsedGradients, read_beside
from keepstep.edge.torch.ddp_buckets import Buckets, Grouping, regroups
from keepstep.edge.torch.ddp_rebuild import renew
from keepstep.edge.torch.plan import BESIDE
from keepstep.edge.torch.restore import Unpacked, apply
from keepstep.edge.torch.state import Protected
from keepstep.errors import UntrustedError

SMALL_MB = 0.001  # so that there are several buckets
PASSES = 3  # torch tells of a regrouping behind the third


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Crossed(nn.Module):
    """Its parameters are used in another order than they are listed in."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(31, 4)
        self.first = nn.Linear(8, 16)
        self.middle = nn.Linear(16, 31)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.middle(self.first(x)))
        return found


def wrapped(module: nn.Module | None = None, **given: bool) -> DistributedDataParallel:
    module = Crossed() if module is None else module
    return DistributedDataParallel(module, bucket_cap_mb=SMALL_MB, **given)


def train(ddp: DistributedDataParallel, passes: int = PASSES) -> None:
    for _ in range(passes):
        ddp(torch.ones(2, 8)).sum().backward()


def order(ddp: DistributedDataParallel) -> Grouping:
    """As the reducer has it."""
    numbers = {id(p): number for number, p in enumerate(ddp.module.parameters())}
    buckets = ddp.reducer._get_zeros_like_grad_buckets()
    return [[numbers[id(p)] for p in bucket.parameters()] for bucket in buckets]


def check_known_and_renewed(given: Any, ddp: DistributedDataParallel, path: str) -> None:
    """Its grouping, by what was given as "model", and its reducer."""
    buckets = Buckets({"model": given})
    buckets.look()
    assert buckets.known == {path: order(ddp)}
    at_last = order(ddp)
    renew([given])
    assert order(ddp) != at_last


def given(_: None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """What a hook answers: the bucket as it is."""
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def test_what_torch_has_regrouped_is_known_and_before_that_nothing() -> None:
    ddp = wrapped()
    buckets = Buckets({"model": ddp})
    buckets.look()
    assert buckets.known == {}
    at_first = order(ddp)
    train(ddp)
    buckets.look()
    assert buckets.known == {"model": order(ddp)} and order(ddp) != at_first


def test_who_resumes_has_it_from_the_first_pass_on() -> None:
    ddp = wrapped()
    train(ddp)
    before = Buckets({"model": ddp})
    before.look()
    saved = read_beside({"model": ddp}, UsedGradients(), before.known)[BUCKETS]

    newcomer = wrapped()
    assert order(newcomer) != saved["model"]
    after = Buckets({"model": newcomer})
    assert after.restore(saved) == []
    assert order(newcomer) == saved["model"] and after.known == saved
    train(newcomer)
    after.look()
    assert order(newcomer) == saved["model"] and after.known == saved


def test_who_stayed_in_its_process_has_what_a_newcomer_has() -> None:
    for saved_from in (0, PASSES):
        ddp = wrapped()
        train(ddp, saved_from)
        buckets = Buckets({"model": ddp})
        buckets.look()
        saved = dict(buckets.known)
        train(ddp)
        buckets.restore(saved)
        renew([ddp])
        newcomer = wrapped()
        Buckets({"model": newcomer}).restore(saved)
        assert order(ddp) == order(newcomer)
        buckets.look()
        assert buckets.known == saved


def test_the_module_may_be_given_without_its_wrapper_and_lie_deeper() -> None:
    net = nn.Sequential(nn.Identity(), Crossed())
    ddp = wrapped(net[1])
    train(ddp)
    check_known_and_renewed(net, ddp, "model.1")


@pytest.mark.parametrize("gives", ["model", "what is compiled", "what is wrapped"])
def test_what_is_compiled_and_then_wrapped_is_known_too(gives: str) -> None:
    net = Crossed()
    compiled = torch.compile(net, backend="eager")
    ddp = DistributedDataParallel(compiled)  # the compiler wants no small buckets
    train(ddp)
    given = {"model": net, "what is compiled": compiled, "what is wrapped": ddp}[gives]
    check_known_and_renewed(given, ddp, "model")


@pytest.mark.parametrize("renewals", [0, 1, 3])
def test_gradients_are_summed_once_however_often_a_reducer_was_made(renewals: int) -> None:
    ddp = wrapped()
    train(ddp)
    buckets = Buckets({"model": ddp})
    buckets.look()
    saved = dict(buckets.known)
    for _ in range(renewals):
        renew([ddp])
        buckets.restore(saved)
    summed: list[torch.Tensor] = []
    ddp.register_comm_hook(
        None, lambda _, bucket: given(summed.extend(bucket.parameters()), bucket)
    )
    train(ddp, 1)
    assert len(summed) == len(list(ddp.parameters()))


def test_a_hook_for_sums_outlives_a_new_reducer() -> None:
    ddp = wrapped()
    seen: list[int] = []
    ddp.register_comm_hook(None, lambda _, bucket: given(seen.append(bucket.index()), bucket))
    train(ddp)
    buckets = Buckets({"model": ddp})
    buckets.look()
    newcomer = wrapped()
    newcomer.register_comm_hook(None, lambda _, bucket: given(seen.append(bucket.index()), bucket))
    Buckets({"model": newcomer}).restore(buckets.known)
    seen.clear()
    train(newcomer, 1)
    assert sorted(seen) == list(range(len(buckets.known["model"])))


def test_one_of_other_parameters_is_told_and_left() -> None:
    ddp = wrapped()
    train(ddp)
    buckets = Buckets({"model": ddp})
    buckets.look()
    other = Crossed()
    other.first.bias.requires_grad_(False)
    newcomer = wrapped(other)
    at_first = order(newcomer)
    [told] = Buckets({"model": newcomer}).restore(buckets.known)
    assert "model" in told and "6" in told and order(newcomer) == at_first


@pytest.mark.parametrize(
    "saved",
    [[[0, 0]], [[1, 2]], [["0"]], [[True]], [0], {"0": 1}, [[0], []], [[0, 1, 2, 3, 4, 5, 6, -1]]],
)
def test_what_is_no_grouping_is_refused_and_changes_nothing(saved: object) -> None:
    ddp = wrapped()
    reducer = id(ddp.reducer)
    with pytest.raises(UntrustedError, match="model"):
        Buckets({"model": ddp}).checked({"model": saved})
    assert id(ddp.reducer) == reducer


def test_nothing_is_loaded_of_a_state_whose_grouping_is_refused() -> None:
    ddp = wrapped()
    protected = Protected.of({"model": ddp}, lazy=False)
    protected.buckets = Buckets(protected.parts())
    before = [p.detach().clone() for p in ddp.parameters()]
    tree = protected.tree()
    tree["model"] = {name: tensor + 1 for name, tensor in tree["model"].items()}
    for grouping in ({"model": [[0, 0]]}, [["model"]]):
        tree[BESIDE][BUCKETS] = grouping
        with pytest.raises(UntrustedError):
            apply(protected, Unpacked(tree, protected.about(), {}))
    assert all(map(torch.equal, before, ddp.parameters()))


def test_one_grouping_for_ever_is_not_looked_at() -> None:
    ddp = wrapped(find_unused_parameters=True)
    assert not regroups(ddp)
    train(ddp)
    buckets = Buckets({"model": ddp})
    buckets.look()
    assert buckets.known == {} and buckets.not_kept == []
