"""Tasks: coroutines over callback ports, for conversations that are easier to read in a row.

    text = await ask(kv.swap, key, None, "yes")

A `Task` runs its coroutine until that waits for an answer, and goes on when the answer comes, from
whoever brings it. There is no loop here and no thread: the ports' owner drives it.

Invariant: a cancelled task does nothing any more; answers it waited for are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from keepstep.errors import KeepstepError
from keepstep.ports import Timer, Timers

T = TypeVar("T")


class Answer(Generic[T]):
    """What a port will say. Given once, awaited once."""

    def __init__(self) -> None:
        self._given: list[T] = []
        self._then: Callable[[], None] | None = None
        self.timer: Timer | None = None  # of the question, which can be taken back

    def give(self, value: T) -> None:
        self._given.append(value)
        if self._then is not None:
            self._then()

    def when_given(self, then: Callable[[], None]) -> None:
        self._then = then
        if self._given:
            then()

    def forget(self) -> None:
        """Nobody wants it any more."""
        self._then = None
        if self.timer is not None:
            self.timer.cancel()

    def __await__(self) -> Generator[Answer[T], None, T]:
        if not self._given:
            yield self
        return self._given[0]


def ask(question: Callable[..., Any], *arguments: Any) -> Answer[Any]:
    """The answer of a port's method whose last argument is `then`."""
    answer: Answer[Any] = Answer()
    timer = question(*arguments, answer.give)
    answer.timer = timer if hasattr(timer, "cancel") else None
    return answer


def sleep(timers: Timers, delay_ns: int) -> Answer[None]:
    """Awaited, it takes so long."""
    answer: Answer[None] = Answer()
    answer.timer = timers.after(delay_ns, lambda: answer.give(None))
    return answer


class Task(Generic[T]):
    """One coroutine, begun at once. `done` hears its result; `failed` an error that keepstep raises
    on purpose."""

    def __init__(
        self,
        coroutine: Coroutine[Answer[Any], None, T],
        done: Callable[[T], None],
        failed: Callable[[KeepstepError], None],
    ) -> None:
        self._coroutine = coroutine
        self._done = done
        self._failed = failed
        self._awaited: Answer[Any] | None = None
        self._is_over = False
        self._is_running = False
        self._go_on()

    @property
    def is_over(self) -> bool:
        return self._is_over

    def cancel(self) -> None:
        """It goes no further than to what it waits for next. Nothing if it is over."""
        if self._is_over:
            return
        self._is_over = True
        if self._awaited is not None:
            self._awaited.forget()
        if not self._is_running:
            self._coroutine.close()

    def _go_on(self) -> None:
        if self._is_over:
            return
        self._awaited = None
        self._is_running = True
        try:
            awaited = self._coroutine.send(None)
        except StopIteration as over:
            result: T = over.value
            self._end(lambda: self._done(result))
        except KeepstepError as error:
            failure = error
            self._end(lambda: self._failed(failure))
        else:
            self._wait_for(awaited)
        finally:
            self._is_running = False

    def _end(self, tell: Callable[[], None]) -> None:
        is_cancelled, self._is_over = self._is_over, True
        if not is_cancelled:
            tell()

    def _wait_for(self, awaited: Answer[Any]) -> None:
        self._is_running = False
        if self._is_over:  # it was cancelled by what it did itself
            awaited.forget()
            self._coroutine.close()
        else:
            self._awaited = awaited
            awaited.when_given(self._go_on)
