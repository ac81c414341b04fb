"""Parts: what of a machine can be sick, what a probe reads of it, and what that says.

Values only. `edge/parts/` reads them, each probe in a process of its own; `core/parts/` judges;
`runtime/agent/parts_watch.py` acts. None in a reading: nobody says.

Invariant: what nobody has seen lately is UNKNOWN. A probe that saw nothing is no witness of health.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum, IntEnum
from typing import Any, NamedTuple, get_args

from keepstep.errors import ConfigError
from keepstep.model.decoding import (
    a_count,
    a_list,
    a_number,
    a_record,
    a_text,
    an_object,
    from_json,
)
from keepstep.model.units import MS_NS, S_NS


class PartState(Enum):
    """Of a part."""

    OK = "ok"
    BAD = "bad"
    UNKNOWN = "unknown"


class PartPolicy(IntEnum):
    """What is done about a sick part, the mildest first.

    WARN: it is told. AVOID: at the job's next restart its node leaves its place to a spare. LEAVE:
    the job restarts for that now, where the other nodes' memory can do without this one. STOP: the
    job ends as by SIGTERM, its newest step in the store.
    """

    WARN = 0
    AVOID = 1
    LEAVE = 2
    STOP = 3


PART_KINDS = ("gpu", "nic", "disk", "shm", "memory", "cpu", "clock", "kernel")
OFF = "off"


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One look at a GPU. `bus`: its PCI address. `margin_c`: degrees left to where it is slowed
    down. `reasons`: why its clock is what it is (NVML's bits of clock events). `used_ratio`: of the
    last second in which some kernel ran. `uncorrected`, `corrected`: ECC errors since the driver
    was loaded. `links`, `link_errors`: NVLinks that are up, and what they have counted of replays,
    recoveries and checksum errors."""

    bus: str
    name: str = ""
    temperature_c: int | None = None
    margin_c: int | None = None
    reasons: int | None = None
    clock_mhz: int | None = None
    used_ratio: float | None = None
    uncorrected: int | None = None
    corrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    links: int | None = None
    link_errors: int | None = None


@dataclass(frozen=True, slots=True)
class NicReading:
    """One look at a network interface. `changes`: how often its carrier came or went. `errors` and
    `dropped`: of packets both ways; beside them each way, None where it is not counted.
    `has_device`: it is a card's; virtual ones (bridges, veth) come and go as programs like."""

    name: str
    is_up: bool
    changes: int | None
    packets: int
    errors: int
    dropped: int
    received_errors: int | None = None
    sent_errors: int | None = None
    received_dropped: int | None = None
    sent_dropped: int | None = None
    has_device: bool = True


@dataclass(frozen=True, slots=True)
class PortReading:
    """One look at a port of an RDMA adapter. `state`: InfiniBand's number of it, 4: active. The
    rest are counters: how often the link went `down` or `recovered` from errors, damaged symbols
    and packets, packets that were not sent (`discards`) or were (`packets`); of the transport, what
    came out of sequence, and how often a requester was told so or heard nothing in time."""

    device: str
    port: int
    state: int | None
    downed: int | None = None
    recovered: int | None = None
    symbol_errors: int | None = None
    received_errors: int | None = None
    discards: int | None = None
    packets: int | None = None
    out_of_sequence: int | None = None
    sequence_errors: int | None = None
    timeouts: int | None = None

    @property
    def name(self) -> str:
        """`mlx5_0/1`."""
        return f"{self.device}/{self.port}"


@dataclass(frozen=True, slots=True)
class PlaceReading:
    """A directory: so many bytes were written, forced out, and read back. `refusal`: why not, empty
    when they were. `is_same`: what was read is what was written."""

    path: str
    took_ns: int
    refusal: str
    is_same: bool
    free_bytes: int | None
    total_bytes: int | None


