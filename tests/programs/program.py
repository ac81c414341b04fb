"""A generated training program: what it is made of is drawn, the same whenever it is built.

    Plan (drawn, in JSON's types) -> Program: build, step, digest

Every step is a function of the program's state and of the random generators alone, so a program
that is restored exactly ends in the same digest as one that was never disturbed.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import logging
import pickle
import random
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.utils import parametrizations

WIDTH = 4


@dataclass(frozen=True)
class Plan:
    """What a program is made of. `events`: (step, what) in the middle of the training."""

    seed: int = 1
    blocks: tuple[str, ...] = ("linear",)
    dtype: str = "float32"
    optimizers: tuple[str, ...] = ("adamw",)
    groups: str = "one"  # or one a block, or one a parameter
    schedule: str = "none"
    zeroing: str = "none first"
    container: str = "flat"
    average: str = "none"
    values: tuple[str, ...] = ()
    events: tuple[tuple[int, str], ...] = ()
    wrapped: bool = False
    scaler: bool = False
    total_steps: int = 5
    cut: int = 2  # the last step before it is interrupted

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Plan:
        """The inverse of `asdict`, through JSON."""
        tuples = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**{**tuples, "events": tuple((s, w) for s, w in data["events"])})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


# -- blocks


class Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("wide", torch.tensor([1.5]).expand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.wide.to(x.dtype)


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x.detach().float().mean().reshape(1)])
        return x + self.seen.mean().to(x.dtype)


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        flat = torch.zeros(2 * WIDTH)
        self.register_buffer("flat", flat)
        self.register_buffer("part", flat[2 : 2 + WIDTH])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.flat += x.detach().float().mean()
        return x + self.part.to(x.dtype)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("low", torch.zeros(2, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.flags[int(self.count) % 3] = True
        self.low = self.low + 0.5
        return x * (1 + self.low.sum().to(x.dtype) / 10)


class Late(nn.Module):
    """Its buffers come into being, and go, while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("none", None)
        self.register_buffer("some", torch.ones(2))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.none is None:
            self.none = torch.rand(WIDTH)
        if not hasattr(self, "later"):
            self.register_buffer("later", torch.full((1,), 0.5))
        self.later = self.later * 1.25
        self.some = None
        return x + (self.none * self.later).to(x.dtype)


class Extra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def get_extra_state(self) -> dict[str, Any]:
        return {"scale": self.scale, "tensor": torch.tensor([self.scale])}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale *= 0.9
        return x * self.scale


