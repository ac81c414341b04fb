"""Passes: when a protected module's forward pass begins and ends, and the backward pass that goes
back through it.

Torch's hooks on the module itself, none on its parts, and one on the first tensor of what it gives
that needs a gradient: what it costs does not grow with the number of modules or tensors. The end is
a callback of the autograd engine's, which runs before those that are asked for later in the same
pass: so before DistributedDataParallel's, which waits for what it reduces. Hooks that
torch calls a full backward's would put a function of theirs into the program's graph; these change
nothing in it. Within what is compiled nothing is seen, and what is computed again within a backward
pass (checkpointed activations) is a part of that one. Decides nothing.

Invariant: a copy of the module, and a file of it, has hooks that do nothing; no error leaves here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

MOST_LOOKED_AT = 16  # of what a module gives


class HearsPasses(Protocol):
    """Who is told."""

    def forward_begun(self) -> int: ...

    def forward_ended(self, before: int) -> None: ...

    def backward_begun(self) -> None: ...

    def backward_ended(self) -> None: ...


def watch_passes(objects: Iterable[Any], told: HearsPasses) -> list[RemovableHandle]:
    """Of those objects that are modules, from now on, on this thread."""
    passes = _Passes(told)
    found = []
    for module in objects:
        if isinstance(module, torch.nn.Module) and not isinstance(module, torch.jit.ScriptModule):
            found.append(module.register_forward_pre_hook(_Begins(passes)))
            found.append(module.register_forward_hook(_Ends(passes)))
    return found


class _Passes:
    def __init__(self, told: HearsPasses) -> None:
        self._told = told
        self._thread = threading.get_ident()
        self._before: dict[int, int] = {}  # by module, which pass it was called in

    def begins(self, module: torch.nn.Module) -> None:
        if threading.get_ident() == self._thread:
            self._before[id(module)] = self._told.forward_begun()

    def ends(self, module: torch.nn.Module, output: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self._told.forward_ended(self._before.pop(id(module), 0))
        tensor = _first(output) if torch.is_grad_enabled() else None
        if tensor is None:
            return
        with suppress(RuntimeError):  # of a kind that takes none: that pass is not seen
            tensor.register_hook(self._backward)

    def _backward(self, _: torch.Tensor) -> None:
        if torch.compiler.is_compiling():
            return
        self._told.backward_begun()
        with suppress(RuntimeError):  # else it ends with whatever comes next
            torch.autograd.Variable._execution_engine.queue_callback(self._told.backward_ended)


class _Begins:
    def __init__(self, passes: _Passes) -> None:
        self._passes = passes

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling() and not _is_within_backward():
            self._passes.begins(module)

    def __reduce__(self) -> Any:
        return _InCopy, ()


class _Ends:
    def __init__(self, passes: _Passes) -> None:
        self._passes = passes

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and not _is_within_backward():
            self._passes.ends(module, output)

    def __reduce__(self) -> Any:
        return _InCopy, ()


class _InCopy:
    """In place of a hook: there is nobody to tell."""

    def __call__(self, *_: Any) -> None: ...


def _is_within_backward() -> bool:
    """This thread computes gradients. As torch.utils.checkpoint asks it."""
    task: int = torch._C._current_graph_task_id()
    return task != -1


def _first(output: Any) -> torch.Tensor | None:
    """The first tensor that needs a gradient, of what is looked at."""
    waiting, count = [output], 0
    while waiting and count < MOST_LOOKED_AT:
        one, count = waiting.pop(0), count + 1
        if isinstance(one, torch.Tensor):
            if one.requires_grad:
                return one
        elif isinstance(one, Mapping):
            waiting += list(one.values())[:MOST_LOOKED_AT]
        elif isinstance(one, list | tuple):
            waiting += one[:MOST_LOOKED_AT]
    return None
