"""How many threads compute for a thread of ours, and for those of the program."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from keepstep.edge.torch.one_core import compute_on_one_core

BEFORE = 3
VALUES = torch.ones(1 << 20)  # so many are shared out


@pytest.fixture
def program_has_three() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(BEFORE)
    yield
    torch.set_num_threads(before)


def on_a_thread(call: Callable[[], int]) -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def begins_threads(compute: Callable[[torch.Tensor], object]) -> int:
    """How many threads there are then that were not there before."""
    before = set(Path("/proc/self/task").iterdir())
    compute(VALUES)
    return len(set(Path("/proc/self/task").iterdir()) - before)


def blas(values: torch.Tensor) -> object:
    return torch.dot(values, values)


def operator(values: torch.Tensor) -> object:
    return values.exp()


@pytest.mark.usefixtures("program_has_three")
@pytest.mark.parametrize("compute", [blas, operator])
def test_it_begins_no_threads(compute: Callable[[torch.Tensor], object]) -> None:
    def of_ours() -> int:
        compute_on_one_core()
        return begins_threads(compute)

    assert on_a_thread(of_ours) == 0
    assert on_a_thread(lambda: begins_threads(compute)) > 0, "torch does this itself now"


@pytest.mark.usefixtures("program_has_three")
def test_the_program_keeps_its_own() -> None:
    def of_ours() -> int:
        compute_on_one_core()
        return torch.get_num_threads()

    assert on_a_thread(of_ours) == 1
    assert torch.get_num_threads() == BEFORE
    assert on_a_thread(torch.get_num_threads) == BEFORE


def test_one_asked_for_holds_for_the_blas() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:

        def of_ours() -> int:
            compute_on_one_core()
            return begins_threads(blas)

        assert on_a_thread(of_ours) == 0
    finally:
        torch.set_num_threads(before)
