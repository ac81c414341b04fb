"""Programs as people write them: containers, states that grow, gradients at the boundary, values by
reference. Whatever is saved comes back byte for byte, or is refused by name."""

from __future__ import annotations

from collections import deque, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from keepstep.edge.torch.beside import ZERO
from keepstep.edge.torch.plan import BESIDE
from keepstep.edge.torch.state import Protected
from keepstep.errors import ConfigError, LayoutError
from keepstep.model.units import PAGE_BYTES
from tests.edge.torch.conftest import Holder, Room, bytes_of


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()


def pair(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 2)
    return model, torch.optim.Adam(model.parameters(), 0.01 * seed)


# -- containers


@pytest.mark.parametrize("kind", [list, tuple, "dict", "nested"])
def test_optimizers_and_modules_in_containers_go_on(room: Room, kind: Any) -> None:
    def make(seed: int) -> tuple[Any, list[Any]]:
        (m0, o0), (m1, o1) = pair(seed), pair(seed + 10)
        flat = [m0, o0, m1, o1]
        if kind == "dict":
            return {"g": m0, "go": o0, "d": m1, "do": o1, "epoch": seed}, flat
        if kind == "nested":
            return {"nets": [m0, (m1,)], 3: {"optimizers": [o0, [o1]]}, "epoch": seed}, flat
        return kind(flat), flat

    saved, parts = make(1)
    for model, optimizer in (parts[:2], parts[2:]):
        stepped(model, optimizer, 2)
    room.save(stuff=saved)
    expected = bytes_of([p.state_dict() for p in parts])
    live, others = make(5)
    protected = room.load(stuff=live)
    assert bytes_of([p.state_dict() for p in others]) == expected
    assert protected.values["stuff"] is live
    if isinstance(live, dict):
        assert live["epoch"] == 1


def test_schedulers_and_stateful_objects_in_a_list_go_on(room: Room) -> None:
    def make() -> tuple[Any, ...]:
        model, optimizer = pair(1)
        schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2, g) for g in (0.5, 0.1)]
        return model, optimizer, schedules

    model, optimizer, schedules = make()
    for schedule in schedules:
        stepped(model, optimizer)
        schedule.step()
    room.save(model=model, optimizer=optimizer, schedules=schedules)
    other, fresh, again = make()
    room.load(model=other, optimizer=fresh, schedules=again)
    assert [s.state_dict() for s in again] == [s.state_dict() for s in schedules]


def test_a_list_that_lacks_an_optimizer_is_told_by_path(room: Room) -> None:
    room.save(optimizers=[pair(1)[1], pair(2)[1]])
    with pytest.raises(LayoutError, match=r"optimizers\.1: saved optimizer, live nothing"):
        room.load(optimizers=[pair(1)[1]])


def test_two_things_of_one_path_are_refused() -> None:
    with pytest.raises(ConfigError, match="'a.b'"):
        Protected.of({"a": {"b": nn.Linear(1, 1)}, "a.b": nn.Linear(1, 1)}, lazy=True)


