"""Plan: whatever a program changes between two boundaries, the gather that compares with the last
one finds what a gather that asks everything anew finds."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from keepstep.edge.torch import dict_changes, looks, plan
from keepstep.edge.torch.looks import Looks
from keepstep.edge.torch.state import Protected, State
from keepstep.edge.torch.tree import Kept, Numbers, TreePickler, name_tensors
from tests.edge.torch.conftest import bytes_of

WIDTH = 3
MADE_ANEW = ("rng.", "model.0.hooked")


class Own(nn.Module):
    """Buffers of every kind, and an attribute that is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.register_buffer("none", None)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.count += 1
        return x


class Thing:
    def __init__(self) -> None:
        self.value = 1


class World:
    """A program in the middle of its training."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Own(), nn.Linear(WIDTH, WIDTH)
        )
        self.model.append(nn.Linear(WIDTH, WIDTH))
        self.model[4].weight = self.model[0].weight
        first, *others = list(self.model.parameters())
        self.adam = torch.optim.AdamW(others, 0.01)
        self.sgd = torch.optim.SGD([first], 0.01, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.adam, 1)
        self.alone = torch.ones(2)
        self.values: dict[str, Any] = {"inner": {"list": [1, 2]}, "thing": Thing(), "number": 1}
        self.protected = Protected.of(
            {
                "model": self.model,
                "adam": self.adam,
                "sgd": self.sgd,
                "schedule": self.schedule,
                "alone": self.alone,
                **self.values,
            },
            lazy=True,
        )
        for optimizer in (self.adam, self.sgd):
            optimizer.register_step_post_hook(self.protected.used_gradients.updated)

    def step(self) -> None:
        found = {p.dtype for p in self.model.parameters()}
        for optimizer in (self.adam, self.sgd):
            optimizer.zero_grad()
        if len(found) == 1 and any(p.requires_grad for p in self.model.parameters()):
            self.model(torch.randn(4, WIDTH, dtype=found.pop())).sum().backward()
        self.adam.step()
        self.sgd.step()
        self.schedule.step()

    @property
    def linear(self) -> nn.Linear:
        found = self.model[0]
        assert isinstance(found, nn.Linear)
        return found

    def entry(self) -> dict[str, Any]:
        """What Adam keeps of one parameter; empty before its first step."""
        return next(iter(self.adam.state.values()), {})


def replace_a_parameter(world: World) -> None:
    world.linear.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))


def replace_the_data(world: World) -> None:
    world.linear.weight.data = torch.randn(WIDTH, WIDTH)


def turn_the_data(world: World) -> None:
    world.linear.weight.data = world.linear.weight.data.t()


def turn_in_place(world: World) -> None:
    world.alone.resize_(1, 2).t_()


def resize(world: World) -> None:
    world.alone.resize_(world.alone.numel() + 1)


def shrink(world: World) -> None:
    world.alone.resize_(1)


def learn_alone(world: World) -> None:
    world.alone.requires_grad_(not world.alone.requires_grad)


def conjugate(world: World) -> None:
    world.model[2].register_buffer("complex", torch.ones(2, dtype=torch.complex64))
    world.protected.gather()
    buffer = world.model[2].complex
    assert isinstance(buffer, torch.Tensor)
    buffer.data = buffer.data.conj()


def swap(world: World) -> None:
    torch.utils.swap_tensors(world.linear.bias, nn.Parameter(torch.ones(WIDTH)))


def add_a_group(world: World) -> None:
    world.adam.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 0.5})


def drop_a_group(world: World) -> None:
    if len(world.adam.param_groups) > 1:
        del world.adam.param_groups[1:]


def swap_parameters(world: World) -> None:
    found = world.adam.param_groups[0]["params"]
    found[0], found[1] = found[1], found[0]


def set_an_option(world: World) -> None:
    world.adam.param_groups[0]["lr"] *= 0.5
    world.adam.param_groups[0]["fresh"] = len(world.adam.param_groups)


def tensor_option(world: World) -> None:
    world.sgd.param_groups[0]["lr"] = torch.tensor(0.25)


def add_a_buffer(world: World) -> None:
    world.model[2].register_buffer(f"more{len(world.model[2]._buffers)}", torch.ones(2))


def fill_the_empty_buffer(world: World) -> None:
    world.model[2].none = torch.ones(1)


def move_a_buffer(world: World) -> None:
    world.model[2].count = world.model[2].count + 1


def hide_a_buffer(world: World) -> None:
    world.model[2]._non_persistent_buffers_set.symmetric_difference_update({"count"})


def rename_a_buffer(world: World) -> None:
    buffers = world.model[2]._buffers
    buffers["renamed"] = buffers.pop("hidden", None)


def new_dict_of_buffers(world: World) -> None:
    world.model[2]._buffers = {**world.model[2]._buffers, "from": torch.zeros(1)}


def drop_a_module(world: World) -> None:
    if len(world.model) > 3:
        del world.model[len(world.model) - 1]


def replace_a_module(world: World) -> None:
    world.model[1] = nn.Identity()


def another_class(world: World) -> None:
    world.model[0].__class__ = type("Renamed", (nn.Linear,), {"_version": 7})


def replace_state(world: World) -> None:
    entry = world.entry()
    if entry:
        entry["exp_avg"] = torch.randn_like(entry["exp_avg"])


def equal_state(world: World) -> None:
    entry = world.entry()
    if entry:
        entry["step"] = entry["step"].clone()


def new_entry(world: World) -> None:
    for parameter, entry in list(world.adam.state.items())[:1]:
        world.adam.state[parameter] = {**entry, "extra": torch.ones(1)}


def rename_state(world: World) -> None:
    entry = world.entry()
    if "extra" in entry:
        entry["other"] = entry.pop("extra")


def state_in_another_order(world: World) -> None:
    entry = world.entry()
    if entry:
        entry["step"] = entry.pop("step")


def same_state_again(world: World) -> None:
    entry = world.entry()
    if entry:
        entry["more"] = entry["step"]
        del entry["more"]


def number_in_state(world: World) -> None:
    entry = world.entry()
    if entry:
        entry["count"] = entry.get("count", 0) + 1


def forget_state(world: World) -> None:
    world.adam.state.clear()


def load_states(world: World) -> None:
    world.adam.load_state_dict(copy.deepcopy(world.adam.state_dict()))
    world.model.load_state_dict({k: v + 1 for k, v in world.model.state_dict().items()})


def assign_states(world: World) -> None:
    world.model.load_state_dict(copy.deepcopy(world.model.state_dict()), assign=True)


def change_a_list(world: World) -> None:
    world.values["inner"]["list"].append(len(world.values["inner"]["list"]))


def change_a_thing(world: World) -> None:
    world.values["thing"].value += 1


def tensor_in_a_list(world: World) -> None:
    world.values["inner"]["list"] += [world.linear.weight, torch.ones(1), torch.ones(0)]


def state_in_a_list(world: World) -> None:
    world.values["inner"]["list"] += [*world.entry().values(), world.entry()]


def part_in_a_list(world: World) -> None:
    world.values["inner"]["list"].append(nn.Linear(1, 1))


def another_number(world: World) -> None:
    world.protected.values["number"] = torch.ones(1)


def a_part_as_value(world: World) -> None:
    world.protected.values["number"] = nn.Linear(2, 1)


def freeze(world: World) -> None:
    world.linear.bias.requires_grad_(not world.linear.bias.requires_grad)


def no_gradients(world: World) -> None:
    world.adam.zero_grad(set_to_none=True)


def zero_gradients(world: World) -> None:
    world.adam.zero_grad(set_to_none=False)


def accumulate(world: World) -> None:
    for parameter in world.model.parameters():
        if parameter.grad is not None:
            parameter.grad += 1


def one_gradient(world: World) -> None:
    world.linear.weight.grad = torch.ones_like(world.linear.weight)


def evaluate(world: World) -> None:
    world.model.train(not world.model.training)


def evaluate_one(world: World) -> None:
    world.model[1].train(not world.model[1].training)


def double(world: World) -> None:
    world.model.to(torch.float64)


def half(world: World) -> None:
    world.model.half()


def hook(world: World) -> None:
    world.model[0].register_state_dict_post_hook(
        lambda module, state, prefix, metadata: state.update({f"{prefix}hooked": torch.ones(1)})
    )


def pre_hook(world: World) -> None:
    world.model[1].register_state_dict_pre_hook(
        lambda module, prefix, keep_vars: module.__dict__.update(hooked=prefix)
    )


def hook_of_optimizer(world: World) -> None:
    world.sgd.register_state_dict_post_hook(lambda optimizer, state: {**state, "hooked": 1})


def own_state_dict(world: World) -> None:
    kept = world.model[3]
    kept.state_dict = lambda *a, **k: nn.Linear.state_dict(kept, *a, **k)  # type: ignore[assignment]


def extra_state(world: World) -> None:
    def extra(module: nn.Module) -> dict[str, int]:
        return {"calls": 1}

    world.model[0].__class__ = type("Extra", (nn.Linear,), {"get_extra_state": extra})


def draw_numbers(world: World) -> None:
    torch.rand(3)


def tear(world: World) -> None:
    world.protected.eager_names.add("model.0.bias")


def empty_tensors(world: World) -> None:
    world.model[2].register_buffer("empty", torch.ones(0))
    world.values["inner"]["list"].append(torch.ones(0, 2))


CHANGES: dict[str, Callable[[World], None]] = {
    change.__name__: change
    for change in (
        replace_a_parameter,
        replace_the_data,
        turn_the_data,
        turn_in_place,
        resize,
        shrink,
        learn_alone,
        conjugate,
        swap,
        add_a_group,
        drop_a_group,
        swap_parameters,
        set_an_option,
        tensor_option,
        add_a_buffer,
        fill_the_empty_buffer,
        move_a_buffer,
        hide_a_buffer,
        rename_a_buffer,
        new_dict_of_buffers,
        drop_a_module,
        replace_a_module,
        another_class,
        replace_state,
        state_in_another_order,
        same_state_again,
        equal_state,
        new_entry,
        rename_state,
        number_in_state,
        forget_state,
        load_states,
        assign_states,
        change_a_list,
        change_a_thing,
        tensor_in_a_list,
        state_in_a_list,
        part_in_a_list,
        another_number,
        a_part_as_value,
        freeze,
        no_gradients,
        zero_gradients,
        accumulate,
        one_gradient,
        evaluate,
        evaluate_one,
        double,
        half,
        hook,
        pre_hook,
        hook_of_optimizer,
        own_state_dict,
        extra_state,
        draw_numbers,
        tear,
        empty_tensors,
    )
}


def found(state: State) -> list[Any]:
    """All that a capture makes of it."""
    items = [
        (
            item.spec,
            item.lazy,
            item.address is None,
            bytes_of(item.local),
            item.local.is_conj(),
            # what is made as it is asked for is another tensor each time
            "made anew" if item.spec.name.startswith(MADE_ANEW) else item.local.data_ptr(),
        )
        for item in state.items
    ]
    copied = [
        (kind, item.spec.name, segment.offset)
        for copies in state.copies
        for kind, share in (("lazy", copies.lazy), ("eager", copies.eager))
        for item, segment in share.pairs
    ]
    return [items, copied, state.layout, state.objects]


def anew(protected: Protected) -> State:
    """By the full road; the plan that is kept stays as it is."""
    stranger = copy.copy(protected)
    stranger.forget_plan()
    return stranger.gather()


def same(world: World) -> None:
    by_plan = found(world.protected.gather())
    assert by_plan == found(anew(world.protected))


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_found(name: str) -> None:
    world = World()
    world.step()
    same(world)
    CHANGES[name](world)
    same(world)
    with contextlib.suppress(RuntimeError):  # what was changed may not fit any more
        world.step()
    same(world)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(["step", *CHANGES]), max_size=12), st.booleans())
def test_any_changes_are_found(names: list[str], are_counted: bool) -> None:
    counts = dict_changes._version if are_counted else None
    with mock.patch.object(dict_changes, "_version", counts):
        find_changes(names)


def find_changes(names: list[str]) -> None:
    world = World()
    world.step()
    same(world)
    for name in names:
        # An earlier change may have left nothing to change here.
        with contextlib.suppress(RuntimeError, AttributeError, IndexError, TypeError):
            world.step() if name == "step" else CHANGES[name](world)
        same(world)


def test_nothing_is_asked_while_only_values_change(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    for _ in range(2):
        world.step()
    before = world.protected.gather()
    asked: list[Any] = []
    monkeypatch.setattr(plan, "state_of", lambda part: asked.append(part) or part.state_dict())
    for _ in range(3):
        world.step()
        state = world.protected.gather()
        assert state.layout is before.layout
        assert state.sections[0] is before.sections[0]
        assert state.sections[1] is before.sections[1]
    assert set(map(type, asked)) == {torch.optim.lr_scheduler.StepLR}


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_plan_holds_whether_gradients_are_enabled_or_not(is_enabled: bool) -> None:
    world = World()
    for _ in range(2):
        world.step()
    before = world.protected.gather()
    with torch.set_grad_enabled(is_enabled):
        assert world.protected.gather().sections[0] is before.sections[0]
        freeze(world)
        same(world)


@settings(derandomize=True, deadline=None)
@given(
    st.lists(st.integers(-2, 5), max_size=6)
    | st.integers(0, 2000).flatmap(lambda n: st.integers(0, 9).map(lambda a: [*range(a, a + n)]))
)
def test_numbers_come_back_as_the_list_they_stand_for(numbers: list[int]) -> None:
    pickled = TreePickler(Kept(), {}, {}).states({"params": Numbers.of(numbers)})
    found = pickle.loads(pickled)["params"]
    assert type(found) is list
    assert found == numbers


def test_options_cost_the_same_however_many_parameters_there_are() -> None:
    sizes = []
    for count in (3, 400):
        model = nn.ParameterList(torch.ones(1) for _ in range(count))
        adam = torch.optim.Adam(model.parameters())
        state = Protected.of({"model": model, "adam": adam}, lazy=True).gather()
        sizes.append(len(state.sections[-1]))
    assert max(sizes) - min(sizes) <= 8


def tensors() -> list[torch.Tensor]:
    return [torch.ones(2, 2), nn.Parameter(torch.ones(2)), torch.ones(2, dtype=torch.complex64)]


def test_tensors_are_looked_at_by_guards_where_torch_has_them() -> None:
    assert (looks._by_guards(tensors()) is None) == (looks._guards is None)
    twice = tensors()[:1] * 2  # guards know each but once
    assert Looks(twice).are(twice)


@pytest.mark.parametrize("has_guards", [True, False])
@pytest.mark.parametrize(
    ("index", "change"),
    [
        (0, lambda t: t.t_().resize_(2, 1)),
        (0, lambda t: t.as_strided_((2, 2), (1, 2))),
        (0, lambda t: t.requires_grad_()),
        (0, lambda t: setattr(t, "data", torch.ones(2, 2))),
        (1, lambda t: t.requires_grad_(False)),
        (1, lambda t: setattr(t, "data", t.data.view(torch.int32).view(torch.float32)[:1])),
        (2, lambda t: setattr(t, "data", t.data.conj())),
    ],
)
def test_tensors_look_the_same_or_not(
    monkeypatch: pytest.MonkeyPatch, has_guards: bool, index: int, change: Callable[..., Any]
) -> None:
    if not has_guards:
        monkeypatch.setattr(looks, "_guards", None)
    found = tensors()
    before = Looks(found)
    with torch.no_grad():
        found[0] += 1
        found[1] += 1
    assert before.are(found)
    change(found[index])
    assert not before.are(found)


def test_two_tensors_of_one_path_have_two_names() -> None:
    tree = {"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}}
    names: dict[int, str] = {}
    name_tensors(tree, "d", names)
    first = Kept()
    first.keep(tree["a.b"], names)
    second = first.after()
    second.keep(tree["a"]["b"], names)
    assert [item.spec.name for item in first.items + second.items] == ["d.a.b", "d.a.b#2"]
