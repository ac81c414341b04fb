"""Each check in a process of its own: what comes of it when it answers, lies, hangs or dies."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepstep.core.preflight.catalogue import (
    BY_CHECK,
    CHECKS,
    DISK,
    MEMORY,
    PCIE,
    PRODUCTS,
    RING,
)
from keepstep.edge.preflight import memory, products
from keepstep.edge.preflight.child_process import ChildEnd
from keepstep.model.messages.preflight import CheckOutcome, CheckReading, PreflightHistory
from keepstep.model.units import MIB
from keepstep.runtime.preflight import child, fleet
from keepstep.runtime.preflight.child import CHECKS as MEASURED
from keepstep.runtime.preflight.child import READINGS
from keepstep.runtime.preflight.fleet import NO_CHILD, check_self
from keepstep.runtime.preflight.local_checks import Efforts, reading_of, run_check, run_checks
from keepstep.runtime.preflight.request import PreflightRequest, plan_checks

OK, BAD, UNKNOWN = CheckOutcome.OK, CheckOutcome.BAD, CheckOutcome.UNKNOWN
CHEAP = [MEMORY, "memory-speed", DISK, PRODUCTS]


def small(directory: Path) -> Efforts:
    return Efforts(directory, MIB, MIB, 4 * MIB, 32, 1, 2, 4096, 2)


@pytest.mark.parametrize("name", CHEAP)
def test_a_check_answers_from_a_process_of_its_own(name: str, tmp_path: Path) -> None:
    efforts = small(tmp_path)
    reading = run_check(BY_CHECK[name], efforts.of_check(name), os.environ)
    assert (reading.check, reading.outcome) == (name, OK), reading.found
    assert reading.took_ms > 0
    measured = {samples.quantity for samples in reading.samples}
    assert measured == {quantity.name for quantity in BY_CHECK[name].quantities}


def test_every_check_has_a_child_or_needs_none() -> None:
    assert set(MEASURED) | set(NO_CHILD) == set(BY_CHECK)
    for name in MEASURED:
        json.dumps(Efforts(Path("/")).of_check(name))


def end(code: int | None, output: bytes = b"") -> ChildEnd:
    return ChildEnd(code, output, "last words", 1500)


def test_no_answer_is_unknown() -> None:
    assert reading_of(MEMORY, end(None)).found == "no answer within 2 s"
    assert reading_of(MEMORY, end(1)).outcome is UNKNOWN
    assert reading_of(MEMORY, end(-signal.SIGKILL)).outcome is UNKNOWN
    assert reading_of(MEMORY, end(0, b"{}")).outcome is UNKNOWN
    another = READINGS.encode(CheckReading(DISK, OK))
    assert reading_of(MEMORY, end(0, another)).outcome is UNKNOWN
    assert reading_of(DISK, end(0, another)) == CheckReading(DISK, OK)


def test_broken_memory_that_the_kernel_has_found_is_bad() -> None:
    assert reading_of(MEMORY, end(-signal.SIGBUS)).outcome is BAD


def test_one_that_hangs_is_unknown_in_time() -> None:
    check = BY_CHECK[MEMORY]
    hurried = replace(check, expects_s=-4.9)
    assert 0 < hurried.deadline_s < 1
    reading = run_check(hurried, {"bytes": 1 << 40}, os.environ)
    assert reading.outcome is UNKNOWN and reading.took_ms < 20_000


def test_when_the_time_is_over_nothing_more_begins(tmp_path: Path) -> None:
    told: list[str] = []
    checks = [BY_CHECK[name] for name in CHEAP]
    over_s = time.monotonic() - 1
    readings = run_checks(checks, small(tmp_path), os.environ, told.append, over_s)
    assert [(reading.check, reading.outcome) for reading in readings] == [
        (name, UNKNOWN) for name in CHEAP
    ]
    assert told == [] and "the time was over" in readings[0].found


def test_what_runs_has_what_is_left_and_its_usual_time_at_least() -> None:
    """Not the twenty seconds and more that it has where there is time for all."""
    check = replace(BY_CHECK[MEMORY], expects_s=0.5)
    assert check.deadline_s > 5
    reading = run_check(check, {"bytes": 4 << 30}, os.environ, left_s=0.1)
    assert reading.outcome is UNKNOWN and "no answer within" in reading.found
    assert 500 <= reading.took_ms < 5_000


def test_alone_the_time_that_is_given_bounds_the_ring_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(tmp_path, only=frozenset({RING, MEMORY}), ranks=2, within_s=1e9)
    monkeypatch.setattr(fleet, "_until_s", lambda request: time.monotonic() - 1)
    evidence = fleet.check_alone(asked, PreflightHistory({}, {}), os.environ, lambda name: None)
    assert {reading.check: reading.outcome for reading in evidence.readings[0]} == {
        MEMORY: UNKNOWN,
        RING: UNKNOWN,
    }


def test_a_blind_check_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "can_see", lambda: False)
    monkeypatch.setattr(products, "can_see", lambda: False)
    assert child.check_memory({"bytes": MIB}).outcome is UNKNOWN
    assert child.check_products({"size": 8, "repetitions": 1}).outcome is UNKNOWN


def test_what_is_wrong_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = memory.WrongByte(3 * MIB, 0xAA, 0xAB, 1)
    monkeypatch.setattr(memory, "check_memory", lambda size: wrong)
    found = child.check_memory({"bytes": 4 * MIB})
    assert found.outcome is BAD
    assert "0xab where 0xaa was written, 1 wrong bits" in found.found
    result = products.ProductFigures((), products.WrongProduct(5, "normal", 2, 7))
    monkeypatch.setattr(products, "check_products", lambda size, repetitions: result)
    found = child.check_products({"size": 8, "repetitions": 1})
    assert found.outcome is BAD and found.found.startswith(
        "core 5 gave another product: 7 elements"
    )
    assert found.why and found.fix
    given = {"directory": tmp_path / "none", "bytes": MIB, "samples": 1, "syncs": 1}
    assert "No such file" in child.check_disk(given).found


def request(tmp_path: Path, **given: Any) -> PreflightRequest:
    return PreflightRequest(small(tmp_path), (), **given)


def test_without_a_device_nothing_is_started_for_one(tmp_path: Path) -> None:
    asked = request(tmp_path, only=frozenset({PCIE}))
    told: list[str] = []
    (reading,) = check_self([BY_CHECK[PCIE]], asked, os.environ, told.append)
    assert (reading.outcome, told) == (CheckOutcome.SKIPPED, [])


def test_a_plan_says_why_a_check_is_left_out(tmp_path: Path) -> None:
    plan = plan_checks(request(tmp_path, skip=frozenset({"disk"})), {})
    assert set(plan.checks) | set(plan.skipped) == {check.name for check in CHECKS}
    assert plan.skipped["disk"] == "not asked for"
    assert plan.skipped["network"] == "needs several nodes (--nnodes)"
    assert "ring" in plan_checks(request(tmp_path, ranks=2), {}).checks
    assert plan_checks(request(tmp_path, nodes=2), {}).skipped == {}
    hurried = plan_checks(request(tmp_path, nodes=2, within_s=0.7), {})
    assert hurried.checks == ("static", "same-software")


def test_more_memory_is_given_more_time() -> None:
    large = Efforts(Path("/"), memory_bytes=200_000 * MIB)
    assert large.planned(BY_CHECK[MEMORY]).deadline_s > 1000