class Expert(nn.Module):
    """A part of it learns in every other call only."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.even(x) if torch.rand(()) < 0.5 else self.odd(x)


class Hooked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_state_dict_post_hook(lambda module, state, prefix, metadata: None)
        self.register_load_state_dict_pre_hook(lambda *given: None)


BLOCKS: dict[str, Any] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "plain batch norm": lambda: nn.BatchNorm1d(WIDTH, affine=False, momentum=None),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "dropout": lambda: nn.Dropout(0.3),
    "prelu": nn.PReLU,
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "rrelu": nn.RReLU,
    "expanded": Expanded,
    "growing": Growing,
    "views": Views,
    "counter": Counter,
    "late": Late,
    "extra": Extra,
    "expert": Expert,
    "hooked": Hooked,
    "tied": lambda: nn.Linear(WIDTH, WIDTH),
    "transposed": lambda: _transposed(),
}


def _transposed() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
    return layer


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    "foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True, weight_decay=0.1),
    "tensor lr": lambda p: torch.optim.Adam(p, torch.tensor(0.01)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
    "adadelta": torch.optim.Adadelta,
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
    "radam": lambda p: torch.optim.RAdam(p, 0.01),
    "asgd": lambda p: torch.optim.ASGD(p, 0.01),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
}

_lr = torch.optim.lr_scheduler
SCHEDULES: dict[str, Any] = {
    "step": lambda o: _lr.StepLR(o, 2, 0.5),
    "cosine": lambda o: _lr.CosineAnnealingLR(o, 6),
    "lambda": lambda o: _lr.LambdaLR(o, lambda n: 0.9**n),
    "one cycle": lambda o: _lr.OneCycleLR(o, 0.1, total_steps=30, cycle_momentum=False),
    "plateau": lambda o: _lr.ReduceLROnPlateau(o, patience=0),
    "sequence": lambda o: _lr.SequentialLR(
        o, [_lr.ConstantLR(o, 0.5, 2), _lr.ExponentialLR(o, 0.9)], [2]
    ),
}

ZEROING = ("none first", "zeros first", "last", "zeros last", "every other", "backward last")
CONTAINERS = ("flat", "list", "tuple", "dict", "nested")
AVERAGES = ("none", "dict", "aliased dict", "module", "stateful", "swa")
EVENTS = ("freeze", "unfreeze", "add group", "evaluate", "lr", "write", "new optimizer state")
VALUES = (
    *("array", "deque", "record", "slotted", "generators", "reference", "history", "counter"),
    *("hooks", "late tree", "namespace", "table", "defaults", "cycle", "sparse", "guarded"),
    *("logger", "alias"),
)


class Record:
    def __init__(self) -> None:
        self.best = 0.0
        self.table = numpy.zeros(3)
        self.trace: list[torch.Tensor] = []


class Slotted:
    __slots__ = ("count", "weights")

    def __init__(self) -> None:
        self.count, self.weights = 0, torch.zeros(2)


class Hooks:
    """It calls its own methods, as callbacks do."""

    def __init__(self) -> None:
        self.count = 0
        self.calls: list[Any] = [self.up, partial(self.up, 2)]

    def up(self, by: int = 1) -> None:
        self.count += by

    def told(self) -> Any:
        return [self.count, len(self.calls)]


class Node:
    """Of a tree whose nodes know their parents."""

    def __init__(self, parent: Node | None = None) -> None:
        self.parent, self.children, self.best = parent, [], 0.0  # type: ignore[var-annotated]

    def told(self) -> Any:
        return [self.best, [(child.best, child.parent is self) for child in self.children]]


class Table(dict[str, Any]):
    """A dict with something beside its items."""

    def __init__(self) -> None:
        super().__init__(n=0)
        self.seen: list[int] = []

    def told(self) -> Any:
        return [dict(self), self.seen]


class Guarded:
    """With a lock, which is in no state."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.lock = Lock()

    def __getstate__(self) -> Any:
        return {"losses": self.losses}

    def __setstate__(self, state: Any) -> None:
        self.losses, self.lock = state["losses"], Lock()

    def told(self) -> Any:
        return self.losses


class Meter:
    """With a logger, which is one in the process."""

    def __init__(self) -> None:
        self.log = logging.getLogger("tests.programs")
        self.count = 0

    def told(self) -> Any:
        return [self.count, self.log is logging.getLogger("tests.programs")]


def no_losses() -> list[float]:
    """What a defaultdict begins with."""
    return [0.0]


class Average:
    """An average of the parameters, as people write one."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


class Wrapper(torch.optim.Optimizer):
    """An optimizer in an optimizer's clothes, as accelerate makes them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)