@dataclass(frozen=True, slots=True)
class PressureReading:
    """Of the cgroup, or the machine where it counts none. `stall_ns`: in which some process waited
    for memory, in all. `periods`, `throttled`: of the quota of processor time, and of them those in
    which somebody had to wait. `heat`: how often a core was slowed down for its heat."""

    stall_ns: int | None
    available_ratio: float | None
    periods: int | None
    throttled: int | None
    heat: int | None


@dataclass(frozen=True, slots=True)
class ClockReading:
    """`wall_ns` and `mono_ns` of one moment, `spread_ns` apart at most."""

    wall_ns: int
    mono_ns: int
    spread_ns: int


@dataclass(frozen=True, slots=True)
class KernelLine:
    """A line of the kernel's log, and when it was written, since the machine started."""

    at_ns: int
    text: str


PartReading = (
    GpuReading
    | NicReading
    | PortReading
    | PlaceReading
    | PressureReading
    | ClockReading
    | KernelLine
)
READINGS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(PartReading)}


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """What one run of a probe brought. `at_ns`: when it was over (CLOCK_MONOTONIC). `blind`: why it
    is no witness this time (it hung, it died, its canary was not seen), empty: it is one. `cursor`:
    from where the probe's next look reads on, -1: from now."""

    probe: str
    at_ns: int
    took_ns: int
    blind: str
    readings: tuple[PartReading, ...] = ()
    cursor: int = -1

    def to_line(self) -> str:
        """For a pipe."""
        plain = {
            **{
                name: getattr(self, name)
                for name in ("probe", "at_ns", "took_ns", "blind", "cursor")
            },
            "readings": [[type(each).__name__, asdict(each)] for each in self.readings],
        }
        return json.dumps(plain, separators=(",", ":")) + "\n"


def answer_from_line(line: str | bytes) -> ProbeAnswer:
    """The inverse. Raises ValueError on anything else."""
    plain = an_object(from_json(line))
    readings = []
    for each in a_list(plain.get("readings")):
        name, values = a_list(each)
        if a_text(name) not in READINGS:
            raise ValueError(f"expected a kind of reading, found {name!r:.40}")
        readings.append(a_record(READINGS[name], values))
    return ProbeAnswer(
        a_text(plain.get("probe")),
        a_count(plain.get("at_ns")),
        a_count(plain.get("took_ns")),
        a_text(plain.get("blind")),
        tuple(readings),
        a_cursor(plain.get("cursor", -1)),
    )


def a_cursor(plain: Any) -> int:
    """Raises ValueError on what is none."""
    return a_count(plain, least=-1)


class PartHealth(NamedTuple):
    """What is said of a part. `part`: its kind and, of several, which. `health`: the word of
    `PartState`. `why`: a clause with its numbers, `fix`: the cheapest thing to do about it. `most`:
    the harshest `PartPolicy` that this is worth. `seen_ns`: when that was last looked at, 0:
    never. `slows`: what is sick slows down the ranks that compute with it: heat, power, or a clock
    that is below its peers'."""

    part: str
    health: str
    why: str = ""
    fix: str = ""
    most: int = int(PartPolicy.STOP)
    seen_ns: int = 0
    slows: bool = False

    @property
    def part_kind(self) -> str:
        """Which of PART_KINDS."""
        return self.part.partition(" ")[0]


class PartNumber(NamedTuple):
    """A number that a probe has read, as other exporters name it. `label` is empty where there is
    one such number; where it takes several, their names and values stand with commas between."""

    name: str
    label: str
    of: str
    value: float


@dataclass(frozen=True, slots=True)
class PartsReport:
    """All parts of a node, as its agent last told. `boot`: of the machine's life to which the
    times belong. `numbers`: what good witnesses have read."""

    at_ns: int
    boot: str
    parts: tuple[PartHealth, ...]
    numbers: tuple[PartNumber, ...] = ()

    def to_text(self) -> bytes:
        """For a file."""
        plain = {
            "at_ns": self.at_ns,
            "boot": self.boot,
            "parts": [part._asdict() for part in self.parts],
            "numbers": self.numbers,
        }
        return json.dumps(plain, separators=(",", ":")).encode()


