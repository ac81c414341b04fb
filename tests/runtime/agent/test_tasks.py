"""A coroutine over callback ports goes on when its answers come, and nowhere after it is
cancelled."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from keepstep.errors import KeepstepError, MeetingError
from keepstep.runtime.agent.tasks import Answer, Task, ask, sleep


class Port:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, Callable[[int], None]]] = []
        self.cancelled = 0

    def double(self, number: int, then: Callable[[int], None]) -> None:
        self.waiting.append((number, then))

    def cancellable(self, number: int, then: Callable[[int], None]) -> Port:
        self.double(number, then)
        return self

    def cancel(self) -> None:
        self.cancelled += 1

    def after(self, delay_ns: int, call: Callable[[], None]) -> Port:
        self.waiting.append((delay_ns, lambda _: call()))
        return self

    def answer(self) -> None:
        number, then = self.waiting.pop(0)
        then(2 * number)


class Outcome:
    def __init__(self) -> None:
        self.results: list[int] = []
        self.errors: list[KeepstepError] = []

    def run(self, coroutine: object) -> Task[int]:
        return Task(coroutine, self.results.append, self.errors.append)  # type: ignore[arg-type]


async def sum_of_doubles(port: Port, numbers: list[int]) -> int:
    return sum([await ask(port.double, number) for number in numbers])


def test_it_goes_on_with_every_answer_and_ends_with_its_result() -> None:
    port, outcome = Port(), Outcome()
    outcome.run(sum_of_doubles(port, [1, 2, 3]))
    for _ in range(3):
        assert not outcome.results and len(port.waiting) == 1
        port.answer()
    assert outcome.results == [12] and not port.waiting


def test_without_a_question_it_is_over_at_once() -> None:
    outcome = Outcome()
    outcome.run(sum_of_doubles(Port(), []))
    assert outcome.results == [0]


def test_an_answer_that_is_there_already_is_not_waited_for() -> None:
    async def late() -> int:
        answer: Answer[int] = Answer()
        answer.give(7)
        return await answer

    outcome = Outcome()
    outcome.run(late())
    assert outcome.results == [7]


def test_a_cancelled_one_hears_nothing_and_takes_its_question_back() -> None:
    port, outcome = Port(), Outcome()

    async def asks() -> int:
        return int(await ask(port.cancellable, 1))

    task = outcome.run(asks())
    task.cancel()
    task.cancel()
    assert port.cancelled == 1
    port.answer()
    assert not outcome.results and not outcome.errors


def test_it_may_be_cancelled_by_what_it_does_itself() -> None:
    port, outcome = Port(), Outcome()
    tasks: list[Task[int]] = []

    async def cancels() -> int:
        await ask(port.double, 1)
        tasks[0].cancel()
        await ask(port.double, 2)
        return 3

    tasks.append(outcome.run(cancels()))
    port.answer()
    port.answer()
    assert not outcome.results and not outcome.errors


def test_an_error_on_purpose_is_told_and_another_one_is_raised() -> None:
    outcome = Outcome()

    async def fails(error: Exception) -> int:
        raise error

    outcome.run(fails(MeetingError("gone")))
    assert [str(error) for error in outcome.errors] == ["gone [KS3200]"]
    with pytest.raises(ZeroDivisionError):
        outcome.run(fails(ZeroDivisionError()))


def test_sleep_is_a_timer() -> None:
    port, outcome = Port(), Outcome()

    async def sleeps() -> int:
        await sleep(port, 5)
        return 1

    task = outcome.run(sleeps())
    assert port.waiting[0][0] == 5
    port.answer()
    assert outcome.results == [1]
    task.cancel()
    assert port.cancelled == 0