@dataclass
class Program:
    """Built and trained. `protected` is what it gives to `keepstep.protect`."""

    plan: Plan
    protected: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        plan = self.plan
        torch.manual_seed(plan.seed)
        random.seed(plan.seed)
        numpy.random.seed(plan.seed)
        self.model = self._model().to(getattr(torch, plan.dtype))
        self.head = nn.Linear(WIDTH, WIDTH).to(getattr(torch, plan.dtype))  # joins in an event
        self.head_joined = torch.zeros((), dtype=torch.bool)
        self.optimizers = self._optimizers()
        make = SCHEDULES.get(plan.schedule)
        self.schedules = [make(o) for o in self.optimizers] if make else []
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        self._make_average()
        self._make_values()
        self.protected = self._in_containers()

    # -- building

    def _model(self) -> nn.Sequential:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(BLOCKS[b]() for b in self.plan.blocks))
        for name, block in zip(self.plan.blocks, model[1:], strict=True):
            if name == "tied":
                block.weight = model[0].weight
        return model

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        kinds = self.plan.optimizers
        shares: list[list[list[nn.Parameter]]] = [[] for _ in kinds]
        seen: set[int] = set()
        for index, block in enumerate(self.model):
            own = [p for p in block.parameters() if id(p) not in seen]
            seen.update(map(id, own))
            if own:
                shares[index % len(kinds)].append(own)
        made = []
        for kind, blocks in zip(kinds, shares, strict=True):
            if blocks:
                made.append(OPTIMIZERS[kind](self._grouped(blocks)))
        return made

    def _grouped(self, blocks: list[list[nn.Parameter]]) -> Any:
        if self.plan.groups == "one":
            return [p for block in blocks for p in block]
        if self.plan.groups == "one a block":
            return [{"params": block} for block in blocks]
        return [{"params": [p], "tag": n} for block in blocks for n, p in enumerate(block)]

    def _make_average(self) -> None:
        kind, model = self.plan.average, self.model
        self.average: Any = None
        if kind == "dict":
            self.average = {n: p.detach().clone() for n, p in model.named_parameters()}
        elif kind == "aliased dict":
            self.average = {n: p.detach() for n, p in model.named_parameters()}
        elif kind == "module":
            self.average = copy.deepcopy(nn.ParameterList(model.parameters()))
        elif kind == "stateful":
            self.average = Average(model)
        elif kind == "swa":
            self.average = torch.optim.swa_utils.AveragedModel(nn.ParameterList(model.parameters()))

    def _make_values(self) -> None:
        self.values: dict[str, Any] = {}
        made: dict[str, Any] = {
            "array": lambda: numpy.zeros(4),
            "deque": lambda: deque(maxlen=3),
            "record": Record,
            "slotted": Slotted,
            "generators": lambda: {
                "torch": torch.Generator().manual_seed(3),
                "numpy": numpy.random.default_rng(3),
                "python": random.Random(3),
            },
            "reference": lambda: {"first": self.model[0].weight, "loss": torch.zeros(())},
            "history": list,
            "counter": lambda: {"n": 0, "deep": [{"m": 0}]},
            "hooks": Hooks,
            "late tree": lambda: {"best": None},
            "namespace": lambda: SimpleNamespace(n=0, trace=[]),
            "table": Table,
            "defaults": lambda: {"losses": defaultdict(no_losses)},
            "cycle": lambda: {"rates": itertools.cycle([0.5, 0.25, 0.125]), "rate": 0.0},
            "sparse": lambda: {"adjacent": None},
            "guarded": Guarded,
            "logger": lambda: {"meter": None},
            "alias": _alias,
        }
        for name in self.plan.values:
            self.values[name] = made[name]()

    def _in_containers(self) -> dict[str, Any]:
        optimizers: list[Any] = list(self.optimizers)
        if self.plan.wrapped:
            optimizers = [Wrapper(o) for o in optimizers]
        things: dict[str, Any] = {"model": self.model, "head": self.head}
        kind = self.plan.container
        if kind == "flat":
            things.update({f"optimizer{i}": o for i, o in enumerate(optimizers)})
            things.update({f"schedule{i}": s for i, s in enumerate(self.schedules)})
        elif kind in ("list", "tuple"):
            make = {"list": list, "tuple": tuple}[kind]
            things["optimizers"], things["schedules"] = make(optimizers), make(self.schedules)
        elif kind == "dict":
            things["optimizers"] = {f"o{i}": o for i, o in enumerate(optimizers)}
            things["schedules"] = dict(enumerate(self.schedules))
        else:
            nets = {"model": things.pop("model"), "heads": [things.pop("head")]}
            things["all"] = [nets, {"tools": (optimizers, [self.schedules])}]
        if self.plan.scaler:
            things["scaler"] = self.scaler
        if self.average is not None:
            things["average"] = self.average
        return {**things, "joined": self.head_joined, **self.values}

    # -- training

    def run(self, first: int, until: int) -> None:
        for step in range(first, until):
            self.step(step)

    def step(self, step: int) -> None:
        zeroing = self.plan.zeroing
        for when, what in self.plan.events:
            if when == step:
                self._happens(what)
        if zeroing in ("none first", "zeros first"):
            self._zero(to_none=zeroing == "none first")
        if zeroing == "backward last":
            self._update()
            self._zero(to_none=True)
            loss = self._backward()
        else:
            loss = self._backward()
            if zeroing != "every other" or step % 2:
                self._update()
        if zeroing in ("last", "zeros last") or (zeroing == "every other" and step % 2):
            self._zero(to_none=zeroing != "zeros last")
        for schedule in self.schedules:
            if isinstance(schedule, _lr.ReduceLROnPlateau):
                schedule.step(float(loss))
            else:
                schedule.step()
        self._average_moves()
        self._values_move(step, loss)

    def _zero(self, to_none: bool) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=to_none)

    def _backward(self) -> torch.Tensor:
        x = torch.randn(3, WIDTH) + random.random() + float(numpy.random.rand())
        out = self.model(x.to(getattr(torch, self.plan.dtype)))
        if self.head_joined:
            out = self.head(out)
        loss = out.float().square().mean()
        if loss.requires_grad:  # all may be frozen
            (self.scaler.scale(loss) if self.plan.scaler else loss).backward()
        return loss.detach()

    def _update(self) -> None:
        ready = [
            optimizer
            for optimizer in self.optimizers
            if any(p.grad is not None for g in optimizer.param_groups for p in g["params"])
        ]
        for optimizer in ready:
            if self.plan.scaler:
                self.scaler.step(optimizer)
            else:
                optimizer.step()
        if self.plan.scaler and ready:
            self.scaler.update()

    def _happens(self, what: str) -> None:
        first, last = self.model[0], self.model[-1]
        if what == "freeze":
            first.requires_grad_(False)
        elif what == "unfreeze":
            last.requires_grad_(True)
        elif what == "evaluate":
            last.eval()
        elif what == "lr":
            for group in self.optimizers[0].param_groups:
                group["weight_decay"] = group.get("weight_decay", 0) + 0.01
        elif what == "write":
            with torch.no_grad():
                first.weight.mul_(1.01)
        elif what == "new optimizer state":
            self.optimizers[0].state.clear()
        elif what == "add group" and not self.head_joined and not self.schedules:
            self.optimizers[0].add_param_group({"params": list(self.head.parameters()), "lr": 0.02})
            self.head_joined.fill_(True)

    def _average_moves(self) -> None:
        kind = self.plan.average
        if kind == "swa":
            self.average.update_parameters(nn.ParameterList(self.model.parameters()))
            return
        with torch.no_grad():
            if kind == "module":
                for mine, p in zip(self.average, self.model.parameters(), strict=True):
                    mine.lerp_(p, 0.5)
            shadow = self.average.shadow if kind == "stateful" else self.average
            if kind in ("stateful", "dict", "aliased dict"):
                for name, p in self.model.named_parameters():
                    if kind == "dict":
                        shadow[name].mul_(0.5).add_(p, alpha=0.5)
                    else:
                        shadow[name] = shadow[name] * 0.5 + p * 0.5

    def _values_move(self, step: int, loss: torch.Tensor) -> None:
        for name, value in self.values.items():
            if name == "array":
                value += numpy.random.rand(4)
            elif name == "deque":
                value.append(float(loss))
            elif name == "record":
                value.best = max(value.best, float(loss))
                value.table[step % 3] += 1
                value.trace.append(loss.clone())
            elif name == "slotted":
                value.count += 1
                value.weights += value.count
            elif name == "generators":
                drawn = torch.rand((), generator=value["torch"]) + value["numpy"].random()
                torch.manual_seed(int((float(drawn) + value["python"].random()) * 1e6))
            elif name == "reference":
                value["loss"].add_(loss)
                with torch.no_grad():
                    value["first"].mul_(0.99)
            elif name == "history":
                value.append((step, loss.clone(), {"at": step}))
            elif name == "counter":
                value["n"] += 1
                value["deep"][0]["m"] += value["n"]
            else:
                _moves(name, value, step, float(loss))

    # -- what it has become

    def digest(self) -> str:
        sums = hashlib.sha256()
        for piece in _pieces(self._everything()):
            sums.update(piece)
        return sums.hexdigest()

    def _everything(self) -> list[Any]:
        modules = [self.model, self.head]
        average = self.average
        if hasattr(average, "state_dict"):
            average = average.state_dict()
        elif self.plan.average == "stateful":
            average = average.shadow
        return [
            [m.state_dict() for m in modules],
            [o.state_dict() for o in self.optimizers],
            [s.state_dict() for s in self.schedules],
            self.scaler.state_dict(),
            average,
            self.head_joined,
            [[x.training for x in m.modules()] for m in modules],
            [[(p.requires_grad, p.grad is None) for p in m.parameters()] for m in modules],
            self.values,
            torch.get_rng_state(),
            random.getstate(),
            pickle.dumps(numpy.random.get_state()),
        ]


