"""Dict changes: whether dicts hold what they held, without a look into them.

Up to Python 3.11 every dict has a number that is given anew, and to no dict twice, whenever what
it holds changes (PEP 509). torch's own compiler reads it, and so it can be asked for here. It is
no public name, and later Pythons count for those only who watch a dict, which costs its owner:
there, and where a torch lacks it, nothing is known, and who wants to know must look.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

# An OrderedDict can be put into another order, which its number does not tell.
_COUNTED = (dict, defaultdict)

_version: Callable[[dict[Any, Any]], int] | None = (
    getattr(getattr(torch._C._dynamo, "guards", None), "dict_version", None)
    if sys.version_info < (3, 12) and hasattr(torch._C, "_dynamo")
    else None
)


def can_count(container: Any) -> bool:
    """Whether this container's changes are known here."""
    return _version is not None and type(container) in _COUNTED


def changes_of(dicts: Iterable[dict[Any, Any]]) -> list[Any]:
    """Equal to what was told before only if all of them hold the very same as then, in the same
    order. Where nothing is known it never is."""
    return [object() for _ in dicts] if _version is None else list(map(_version, dicts))
