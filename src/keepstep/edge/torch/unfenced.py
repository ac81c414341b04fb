"""Unfenced: optimizers whose updates may come without their pre-step hooks, where the fence is.

A captured CUDA graph replays an update without any of the program's Python, and a compiled step may
leave hooks out. Neither moves a version counter. What such an optimizer overwrites is copied at the
boundary, with the device waiting, and a person is told once.

Comes in: optimizers, as they are and as they step. Goes out: why one has no fence, in words.
"""

from __future__ import annotations

from typing import Any

import torch

GRAPH = "its step was captured in a CUDA graph, whose replays run no hooks"


def why_unfenced(optimizer: torch.optim.Optimizer) -> str:
    """By how it was made; empty for one whose hooks run."""
    if any(group.get("capturable") for group in optimizer.param_groups):
        return "it is capturable: its steps may be replayed in a CUDA graph, which runs no hooks"
    if hasattr(optimizer.step, "_torchdynamo_orig_callable"):
        return "its step is compiled, which may leave out hooks"
    return ""


def why_this_update(device_type: str = "cuda") -> str:
    """In a pre-step hook: why later updates may come without it; empty when nothing says so."""
    if torch.compiler.is_compiling():
        return "its step is compiled with what is around it, which may leave out hooks"
    if device_type == "cuda" and torch.cuda.is_available() and _is_capturing():
        return GRAPH
    return ""


def _is_capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def unfenced_remark(names: dict[str, str]) -> str:
    """What to tell of these optimizers, by their paths; empty for none."""
    if not names:
        return ""
    each = "; ".join(f"{name}: {why}" for name, why in names.items())
    return (
        f"what these optimizers update is copied at the step's boundary from now on: {each}. The "
        "device waits for that copy; without a graph, capturable=False and an eager step need "
        "no wait"
    )


def path_of(parts: dict[str, Any], optimizer: object) -> str:
    """Under which name it is protected."""
    return next((name for name, part in parts.items() if part is optimizer), "an optimizer")