class Wrapper(torch.optim.Optimizer):
    """As accelerate makes one: calls itself an optimizer, and has no hooks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)


def test_an_optimizer_is_found_in_its_wrapper(room: Room) -> None:
    model, optimizer = pair(1)
    stepped(model, optimizer)
    room.save(model=model, optimizer=Wrapper(optimizer))
    other, inner = pair(2)
    protected = room.load(model=other, optimizer=Wrapper(inner))
    assert protected.optimizers == [inner]
    assert bytes_of(inner.state_dict()) == bytes_of(optimizer.state_dict())


# -- what would come back dead


class Bag:
    def __init__(self, held: Any) -> None:
        self.held = held


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (DataLoader(TensorDataset(torch.ones(4))), "bag: a DataLoader .*StatefulDataLoader"),
        (RandomSampler(range(4)), "bag: a RandomSampler .*job.step"),  # type: ignore[arg-type]
        (Bag(nn.Linear(1, 1)), "bag: a Linear inside another object"),
        (Bag(pair(1)[1]), "bag: a Adam inside another object"),
        (Bag([torch.Generator()]), "bag: a Generator inside another object"),
        ({"deep": [Bag(nn.Linear(1, 1))]}, "bag: a Linear inside another object"),
    ],
    ids=["loader", "sampler", "module", "optimizer", "generator", "deep"],
)
def test_what_would_come_back_dead_is_refused_by_name(value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Protected.of({"x": 1, "bag": value}, lazy=True)


def test_generators_are_restored_wherever_they_are_passed(room: Room) -> None:
    def make(seed: int) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed + i) for i in range(3)]

    saved, live = make(1), make(7)
    room.save(bare=saved[0], some=[saved[1], {"deep": saved[2]}])
    expected = [torch.rand(2, generator=g).tolist() for g in saved]
    room.load(bare=live[0], some=[live[1], {"deep": live[2]}])
    assert [torch.rand(2, generator=g).tolist() for g in live] == expected


# -- values by reference


@dataclass
class Record:
    losses: list[float] = field(default_factory=list)
    table: Any = None


class Slotted:
    __slots__ = ("__private", "count", "weights")

    def __init__(self, count: int) -> None:
        self.count = count
        self.weights = numpy.full(3, float(count))
        self.__private = count

    def private(self) -> int:
        return self.__private


@dataclass(slots=True)
class SlottedRecord:
    count: int = 0


Point = namedtuple("Point", "x y")


def test_what_was_passed_by_reference_is_filled_in_place(room: Room) -> None:
    def make(n: int) -> dict[str, Any]:
        return {
            "array": numpy.arange(4) * n,
            "recent": deque([n, n + 1], maxlen=5),
            "record": Record([float(n)], numpy.ones((2, 2)) * n),
            "slotted": Slotted(n),
            "both": SlottedRecord(n),
            "ema": {"w": torch.full((2,), float(n)), "deep": [torch.full((3,), float(n))]},
            "pair": (torch.full((2,), float(n)), numpy.full(2, n)),
            "point": Point(numpy.full(2, n), [n]),
        }

    saved, live = make(3), make(8)
    held = [
        live["array"],
        live["recent"],
        live["record"].table,
        live["slotted"].weights,
        live["ema"]["w"],
        live["ema"]["deep"][0],
        live["pair"][0],
        live["pair"][1],
        live["point"].x,
        live["point"].y,
    ]
    room.save(**saved)
    protected = room.load(**live)
    assert all(protected.values[name] is live[name] for name in live)
    assert [numpy.asarray(h).tolist() for h in held] == [
        [0, 3, 6, 9],
        [3, 4],
        [[3.0, 3.0], [3.0, 3.0]],
        [3.0, 3.0, 3.0],
        [3.0, 3.0],
        [3.0, 3.0, 3.0],
        [3.0, 3.0],
        [3, 3],
        [3, 3],
        [3],
    ]
    assert live["record"].losses == [3.0] and live["both"].count == 3
    assert (live["slotted"].count, live["slotted"].private()) == (3, 3)


def test_what_cannot_be_filled_in_place_is_in_the_job_s_state(room: Room) -> None:
    room.save(array=numpy.arange(5), recent=deque([1], maxlen=2), plain=(1, 2))
    protected = room.load(array=numpy.zeros(2), recent=deque([1], maxlen=3), plain=(5, 6))
    assert protected.values["array"].tolist() == [0, 1, 2, 3, 4]
    assert protected.values["recent"].maxlen == 2 and protected.values["plain"] == (1, 2)


def test_tensors_of_a_value_that_were_a_module_s_are_so_again(room: Room) -> None:
    def make() -> dict[str, Any]:
        model = nn.Linear(3, 3)
        return {"model": model, "refs": {"w": model.weight, "own": torch.randn(3, 3)}}

    room.save(**make())
    live = make()
    room.load(**live)
    assert live["refs"]["w"] is live["model"].weight
    with torch.no_grad():
        live["refs"]["own"].zero_()
    assert live["model"].weight.any(), "what was separate is separate"


def test_tensors_that_were_parted_since_are_parted_again(room: Room) -> None:
    """An average that begins as the model's own tensors must not be written into the model."""
    model = nn.Linear(3, 3)
    room.save(model=model, ema={"w": model.weight.detach() * 2})
    other = nn.Linear(3, 3)
    ema = {"w": other.weight.detach()}
    room.load(model=other, ema=ema)
    assert torch.equal(other.weight, model.weight) and torch.equal(ema["w"], model.weight * 2)


def test_nothing_live_looks_into_the_slot(room: Room) -> None:
    """A stateful object that keeps what it is given may hold the module's tensors."""

    model = nn.Linear(3, 3)
    room.save(model=model, keeps=Holder(model.weight.detach()))
    other, keeps = nn.Linear(3, 3), Holder(None)
    room.load(model=other, keeps=keeps)
    assert room.slot is not None
    room.slot.payload[:PAGE_BYTES] = bytes(PAGE_BYTES)
    assert torch.equal(keeps.held, model.weight) and torch.equal(other.weight, model.weight)


# -- states that grow


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("later", None)
        self.register_buffer("wide", torch.tensor([[1.0], [2.0]]).expand(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x.detach().mean().reshape(1)])
        if self.later is None:
            self.later = torch.ones(2)
        if not hasattr(self, "unknown"):
            self.register_buffer("unknown", torch.full((3,), 4.0))
        self.later = self.later * 1.5
        return self.head(self.body(x)) * self.wide.sum()


def growing() -> tuple[Grows, torch.optim.Optimizer]:
    model = Grows()
    return model, torch.optim.AdamW(model.body.parameters(), 0.01)


def comparable(model: Grows, optimizer: torch.optim.Optimizer) -> Any:
    """What was expanded comes back whole."""
    state = {**model.state_dict(), "wide": model.wide.contiguous()}
    return bytes_of([state, optimizer.state_dict()])


