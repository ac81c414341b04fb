"""Prewarm: what a standby process does before it knows which rank it will be. Importing torch takes
seconds of a core."""

from __future__ import annotations

import torch
import torch.distributed
import torch.nn.parallel
import torch.optim

from keepstep.edge.torch import groups
from keepstep.edge.torch.ddp_rebuild import prepare_to_renew


def warm_up() -> None:
    """Do once what the first use of these does; leaves nothing behind that a training could
    notice."""
    groups.register()
    prepare_to_renew()
    state = torch.get_rng_state()
    module = torch.nn.Linear(2, 2)
    torch.optim.AdamW(module.parameters())
    module(torch.zeros(1, 2)).sum().backward()
    torch.set_rng_state(state)
