"""Kernel log: what the kernel's own lines say of parts: Xids of NVIDIA's driver, and some more.

Comes in: lines of the kernel's log, and a table (`kernel_table.json`, with its version and where it
is from). Goes out: the health of the parts they are about, and of `kernel`, which says that the log
is read.

* Only lines that the driver begins itself count: a line in which somebody quotes an Xid is none.
* The same code of the same GPU within a minute is one event.
* 45 is what is left of another error: never its cause. 13 and 31 are the program's or the GPU's:
  one alone accuses nobody, three within a day on one GPU do.
* A code that the table does not have is told and no more.

Invariant: what is said depends on lines and table alone, not on when they are read.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keepstep.core.parts.judge import sick, well
from keepstep.model.decoding import from_json
from keepstep.model.parts import PART_KINDS, KernelLine, PartHealth, PartPolicy, PartReading
from keepstep.model.units import S_NS

_XID = re.compile(r"^NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{1,40})\)[^:]*: *(\d{1,9})\b")
_ADDRESS = re.compile(
    r"(?i:pci:)?(?:[0-9a-fA-F]{1,8}:)?[0-9a-fA-F]+:[0-9a-fA-F]+(?:\.[0-9a-fA-F])?"
)
_BUS = re.compile(r"\b([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-7])?\b")
ONE_EVENT_NS = 60 * S_NS
DAY_NS = 24 * 3600 * S_NS
OFTEN = 3  # so many of the program's class within a day are the GPU's
PROGRAM = "program"


@dataclass(frozen=True, slots=True)
class LineClass:
    """What lines of a class say. `lasts_ns`: so long the part is called that. `most`: see
    `PartHealth`."""

    name: str
    is_bad: bool
    most: PartPolicy
    lasts_ns: int
    fix: str


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """What a line says. `code`: the Xid, None where it is another line."""

    part: str
    code: int | None
    meaning: LineClass
    why: str


@dataclass(frozen=True, slots=True)
class _Words:
    words: tuple[str, ...]
    part: str
    meaning: LineClass
    means: str


@dataclass(frozen=True, slots=True)
class KernelTable:
    """See above."""

    version: str
    provenance: str
    xids: Mapping[int, tuple[LineClass, str]]
    unknown_xid: LineClass
    lines: tuple[_Words, ...]

    def read(self, text: str) -> KernelEvent | None:
        """What a line says; None: nothing that is looked for."""
        if (found := xid_of(text)) is not None:
            of_bus, code = found
            meaning, means = self.xids.get(code, (self.unknown_xid, "not in the table"))
            why = f"Xid {code}{f', {means}' if means else ''}"
            return KernelEvent(f"gpu {of_bus}", code, meaning, why)
        for line in self.lines:
            if all(word in text for word in line.words):
                bus = _BUS.search(text) if line.part == "gpu" else None
                part = line.part if bus is None else f"{line.part} {bus_of(bus[1])}"
                return KernelEvent(part, None, line.meaning, f"{line.means}: {text[:120]}")
        return None


def xid_of(text: str) -> tuple[str, int] | None:
    """Of which GPU, by its bus, and its number; None: the line is none of the driver's Xids."""
    found = _XID.match(text)
    return None if found is None else (bus_of(found[1]), int(found[2]))


def bus_of(address: str) -> str:
    """A PCI address in one form, `0000:3b:00`: the driver writes it in several. What is none stays
    as it is: a line that is not understood must not hide the ones beside it."""
    if _ADDRESS.fullmatch(address) is None:
        return address.lower()
    domain, _, rest = address.lower().removeprefix("pci:").partition(":")
    if rest.count(":") == 0:  # without a domain
        domain, rest = "0", f"{domain}:{rest}"
    return f"{int(domain, 16):04x}:{rest.partition('.')[0]}"


def load_table(text: str | bytes) -> KernelTable:
    """Raises ValueError or KeyError when it is not one."""
    plain = from_json(text)
    classes = {
        name: LineClass(
            name,
            said["health"] == "bad",
            PartPolicy[said["most"].upper()],
            said["lasts_s"] * S_NS,
            said["fix"],
        )
        for name, said in plain["classes"].items()
    }
    lines = tuple(
        _Words(tuple(each["words"]), each["part"], classes[each["class"]], each["means"])
        for each in plain["lines"]
    )
    odd = [line.part for line in lines if line.part not in PART_KINDS]
    if odd:
        raise ValueError(f"expected a kind of part, found {odd[0]!r}")
    return KernelTable(
        plain["version"],
        plain["provenance"],
        {int(code): (classes[name], means) for code, (name, means) in plain["xids"].items()},
        classes[plain["unknown_xid"]],
        lines,
    )


class KernelLog:
    """See `Judge`. Of lines in the order in which they were written."""

    def __init__(self, table: KernelTable) -> None:
        self._table = table
        self._told: dict[tuple[str, str], int] = {}  # when a part was last said to have that
        self._programs: defaultdict[str, deque[int]] = defaultdict(lambda: deque(maxlen=OFTEN))
        self._now: dict[str, tuple[int, KernelEvent]] = {}  # by part: until when, and what

    def events(self, lines: Sequence[KernelLine]) -> list[KernelEvent]:
        """What is new among these, each once."""
        found = []
        for line in lines:
            event = self._table.read(line.text)
            if event is None:
                continue
            what = (event.part, str(event.code or event.why))
            last_ns = self._told.get(what)
            self._told[what] = line.at_ns
            if last_ns is None or line.at_ns - last_ns > ONE_EVENT_NS:
                found.append(self._often(event, line.at_ns))
        return found

    def _often(self, event: KernelEvent, at_ns: int) -> KernelEvent:
        """The same, or what it comes to when it is not the first."""
        if event.meaning.name != PROGRAM:
            return event
        times = self._programs[event.part]
        times.append(at_ns)
        if len(times) < OFTEN or at_ns - times[0] > DAY_NS:
            return event
        worse = self._table.xids[48][0]
        why = f"{event.why}, {OFTEN} times within a day"
        return KernelEvent(event.part, event.code, worse, why)

    def add(self, readings: Sequence[PartReading], at_ns: int) -> list[PartHealth]:
        """See `Judge`."""
        lines = [each for each in readings if isinstance(each, KernelLine)]
        for event in self.events(lines):
            before = self._now.get(event.part)
            is_worse = before is None or event.meaning.most >= before[1].meaning.most
            if event.meaning.is_bad and (is_worse or (before and before[0] <= at_ns)):
                self._now[event.part] = (at_ns + event.meaning.lasts_ns, event)
        found = [well("kernel", at_ns)]
        for part, (until_ns, event) in self._now.items():
            if at_ns < until_ns:
                meaning = event.meaning
                found.append(sick(part, at_ns, event.why, meaning.fix, meaning.most))
            else:
                found.append(well(part, at_ns))
        return found
