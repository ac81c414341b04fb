"""Clock: whether this machine's time is right, and cheap to ask for.

Comes in: facts of its clocks. Goes out: defects. keepstep's own deadlines go by the monotonic
clock; the wall clock dates journals, certificates and what stores sign.
"""

from __future__ import annotations

from collections.abc import Iterator

from keepstep.core.doctor.defect import Defect, DoctorCheck, broken, silence, warning
from keepstep.model.machine_facts import MachineFacts

SLOW_SOURCES = {"acpi_pm", "hpet", "jiffies", "refined-jiffies", "xen"}
SOURCE_FILE = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
EARLIEST_S = 1_735_689_600  # 2025: this version is younger
MAX_AHEAD_S = 60.0
YEAR_S = 31_556_952


def clock_synchronised(facts: MachineFacts) -> Iterator[Defect]:
    """Whether somebody keeps the clock right."""
    if facts.clock.is_synchronised is None:
        yield silence("whether the clock is synchronised")
    elif not facts.clock.is_synchronised:
        yield warning(
            "the clock is not synchronised",
            "journals of several nodes tell events in the wrong order, and object stores refuse "
            "requests that are minutes off",
            "start chrony or systemd-timesyncd: timedatectl set-ntp true (on the host of a "
            "container)",
        )


def clock_source(facts: MachineFacts) -> Iterator[Defect]:
    """Whether reading the clock is cheap."""
    source = facts.clock.source
    if source is None:
        yield silence("the kernel's clock source")
    elif source in SLOW_SOURCES:
        better = next((each for each in facts.clock.sources if each not in SLOW_SOURCES), None)
        yield warning(
            f"the kernel's clock source is {source}",
            "each look at the clock is a call into the kernel, and torch looks all the time",
            "boot with clocksource=tsc tsc=reliable"
            if better is None
            else f"echo {better} > {SOURCE_FILE}",
        )


def clock_right(facts: MachineFacts) -> Iterator[Defect]:
    """Whether it can be that late, and whether it has gone back."""
    wall_s = facts.clock.wall_s
    if wall_s < EARLIEST_S:
        yield broken(
            f"the clock says that it is {1970 + int(wall_s / YEAR_S)}",
            "TLS refuses every certificate, and stores every request",
            "chronyc makestep, or date --set; then hwclock --systohc",
        )
    elif facts.clock.newest is not None:
        path, written_s = facts.clock.newest
        if written_s > wall_s + MAX_AHEAD_S:
            yield warning(
                f"{path} was written {written_s - wall_s:.0f} s from now: the clock has gone back",
                "journals tell events in the wrong order, and the newest job is not the last",
                "see why (chronyc tracking, journalctl -u systemd-timesyncd), or touch the file",
            )


CHECKS = (
    DoctorCheck("clock-synchronised", clock_synchronised),
    DoctorCheck("clock-source", clock_source),
    DoctorCheck("clock-right", clock_right),
)
