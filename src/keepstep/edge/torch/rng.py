"""Random states: torch's (CPU and every CUDA device), numpy's and Python's.

Read before any other state and restored after all of them, because other `state_dict()` and
`load_state_dict()` calls may draw numbers (the order torchsnapshot found necessary). numpy's is
kept only when the program has imported numpy.
"""

from __future__ import annotations

import pickle
import random
import sys
from typing import Any

import torch


def read_rng() -> dict[str, Any]:
    """All generators' states; tensors stay tensors."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    return state


def put_back(state: dict[str, Any]) -> None:
    """Undo what others drew since `state` was read: a step that is captured and one that is skipped
    must go on alike."""
    now = read_rng()
    same = torch.equal(now["torch"], state["torch"]) and now["python"] == state["python"]
    same = same and all(map(torch.equal, now.get("cuda", ()), state.get("cuda", ())))
    if not same or (
        "numpy" in state and pickle.dumps(now["numpy"]) != pickle.dumps(state["numpy"])
    ):
        write_rng(state)


def write_rng(state: dict[str, Any]) -> list[str]:
    """Set every generator. Returns what could not be set and why (fewer CUDA devices than
    saved)."""
    missing = []
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    devices = torch.cuda.device_count() if "cuda" in state else 0
    for index, cuda in enumerate(state.get("cuda", ())):
        if index < devices:
            torch.cuda.set_rng_state(cuda, index)
        else:
            missing.append(
                f"cuda:{index} has saved random state, but only {devices} devices are here"
            )
    return missing
