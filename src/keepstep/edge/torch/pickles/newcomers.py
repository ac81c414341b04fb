"""Newcomers: what a state has taken in since the process began, and a new process would refuse.

Comes in: the state as it was at first, and its pickle whenever a class turns up in it that was not
there before. Goes out: a sentence that says what to add to `trusted_types`, before it is needed: a
refusal comes after the failure, when nobody may be there to read it.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch

from keepstep.edge.torch.pickles.inert import Uses, uses_of
from keepstep.edge.torch.pickles.known import Name, is_ours
from keepstep.edge.torch.pickles.own import Own
from keepstep.errors import UntrustedError

# What a training takes in with its first step, and comes back whatever is in it.
_SIMPLE = frozenset((OrderedDict, torch.Size, torch.device, torch.dtype))


class Newcomers:
    """Of one process. `vocabulary`: what it could have read when it began."""

    def __init__(self, vocabulary: Own) -> None:
        self._vocabulary = vocabulary
        self._modules = frozenset(sys.modules)
        self._kinds: set[Any] = set()
        self._told: set[Name] = set()

    def remark(self, kinds: Set[Any], raw: Callable[[], bytes], sections: Sequence[int]) -> str:
        """What to say of a state, empty for nothing. `kinds`: all classes and functions that were
        ever pickled; the state is read only where one of them is new, and then as one who runs
        nothing of the program's reads it."""
        if len(kinds) == len(self._kinds):
            return ""
        new = kinds - self._kinds
        self._kinds |= new
        if new <= _SIMPLE:
            return ""
        try:
            refused = self._refused(uses_of(raw(), sections))
        except UntrustedError as error:
            return f"a restart will refuse this state: {error}"
        found = sorted(refused - self._told)
        self._told.update(found)
        if not found:
            return ""
        names = ",".join(".".join(name) for name in found)
        return (
            "the state has taken in what a new process does not know when it begins, and would "
            f"refuse: set KEEPSTEP_TRUSTED_TYPES={names}"
        )

    def _refused(self, uses: Uses) -> set[Name]:
        late = {name for name in uses.named if name[0] not in self._modules}
        return {name for name in late if not is_ours(name)} | self._vocabulary.refused(uses)