def _alias() -> dict[str, Any]:
    steps: list[int] = []
    return {"all": steps, "again": {"of": steps}}


def _moves(name: str, value: Any, step: int, loss: float) -> None:
    if name == "hooks":
        for call in value.calls:
            call()
    elif name == "late tree":
        if step % 2:
            value["best"] = Node()
            value["best"].children.append(Node(value["best"]))
        if value["best"] is not None:
            value["best"].children[0].parent.best += loss
    elif name == "namespace":
        value.n += 1
        value.trace.append(loss)
    elif name == "table":
        value["n"] += 1
        value.seen.append(step)
    elif name == "defaults":
        value["losses"][step % 2].append(loss)
    elif name == "cycle":
        value["rate"] = next(value["rates"])
    elif name == "sparse":
        value["adjacent"] = (torch.eye(3) * (step + loss)).to_sparse_csr()
    elif name == "guarded":
        with value.lock:
            value.losses.append(loss)
    elif name == "logger":
        value["meter"] = value["meter"] or Meter()
        value["meter"].count += 1
    elif name == "alias":
        value["all"].append(step)
        value["again"]["of"].append(-step)


def _pieces(value: Any) -> Iterator[bytes]:
    if hasattr(value, "told"):
        yield type(value).__name__.encode()
        value = value.told()
    if isinstance(value, SimpleNamespace):
        value = vars(value)
    if hasattr(value, "__next__"):
        return  # what it gives is seen in time
    if isinstance(value, torch.Tensor):
        flat = value.detach()
        flat = (flat if flat.layout is torch.strided else flat.to_dense()).contiguous()
        yield f"{value.dtype}{list(value.shape)}".encode()
        yield bytes(flat.reshape(-1).view(torch.uint8).tolist())
    elif isinstance(value, numpy.ndarray):
        yield value.tobytes()
    elif isinstance(value, torch.Generator):
        yield from _pieces(value.get_state())
    elif isinstance(value, numpy.random.Generator):
        yield repr(value.bit_generator.state).encode()
    elif isinstance(value, random.Random):
        yield repr(value.getstate()).encode()
    elif isinstance(value, Record):
        yield from _pieces(vars(value))
    elif isinstance(value, Slotted):
        yield from _pieces([value.count, value.weights])
    elif isinstance(value, Mapping):
        yield b"{"
        for key, inner in value.items():
            yield repr(key).encode()
            yield from _pieces(inner)
    elif isinstance(value, (list, tuple, deque)):
        yield b"["
        for inner in value:
            yield from _pieces(inner)
    elif callable(value):
        yield b"function"
    else:
        yield repr(value).encode()
