"""Sampler state: what a sampler of the program's own keeps in its attributes and changes as it is
gone through: generators, counters, a list that is shuffled in place.

Comes in: samplers without a `state_dict()`. Goes out: for each the attributes that are no longer
what they were when the loader was made, which is how a restarted program makes them again; and the
way back. Kept are random generators, numbers, texts, and containers and arrays of such; never what
the sampler draws from.

Invariant: an attribute that never changes costs nothing in a snapshot.
"""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections import deque
from typing import Any

import torch

from keepstep.edge.torch.values import Refill

# More items than that are not kept: each snapshot would hold them.
MOST_ITEMS = 200_000
_PLAIN = (int, float, bool, str, bytes, type(None))
_CONTAINERS = (list, tuple, set, dict, deque)


class SamplerState:
    """Of one sampler."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._first = {name: _copied(value) for name, value in self._kept()}

    def _kept(self) -> list[tuple[str, Any]]:
        return [(n, v) for n, v in vars(self._sampler).items() if _is_kept(v)]

    def look(self) -> dict[str, Any]:
        """What has changed, by attribute."""
        changed = {}
        for name, value in self._kept():
            now = _copied(value)
            if name not in self._first or _raw(now) != _raw(self._first[name]):
                changed[name] = now
        return changed

    def put_back(self, saved: dict[str, Any]) -> None:
        """As it was at that look."""
        for name, value in {**self._first, **saved}.items():
            live = vars(self._sampler).get(name)
            if isinstance(live, torch.Generator):
                live.set_state(torch.frombuffer(bytearray(value), dtype=torch.uint8))
            else:
                vars(self._sampler)[name] = Refill({}).top(name, live, copy.deepcopy(value))


def has_own_attributes(sampler: Any) -> bool:
    """Whether nobody else keeps them: it is a class of the program's, without a `state_dict()`."""
    is_torchs = type(sampler).__module__.partition(".")[0] in ("torch", "torchdata")
    return not is_torchs and not hasattr(sampler, "state_dict") and hasattr(sampler, "__dict__")


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    return copy.deepcopy(value)


def _raw(value: Any) -> bytes:
    return pickle.dumps(value, protocol=5)


def _is_kept(value: Any) -> bool:
    if isinstance(value, (torch.Generator, random.Random)) or type(value) in _PLAIN:
        return True
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(value, (numpy.random.Generator, numpy.random.RandomState)):
            return True
        if type(value) is numpy.ndarray:
            return not value.dtype.hasobject and value.size <= MOST_ITEMS
    if type(value) is torch.Tensor:
        return value.numel() <= MOST_ITEMS and value.device.type == "cpu"
    if type(value) not in _CONTAINERS or len(value) > MOST_ITEMS:
        return False
    items = [*value, *value.values()] if type(value) is dict else value
    return all(type(item) in _PLAIN or (type(item) is tuple and _is_kept(item)) for item in items)
