"""Foremost: a hook that an optimizer calls before all others, also those that the program had
registered before.

torch calls hooks in the order in which they stand in a dictionary of the optimizer, and registers
at its end. Where there is no such dictionary, the hook stands last, as any other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle


def register_foremost(optimizer: Optimizer, hook: Callable[..., None]) -> RemovableHandle:
    """Before each step, from now on."""
    handle: Any = optimizer.register_step_pre_hook(hook)
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    if isinstance(hooks, OrderedDict) and handle.id in hooks:
        hooks.move_to_end(handle.id, last=False)
    found: RemovableHandle = handle
    return found
