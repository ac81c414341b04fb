"""Passes: a protected module's forward and backward pass are seen, in a program that is not
touched."""

from __future__ import annotations

import copy
import io
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from keepstep.edge.torch.passes import watch_passes


class Heard:
    def __init__(self) -> None:
        self.told: list[str] = []
        self._lock = threading.Lock()  # as a clock has one: neither copied nor written to a file

    def forward_begun(self) -> int:
        self.told.append("forward")
        return len(self.told)

    def forward_ended(self, before: int) -> None:
        self.told.append("ended")

    def backward_begun(self) -> None:
        self.told.append("backward")

    def backward_ended(self) -> None:
        self.told.append("done")


class Gives(torch.nn.Module):
    """What a linear layer gives, in some shape."""

    def __init__(self, shape: Any = lambda tensor: tensor) -> None:
        super().__init__()
        self.layer, self.shape = torch.nn.Linear(3, 3), shape

    def forward(self, given: torch.Tensor) -> Any:
        return self.shape(self.layer(given))


def watched(module: torch.nn.Module) -> list[str]:
    heard = Heard()
    watch_passes([module, object()], heard)
    return heard.told


GIVEN = torch.ones(2, 3)


@pytest.mark.parametrize(
    "shape",
    [
        lambda tensor: tensor,
        lambda tensor: (torch.zeros(1), None, tensor),
        lambda tensor: {"number": 1, "more": [tensor, torch.zeros(1)]},
    ],
)
def test_both_passes_are_seen_whatever_the_module_gives(shape: Any) -> None:
    module = Gives(shape)
    told = watched(module)
    output = module(GIVEN)
    while not isinstance(output, torch.Tensor):
        inner = output["more"] if isinstance(output, dict) else output
        output = next(one for one in inner if getattr(one, "requires_grad", False))
    output.sum().backward()
    assert told == ["forward", "ended", "backward", "done"]


def test_a_step_of_micro_batches_is_forward_and_backward_by_turns() -> None:
    module = Gives(lambda tensor: {"loss": tensor.sum(), "out": tensor})
    told = watched(module)
    for _ in range(2):
        module(GIVEN)["loss"].backward()
    assert told == ["forward", "ended", "backward", "done"] * 2


def test_gradients_are_the_same_bits_and_the_graph_has_no_more_in_it() -> None:
    plain, module = Gives(), Gives()
    module.load_state_dict(plain.state_dict())
    watched(module)
    outs = [one(GIVEN) for one in (plain, module)]
    assert type(outs[0].grad_fn) is type(outs[1].grad_fn)
    for out in outs:
        (out * 2).sum().backward()
    assert torch.equal(plain.layer.weight.grad, module.layer.weight.grad)  # type: ignore[arg-type]


def test_without_gradients_only_the_forward_pass_is_seen() -> None:
    module = Gives()
    told = watched(module)
    with torch.no_grad():
        module(GIVEN)
    module.requires_grad_(False)
    module(GIVEN)
    assert told == ["forward", "ended"] * 2


def test_what_is_computed_again_within_the_backward_pass_is_a_part_of_it() -> None:
    module = Gives()
    told = watched(module)
    checkpoint(module, GIVEN, use_reentrant=False).sum().backward()  # type: ignore[no-untyped-call]
    assert told == ["forward", "ended", "backward", "done"]


def test_a_graph_computed_again_inside_the_backward_pass_ends_no_pass() -> None:
    """That one runs an engine within the engine."""
    module = Gives(lambda t: checkpoint(torch.tanh, t, use_reentrant=True))  # type: ignore[no-untyped-call]
    told = watched(module)
    module(GIVEN.clone().requires_grad_()).sum().backward()
    assert told == ["forward", "ended", "backward", "done"]


def test_a_backward_pass_that_fails_begins_and_does_not_end() -> None:
    def fails(gradient: torch.Tensor) -> None:
        raise ValueError("in the program")

    module = Gives()
    told = watched(module)
    module.layer.weight.register_hook(fails)
    with pytest.raises(ValueError, match="in the program"):
        module(GIVEN).sum().backward()
    assert told == ["forward", "ended", "backward"]


def test_the_backward_pass_has_ended_when_data_parallel_waits_for_its_sums() -> None:
    """Its wait lies in a callback of the engine's, too, which is asked for later."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = DistributedDataParallel(Gives(torch.nn.Identity()))
        told = watched(module)
        seen: list[list[str]] = []

        def sums(_: Any, bucket: Any) -> Any:
            late: Any = torch.futures.Future()

            def comes() -> None:
                seen.append(list(told))
                late.set_result(bucket.buffer())

            threading.Timer(0.2, comes).start()
            return late

        sums.__annotations__ = {}  # as texts they are not what torch expects
        module.register_comm_hook(None, sums)
        module(GIVEN).sum().backward()
        assert seen == [["forward", "ended", "backward", "done"]]
    finally:
        dist.destroy_process_group()


def test_copies_and_files_have_hooks_that_do_nothing() -> None:
    module = Gives(torch.nn.Identity())
    told = watched(module)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        other(GIVEN).sum().backward()
    assert told == []


def test_a_module_that_is_compiled_is_one_graph_as_before() -> None:
    module = Gives(torch.nn.Identity())
    told = watched(module)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    compiled(GIVEN).sum().backward()
    assert told == []
    outside = watched(compiled)
    compiled(GIVEN).sum().backward()
    assert outside in ([], ["forward", "ended", "backward", "done"])


def test_an_error_in_the_module_is_the_programs() -> None:
    def fails(tensor: torch.Tensor) -> None:
        raise ValueError("in the program")

    module = Gives(fails)
    told = watched(module)
    with pytest.raises(ValueError, match="in the program"):
        module(GIVEN)
    assert told == ["forward"]


def test_handles_take_all_away() -> None:
    module, heard = Gives(), Heard()
    for handle in watch_passes([module], heard):
        handle.remove()
    module(GIVEN).sum().backward()
    assert heard.told == []
