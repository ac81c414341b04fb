"""Restore: whatever is protected comes back byte for byte, and training goes on as if nothing had
happened."""

from __future__ import annotations

import copy
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from keepstep.edge.shm import copy_table
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.torch import restore
from keepstep.edge.torch.state import Protected
from keepstep.errors import DamageError, LayoutError
from keepstep.model.wire import Part
from tests.edge.torch.conftest import Holder, bytes_of

Bytes = Callable[[Any], Any]
Room = Any  # conftest's


@pytest.fixture
def as_bytes(snapshot_bytes: Bytes) -> Bytes:
    return snapshot_bytes


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(144, 2),
    ).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *rest: Any) -> None:
    """Steps that use every source of randomness there is."""
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        batch = torch.randn(5, 1, 8, 8) + random.random() + numpy.random.rand()

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch.to(dtype)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        for stepper in rest:
            stepper.step()


# ----------------------------------------------------------------------------------------------
# training goes on

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, 0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "lbfgs": lambda p: torch.optim.LBFGS(
        p, 0.1, max_iter=3, history_size=3, line_search_fn="strong_wolfe"
    ),
    "tensor-lr": lambda p: torch.optim.Adam(p, torch.tensor(0.01)),
    "two-groups": lambda p: torch.optim.AdamW(
        [{"params": list(p)[:2], "lr": 0.1}, {"params": list(p)[2:]}], 0.01
    ),
}


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_nothing_had_happened(
    room: Room, as_bytes: Bytes, name: str, steps_before: int
) -> None:
    """With 0 steps before, the optimizer's state appears only after the restore."""
    model = network()
    optimizer = OPTIMIZERS[name](
        model.parameters() if name != "two-groups" else list(model.parameters())
    )
    train(model, optimizer, steps_before)
    room.save(model=model, optimizer=optimizer)
    train(model, optimizer, 3)
    expected = as_bytes([model.state_dict(), optimizer.state_dict()])

    torch.manual_seed(99)
    other = network()
    fresh = OPTIMIZERS[name](
        other.parameters() if name != "two-groups" else list(other.parameters())
    )
    train(other, fresh, steps_before)  # a wrong state to overwrite
    room.load(model=other, optimizer=fresh)
    train(other, fresh, 3)
    assert as_bytes([other.state_dict(), fresh.state_dict()]) == expected


def test_a_state_older_than_the_first_update_empties_an_optimizer(room: Room) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    room.save(model=model, optimizer=optimizer)
    train(model, optimizer, 1)
    assert optimizer.state
    room.load(model=model, optimizer=optimizer)
    assert not optimizer.state


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_capturable_optimizers(room: Room, as_bytes: Bytes, kind: Any) -> None:
    model = network()
    optimizer = kind(model.parameters(), capturable=True)
    try:
        train(model, optimizer, 2)
    except (AssertionError, RuntimeError, ValueError) as error:
        pytest.skip(f"torch itself refuses capturable optimizers without an accelerator: {error}")
    room.save(model=model, optimizer=optimizer)
    expected = as_bytes(optimizer.state_dict())
    train(model, optimizer, 1)
    room.load(model=model, optimizer=optimizer)
    assert as_bytes(optimizer.state_dict()) == expected


def test_a_step_count_on_the_device_as_capturable_keeps_it(room: Room, as_bytes: Bytes) -> None:
    """What capturable means for the state, without the accelerator it needs to run: `step` is the
    parameter's, and `lr` a tensor."""
    model = network(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), torch.tensor(0.01))
    train(model, optimizer, 2)
    for group in optimizer.param_groups:
        group["capturable"] = True
    room.save(model=model, optimizer=optimizer)
    expected = as_bytes(optimizer.state_dict())
    other = network(torch.bfloat16)
    fresh = torch.optim.AdamW(other.parameters(), torch.tensor(0.5))
    room.load(model=other, optimizer=fresh)
    assert as_bytes(fresh.state_dict()) == expected


