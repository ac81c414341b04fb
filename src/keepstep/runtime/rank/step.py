"""Step: a step's number, and its body."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType


class Step(int):
    """The number of a step. `with step:` gives the body up when a peer is lost, and the next step
    is the one to do again."""

    _enter: Callable[[int], None]
    _leave: Callable[[], bool]
    entered: bool
    ended: bool  # its body, without an error

    @classmethod
    def of(cls, number: int, enter: Callable[[int], None], leave: Callable[[], bool]) -> Step:
        """`enter` hears that the body begins; `leave` that it is over, and says whether a peer is
        lost: then what the body raised is that peer's doing."""
        step = cls(number)
        step._enter = enter
        step._leave = leave
        step.entered = False
        step.ended = False
        return step

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # wherever it is kept, it is a number

    def __enter__(self) -> Step:
        self.entered = True
        self._enter(int(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.ended = error is None
        # Collectives end with nothing in them when a peer is lost, and what follows may fail.
        return self._leave() and isinstance(error, Exception)
