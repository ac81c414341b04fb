"""Soft errors: chance is no ageing, and a device that errs again and again is told."""

from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.numbers.soft_errors import (
    LEAST_ERRORS,
    LEVEL,
    DeviceRecord,
    SoftError,
    ageing,
    records_of,
)


def fleet(errors: dict[int, int], devices: int = 16, steps: int = 1000) -> dict[str, DeviceRecord]:
    return {f"d{i:02}": DeviceRecord(errors.get(i, 0), steps) for i in range(devices)}


def test_a_device_that_errs_again_and_again_is_told() -> None:
    found = ageing(fleet({3: 5, 9: 1}))
    assert [a.device for a in found] == ["d03"]
    assert "5 times" in found[0].why and found[0].expected == 6 / 16


@given(st.integers(0, LEAST_ERRORS - 1), st.integers(1, 64))
def test_too_few_errors_say_nothing(errors: int, devices: int) -> None:
    assert ageing(fleet({0: errors}, devices)) == []


@given(st.integers(2, 32), st.integers(0, 20))
def test_where_all_err_alike_nobody_is_told(devices: int, errors: int) -> None:
    assert ageing(fleet(dict.fromkeys(range(devices), errors), devices)) == []


def test_who_computes_more_may_err_more() -> None:
    records = {"busy": DeviceRecord(10, 100_000), "idle": DeviceRecord(0, 1000)}
    assert ageing(records) == []


def test_a_device_alone_is_told_by_its_own_errors() -> None:
    assert ageing({"d": DeviceRecord(LEAST_ERRORS - 1, 10)}) == []
    assert len(ageing({"d": DeviceRecord(LEAST_ERRORS, 10)})) == 1


def test_a_healthy_fleet_is_told_of_no_more_often_than_promised() -> None:
    """2000 fleets of 16 whose 20 errors strike at random: fewer than 0.1 % and what chance adds."""
    rng = random.Random(5)
    alarms = 0
    for _ in range(2000):
        errors: dict[int, int] = {}
        for _ in range(20):
            struck = rng.randrange(16)
            errors[struck] = errors.get(struck, 0) + 1
        alarms += bool(ageing(fleet(errors)))
    assert alarms <= 2000 * LEVEL + 4 * math.sqrt(2000 * LEVEL)


DEVICES = st.sampled_from([f"device {n} of {h}" for h in ("a", "b", "c") for n in (0, 1)])
ERRORS = st.lists(st.builds(SoftError, DEVICES, st.integers(0, 99)), max_size=30)


@given(ERRORS, st.sets(DEVICES, min_size=1), st.randoms(use_true_random=False))
def test_records_count_each_error_once_however_often_and_in_which_order_it_is_told(
    errors: list[SoftError], present: set[str], rng: random.Random
) -> None:
    found = records_of(errors, present, 99)
    told = errors * 2
    rng.shuffle(told)
    assert records_of(told, present, 99) == found
    assert set(found) == present | {error.device for error in errors}
    assert sum(record.errors for record in found.values()) == len(set(errors))
    for device, record in found.items():
        its = [error.step for error in errors if error.device == device]
        assert record.steps == (100 if device in present else max(its) + 1)
