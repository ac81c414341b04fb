"""Units: the constants and how a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
MS_NS = 1_000_000
S_NS = 1_000_000_000
PAGE_BYTES = 4096
SHOWN_NAMES = 5  # in a sentence


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def counted(count: int, noun: str) -> str:
    """`1 step`, `2 steps`: a count for a sentence."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def every(count: int, noun: str) -> str:
    """`the only rank`, `all 2 ranks`: whoever there is, for a sentence."""
    return f"the only {noun}" if count == 1 else f"all {count} {noun}s"


def first_line(message: str) -> str:
    """The first line with words of what a program says: a sentence has room for no more."""
    return next((line.strip() for line in message.splitlines() if line.strip()), "")


def human_bytes(count: int) -> str:
    """`3.2 GiB`: bytes for a sentence."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def human_ns(duration_ns: int) -> str:
    """`12.3 ms`: a duration for a sentence."""
    if duration_ns >= S_NS:
        return f"{duration_ns / S_NS:.2f} s"
    if duration_ns >= MS_NS:
        return f"{duration_ns / MS_NS:.1f} ms"
    return f"{duration_ns / 1000:.0f} us"


def first_names(names: Sequence[str], most: int = SHOWN_NAMES) -> str:
    """For a sentence: the first ones, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
