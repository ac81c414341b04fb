"""Instances: which objects of a class live in this process, without a search each time.

A search goes through all objects of the process: 15 ms and more, and all ranks wait meanwhile. So
there is one, and from then on the class keeps what it makes, by a call, a copy or an unpickling.
"""

from __future__ import annotations

import gc
from typing import Any
from weakref import WeakSet

_watched: dict[type[Any], WeakSet[Any]] = {}


def watch(kind: type[Any]) -> None:
    """Have `instances` answer without a search from now on. Its objects must be hashable, and take
    weak references."""
    if kind in _watched:
        return
    known: WeakSet[Any] = WeakSet()
    create: Any = kind.__new__

    def made(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        # object's own takes no arguments from a class that has another one
        new = create(cls) if create is object.__new__ else create(cls, *args, **kwargs)
        known.add(new)
        return new

    kind.__new__ = made  # type: ignore[assignment]
    known.update(_search(kind))  # after that: none is made between the two
    _watched[kind] = known


def instances(kind: type[Any]) -> list[Any]:
    """Of the class and of those below it."""
    watch(kind)
    return list(_watched[kind])


def _search(kind: type[Any]) -> list[Any]:
    """By what refers to the class: a third of the time of a look at all objects."""
    kinds = _with_subclasses(kind)
    # by the type itself: `isinstance` would ask objects that pretend to be others
    return [found for found in gc.get_referrers(*kinds) if type(found) in kinds]


def _with_subclasses(kind: type[Any]) -> set[type[Any]]:
    kinds = {kind}
    for below in kind.__subclasses__():
        kinds |= _with_subclasses(below)
    return kinds
