"""Beside: what decides the next step and is in no state dict: which modules train, which parameters
learn, gradients, and in which groups DDP sums them (`ddp_buckets.py`).

Whether a parameter has a gradient at the step boundary is state: an optimizer skips a parameter
without one, and moves a parameter whose gradient is zero. What the gradient is matters only until
an update has used it: from then on the program may only zero it. So a gradient that its last update
has seen comes back as zeros, and any other (accumulated over the boundary) with its values.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress, repeat
from operator import is_, is_not
from typing import Any

import torch

from keepstep.edge.torch.ddp_buckets import Grouping
from keepstep.edge.torch.dtensors import is_dtensor
from keepstep.edge.torch.in_place import fill, takes
from keepstep.edge.torch.looks import GRADIENT, VERSION
from keepstep.edge.torch.parts import bare, parameters_of
from keepstep.edge.torch.zeros import zeros_like

ZERO = "zero"
BUCKETS = "buckets"
RESTORED = 0  # in place of an optimizer's id

Parts = Mapping[str, Any]


class _Seen:
    """Gradients that an update has used, by their parameters. Each has one weak reference, however
    often it is asked for."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        found = list(map(GRADIENT, parameters))
        have = list(map(is_not, found, repeat(None)))
        gradients = [gradient for gradient in found if gradient is not None]
        self._ids = list(map(id, compress(parameters, have)))
        self._references = list(map(weakref.ref, gradients))
        self._versions = list(map(VERSION, gradients))
        self._places: dict[int, int] | None = None  # by id, once it is asked for

    def are(self, ids: Sequence[int], gradients: Sequence[torch.Tensor]) -> bool:
        """Whether it is exactly these."""
        return (
            ids == self._ids
            and all(map(is_, self._references, map(weakref.ref, gradients)))
            and list(map(VERSION, gradients)) == self._versions
        )

    def has(self, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        """Whether it is among them."""
        if self._places is None:
            self._places = {key: place for place, key in enumerate(self._ids)}
        place = self._places.get(id(parameter))
        return (
            place is not None
            and self._references[place]() is gradient
            and self._versions[place] == gradient._version
        )


class UsedGradients:
    """Which gradients their optimizer's last update has seen."""

    def __init__(self) -> None:
        self._by_optimizer: dict[int, _Seen] = {}

    def updated(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer's post-step hook."""
        self._by_optimizer[id(optimizer)] = _Seen(parameters_of(optimizer))

    def restored(self, parameters: Sequence[torch.Tensor]) -> None:
        """An update in an earlier life has used their gradients; others none."""
        self._by_optimizer = {RESTORED: _Seen(parameters)}

    def are(self, parameter: torch.Tensor) -> bool:
        """Whether this parameter's gradient is what an update has used."""
        gradient = parameter.grad
        assert gradient is not None
        return any(seen.has(parameter, gradient) for seen in self._by_optimizer.values())

    def are_all(
        self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> bool:
        """Whether the parameters' gradients are all what an update has used."""
        ids = list(map(id, parameters))
        if any(seen.are(ids, gradients) for seen in self._by_optimizer.values()):
            return True
        return all(map(self.are, parameters))


def learning(parts: Parts) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that may have a gradient, once, by a name that is the same in every life."""
    seen: set[int] = set()
    for path, part in parts.items():
        for name, tensor in _tensors_of(path, part):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor


def _tensors_of(path: str, part: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(part, torch.nn.Module):
        yield from ((f"{path}.{name}", p) for name, p in bare(part).named_parameters())
    elif isinstance(part, torch.Tensor):
        yield path, part
    elif isinstance(part, torch.optim.Optimizer):
        yield from ((f"{path}.parameter.{i}", p) for i, p in enumerate(parameters_of(part)))


def read_beside(
    parts: Parts, used: UsedGradients, buckets: Mapping[str, Grouping]
) -> dict[str, Any]:
    """It all, of all parts, to be pickled. Gradients with values are tensors of the program's."""
    tensors = dict(learning(parts))
    leaves = {name: t for name, t in tensors.items() if t.is_leaf}
    return {
        "training": {
            path: _read_modes(bare(part))
            for path, part in parts.items()
            if isinstance(part, torch.nn.Module)
        },
        "frozen": sorted(name for name, t in leaves.items() if not t.requires_grad),
        "gradients": {
            name: _read_gradient(t, used) for name, t in leaves.items() if t.grad is not None
        },
        BUCKETS: dict(buckets),
    }


def _read_modes(module: torch.nn.Module) -> tuple[bool, list[str]]:
    """The root's mode, and the names of the modules that are in the other one."""
    root = module.training
    return root, [name for name, m in module.named_modules() if m.training != root]


def _read_gradient(tensor: torch.Tensor, used: UsedGradients) -> torch.Tensor | str:
    gradient = tensor.grad
    assert gradient is not None
    if used.are(tensor) or _is_zero(gradient):
        return ZERO
    return gradient


def _is_zero(gradient: torch.Tensor) -> bool:
    """Whether every bit is zero. Not asked on a device, which would have to be waited for."""
    if gradient.device.type != "cpu" or gradient.layout is not torch.strided:
        return False
    local = gradient.to_local() if is_dtensor(gradient) else gradient
    return not bool(local.detach().contiguous().reshape(-1).view(torch.uint8).any())


def write_beside(parts: Parts, saved: Mapping[str, Any], used: UsedGradients) -> None:
    """Put it back. What the program has besides stays as it is."""
    zeroed = []
    for path, (root, others) in saved["training"].items():
        part = parts.get(path)
        if isinstance(part, torch.nn.Module):
            _write_modes(part, root, frozenset(others))
    frozen = frozenset(saved["frozen"])
    gradients = saved["gradients"]
    for name, tensor in learning(parts):
        if not tensor.is_leaf:
            continue
        learns = name not in frozen
        if tensor.requires_grad != learns and (tensor.is_floating_point() or tensor.is_complex()):
            tensor.requires_grad_(learns)
        gradient = gradients.get(name)
        if isinstance(gradient, str):
            zeroed.append(tensor)
        tensor.grad = _gradient(tensor, gradient)
    used.restored(zeroed)


def _gradient(tensor: torch.Tensor, saved: torch.Tensor | str | None) -> torch.Tensor | None:
    """In the memory of the present one, where that takes it."""
    live = tensor.grad
    if saved is None:
        return None
    if isinstance(saved, str):
        if live is None or not takes(live, tensor.detach()):
            return zeros_like(tensor.detach())
        with torch.no_grad():
            return live.zero_()
    if live is None or not takes(live, saved):
        return saved.to(tensor.device)
    fill([(live, saved)])
    return live


def gradient_names(parts: Parts) -> dict[str, torch.Tensor]:
    """Every live gradient, by the name under which it is saved when it has values."""
    return {
        f"<beside>.gradients.{name}": tensor.grad
        for name, tensor in learning(parts)
        if tensor.is_leaf and tensor.grad is not None
    }


def _write_modes(part: torch.nn.Module, root: bool, others: frozenset[str]) -> None:
    inner = bare(part)
    for module in part.modules():  # wrappers are in the mode of what they wrap
        module.training = root
    for name, module in inner.named_modules():
        module.training = root != (name in others)