def test_buffers_that_grew_and_groups_that_were_added_are_restored(room: Room) -> None:
    model, optimizer = growing()
    stepped(model, optimizer, 2)
    optimizer.add_param_group({"params": model.head.parameters(), "lr": 0.5})
    stepped(model, optimizer, 3)
    room.save(model=model, optimizer=optimizer)
    stepped(model, optimizer, 2)
    expected = comparable(model, optimizer)
    other, fresh = growing()
    room.load(model=other, optimizer=fresh)
    assert fresh.param_groups[1]["lr"] == 0.5
    stepped(other, fresh, 2)
    assert comparable(other, fresh) == expected


def test_a_group_that_a_survivor_has_added_goes_when_it_goes_back(room: Room) -> None:
    """It adds the group again in the step that is done again."""
    model, optimizer = growing()
    stepped(model, optimizer, 2)
    protected = Protected.of({"model": model, "optimizer": optimizer}, lazy=True)
    room.save(model=model, optimizer=optimizer)
    expected = comparable(model, optimizer)
    optimizer.add_param_group({"params": model.head.parameters(), "lr": 0.5})
    stepped(model, optimizer, 2)
    room.load_into(protected)
    assert comparable(model, optimizer) == expected
    optimizer.add_param_group({"params": model.head.parameters(), "lr": 0.5})


def test_a_group_that_only_the_program_has_is_refused(room: Room) -> None:
    model, optimizer = growing()
    room.save(model=model, optimizer=optimizer)
    other, more = growing()
    more.add_param_group({"params": other.head.parameters()})
    with pytest.raises(LayoutError, match="optimizer: saved 2 parameters, live 4"):
        room.load(model=other, optimizer=more)


# -- gradients, and what else is in no state dict


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, which: int = 0) -> torch.Tensor:
        return self.experts[which](self.drop(x))


def experts() -> tuple[Experts, torch.optim.Optimizer]:
    model = Experts()
    return model, torch.optim.AdamW(model.parameters(), 0.1)


def watched(model: nn.Module, optimizer: torch.optim.Optimizer) -> Protected:
    protected = Protected.of({"model": model, "optimizer": optimizer}, lazy=True)
    optimizer.register_step_post_hook(protected.used_gradients.updated)
    return protected


def one_expert(model: nn.Module, optimizer: torch.optim.Optimizer, which: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    model(torch.randn(3, 4), which).square().sum().backward()
    optimizer.step()


def test_an_idle_parameter_with_a_zero_gradient_still_decays(room: Room) -> None:
    model, optimizer = experts()
    protected = watched(model, optimizer)
    one_expert(model, optimizer, 0)
    one_expert(model, optimizer, 1)
    room.save_from(protected)
    one_expert(model, optimizer, 1)
    expected = bytes_of([model.state_dict(), optimizer.state_dict()])
    other, fresh = experts()
    room.load(model=other, optimizer=fresh)
    assert [e.weight.grad is None for e in other.experts] == [False, False, True]
    one_expert(other, fresh, 1)
    assert bytes_of([other.state_dict(), fresh.state_dict()]) == expected


def test_gradients_that_no_update_has_used_are_kept_with_their_values(room: Room) -> None:
    model, optimizer = experts()
    protected = watched(model, optimizer)
    one_expert(model, optimizer, 0)
    optimizer.zero_grad()
    model(torch.randn(3, 4), 2).sum().backward()
    room.save_from(protected)
    model(torch.randn(3, 4), 2).sum().backward()
    optimizer.step()
    expected = bytes_of([model.state_dict(), optimizer.state_dict()])
    other, fresh = experts()
    room.load(model=other, optimizer=fresh)
    other(torch.randn(3, 4), 2).sum().backward()
    fresh.step()
    assert bytes_of([other.state_dict(), fresh.state_dict()]) == expected


def test_gradients_that_an_update_has_used_cost_no_bytes() -> None:
    model, optimizer = experts()
    protected = watched(model, optimizer)
    one_expert(model, optimizer, 0)
    gradients = protected.tree()[BESIDE]["gradients"]
    assert gradients == {"model.experts.0.weight": ZERO, "model.experts.0.bias": ZERO}
    assert not any(i.spec.name.startswith(BESIDE) for i in protected.gather().items)
    model(torch.randn(3, 4), 0).sum().backward()  # for the next update
    assert all(torch.is_tensor(g) for g in protected.tree()[BESIDE]["gradients"].values())


def test_what_is_frozen_and_what_is_in_evaluation_mode_is_so_again(room: Room) -> None:
    model, optimizer = experts()
    model.experts[1].requires_grad_(False)
    model.drop.eval()
    room.save(model=model, optimizer=optimizer)
    other, fresh = experts()
    other.experts[0].requires_grad_(False)
    room.load(model=other, optimizer=fresh)
    assert [e.weight.requires_grad for e in other.experts] == [True, False, True]
    assert not other.drop.training and other.training and other.experts[0].training


# -- a part that refuses what it gave


def test_a_load_state_dict_that_raises_is_named(room: Room) -> None:
    class Picky:
        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("b")

    room.save(picky=Picky())
    with pytest.raises(LayoutError, match=r"picky: .*KeyError: 'b'.*KEEPSTEP_FRESH=1"):
        room.load(picky=Picky())
