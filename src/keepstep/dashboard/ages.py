"""Ages: how long, when and how many, as words. Pure."""

from __future__ import annotations

from datetime import datetime

from keepstep.model.units import S_NS, human_ns


def human_age(age_ns: int | None) -> str:
    """`0.4 s`, `12 s`, `3 min`, `2.5 h`, `4 days`: how long ago, to the precision that matters."""
    if age_ns is None:
        return "-"
    seconds = age_ns / S_NS
    for limit, unit_s, words in (
        (10, 1, "{:.1f} s"),
        (120, 1, "{:.0f} s"),
        (7200, 60, "{:.0f} min"),
        (172_800, 3600, "{:.1f} h"),
    ):
        if seconds < limit:
            return words.format(seconds / unit_s)
    return f"{seconds / 86_400:.0f} days"


def human_span(duration_ns: int) -> str:
    """How long, up to two minutes precisely."""
    return human_ns(duration_ns) if duration_ns < 120 * S_NS else human_age(duration_ns)


def clock(wall_ns: int) -> str:
    """Date and time of day, in local time."""
    return datetime.fromtimestamp(wall_ns // S_NS).isoformat(" ")


def count(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