def test_full_precision_state_of_half_precision_parameters_is_not_rounded(
    room: Room, as_bytes: Bytes
) -> None:
    """torch's own load_state_dict casts it to the parameter's type."""
    model = network(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.randn(parameter.shape)
        optimizer.state[parameter]["master"] = torch.randn(parameter.shape, dtype=torch.float64)
    expected = as_bytes(optimizer.state_dict())
    room.save(model=model, optimizer=optimizer)
    other = network(torch.bfloat16)
    fresh = torch.optim.SGD(other.parameters(), 0.1, momentum=0.9)
    room.load(model=other, optimizer=fresh)
    assert as_bytes(fresh.state_dict()) == expected


def test_batch_norm_s_running_statistics(room: Room, as_bytes: Bytes) -> None:
    model = nn.BatchNorm1d(6)
    for _ in range(3):
        model(torch.randn(4, 6))
    expected = as_bytes(dict(model.named_buffers()))
    room.save(model=model)
    model(torch.randn(4, 6))
    room.load(model=model)
    assert as_bytes(dict(model.named_buffers())) == expected


def test_a_schedule_goes_on(room: Room, as_bytes: Bytes) -> None:
    def make() -> tuple[Any, ...]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
        return (
            model,
            optimizer,
            torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [4]),
        )

    model, optimizer, schedule = make()
    train(model, optimizer, 3, schedule)
    room.save(model=model, optimizer=optimizer, schedule=schedule)
    train(model, optimizer, 4, schedule)
    expected = as_bytes([model.state_dict(), optimizer.state_dict()]), schedule.get_last_lr()
    other, fresh, again = make()
    room.load(model=other, optimizer=fresh, schedule=again)
    train(other, fresh, 4, again)
    assert (as_bytes([other.state_dict(), fresh.state_dict()]), again.get_last_lr()) == expected


