"""Is it the processor or the program, by fixed work."""

from __future__ import annotations

import pytest

from keepstep.core.detection.reference import confirm, throttled
from keepstep.model.parts import PartHealth
from keepstep.model.step_work import FixedWork

PEERS = {rank: FixedWork(frozenset({rank}), (100, 101, 140)) for rank in (0, 2, 3)}


@pytest.mark.parametrize(
    ("tries", "excess", "cause"),
    [
        ((150, 152, 151), 0.5, "processor"),
        ((300, 152, 900), 0.5, "processor"),  # what else runs there only adds
        ((101, 100, 130), 0.5, "program"),
        ((115, 116, 118), 0.5, "unknown"),
        ((110, 111, 112), 0.1, "processor"),
        ((101, 102, 103), 0.1, "program"),
        ((), 0.5, "unknown"),
    ],
)
def test_the_fastest_try_decides(tries: tuple[int, ...], excess: float, cause: str) -> None:
    found = confirm(1, excess, {**PEERS, 1: FixedWork(frozenset({1}), tries)})
    assert found.cause == cause and found.why.startswith("rank 1: ")


def test_the_same_processors_tell_nothing() -> None:
    everywhere = frozenset({0, 1})
    works = {rank: FixedWork(everywhere, (100 + 50 * rank,)) for rank in range(2)}
    found = confirm(1, 0.5, works)
    assert found.cause == "unknown" and "same processors" in found.why


def test_alone_nobody_knows() -> None:
    assert confirm(1, 0.5, {1: FixedWork(frozenset({1}), (100,))}).cause == "unknown"
    assert confirm(1, 0.5, {}).cause == "unknown"


def test_a_slow_processor_on_a_node_that_is_hot_is_throttled_with_both_numbers() -> None:
    slow = confirm(1, 0.5, {**PEERS, 1: FixedWork(frozenset({1}), (147,))})
    cpu = PartHealth("cpu", "bad", "cores were slowed down 12 times", "look at fans", slows=True)
    found = throttled(1, slow, cpu)
    assert (found.cause, found.ratio) == ("throttled", slow.ratio)
    assert "1.47 times as long" in found.why and "slowed down 12 times" in found.why
    assert found.why.startswith("rank 1: ") and found.why.endswith("cheapest: look at fans")
