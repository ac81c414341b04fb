"""Collector: Python's search for cycles stands still while many objects are made that all stay.

Whenever some hundreds have been made Python looks for cycles among them, now and then among all
that the process has. With torch imported that takes a quarter of a second, and finds nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Also a decorator. Where the program has switched the collector off it stays off."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
