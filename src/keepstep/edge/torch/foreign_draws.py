"""Foreign draws: batches that a step took from a DataLoader nobody keeps the place of.

An iterator that is still alive when the step ends was not begun for this step alone: a restart
would begin it anew. An evaluation that goes through its loader within a step leaves none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data.dataloader import _BaseDataLoaderIter


class Ours:
    """While entered, what is drawn is drawn by a `Loader`."""

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


class ForeignDraws:
    """Watches torch's DataLoaders in this process, from `begin` to `end`."""

    def __init__(self) -> None:
        self.ours = Ours()
        self._drawn: weakref.WeakSet[_BaseDataLoaderIter] = weakref.WeakSet()
        self._original: Callable[..., Any] | None = None

    def begin(self) -> None:
        if self._original is not None:
            return
        original = self._original = _BaseDataLoaderIter.__next__

        def watched(iterator: _BaseDataLoaderIter) -> Any:
            try:
                batch = original(iterator)
            except StopIteration:
                self._drawn.discard(iterator)
                raise
            if not self.ours.depth:
                self._drawn.add(iterator)
            return batch

        _BaseDataLoaderIter.__next__ = watched  # type: ignore[assignment,method-assign]

    def end(self) -> None:
        if self._original is not None:
            _BaseDataLoaderIter.__next__ = self._original  # type: ignore[method-assign]
            self._original = None
            self._drawn.clear()

    def any_since(self, kept: Iterable[Any]) -> bool:
        """Whether there was one since this was asked last. `kept`: loaders whose place is kept in
        another way."""
        known = {id(getattr(loader, "_iterator", None)) for loader in kept}
        found = any(id(iterator) not in known for iterator in self._drawn)
        self._drawn.clear()
        return found
