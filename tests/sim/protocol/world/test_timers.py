"""Simulated timers, beyond `tests/contracts/test_timers.py`: they belong to a process."""

from __future__ import annotations

from keepstep.model.units import MS_NS, S_NS
from keepstep.sim.protocol.world.timers import SimTimers
from tests.contracts.simulated import Time


def test_a_timer_dies_with_its_process() -> None:
    time = Time()
    machine = time.machine(0)
    heard: list[str] = []
    dead, alive = machine.start("dead"), machine.start("alive")
    for process in (dead, alive):
        SimTimers(process).after(MS_NS, lambda name=process.name: heard.append(name))  # type: ignore[misc]
    dead.end("killed")
    time.world.run(S_NS)
    assert heard == [alive.name]


def test_machines_do_not_agree_about_how_long_something_takes() -> None:
    time = Time()
    came_ns: set[int] = set()
    for number in range(5):
        timers = SimTimers(time.machine(number).start("loop"))
        timers.after(100 * S_NS, lambda: came_ns.add(time.world.now_ns))
    time.world.run(101 * S_NS)
    assert len(came_ns) == 5
    assert all(abs(at_ns - 100 * S_NS) < 20 * MS_NS for at_ns in came_ns)
