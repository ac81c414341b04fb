"""Traces recorded on a machine: recorded here and now, and those that lie in `recorded/`."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
from pathlib import Path

import pytest

from keepstep.core.parts.judgement import Judgement
from keepstep.core.parts.redactor import Redactor
from keepstep.edge.parts import traces
from keepstep.edge.parts.probe import Targets
from keepstep.edge.parts.recorder import record
from keepstep.errors import ConfigError
from keepstep.model.parts import PROBES, PartHealth, PartState, ProbeAnswer
from tests.core.parts.test_kernel_log import TABLE

RECORDED = Path(__file__).with_name("recorded")
REDACTOR = Redactor((socket.gethostname(), socket.gethostname().partition(".")[0]))
NAMES = sorted(path.stem for path in RECORDED.glob("*.jsonl"))


def looks_of(directory: Path, probe: str) -> list[tuple[object, ...]]:
    """All of a trace, as it is played."""
    targets = Targets(directory, directory, 1, traces=directory)
    found, cursor = [], -1
    while (look := traces.play(probe, targets, cursor)) is not None and look.cursor != cursor:
        found.append((look.readings, look.blind))
        cursor = look.cursor
    return found


def judged(directory: Path, probe: str) -> tuple[PartHealth, ...]:
    """What is said of its parts after all looks."""
    judgement, at_ns = Judgement(TABLE, 0), 0
    for number, (readings, blind) in enumerate(looks_of(directory, probe)):
        at_ns = (number + 1) * PROBES[probe].every_ns
        judgement.hear(ProbeAnswer(probe, at_ns, 1, blind, readings))  # type: ignore[arg-type]
    kinds = PROBES[probe].kinds
    return tuple(part for part in judgement.parts(at_ns) if part.part_kind in kinds)


def own_copy(tmp_path: Path) -> Path:
    """A trace is played out of a directory that is this user's alone."""
    there = tmp_path / "own" / "traces"
    there.mkdir(parents=True, mode=0o700)
    for path in RECORDED.glob("*.jsonl"):
        (there / path.name).write_text(path.read_text())
    return there


def test_what_is_recorded_here_is_played_back(tmp_path: Path) -> None:
    for name in ("arena", "disk"):
        (tmp_path / name).mkdir()
    room = tmp_path / "room"
    room.mkdir(mode=0o700)
    found = record(
        Targets(tmp_path / "arena", tmp_path / "disk", os.getpid()), room / "t", 2.5, REDACTOR
    )
    assert {"nic", "disk", "shm", "clock", "pressure", "kernel"} <= found.keys()
    for probe, count in found.items():
        path = room / "t" / f"{probe}.jsonl"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert len(looks_of(room / "t", probe)) == count
        assert str(tmp_path) not in path.read_text()
    readings, blind = looks_of(room / "t", "shm")[0]
    assert blind or readings
    with pytest.raises(ConfigError, match="expected a new or empty directory"):
        record(Targets(tmp_path, tmp_path, 1), room / "t", 0.2, REDACTOR)
    with pytest.raises(ConfigError, match="expected a directory to write to"):
        record(Targets(tmp_path, tmp_path, 1), room / "t" / "nic.jsonl", 0.2, REDACTOR)


def test_a_look_that_saw_nothing_is_played_as_one(tmp_path: Path) -> None:
    there = own_copy(tmp_path)
    (there / "nic.jsonl").write_text(
        traces.look_to_line((), 'no "answer" within 1.5 s') + traces.look_to_line((), "")
    )
    assert looks_of(there, "nic") == [((), 'no "answer" within 1.5 s'), ((), "")]


def test_there_are_traces_of_a_machine() -> None:
    assert {"nic", "disk", "shm", "clock", "pressure", "kernel"} <= set(NAMES)


@pytest.mark.parametrize("probe", NAMES)
def test_a_recorded_machine_is_judged_as_it_was(tmp_path: Path, probe: str) -> None:
    """It was sound."""
    said = judged(own_copy(tmp_path), probe)
    assert said, "its parts are known"
    for part in said:
        assert part.health == PartState.OK.value, part


@pytest.mark.parametrize("probe", NAMES)
def test_a_recorded_trace_names_nobody(probe: str) -> None:
    text = (RECORDED / f"{probe}.jsonl").read_text()
    assert socket.gethostname().lower() not in text.lower()
    assert not re.search(r"/\w+/\w", text) and not re.search(r"\d+\.\d+\.\d+\.\d+", text)
    for line in text.splitlines():
        json.loads(line)
