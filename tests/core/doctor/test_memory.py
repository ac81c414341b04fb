"""Memory that is short, swapped out, or moved about."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.core.doctor.defect import Grade
from keepstep.model.machine_facts import UNLIMITED
from keepstep.model.units import GIB
from tests.core.doctor.sane_machine import found_by, only_defect, with_facts


@pytest.mark.parametrize(
    ("changes", "check", "words"),
    [
        ({"memory.available_bytes": 5 * GIB}, "memory-available", "5.0 GiB of 256.0 GiB"),
        ({"cgroup.memory_limit_bytes": 64 * GIB}, "memory-cgroup", "remount,size=32768m /dev/shm"),
        ({"cgroup.memory_used_bytes": 190 * GIB}, "memory-cgroup", "190.0 GiB of 200.0 GiB"),
        ({"memory.swapped_bytes": 10 * GIB}, "swap", "swapoff -a"),
        ({"memory.overcommit": 2}, "overcommit", "108.0 GiB can be reserved yet"),
        ({"memory.defrag": "always"}, "huge-page-defrag", "echo madvise"),
        ({"memory.huge_pages_bytes": 100 * GIB}, "reserved-huge-pages", "100.0 GiB"),
        ({"memory.zone_reclaim": 1}, "numa", "zone_reclaim_mode=0"),
        ({"memory.numa_balancing": 1}, "numa", "numa_balancing=0"),
    ],
)
def test_a_defect_is_named(changes: dict[str, Any], check: str, words: str) -> None:
    defect = only_defect(changes, check)
    assert defect.grade is Grade.WARNING and words in f"{defect.found} {defect.why} {defect.fix}"


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"memory.available_bytes": None}, "memory-available"),
        ({"cgroup.memory_used_bytes": None}, "memory-cgroup"),
        ({"memory.swapped_bytes": None}, "swap"),
        ({"memory.overcommit": None}, "overcommit"),
        ({"memory.huge_pages_bytes": None}, "reserved-huge-pages"),
    ],
)
def test_what_cannot_be_read_is_said_to_be_unknown(changes: dict[str, Any], check: str) -> None:
    assert only_defect(changes, check).grade is Grade.UNKNOWN


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        (
            {"cgroup.memory_limit_bytes": UNLIMITED, "cgroup.memory_used_bytes": None},
            "memory-cgroup",
        ),
        ({"cgroup.memory_limit_bytes": 256 * GIB, "arena.total_bytes": 300 * GIB}, "memory-cgroup"),
        ({"memory.numa_nodes": 1, "memory.numa_balancing": 1, "memory.zone_reclaim": 1}, "numa"),
        ({"memory.defrag": None}, "huge-page-defrag"),  # a kernel without huge pages
    ],
)
def test_what_is_in_order_is_not_named(changes: dict[str, Any], check: str) -> None:
    assert found_by(check, with_facts(changes)) == []
