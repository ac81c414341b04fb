"""Parts: which of the things that a user protects have a state of their own to load, and where they
are.

Comes in: the things by their names. Goes out: modules, optimizers, schedulers and other stateful
objects, and generators, each by the dotted path that leads to it; lists, tuples and dicts are
looked into. Whatever else there is stays a value: it is pickled, and a part inside it leaves a
`PlaceOfPart` there. What would come back as a dead copy (a module inside an object of the user's
own) is refused by name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Sampler

from keepstep.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PlaceOfPart:
    """Stands in a value where a part of that path is."""

    path: str


def bare(module: torch.nn.Module) -> torch.nn.Module:
    """The user's module inside DistributedDataParallel and torch.compile, whose prefixes must not
    reach the names."""
    while True:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            module = module.module
        elif hasattr(module, "_orig_mod"):
            module = module._orig_mod  # type: ignore[assignment]
        else:
            return module


def unwrapped(value: Any) -> Any:
    """The optimizer inside wrappers that call themselves one and have no hooks of their own
    (accelerate's); anything else as it is."""
    while (
        isinstance(value, torch.optim.Optimizer)
        and "_optimizer_step_pre_hooks" not in vars(value)
        and isinstance(getattr(value, "optimizer", None), torch.optim.Optimizer)
    ):
        value = value.optimizer  # type: ignore[attr-defined]
    return value


def kind_of(value: Any) -> str:
    """`module`, `optimizer`, `tensor`, `generator`, `stateful` or `value`."""
    if isinstance(value, torch.nn.Module):
        return "module"
    if isinstance(value, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, torch.Generator):
        return "generator"
    if _is_stateful(value):
        return "stateful"
    return "value"


def _is_stateful(value: Any) -> bool:
    return (
        hasattr(value, "state_dict")
        and hasattr(value, "load_state_dict")
        and not isinstance(value, type)
    )


def state_of(part: Any) -> Any:
    """What a part tells of itself, to be kept."""
    if isinstance(part, torch.nn.Module):
        return bare(part).state_dict()
    if isinstance(part, torch.Tensor):
        return part
    if isinstance(part, torch.Generator):
        return {"state": part.get_state()}
    return part.state_dict()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The optimizer's parameters in the order its state dict numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def parts_inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a protected thing with their paths: itself, or those in its containers. Raises
    ConfigError for containers that lie deeper than Python can follow."""
    try:
        yield from _walk(name, value, is_outermost=True, seen=set())
    except RecursionError as error:
        raise ConfigError(
            f"{name}: expected containers within each other as deep as Python follows them "
            f"(sys.getrecursionlimit() is {sys.getrecursionlimit()}), found deeper ones"
        ) from error


def _walk(path: str, value: Any, is_outermost: bool, seen: set[int]) -> Iterator[tuple[str, Any]]:
    kind = kind_of(value)
    if kind == "tensor" and not is_outermost:
        return  # a tensor in a container may be another one tomorrow: it is a value's
    if kind != "value":
        yield path, unwrapped(value)
    elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
        seen.add(id(value))
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            if isinstance(inner, (int, float, str, bytes)) or inner is None:
                continue  # most of what long lists hold
            yield from _walk(f"{path}.{key}", inner, is_outermost=False, seen=seen)


def refuse_dead(value: Any) -> None:
    """Of an object that is about to be pickled by value. Raises ConfigError when the live one would
    not hear of what its copy is restored to."""
    kind = type(value).__name__
    if isinstance(value, DataLoader):
        raise ConfigError(
            f"a {kind} has no state that could be restored; take batches from job.loader() "
            "after protect(), pass torchdata's StatefulDataLoader, or choose each batch by job.step"
        )
    if isinstance(value, Sampler) and type(value).__module__.startswith("torch."):
        raise ConfigError(
            f"a {kind} keeps its position where nobody can read it; choose each batch by "
            "job.step, or give it state_dict() and load_state_dict()"
        )
    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer, LRScheduler, torch.Generator)):
        raise ConfigError(
            f"a {kind} inside another object would come back as a copy that nobody uses; pass it "
            "to protect() by a name of its own, or give the object around it state_dict() and "
            "load_state_dict()"
        )


def check_names(things: Mapping[str, Any]) -> None:
    """Raises ConfigError when two parts have one path."""
    seen: set[str] = set()
    for name, value in things.items():
        for path, _ in parts_inside(name, value):
            if path in seen:
                raise ConfigError(f"two protected things are called {path!r}; rename one")
            seen.add(path)
