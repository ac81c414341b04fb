"""Python's collector of cycles stands still as long as it is told to, and no longer."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from keepstep.edge.os.collector import collector_paused


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    gc.enable()


@collector_paused()
def is_on(deeper: int = 0) -> bool:
    return is_on(deeper - 1) if deeper else gc.isenabled()


@pytest.mark.parametrize("deeper", [0, 2])
def test_it_stands_still_meanwhile_and_goes_on_behind(deeper: int) -> None:
    assert not is_on(deeper)
    assert gc.isenabled()


def test_it_goes_on_behind_an_error() -> None:
    with pytest.raises(ValueError, match="of a test"), collector_paused():
        raise ValueError("of a test")
    assert gc.isenabled()


def test_where_a_program_has_none_it_gets_none() -> None:
    gc.disable()
    assert not is_on()
    assert not gc.isenabled()


def test_nothing_is_collected_meanwhile() -> None:
    seen: list[str] = []
    note = lambda phase, info: seen.append(phase)  # noqa: E731
    gc.callbacks.append(note)
    try:
        with collector_paused():
            kept = [[number] for number in range(100_000)]
            told = list(seen)
        assert told == [] and len(kept) == 100_000
    finally:
        gc.callbacks.remove(note)
