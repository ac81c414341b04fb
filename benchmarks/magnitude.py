"""Magnitude: of flips of one bit, how many of each range of bits were found.

Comes in: rows of flips that changed a state, each with its bit and who saw it. Goes out: by range,
from the greatest change of a value to the least, how many there were and were seen, with Wilson's
interval. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keepstep.sim.economics.confidence import share_interval

# What a flip of these bits of a float32 does to its value.
RANGES = {
    "sign": range(31, 32),
    "exponent: a factor of 2^16 to 2^128": range(27, 31),
    "exponent: a factor of 2 to 2^8": range(23, 27),
    "mantissa: 2^-8 to 2^-1 of its power of 2": range(15, 23),
    "mantissa: 2^-16 to 2^-9 of it": range(7, 15),
    "mantissa: 2^-23 to 2^-17 of it": range(7),
}


def by_magnitude(changing: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """`changing`: flips that changed a bit of some rank's state."""
    found = {}
    for name, bits in RANGES.items():
        inside = [row for row in changing if row["bit"] in bits]
        seen = sum(bool(row["digests"] or row["buddy"]) for row in inside)
        interval = share_interval(seen, len(inside))
        found[name] = {"changing": len(inside), "either": seen, "interval": interval}
    return found
