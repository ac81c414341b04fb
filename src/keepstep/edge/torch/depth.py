"""Depth: as deep as what was pickled can be nested.

Python's pickler counts its levels against the limit on recursion, in C. Whoever walks through the
same objects with functions of Python's own takes several frames a level.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

FRAMES_PER_LEVEL = 8


@contextmanager
def as_deep_as_pickles() -> Iterator[None]:
    """Room for that, in this block."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(FRAMES_PER_LEVEL * limit)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)
