"""Operations: a thread's call is over when it has left it, or when it could not write a tensor."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from keepstep.edge.torch.operations import Operation

WITHIN_S = 60.0


class Trainer:
    """A thread that runs `body`."""

    def __init__(self, body: Callable[[], object]) -> None:
        self._is_there = threading.Event()
        self._body = body
        self.native_id = 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self._is_there.wait(WITHIN_S)

    def _run(self) -> None:
        self.native_id = threading.get_native_id()
        self._is_there.set()
        self._body()

    def operation(self) -> Operation:
        assert self.thread.ident is not None
        return Operation(self.thread.ident, self.native_id)


def wait_for(fact: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WITHIN_S
    while not fact():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.001)


@pytest.fixture
def kernel() -> Iterator[threading.Lock]:
    """Who acquires it is in C for as long as the test wants, as in a long kernel."""
    lock = threading.Lock()
    lock.acquire()
    yield lock
    if lock.locked():
        lock.release()


def in_kernel(trainer: Trainer) -> bool:
    """Whether the thread is in the call that stands for a kernel."""
    with open(f"/proc/self/task/{trainer.native_id}/syscall") as file:
        return not file.read().startswith("running")


def test_a_call_that_goes_on_is_not_over_and_over_when_left(kernel: threading.Lock) -> None:
    def body() -> None:
        kernel.acquire()
        threading.Event().wait(WITHIN_S)

    trainer = Trainer(body)
    wait_for(lambda: in_kernel(trainer))
    operation = trainer.operation()
    assert not operation.is_over() and not operation.is_over()
    kernel.release()
    wait_for(operation.is_over)


def test_what_an_operation_calls_back_is_part_of_it(kernel: threading.Lock) -> None:
    """A DTensor's counter moves behind all that its dispatch has called, in whatever frame."""
    go_on = threading.Event()

    def __torch_dispatch__() -> None:
        kernel.acquire()
        go_on.wait()

    trainer = Trainer(lambda: (__torch_dispatch__(), threading.Event().wait(WITHIN_S)))
    wait_for(lambda: in_kernel(trainer))
    operation = trainer.operation()
    kernel.release()
    wait_for(lambda: not kernel.locked())
    assert not operation.is_over()
    go_on.set()
    wait_for(operation.is_over)


def test_who_waits_in_python_or_sleeps_is_in_no_operation() -> None:
    for body in (threading.Event().wait, lambda: select.select([], [], [], WITHIN_S)):
        trainer = Trainer(body)
        wait_for(lambda trainer=trainer: trainer.operation().is_over())  # type: ignore[misc]


def test_the_backward_pass_is_no_operation(kernel: threading.Lock) -> None:
    """It lasts long, and moves nothing that stands still."""
    x = torch.full((1200, 1200), 1e-3, requires_grad=True)
    seen: list[bool] = []

    def body() -> None:
        for _ in range(200):
            y = x
            for _ in range(8):
                y = y @ x
            y.sum().backward()
            if seen:
                return

    trainer = Trainer(body)

    def looked() -> bool:
        operation = trainer.operation()
        stack = operation._stack()
        if stack and stack[-1].f_code.co_name == "_engine_run_backward":
            seen.append(operation.is_over())
        return bool(seen)

    wait_for(looked)
    assert seen == [True]
    trainer.thread.join(WITHIN_S)


def test_a_thread_that_has_ended_is_in_no_operation() -> None:
    trainer = Trainer(lambda: None)
    trainer.thread.join(WITHIN_S)
    assert trainer.operation().is_over()
