"""What all `Timers` do: each comes once, in its order, never too early, and not when cancelled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import pytest

from keepstep.edge.os.clock import CLOCK
from keepstep.model.units import MS_NS
from keepstep.ports import Clock, Timers
from keepstep.sim.protocol.world.timers import SimTimers
from tests.contracts.real import PatientLoop
from tests.contracts.simulated import Time


class Hour(Protocol):
    """Timers, the clock they go by, and the loop that makes their calls."""

    timers: Timers
    clock: Clock

    def until(self, holds: Callable[[], bool]) -> None:
        """Let it run until that is so."""

    def close(self) -> None: ...


class RealHour(PatientLoop):
    def __init__(self) -> None:
        super().__init__()
        self.timers: Timers = self.loop
        self.clock: Clock = CLOCK


class SimHour(Time):
    """`number`: of the machine; some clocks are too fast and some too slow."""

    def __init__(self, number: int) -> None:
        super().__init__()
        machine = self.machine(number)
        self.process = machine.start("loop")
        self.timers: Timers = SimTimers(self.process)
        self.clock: Clock = machine.clock

    def close(self) -> None:
        pass


HOURS: dict[str, Callable[[], Hour]] = {
    "real": RealHour,
    **{f"simulated {number}": lambda number=number: SimHour(number) for number in range(4)},  # type: ignore[misc]
}


@pytest.fixture(params=HOURS)
def hour(request: pytest.FixtureRequest) -> Iterator[Hour]:
    made = HOURS[request.param]()
    yield made
    made.close()


def test_a_timer_comes_once_and_never_too_early(hour: Hour) -> None:
    late_ns: list[int] = []

    def ask(delay_ns: int) -> None:
        due_ns = hour.clock.monotonic_ns() + delay_ns
        hour.timers.after(delay_ns, lambda: late_ns.append(hour.clock.monotonic_ns() - due_ns))

    delays_ns = [0, 1, 999, MS_NS, 3 * MS_NS + 7, 20 * MS_NS]
    for delay_ns in delays_ns:
        ask(delay_ns)
    assert late_ns == [], "not while it is asked for"
    hour.until(lambda: len(late_ns) == len(delays_ns))
    over: list[int] = []
    hour.timers.after(30 * MS_NS, lambda: over.append(1))
    hour.until(lambda: bool(over))
    assert len(late_ns) == len(delays_ns)
    assert min(late_ns) >= 0


def test_they_come_in_the_order_in_which_they_are_due(hour: Hour) -> None:
    heard: list[str] = []
    for name, delay_ns in (("c", 9), ("a", 3), ("d", 9), ("b", 6), ("first", -5)):
        hour.timers.after(delay_ns * MS_NS, lambda name=name: heard.append(name))  # type: ignore[misc]
    hour.until(lambda: len(heard) == 5)
    assert heard == ["first", "a", "b", "c", "d"]


def test_a_timer_is_cancelled_before_in_and_after_its_call(hour: Hour) -> None:
    heard: list[str] = []

    def come() -> None:
        heard.append("one")
        one.cancel()
        other.cancel()

    one = hour.timers.after(MS_NS, come)
    other = hour.timers.after(2 * MS_NS, lambda: heard.append("other"))
    before = hour.timers.after(0, lambda: heard.append("before"))
    before.cancel()
    before.cancel()
    hour.timers.after(5 * MS_NS, lambda: heard.append("last"))
    hour.until(lambda: "last" in heard)
    one.cancel()
    assert heard == ["one", "last"]


def test_a_timer_may_set_the_next_one(hour: Hour) -> None:
    heard: list[int] = []

    def come() -> None:
        heard.append(len(heard))
        if len(heard) < 5:
            hour.timers.after(0, come)

    hour.timers.after(MS_NS, come)
    hour.until(lambda: len(heard) == 5)
