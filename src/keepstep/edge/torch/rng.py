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

from keepstep.edge.torch.known_states import numpy_state, python_state
from keepstep.edge.torch.pickles.known_numpy import check_generator_state


def read_rng() -> dict[str, Any]:
    """All generators' states; tensors stay tensors."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": python_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        state["numpy"] = numpy_state()
    return state


def tensors_of(state: dict[str, Any]) -> dict[str, Any]:
    """What `read_rng` has read, without Python's and numpy's thousands of numbers."""
    return {name: state[name] for name in ("torch", "cuda") if name in state}


class PickledNumbers:
    """The other part of what `read_rng` has read, pickled. Most steps draw none of these."""

    def __init__(self) -> None:
        self._before: tuple[Any, Any] | None = None
        self._pickled = b""

    def of(self, state: dict[str, Any], name: str) -> bytes:
        """As a tree of its own, by the name of the whole."""
        python, numpy = state["python"], state.get("numpy")
        before = self._before
        if before is None or before[0] != python or not _is_same(before[1], numpy):
            numbers = {"python": python} if numpy is None else {"python": python, "numpy": numpy}
            self._pickled = pickle.dumps({name: numbers}, protocol=5)
            self._before = python, numpy
        return self._pickled


def put_back(state: dict[str, Any]) -> None:
    """Undo what others drew since `state` was read: a step that is captured and one that is skipped
    must go on alike."""
    now = read_rng()
    same = torch.equal(now["torch"], state["torch"]) and now["python"] == state["python"]
    same = same and all(map(torch.equal, now.get("cuda", ()), state.get("cuda", ())))
    if not same or not _is_same(now.get("numpy"), state.get("numpy")):
        write_rng(state)


def _is_same(one: tuple[Any, ...] | None, other: tuple[Any, ...] | None) -> bool:
    """Whether two states of numpy's are: all plain but for one array. None where it is unused."""
    if one is other or one is None or other is None:
        return one is other
    (name, keys, *rest), (other_name, other_keys, *other_rest) = one, other
    return name == other_name and bytes(keys) == bytes(other_keys) and rest == other_rest


def write_rng(state: dict[str, Any]) -> list[str]:
    """Set every generator. Returns what could not be set and why (fewer CUDA devices than
    saved)."""
    missing = []
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state:
        import numpy

        _, _, position, *_ = state["numpy"]
        check_generator_state({"state": {"pos": position}})
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
