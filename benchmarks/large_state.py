"""A state of RECOVERY_MIB MiB, made as a program makes its model: each page is touched.

`recovery.py` names `large_state:weights` to `keepstep.prebuilt`, so that a process that stands by
has it already.
"""

from __future__ import annotations

import os

import torch


def weights() -> torch.nn.Parameter:
    """float32, all zeros."""
    return torch.nn.Parameter(torch.full((int(os.environ["RECOVERY_MIB"]) << 18,), 0.0))
