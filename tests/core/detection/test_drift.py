"""Drift: what a channel is compared with."""

from __future__ import annotations

from keepstep.core.detection.drift import (
    LAG_BLOCKS,
    LEARNT_BLOCKS,
    REFERENCE_BLOCKS,
    Drift,
    DriftPoint,
)


def test_what_is_younger_than_the_lag_is_no_reference_yet() -> None:
    """But for the first one, which has nothing else. Each block's own time is its number here."""
    channel = Drift(0.06)
    learnt: list[tuple[int, float]] = []
    for number in range(LAG_BLOCKS + REFERENCE_BLOCKS):
        before = channel.reference
        channel.add(DriftPoint(0.0, float(number)), number)
        if channel.reference is not None and channel.reference is not before:
            learnt.append((number, channel.reference.own_ns))
    first, *later = learnt
    assert first == (LEARNT_BLOCKS, (LEARNT_BLOCKS - 1) / 2)
    assert later == [(number, (number - LAG_BLOCKS - 1) / 2) for number, _ in later]
    assert len(later) > 5 and later[0][0] >= LAG_BLOCKS + LEARNT_BLOCKS
