"""What every `Clock` does."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from keepstep.edge.os.clock import CLOCK
from keepstep.model.units import MS_NS, S_NS
from keepstep.ports import Clock
from tests.contracts import simulated

LetPass = Callable[[int], object]  # so many nanoseconds


def system() -> tuple[Clock, LetPass]:
    return CLOCK, lambda ns: threading.Event().wait(ns / S_NS)


CLOCKS: dict[str, Callable[[], tuple[Clock, LetPass]]] = {
    "system": system,
    "simulated": simulated.clock,
}


@pytest.fixture(params=CLOCKS)
def clock(request: pytest.FixtureRequest) -> tuple[Clock, LetPass]:
    return CLOCKS[request.param]()


def test_time_passes_and_never_goes_back(clock: tuple[Clock, LetPass]) -> None:
    read, let_pass = clock
    for _ in range(10):
        before_ns = read.monotonic_ns()
        assert isinstance(before_ns, int) and read.monotonic_ns() >= before_ns
        let_pass(2 * MS_NS)
        assert read.monotonic_ns() >= before_ns + 2 * MS_NS


def test_the_wall_shows_a_date(clock: tuple[Clock, LetPass]) -> None:
    read, _ = clock
    years = read.wall_ns() / S_NS / 86400 / 365.25
    assert isinstance(read.wall_ns(), int) and 2020 - 1970 < years < 2200 - 1970
