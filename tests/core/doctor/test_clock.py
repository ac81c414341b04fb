"""Clocks that are wrong, slow, or have gone back."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.core.doctor.defect import Grade
from tests.core.doctor.sane_machine import SANE, found_by, only_defect, with_facts


@pytest.mark.parametrize(
    ("changes", "check", "grade", "words"),
    [
        ({"clock.is_synchronised": False}, "clock-synchronised", Grade.WARNING, "set-ntp"),
        ({"clock.is_synchronised": None}, "clock-synchronised", Grade.UNKNOWN, "clock"),
        ({"clock.source": "hpet"}, "clock-source", Grade.WARNING, "echo tsc > /sys/"),
        ({"clock.source": None}, "clock-source", Grade.UNKNOWN, "source"),
        ({"clock.wall_s": 86400.0}, "clock-right", Grade.BROKEN, "it is 1970"),
        (
            {"clock.newest": ("/tmp/later", SANE.clock.wall_s + 3600)},
            *("clock-right", Grade.WARNING, "/tmp/later was written 3600 s from now"),
        ),
    ],
)
def test_a_defect_is_named(changes: dict[str, Any], check: str, grade: Grade, words: str) -> None:
    defect = only_defect(changes, check)
    assert defect.grade is grade and words in f"{defect.found} {defect.why} {defect.fix}"


def test_without_a_better_source_the_kernel_is_to_be_told() -> None:
    changes = {"clock.source": "hpet", "clock.sources": ("hpet", "acpi_pm")}
    assert "boot with clocksource=tsc" in only_defect(changes, "clock-source").fix


@pytest.mark.parametrize("source", ["kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"])
def test_virtual_machines_have_quick_clocks_of_their_own(source: str) -> None:
    assert found_by("clock-source", with_facts({"clock.source": source})) == []


def test_no_file_tells_nothing() -> None:
    assert found_by("clock-right", with_facts({"clock.newest": None})) == []
