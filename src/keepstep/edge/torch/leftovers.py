"""Leftovers: what a body that was given up has left in objects beside their state is dropped.

A process that has just begun has none of it. One that stays in its process when a peer is lost
would take the step that is done again for the rest of the one that was given up:

* a `torch.amp.GradScaler` remembers between `unscale_` and `update` which optimizers' gradients it
  has unscaled, and would train on with the new ones as they are;
* Accelerate's `Accelerator` counts the batches of an update, and would update in the midst of one.

The objects are the program's, and need not be among what is protected: they are looked for.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from keepstep.edge.torch.instances import instances, watch


def watch_for_leftovers() -> None:
    """While nobody waits; `drop_leftovers` is quick then."""
    watch(torch.amp.GradScaler)
    accelerate: Any = sys.modules.get("accelerate.accelerator")
    if accelerate is not None:
        watch(accelerate.Accelerator)


def drop_leftovers() -> None:
    """Have the next step of every scaler and of every Accelerator begin as the first."""
    for scaler in instances(torch.amp.GradScaler):
        if scaler.is_enabled():
            scaler._per_optimizer_states.clear()  # it makes each anew when it is asked for
    accelerate: Any = sys.modules.get("accelerate.accelerator")
    if accelerate is not None:
        for accelerator in instances(accelerate.Accelerator):
            accelerator.step = 0
            accelerator.gradient_state._set_sync_gradients(True)
