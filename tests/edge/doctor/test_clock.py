"""Clock sources, and the file that was written last."""

from __future__ import annotations

from keepstep.edge.doctor.clock import read_clock
from tests.edge.doctor.fake_machine import FakeMachine


def test_clock_sources(machine: FakeMachine) -> None:
    found = read_clock(machine.host, [])
    assert (found.source, found.sources) == ("tsc", ("tsc", "hpet", "acpi_pm"))
    assert found.is_synchronised and found.newest is None


def test_the_file_that_was_written_last(machine: FakeMachine) -> None:
    written = [machine.write(f"/tmp/{name}", name) for name in ("a", "b")]
    found = read_clock(machine.host, ["/none", "/tmp"])
    assert found.newest is not None
    assert found.newest[1] == max(file.stat().st_ctime for file in written)
