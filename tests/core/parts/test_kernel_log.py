"""Lines of the kernel's log: 25 traces, with near misses, and what the table says of each."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from keepstep.core.parts.kernel_log import DAY_NS, KernelLog, KernelTable, bus_of, load_table
from keepstep.model.parts import KernelLine, PartPolicy, PartState
from keepstep.model.units import S_NS

TRACES: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("xid_traces.json").read_text(encoding="utf-8")
)


def table() -> KernelTable:
    return load_table(files("keepstep.core.parts").joinpath("kernel_table.json").read_text())


TABLE = table()


def lines_of(trace: dict[str, Any]) -> list[KernelLine]:
    every_ns = trace.get("every_s", 1) * S_NS
    return [KernelLine((n + 1) * every_ns, text) for n, text in enumerate(trace["lines"])]


def test_there_are_25_traces() -> None:
    assert len(TRACES) == 25 == len({trace["name"] for trace in TRACES})


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace["name"])
def test_a_trace_is_read_right(trace: dict[str, Any]) -> None:
    """Which part is called sick, if any, and the class and code of what is worst."""
    lines = lines_of(trace)
    events = KernelLog(TABLE).events(lines)
    worst = max(events, key=lambda event: event.meaning.most, default=None)
    found = None if worst is None else (worst.code, worst.meaning.name)
    expected = None if trace["class"] is None else (trace["code"], trace["class"])
    assert found == expected
    parts = KernelLog(TABLE).add(lines, lines[-1].at_ns)
    sick = [part.part for part in parts if part.health == PartState.BAD.value]
    assert sick == ([] if trace["part"] is None else [trace["part"]])
    assert parts[0].part == "kernel" and parts[0].health == "ok"


def test_a_line_is_one_event_however_the_looks_are_cut() -> None:
    """What is said depends on the lines alone."""
    for trace in TRACES:
        lines = lines_of(trace)
        at_once, by_one = KernelLog(TABLE), KernelLog(TABLE)
        together = at_once.events(lines)
        one_by_one = [event for line in lines for event in by_one.events([line])]
        assert together == one_by_one, trace["name"]


def test_sickness_is_over_after_a_while() -> None:
    log = KernelLog(TABLE)
    [_, part] = log.add([KernelLine(S_NS, "blk: I/O error, dev sda, sector 1")], S_NS)
    assert part.health == "bad"
    assert log.add([], 599 * S_NS)[1].health == "bad"
    assert log.add([], 602 * S_NS)[1].health == "ok"


def test_what_is_worse_is_not_hidden_by_what_comes_later() -> None:
    log = KernelLog(TABLE)
    reset = KernelLine(S_NS, "NVRM: Xid (PCI:0000:3b:00): 95, pid=1")
    log.add([reset], S_NS)
    restart = KernelLine(100 * S_NS, "NVRM: Xid (PCI:0000:3b:00): 8, pid=1")
    assert "Xid 95" in log.add([restart], 100 * S_NS)[1].why
    assert (
        "Xid 8"
        in log.add([KernelLine(2 * DAY_NS, "NVRM: Xid (PCI:0000:3b:00): 8, pid=1")], 2 * DAY_NS)[
            1
        ].why
    )


def test_the_table_says_where_it_is_from() -> None:
    assert TABLE.version and "Xid catalogue" in TABLE.provenance
    assert len(TABLE.xids) > 80
    assert TABLE.xids[79][0].most is PartPolicy.STOP
    assert not TABLE.xids[31][0].is_bad and not TABLE.xids[45][0].is_bad


@pytest.mark.parametrize(
    "address", ["0000:3b:00", "PCI:0000:3b:00", "00000000:3B:00.0", "3b:00.0", "3B:00"]
)
def test_an_address_has_one_form(address: str) -> None:
    assert bus_of(address) == "0000:3b:00"


@pytest.mark.parametrize(
    "odd",
    [
        "NVRM: Xid (PCI:....): 79, pid=1",
        "NVRM: Xid (PCI:0000:): 79, pid=1",
        "NVRM: Xid (:::::): 79, pid=1",
        f"NVRM: Xid (PCI:{'f' * 5000}): 79, pid=1",
        f"NVRM: Xid (PCI:0000:3b:00): {'9' * 5000}, pid=1",
    ],
    ids=lambda odd: odd[:40],
)
def test_a_line_that_nobody_understands_does_not_hide_the_one_beside_it(odd: str) -> None:
    lost = KernelLine(2 * S_NS, "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus")
    found = KernelLog(TABLE).add([KernelLine(S_NS, odd), lost], 2 * S_NS)
    assert "gpu 0000:3b:00" in [part.part for part in found if part.health == "bad"]