def test_a_gradient_scaler_goes_on(room: Room) -> None:
    def use(scaler: torch.amp.GradScaler, grad: float) -> None:
        parameter = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], 0.1)
        scaler.scale((parameter * grad).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for grad in (1.0, float("inf"), 1.0):
        use(scaler, grad)
    state = scaler.state_dict()
    assert state["scale"] == 512.0 and state["_growth_tracker"] == 1
    room.save(scaler=scaler)
    fresh = torch.amp.GradScaler("cpu")
    room.load(scaler=fresh)
    assert fresh.state_dict() == state
    use(scaler, 1.0)
    use(fresh, 1.0)
    assert fresh.state_dict() == scaler.state_dict() and fresh.get_scale() == 1024.0


# ----------------------------------------------------------------------------------------------
# every kind of tensor

DTYPES = [
    *(
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ),
    *(
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
        torch.complex32,
        torch.complex64,
        torch.complex128,
        torch.bool,
    ),
    *(
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
]


def noise(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every bit pattern may occur, NaNs with any payload among them."""
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.uint8).bool()
    count = 1
    for size in shape:
        count *= size
    return (
        torch.frombuffer(bytearray(random.Random(1).randbytes(count * dtype.itemsize)), dtype=dtype)
        .view(shape)
        .clone()
    )


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_in_every_place(room: Room, as_bytes: Bytes, dtype: torch.dtype) -> None:
    def make(fill: bool) -> dict[str, Any]:
        tensor = noise(dtype, 4, 6) if fill else torch.zeros(4, 6, dtype=dtype)
        module = nn.Module()
        module.register_buffer("b", tensor.clone())
        module.w = nn.Parameter(tensor.clone(), requires_grad=False)
        return {
            "module": module,
            "plain": tensor.clone(),
            "stateful": Holder([tensor.clone(), tensor.t().clone()]),
            "strided": tensor.clone().t(),
        }

    saved, loaded = make(True), make(False)
    room.save(**saved)
    room.load(**loaded)
    for name in ("plain", "strided"):
        assert as_bytes(loaded[name]) == as_bytes(saved[name])
    for name in ("module", "stateful"):
        assert as_bytes(loaded[name].state_dict()) == as_bytes(saved[name].state_dict())


def odd_tensors() -> dict[str, torch.Tensor]:
    base = torch.randn(4, 3, 5, 5)
    return {
        "empty": torch.empty(0),
        "empty in the middle": torch.empty(3, 0, 2),
        "0-dim": torch.tensor(3.5),
        "channels last": base.to(memory_format=torch.channels_last),
        "transposed": torch.randn(3, 7).t(),
        "every second": torch.randn(20)[::2],
        "not from the start": torch.randn(20)[7:],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "a diagonal": torch.randn(5, 5).diagonal(),
        "overlapping": torch.randn(10).unfold(0, 4, 2),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "one of many": torch.randn(5, 6)[2, 3],
    }


@pytest.mark.parametrize("name", odd_tensors())
def test_odd_tensors_keep_their_values(room: Room, as_bytes: Bytes, name: str) -> None:
    tensor = odd_tensors()[name]
    expected = as_bytes(tensor.clone())
    room.save(holder=Holder(tensor), beside=torch.ones(3))
    loaded = Holder(None)
    room.load(holder=loaded, beside=torch.zeros(3))
    assert as_bytes(loaded.held.clone())[::3] == expected[::3] and torch.equal(loaded.held, tensor)


@pytest.mark.parametrize("name", ["channels last", "transposed"])
def test_dense_tensors_keep_their_strides(room: Room, name: str) -> None:
    tensor = odd_tensors()[name]
    room.save(holder=Holder(tensor))
    loaded = Holder(None)
    room.load(holder=loaded)
    assert loaded.held.stride() == tensor.stride() and torch.equal(loaded.held, tensor)


def test_a_channels_last_network_stays_one(room: Room, as_bytes: Bytes) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = network().to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make()
    train(model, optimizer, 2)
    expected = as_bytes([model.state_dict(), optimizer.state_dict()])
    room.save(model=model, optimizer=optimizer)
    other, fresh = make()
    room.load(model=other, optimizer=fresh)
    assert as_bytes([other.state_dict(), fresh.state_dict()]) == expected


def test_a_tensor_and_its_conjugate_are_two(room: Room) -> None:
    tensor = torch.randn(4, dtype=torch.complex64)
    room.save(holder=Holder([tensor, tensor.conj(), tensor.imag, tensor.conj().imag]))
    loaded = Holder(None)
    room.load(holder=loaded)
    for found, expected in zip(
        loaded.held, [tensor, tensor.conj(), tensor.imag, tensor.conj().imag], strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("convert", ["to_sparse", "to_sparse_csr"])
def test_sparse_tensors(room: Room, as_bytes: Bytes, convert: str) -> None:
    dense = torch.randn(6, 6).relu()
    sparse = getattr(dense, convert)()
    room.save(holder=Holder({"deep": [sparse]}))
    loaded = Holder(None)
    room.load(holder=loaded)
    found = loaded.held["deep"][0]
    assert found.layout == sparse.layout and torch.equal(found.to_dense(), dense)


def test_a_sparse_embedding_s_optimizer(room: Room, as_bytes: Bytes) -> None:
    def make() -> tuple[nn.Embedding, torch.optim.Optimizer]:
        model = nn.Embedding(10, 3, sparse=True)
        return model, torch.optim.SparseAdam(model.parameters())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.randint(0, 10, (4,))).sum().backward()
        optimizer.step()

    model, optimizer = make()
    step(model, optimizer)
    room.save(model=model, optimizer=optimizer)
    step(model, optimizer)
    expected = as_bytes([model.state_dict(), optimizer.state_dict()])
    other, fresh = make()
    room.load(model=other, optimizer=fresh)
    step(other, fresh)
    assert as_bytes([other.state_dict(), fresh.state_dict()]) == expected


# ----------------------------------------------------------------------------------------------
# sharing


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_weights_are_kept_once_and_stay_tied(room: Room, as_bytes: Bytes) -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    protected = Protected.of({"model": model, "optimizer": optimizer}, lazy=True)
    assert [i.spec.name for i in protected.gather().items if i.spec.name.startswith("model")] == [
        "model.embedding.weight"
    ]
    expected = as_bytes(model.state_dict())
    room.save(model=model, optimizer=optimizer)
    other = Tied()
    room.load(model=other, optimizer=torch.optim.SGD(other.parameters(), 0.1))
    assert other.head.weight is other.embedding.weight and as_bytes(other.state_dict()) == expected


def test_one_tensor_in_two_places_is_one_again(room: Room) -> None:
    tensor = torch.randn(4)
    room.save(holder=Holder([tensor, {"again": tensor}]))
    loaded = Holder(None)
    room.load(holder=loaded)
    assert loaded.held[0] is loaded.held[1]["again"] and torch.equal(loaded.held[0], tensor)


def test_views_of_one_storage_that_a_module_owns_stay_views(room: Room) -> None:
    def make() -> nn.Module:
        module = nn.Module()
        flat = torch.randn(12)
        module.register_buffer("flat", flat)
        module.register_buffer("part", flat[4:8].view(2, 2))
        return module

    model, other = make(), make()
    room.save(model=model)
    room.load(model=other)
    assert torch.equal(other.flat, model.flat) and torch.equal(other.part, model.part)
    other.flat[4] = 77.0
    assert other.part[0, 0] == 77.0


class Cupboard:
    """An object of the user's own, with tensors in every corner."""

    def __init__(self) -> None:
        self.list = [torch.randn(3), (torch.randn(2), [torch.randn(1)])]
        self.set = {torch.randn(2)}
        self.parameter = nn.Parameter(torch.randn(2))
        self.words = "words"


def test_tensors_hidden_in_objects(room: Room, as_bytes: Bytes) -> None:
    held = Cupboard()
    room.save(holder=Holder(held))
    expected = copy.deepcopy(held)
    held.list[0].zero_()
    loaded = Holder(None)
    room.load(holder=loaded)
    found = loaded.held
    assert as_bytes(found.list) == as_bytes(expected.list) and found.words == "words"
    assert as_bytes([*found.set]) == as_bytes([*expected.set])
    assert torch.equal(found.parameter, expected.parameter)


def test_hidden_tensors_that_learn_go_on_learning(room: Room) -> None:
    frozen = nn.Parameter(torch.randn(2), requires_grad=False)
    room.save(
        holder=Holder(
            [
                nn.Parameter(torch.randn(2)),
                torch.randn(2, requires_grad=True),
                frozen,
                torch.randn(2),
            ]
        )
    )
    loaded = Holder(None)
    room.load(holder=loaded)
    assert [isinstance(t, nn.Parameter) for t in loaded.held] == [True, False, True, False]
    assert [t.requires_grad for t in loaded.held] == [True, True, False, False]


def test_a_plain_tensor_that_learns(room: Room) -> None:
    room.save(alpha=torch.tensor([2.0], requires_grad=True))
    alpha = torch.tensor([0.0], requires_grad=True)
    room.load(alpha=alpha)
    assert alpha.item() == 2.0 and alpha.requires_grad and alpha.is_leaf


# ----------------------------------------------------------------------------------------------
# values


class Progress:
    def __init__(self) -> None:
        self.tokens = 0


def test_plain_values_come_back_in_the_objects_the_user_holds(room: Room) -> None:
    progress = Progress()
    progress.tokens = 512
    room.save(numbers=[1, 2], table={"a": 1}, seen={3}, progress=progress, best=0.25, name="x")
    numbers, table, seen, mine = [9], {"b": 2}, {4}, Progress()
    protected = room.load(
        numbers=numbers, table=table, seen=seen, progress=mine, best=1.0, name="y"
    )
    assert (numbers, table, seen, mine.tokens) == ([1, 2], {"a": 1}, {3}, 512)
    assert protected.values["best"] == 0.25 and protected.values["name"] == "x"
    assert protected.values["numbers"] is numbers and protected.values["progress"] is mine


def test_a_value_of_another_type_is_replaced(room: Room) -> None:
    room.save(best=0.25)
    assert room.load(best=None).values["best"] == 0.25


def test_generators_of_one_s_own_are_restored_in_place(room: Room) -> None:
    """A data loader or a sampler holds the very object."""

    def make(seed: int) -> dict[str, Any]:
        return {
            "t": torch.Generator().manual_seed(seed),
            "n": numpy.random.default_rng(seed),
            "p": random.Random(seed),
        }

    def numbers(generators: dict[str, Any]) -> list[float]:
        return [
            torch.rand(1, generator=generators["t"]).item(),
            generators["n"].random(),
            generators["p"].gauss(),
        ]

    saved, live = make(1), make(2)
    numbers(saved)
    room.save(**saved)
    expected = [numbers(saved) for _ in range(3)]
    room.load(**live)
    assert [numbers(live) for _ in range(3)] == expected


def test_an_object_that_pickles_itself_is_replaced_whole(room: Room) -> None:
    saved, live = deque([1, 2], maxlen=5), deque([9], maxlen=5)
    room.save(recent=saved)
    assert room.load(recent=live).values["recent"] == saved


def test_plain_tensors_are_filled_in_place(room: Room) -> None:
    room.save(scale=torch.tensor([1.0, 2.0]))
    mine = torch.zeros(2)
    room.load(scale=mine)
    assert mine.tolist() == [1.0, 2.0]


def test_extra_state_and_compiled_modules(room: Room, as_bytes: Bytes) -> None:
    class Extra(nn.Linear):
        seen = 0

        def get_extra_state(self) -> dict[str, Any]:
            return {"seen": self.seen, "tensor": torch.full((2,), float(self.seen))}

        def set_extra_state(self, state: dict[str, Any]) -> None:
            self.seen = state["seen"]
            assert state["tensor"].tolist() == [self.seen] * 2

    model = Extra(2, 2)
    model.seen = 5
    room.save(model=model)
    other = Extra(2, 2)
    room.load(model=torch.compile(other))
    assert other.seen == 5 and torch.equal(other.weight, model.weight)


# ----------------------------------------------------------------------------------------------
# random states


def draw() -> list[float]:
    return [torch.rand(1).item(), random.random(), float(numpy.random.rand())]


def test_every_generator_goes_on(room: Room) -> None:
    draw()
    room.save(x=1)
    expected = [draw() for _ in range(3)]
    room.load(x=1)
    assert [draw() for _ in range(3)] == expected


class Noisy:
    """Draws random numbers whenever it is asked for its state or given one."""

    def state_dict(self) -> dict[str, Any]:
        draw()
        return {"noise": torch.rand(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        draw()


def test_generators_are_restored_after_everything_that_may_draw(room: Room) -> None:
    before = torch.get_rng_state().clone(), random.getstate()
    room.save(noisy=Noisy())
    torch.manual_seed(1)
    room.load(noisy=Noisy())
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_capturing_draws_no_random_number_of_the_training_s(room: Room) -> None:
    """Else a step that is captured and one that is skipped would go on differently."""
    before = torch.get_rng_state().clone(), random.getstate()
    Protected.of({"noisy": Noisy()}, lazy=True).gather()
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


# ----------------------------------------------------------------------------------------------
# what does not fit


def refusals() -> Iterator[tuple[str, dict[str, Any], dict[str, Any], str]]:
    yield (
        "a shape",
        {"m": nn.Linear(3, 2)},
        {"m": nn.Linear(3, 4)},
        r"m.weight: saved float32\[2, 3\], live float32\[4, 3\]",
    )
    yield (
        "a type",
        {"m": nn.Linear(3, 2)},
        {"m": nn.Linear(3, 2).half()},
        r"m.bias: saved float32\[2\], live float16\[2\]",
    )
    yield (
        "a missing parameter",
        {"m": nn.Linear(3, 2, bias=False)},
        {"m": nn.Linear(3, 2)},
        r"m.bias: saved nothing, live float32\[2\]",
    )
    yield (
        "one too many",
        {"m": nn.Linear(3, 2)},
        {"m": nn.Linear(3, 2, bias=False)},
        r"m.bias: saved float32\[2\], live nothing",
    )
    yield (
        "a missing thing",
        {"m": nn.Linear(1, 1)},
        {"m": nn.Linear(1, 1), "t": torch.ones(1)},
        "t: saved nothing, live tensor",
    )
    yield (
        "an unknown thing",
        {"m": nn.Linear(1, 1), "e": 1},
        {"m": nn.Linear(1, 1)},
        "e: saved value, live nothing",
    )
    yield "another kind", {"m": nn.Linear(1, 1)}, {"m": 3}, "m: saved module, live value"
    yield (
        "a plain tensor",
        {"t": torch.ones(2)},
        {"t": torch.ones(3)},
        r"t: saved float32\[2\], live float32\[3\]",
    )
    one, two = nn.Linear(4, 8), nn.Linear(4, 4)
    yield (
        "an optimizer's parameters",
        {"m": one, "o": torch.optim.SGD(one.parameters(), 0.1)},
        {"m": two, "o": torch.optim.SGD(two.parameters(), 0.1)},
        r"o: saved 2 parameters, live 2; the first difference is number 0: "
        r"saved float32\[8, 4\] m.weight, live float32\[4, 4\] m.weight.*"
        r"another job name, or start over with KEEPSTEP_FRESH=1",
    )
    m, n = nn.Linear(2, 2), nn.Linear(2, 2)
    yield (
        "an optimizer's order",
        {"m": m, "o": torch.optim.SGD([m.weight, m.bias], 0.1)},
        {"m": n, "o": torch.optim.SGD([{"params": [n.weight]}, {"params": [n.bias]}], 0.1)},
        r"o: saved groups of \[2\] parameters, live \[1, 1\]",
    )
    hidden = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    grown = torch.optim.SGD(hidden[:1], 0.1)
    grown.add_param_group({"params": hidden[1:]})
    yield (
        "a group that cannot be made",
        {"o": grown},
        {"o": torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)},
        r"o: saved 2 parameters, live 1; .* number 1: saved float32\[3\], live none; "
        r"a group that is added while training is made anew when a protected module has its "
        r"parameters: add the layers",
    )


@pytest.mark.parametrize(
    ("saved", "live", "message"), [r[1:] for r in refusals()], ids=[r[0] for r in refusals()]
)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(
    room: Room, as_bytes: Bytes, saved: dict[str, Any], live: dict[str, Any], message: str
) -> None:
    room.save(**saved)

    def now() -> Any:
        return as_bytes(
            {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in live.items()}
        )

    before = now(), torch.get_rng_state().tolist()
    with pytest.raises(LayoutError, match=message):
        room.load(**live)
    assert (now(), torch.get_rng_state().tolist()) == before


# ---------------------------------------------------------------------------------------------- the
# proof


def test_the_proof_names_what_is_not_as_it_was_saved(room: Room) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 1)
    room.save(model=model, optimizer=optimizer)
    protected = room.load(model=model, optimizer=optimizer)
    assert room.slot is not None
    header, layout = room.slot.verify()
    with torch.no_grad():
        model[5].weight[0, 0] += 1e-6
        optimizer.state[model[0].bias]["exp_avg_sq"][0] = float("nan")
    [weight, average] = restore.prove(protected, room.slot, header, layout)
    assert weight.startswith("model.5.weight: 1 of 288 values differ, first number 0: saved ")
    assert average.startswith("optimizer.state.1.exp_avg_sq: 1 of 4 values differ, first number 0")
    assert average.endswith("live nan")


def test_the_proof_knows_minus_zero_from_zero(room: Room) -> None:
    mine = torch.zeros(3)
    room.save(t=mine)
    protected = room.load(t=mine)
    assert room.slot is not None
    mine[1] = -0.0
    assert restore.prove(protected, room.slot, *room.slot.verify()) == [
        "t: 1 of 3 values differ, first number 1: saved 0.0, live -0.0"
    ]


@pytest.mark.parametrize("where", ["a tensor", "the tree", "the table"])
def test_the_proof_knows_a_slot_that_has_changed_since(room: Room, where: str) -> None:
    """Even when the live bytes are what lies there by now."""
    mine = torch.zeros(1000)
    room.save(t=mine)
    protected = room.load(t=mine)
    assert room.slot is not None
    header, layout = room.slot.verify()
    assert restore.prove(protected, room.slot, header, layout) == []
    if where == "the table":
        room.slot.part(Part.TABLE, header)[0] ^= 1
    else:
        at = 0 if where == "a tensor" else layout.objects_offset + 1
        room.slot.payload[at] ^= 1
    if where == "a tensor":
        mine.view(torch.uint8)[0] ^= 1
    with pytest.raises(DamageError):
        restore.prove(protected, room.slot, header, layout)


def test_the_proof_knows_a_slot_that_was_written_again(room: Room) -> None:
    mine = torch.zeros(3)
    room.save(t=mine)
    protected = room.load(t=mine)
    assert room.slot is not None
    header, layout = room.slot.verify()
    room.slot.void()
    with pytest.raises(LookupError):
        restore.prove(protected, room.slot, header, layout)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_proof_finds_one_bit_wherever_it_is(
    room: Room, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks smaller than a tensor, and with many tensors in a block."""
    monkeypatch.setattr(MEMORY, "block_bytes", 4096)
    monkeypatch.setattr(copy_table, "WINDOW_BYTES", 4096)
    tensors = {f"t{i}": torch.zeros(n) for i, n in enumerate((5000, 1, 3, 700, 0, 2048))}
    tensors["turned"] = torch.zeros(40, 50).t()
    room.save(**tensors)
    protected = room.load(**tensors)
    assert room.slot is not None
    header, layout = room.slot.verify(threads)
    for name, tensor in tensors.items():
        for place in {0, tensor.numel() // 2, tensor.numel() - 1} if tensor.numel() else ():
            index = numpy.unravel_index(place, tensor.shape)
            tensor[index] = -0.0
            [wrong] = restore.prove(protected, room.slot, header, layout, threads)
            assert wrong.startswith(f"{name}: 1 of {tensor.numel()} values differ")
            tensor[index] = 0.0
    assert restore.prove(protected, room.slot, header, layout, threads) == []


@pytest.mark.parametrize("threads", [1, 3])
def test_large_tensors_are_copied_by_threads(room: Room, threads: int) -> None:
    def program() -> tuple[nn.Module, torch.optim.Optimizer, list[torch.Tensor]]:
        model = nn.Sequential(nn.Linear(700, 600), nn.Linear(600, 2))
        return model, torch.optim.AdamW(model.parameters()), [torch.ones(600, 700).t()]

    model, adam, others = program()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    adam.step()
    room.save(model=model, adam=adam, others=[*others, model[0].weight])
    model_2, adam_2, others_2 = program()
    protected = Protected.of({"model": model_2, "adam": adam_2, "others": others_2}, lazy=True)
    header, layout = room.slot.verify()
    opened = restore.open_snapshot(protected, room.slot, header, layout, threads)
    restore.apply(protected, opened)
    assert restore.prove(protected, room.slot, header, layout, threads) == []
    assert bytes_of(adam_2.state_dict()) == bytes_of(adam.state_dict())
    assert protected.values["others"][1] is model_2[0].weight
    names = {thread.name for thread in threading.enumerate()}
    assert not any(name.startswith("load") for name in names)
