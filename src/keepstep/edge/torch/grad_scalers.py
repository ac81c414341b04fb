"""Gradient scalers: what a `torch.amp.GradScaler` remembers of a body that was given up is dropped.

Between `unscale_` and `update` a scaler remembers, beside its state, which optimizers' gradients it
has unscaled. A process that has just begun remembers nothing. One that stays in its process would
take the gradients of the step that is done again for unscaled, and train on with them as they are.
Scalers that are not among what is protected are looked for, too.
"""

from __future__ import annotations

import gc

import torch


def renew_grad_scalers() -> None:
    """Have the next step of every scaler begin as the first."""
    for found in gc.get_objects():
        # by the type itself: `isinstance` would ask objects that pretend to be others
        if issubclass(type(found), torch.amp.GradScaler) and found.is_enabled():
            found._per_optimizer_states.clear()  # it makes each anew when it is asked for
