"""State: what is found, what it is called, what may be copied later, and what is refused."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from keepstep.edge.torch.parts import bare, kind_of
from keepstep.edge.torch.plan import ABOUT, BESIDE
from keepstep.edge.torch.state import RNG, Protected
from keepstep.edge.torch.tree import StateItem, rebuild
from keepstep.edge.torch.views import clone
from keepstep.errors import ConfigError

Room = Any  # conftest's


def protected(lazy: bool = True, **stateful: Any) -> Protected:
    return Protected.of(stateful, lazy)


def named(state: Any) -> dict[str, StateItem]:
    """What is found beside the random states and gradients."""
    return {i.spec.name: i for i in state.items if not i.spec.name.startswith((RNG, f"{BESIDE}."))}


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()


def test_names_are_those_of_the_state_dicts() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    found = named(
        protected(
            model=model, optimizer=optimizer, beside=torch.ones(1), more={"a": [torch.ones(2)]}
        ).gather()
    )
    assert list(found) == [
        *(f"model.{k}" for k in model.state_dict()),
        *(f"optimizer.state.{i}.{k}" for i in range(4) for k in ("step", "exp_avg", "exp_avg_sq")),
        "beside",
        "more.a.0",
    ]
    assert (
        named(protected(model=model).gather())["model.0.weight"].local.data_ptr()
        == model[0].weight.data_ptr()
    ), "nothing is copied yet"


def test_only_what_an_optimizer_owns_is_copied_later() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(
        [*model[0].parameters(), *model[1].parameters()], lr=torch.tensor(0.1)
    )
    stepped(model, optimizer)
    found = named(protected(model=model, optimizer=optimizer, plain=torch.ones(2)).gather())
    lazy = {name for name, item in found.items() if item.lazy}
    assert lazy == {
        *("model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"),
        *(f"optimizer.state.{i}.{k}" for i in range(4) for k in ("step", "exp_avg", "exp_avg_sq")),
    }
    assert "optimizer.param_groups.0.lr" in found, "a schedule moves it between updates"


def test_not_lazy_means_everything_at_the_boundary() -> None:
    model = nn.Linear(3, 1)
    found = named(
        protected(
            lazy=False, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1)
        ).gather()
    )
    assert not any(item.lazy for item in found.values())


def test_what_was_torn_once_is_copied_at_the_boundary() -> None:
    model = nn.Linear(3, 1)
    things = protected(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    things.eager_names.add("model.bias")
    found = named(things.gather())
    assert found["model.weight"].lazy and not found["model.bias"].lazy


def test_the_layout_stays_while_the_state_only_changes_values() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    things = protected(model=model, optimizer=optimizer)
    before = things.gather().layout
    stepped(model, optimizer)
    first = things.gather().layout
    stepped(model, optimizer)
    assert things.gather().layout == first
    assert first.hash() != before.hash(), "the first update brings the optimizer's state"


def test_a_state_is_rebuilt_from_its_tensors_and_its_tree(room: Room) -> None:
    nested = {
        "list": [1, (2.5, torch.arange(3))],
        "ordered": OrderedDict(b=torch.ones(2, 2), a=None),
        "text": "ü",
        5: {6},
    }
    state = protected(nested=nested).gather()
    copy = room.begin(state)
    copy.copy_still()
    room.seal(copy)
    header, layout = room.slot.verify()
    objects = bytes(room.slot.payload[layout.objects_offset : header.payload_bytes])
    tree = rebuild(objects, [clone(room.slot, s) for s in layout.segments])
    assert tree.pop(ABOUT)["kinds"] == {"nested": "value"}
    found = tree["nested"]
    assert torch.equal(found["list"][1][1], torch.arange(3)) and torch.equal(
        found["ordered"]["b"], torch.ones(2, 2)
    )
    assert (
        list(found) == list(nested)
        and list(found["ordered"]) == ["b", "a"]
        and found[5] == {6}
        and found["text"] == "ü"
    )


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (nn.Linear(1, 1), "module"),
        (torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1), "optimizer"),
        (torch.ones(1), "tensor"),
        (torch.amp.GradScaler("cpu"), "stateful"),
        ({"state_dict": 1}, "value"),
        (3, "value"),
        (None, "value"),
    ],
)
def test_kinds(value: Any, kind: str) -> None:
    assert kind_of(value) == kind


def test_wrappers_do_not_reach_the_names() -> None:
    model = nn.Linear(3, 1)
    compiled = torch.compile(model)
    assert bare(compiled) is model and bare(model) is model
    assert list(named(protected(model=compiled).gather())) == ["model.weight", "model.bias"]


def test_nothing_to_protect_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one thing to protect"):
        protected()


def test_reserved_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="'rng' is reserved|'rng' is taken"):
        protected(rng=torch.ones(1))


def test_a_tensor_without_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"shape \(3, 2\) is on the meta device"):
        protected(model=nn.Linear(2, 3, device="meta")).gather()


def test_what_holds_itself_is_kept_and_what_is_too_deep_is_named() -> None:
    ring: dict[str, Any] = {"tensor": torch.ones(2)}
    ring["self"] = ring
    ring["list"] = [ring]
    protected = Protected.of({"ring": ring}, True)
    assert [i.spec.name for i in protected.gather().items if "ring" in i.spec.name] == [
        "ring.tensor"
    ]
    assert protected.meshes() == {}
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]
    with pytest.raises(ConfigError, match="deep: expected containers"):
        Protected.of({"deep": deep}, True)
