"""Leftovers: what a body that was given up has left in objects beside their state is dropped.

A process that has just begun has none of it. One that stays in its process when a peer is lost
would take the step that is done again for the rest of the one that was given up:

* a `torch.amp.GradScaler` remembers between `unscale_` and `update` which optimizers' gradients it
  has unscaled, and would train on with the new ones as they are;
* Accelerate's `Accelerator` counts the batches of an update, and would update in the midst of one.

The objects are the program's, and need not be among what is protected: they are looked for.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch


def drop_leftovers() -> None:
    """Have the next step of every scaler and of every Accelerator begin as the first."""
    accelerate: Any = sys.modules.get("accelerate.accelerator")
    for found in gc.get_objects():
        # by the type itself: `isinstance` would ask objects that pretend to be others
        kind = type(found)
        if issubclass(kind, torch.amp.GradScaler) and found.is_enabled():
            found._per_optimizer_states.clear()  # it makes each anew when it is asked for
        elif accelerate is not None and issubclass(kind, accelerate.Accelerator):
            found.step = 0
            found.gradient_state._set_sync_gradients(True)