_HEALTHS = {health.value for health in PartState}


def report_from_text(text: bytes) -> PartsReport:
    """The inverse. Raises ValueError on anything else."""
    plain = an_object(from_json(text))
    parts = []
    for each in a_list(plain.get("parts")):
        values = an_object(each)
        if values.keys() != set(PartHealth._fields) or values["health"] not in _HEALTHS:
            raise ValueError(f"expected a part's health, found {each!r:.80}")
        part, health, why, fix = (a_text(values[name]) for name in PartHealth._fields[:4])
        most, seen_ns = a_count(values["most"]), a_count(values["seen_ns"])
        if not isinstance(slows := values["slows"], bool):
            raise ValueError(f"expected whether a part slows ranks down, found {slows!r:.40}")
        parts.append(PartHealth(part, health, why, fix, most, seen_ns, slows))
    numbers = []
    for each in a_list(plain.get("numbers")):
        name, label, of, value = a_list(each)
        numbers.append(PartNumber(a_text(name), a_text(label), a_text(of), a_number(value)))
    at_ns, boot = a_count(plain.get("at_ns")), a_text(plain.get("boot"))
    return PartsReport(at_ns, boot, tuple(parts), tuple(numbers))


def parse_part_policies(text: str) -> Mapping[str, PartPolicy] | None:
    """`warn`, or `gpu=leave,nic=avoid`; what is not named is warned of. None: `off`. Raises
    ConfigError."""
    if text == OFF:
        return None
    policies = dict.fromkeys(PART_KINDS, PartPolicy.WARN)
    words = {policy.name.lower(): policy for policy in PartPolicy}
    for said in filter(None, (part.strip() for part in text.split(","))):
        name, sign, word = (each.strip() for each in said.partition("="))
        if not sign and name in words:
            policies = dict.fromkeys(PART_KINDS, words[name])
        elif sign and name in policies and word in words:
            policies[name] = words[word]
        else:
            raise ConfigError(
                f"sick_parts: expected off, {', '.join(words)}, or one of these for a part "
                f"({', '.join(PART_KINDS)}), such as gpu=leave,nic=avoid, found {said!r}"
            )
    return policies


@dataclass(frozen=True, slots=True)
class ProbeKind:
    """A probe: how often it runs, and which kinds of part it speaks of. `needs`: what has to be in
    the machine for it to run at all, empty: nothing."""

    every_ns: int
    kinds: tuple[str, ...]
    needs: str = ""


PROBES: Mapping[str, ProbeKind] = {
    "nvml": ProbeKind(10 * S_NS, ("gpu",), "NVIDIA's driver"),
    "amd": ProbeKind(10 * S_NS, ("gpu",), "AMD's driver"),
    "nic": ProbeKind(10 * S_NS, ("nic",)),
    "disk": ProbeKind(30 * S_NS, ("disk",)),
    "shm": ProbeKind(30 * S_NS, ("shm",)),
    "pressure": ProbeKind(10 * S_NS, ("memory", "cpu")),
    "clock": ProbeKind(10 * S_NS, ("clock",)),
    "kernel": ProbeKind(10 * S_NS, ("kernel",)),
}
# A probe that has not answered by then is killed, and has seen nothing.
DEADLINE_NS = 1500 * MS_NS
# So often the process that runs the probes says that it lives.
BEAT_NS = 5 * S_NS
BEAT = "beat"  # the name of such an answer
# After so long without a word of it nobody knows anything; and it is ended and started anew.
SILENT_NS = 15 * S_NS
# What an agent has not told again for so long is no news of now.
STALE_NS = 20 * S_NS
assert DEADLINE_NS < 2 * S_NS < BEAT_NS < SILENT_NS
assert SILENT_NS <= 30 * S_NS
assert STALE_NS <= 30 * S_NS
