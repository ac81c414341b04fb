"""Recurrence: the program is found at fault only by what was reproduced on other hardware, hardware
only by what went well without it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.recovery.recurrence import Recurrence, normalised
from keepstep.model.failure import Cause, Failure, failure_from_json

CRASH = Failure(Cause.CRASH, 1, "a", "0", step=7, error="ValueError: no")


def kinds(*noted: tuple[Failure, int]) -> list[str | None]:
    recurrence = Recurrence()
    return [
        found and found.kind
        for found in (recurrence.note(failure, life) for failure, life in noted)
    ]


@pytest.mark.parametrize("other", [replace(CRASH, host="b"), replace(CRASH, device="1")])
def test_the_same_on_different_hardware_is_the_program(other: Failure) -> None:
    assert kinds((CRASH, 1), (other, 2)) == [None, "code"]
    assert kinds((CRASH, 1), (CRASH, 2), (other, 3)) == [None, "suspect", "code"]


def test_one_event_on_many_hosts_is_not_reproduced() -> None:
    everywhere = [replace(CRASH, host=host) for host in "abcd"]
    assert kinds(*((failure, 1) for failure in everywhere)) == [None] * 4
    assert kinds(*((failure, 1) for failure in everywhere), (everywhere[0], 2))[-1] == "code", (
        "in the second life it is"
    )


@pytest.mark.parametrize(
    "other",
    [
        replace(CRASH, step=8),
        replace(CRASH, error="KeyError: no"),
        replace(CRASH, cause=Cause.OOM),
        replace(CRASH, step=None),
    ],
)
def test_what_is_not_the_same_is_not_counted_together(other: Failure) -> None:
    assert kinds((CRASH, 1), (replace(other, host="b"), 2)) == [None, None]


def test_a_device_that_says_it_is_broken_is_suspect_at_once() -> None:
    assert kinds((Failure(Cause.DEVICE, 1, "a", "0", error="uncorrectable ECC"), 1)) == ["suspect"]


failures = st.builds(
    Failure,
    cause=st.sampled_from(Cause),
    rank=st.integers(0, 3),
    host=st.sampled_from("ab"),
    device=st.sampled_from(["", "0", "1"]),
    step=st.one_of(st.none(), st.integers(0, 2)),
    error=st.sampled_from(["x", "y"]),
)


@given(st.lists(st.tuples(failures, st.booleans()), max_size=40))
def test_every_finding_rests_on_its_failures(story: list[tuple[Failure, bool]]) -> None:
    recurrence, life = Recurrence(), 0
    lives: dict[Failure, set[int]] = {}
    for failure, is_new_life in story:
        life += is_new_life
        lives.setdefault(failure, set()).add(life)
        found = recurrence.note(failure, life)
        if found is None:
            continue
        if found.kind == "code":
            assert failure.cause.may_be_code and failure.step is not None
            assert len({f.hardware for f in found.failures}) > 1
            assert len(set().union(*(lives[f] for f in found.failures))) > 1
        else:
            assert found.kind == "suspect" and {f.hardware for f in found.failures} == {
                failure.hardware
            }
        assert {(f.cause, f.step, f.error) for f in found.failures} == {
            (failure.cause, failure.step, failure.error)
        }


@given(failures)
def test_a_failure_travels_as_it_is(failure: Failure) -> None:
    assert failure_from_json(failure.to_json()) == failure


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("RuntimeError: bad value 17 at 0x7ffe12", "RuntimeError: bad value 3 at 0xdead"),
        (
            "FileNotFoundError: '/tmp/x1/part-3.bin'\nmore",
            "FileNotFoundError: '/tmp/y2/part-4.bin'",
        ),
    ],
)
def test_errors_are_compared_without_what_differs_each_time(one: str, other: str) -> None:
    assert normalised(one) == normalised(other) != ""


def test_different_errors_stay_different() -> None:
    assert normalised("ValueError: no") != normalised("ValueError: yes") and normalised("") == ""
