"""Memory as the kernel's files tell it."""

from __future__ import annotations

from keepstep.edge.doctor.memory import read_memory
from keepstep.model.units import GIB
from tests.edge.doctor.fake_machine import FakeMachine


def test_memory_is_read_in_bytes(machine: FakeMachine) -> None:
    machine.change("/proc/meminfo", "HugePages_Free:        0", "HugePages_Free:      512")
    machine.change("/proc/meminfo", "SwapFree:        8388608", "SwapFree:        7340032")
    found = read_memory(machine.host)
    assert (found.total_bytes, found.available_bytes) == (64 * GIB, 48 * GIB)
    assert (found.swapped_bytes, found.huge_pages_bytes) == (GIB, GIB)
    assert (found.commit_limit_bytes, found.committed_bytes) == (40 * GIB, 2 * GIB)
    assert (found.defrag, found.numa_nodes, found.overcommit) == ("madvise", 2, 0)


def test_what_is_missing_is_none(machine: FakeMachine) -> None:
    machine.write("/proc/meminfo", "MemTotal: many\nSwapTotal:\n")
    found = read_memory(machine.host)
    assert (found.total_bytes, found.swapped_bytes, found.huge_pages_bytes) == (None, None, None)
