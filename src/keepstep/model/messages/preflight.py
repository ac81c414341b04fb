"""What the nodes of a preflight tell each other where they meet, what a check's process tells who
started it, and what is kept of earlier ones.

Whole numbers only: samples are in the unit of their quantity (`core/preflight/catalogue.py`), bytes
or floating-point operations a second, or ns.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, ClassVar

from keepstep.model.bounds import (
    U63,
    Count,
    HostName,
    Length,
    Port,
    Range,
    Rank,
    Sentence,
    Text,
    WorldSize,
)

MAX_SAMPLES = 64


class CheckOutcome(Enum):
    """What a check says. SKIPPED: it was not asked for, or there is nothing to check; UNKNOWN: it
    was asked for and gave no answer, which is never taken for an answer."""

    OK = "ok"
    BAD = "bad"
    UNKNOWN = "unknown"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Samples:
    """Repeated measurements of one quantity."""

    quantity: Text
    values: Annotated[tuple[Count, ...], Length(MAX_SAMPLES)]


@dataclass(frozen=True, slots=True)
class FleetTrait:
    """Something that all nodes of the same `kind` must have alike: a version, the digest of a loss.
    Traits of different kinds are not compared. `kind` empty: all nodes are of one kind."""

    name: Text
    value: Text
    kind: Text = ""


@dataclass(frozen=True, slots=True)
class CheckReading:
    """What one check of one node gave. `found`: what is wrong, or why it gave nothing. `fix`: the
    remedy, where the check knows a better one than the catalogue."""

    KIND: ClassVar[str] = "reading"
    check: Text
    outcome: CheckOutcome
    found: Sentence = ""
    why: Sentence = ""
    fix: Sentence = ""
    samples: Annotated[tuple[Samples, ...], Length(8)] = ()
    traits: Annotated[tuple[FleetTrait, ...], Length(64)] = ()
    took_ms: Count = 0


@dataclass(frozen=True, slots=True)
class PreflightSeat:
    """A node takes part. `machine`: which machine it is on; nodes of one machine measure one after
    the other. `token`: what its peers say when they connect to it."""

    KIND: ClassVar[str] = "seat"
    host: HostName
    address: HostName
    port: Port
    machine: Text
    token: Text
    nodes: WorldSize
    ranks: Rank
    life: Text  # drawn at random, so that a node knows its own seat


@dataclass(frozen=True, slots=True)
class PreflightPlan:
    """What node 0 has chosen for all. `skipped`: check to reason."""

    KIND: ClassVar[str] = "plan"
    checks: Annotated[tuple[Text, ...], Length(64)]
    skipped: dict[str, Sentence]


@dataclass(frozen=True, slots=True)
class NodeReadings:
    """All that a node has found in one phase."""

    KIND: ClassVar[str] = "readings"
    node: Rank
    readings: Annotated[tuple[CheckReading, ...], Length(64)]


@dataclass(frozen=True, slots=True)
class ClockGap:
    """How far a wall clock is ahead of another one (behind: below 0), and the most by which that
    may be wrong."""

    ahead_ns: Annotated[int, Range(-U63, U63)]
    within_ns: Count


@dataclass(frozen=True, slots=True)
class LinkReading:
    """One pair, measured in both directions by `one`, which has dialled `other`. `error`: why it
    gave nothing. `clock`: of the other to the one's, None: it was not read."""

    one: Rank
    other: Rank
    there_bytes_per_s: Annotated[tuple[Count, ...], Length(MAX_SAMPLES)] = ()
    back_bytes_per_s: Annotated[tuple[Count, ...], Length(MAX_SAMPLES)] = ()
    round_trip_ns: Annotated[tuple[Count, ...], Length(MAX_SAMPLES)] = ()
    error: Sentence = ""
    clock: ClockGap | None = None


@dataclass(frozen=True, slots=True)
class LinkReadings:
    """What a node has measured in one series of rounds."""

    KIND: ClassVar[str] = "links"
    node: Rank
    links: Annotated[tuple[LinkReading, ...], Length(10_000)]


@dataclass(frozen=True, slots=True)
class RingPlace:
    """Where the ranks of the ring meet; port 0: nowhere, and `error` says why."""

    KIND: ClassVar[str] = "ring"
    address: HostName
    port: Port
    error: Sentence = ""


@dataclass(frozen=True, slots=True)
class NodeReady:
    """A node has come to a place where all wait for each other."""

    KIND: ClassVar[str] = "ready"
    node: Rank


@dataclass(frozen=True, slots=True)
class SilentNodes:
    """Nodes that did not answer in time, by their number, and why node 0 thinks so."""

    KIND: ClassVar[str] = "silent"
    nodes: dict[str, Sentence]


@dataclass(frozen=True, slots=True)
class CheckRecord:
    """What a check has brought so far: in how many runs it answered, in how many of these it found
    something, and how long all took together."""

    runs: Count = 0
    found: Count = 0
    took_ms: Count = 0


@dataclass(frozen=True, slots=True)
class PreflightHistory:
    """Kept in the state directory. `losses`: by kind of machine and software, the digest that a
    mini-training gave."""

    KIND: ClassVar[str] = "preflight-history"
    checks: dict[str, CheckRecord]
    losses: dict[str, Text]
