"""Part faults: the hand that makes a part of a node's machine look sick, or its watcher blind.

Comes in: where a node's journal lies. Goes out: a trace beside it, which the node's prober plays
from then on (a GPU that is hot, a disk that has become slow), or SIGSTOP to the prober. No device
is touched, and nothing is written where the job's data is.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from keepstep.edge.parts.prober_process import MODULE
from keepstep.edge.parts.traces import TRACES
from keepstep.model.parts import GpuReading, PartReading, PlaceReading
from keepstep.model.units import GIB, MS_NS, S_NS
from keepstep.testing.faults import BLIND, DISK_SLOW, HOT, Fault

HEAT = GpuReading(
    bus="0000:00:00", name="a trace", temperature_c=91, margin_c=1, reasons=0x40, used_ratio=1.0
)
DISK = PlaceReading("a trace", 5 * MS_NS, "", True, GIB, GIB)
SLOW_DISK = PlaceReading("a trace", 3 * S_NS, "", True, GIB, GIB)
LOOKS: dict[str, tuple[str, list[PartReading]]] = {
    HOT: ("nvml", [HEAT]),
    DISK_SLOW: ("disk", [DISK, DISK, SLOW_DISK]),
}


def strike(fault: Fault, journal: Path) -> dict[str, int]:
    """What is to be noted of it. Raises OSError."""
    if fault.kind == BLIND:
        pid = prober_of(journal)
        os.kill(pid, signal.SIGSTOP)
        return {"prober_pid": pid}
    probe, looks = LOOKS[fault.kind]
    directory = journal.parent / TRACES
    directory.mkdir(exist_ok=True)
    lines = [json.dumps([[type(each).__name__, asdict(each)]]) for each in looks]
    fresh = directory / f".{probe}"
    fresh.write_text("\n".join(lines) + "\n", encoding="utf-8")
    fresh.rename(directory / f"{probe}.jsonl")
    return {"looks": len(looks)}


def prober_of(journal: Path) -> int:
    """The process that probes for that node's agent: its command line names the directory. Raises
    ProcessLookupError."""
    traces = json.dumps(str(journal.parent / TRACES)).encode()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):
                words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
                if MODULE.encode() in words and any(traces in word for word in words):
                    return int(name)
    raise ProcessLookupError(f"no prober of {journal.parent} runs yet")
