"""Bounds: what the field of a message may hold, written beside its type.

    Rank = Annotated[int, Range(0, U32)]

`core/wire/codec.py` checks them whenever a message is written or read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

MAX_PACKET_BYTES = 1 << 16  # of a message between processes of a node
U32, U63, U64 = (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Range:
    """A whole number from `least` to `most`."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Length:
    """A text of at most `most` characters, or a list or an object of at most `most` entries.

    `cuts`: a longer text is cut when it is written, and refused when it is read. For sentences that
    people read: none is worth an error.
    """

    most: int
    cuts: bool = False


Rank = Annotated[int, Range(0, U32)]  # also a node, a place, a pid
Port = Annotated[int, Range(0, (1 << 16) - 1)]
HostName = Annotated[str, Length(255)]
MAX_WORLD_SIZE = 1 << 20
MAX_RANKS_OF_NODE = 1 << 12  # a packet between processes of a node names them all
WorldSize = Annotated[int, Range(1, MAX_WORLD_SIZE)]
Count = Annotated[int, Range(0, U63)]
ByteCount = Annotated[int, Range(0, 1 << 50)]  # of something that lies in memory
StepNumber = Annotated[int, Range(-1, U63)]  # -1: before the first step
Checksum = Annotated[int, Range(0, U64)]
Text = Annotated[str, Length(1000)]
Sentence = Annotated[str, Length(1000, cuts=True)]
LongText = Annotated[str, Length(32_000)]  # a command line, an environment variable
