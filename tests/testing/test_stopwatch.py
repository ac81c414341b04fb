"""Stopwatch: a line a phase, with what the page said where a step begins and where its capture is
over."""

from __future__ import annotations

import json
import os
from pathlib import Path

from benchmarks.prediction.record import Begun
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.status_page import StatusPage
from keepstep.model.snapshot import Phase, SlotState, SlotView, Stamp
from keepstep.testing.stopwatch import Stopwatch


def test_every_phase_is_told_once_and_in_its_order(tmp_path: Path) -> None:
    page = StatusPage.own(MEMORY, tmp_path / "keepstep-job", 1)
    assert page is not None
    watch = Stopwatch(tmp_path / "phases.jsonl", tmp_path / "keepstep-job", 1)
    slots = (
        SlotView(SlotState.SEALED, Stamp(6, 1)),
        SlotView(SlotState.SEALED, Stamp(5, 1)),
        SlotView(SlotState.WRITING, Stamp(7, 1)),
    )
    watch(Phase.UPDATE, 7)
    page.publish(stall_ns_last=3, payload_bytes=1000, slots=slots, copy_ns_last=20, seal_ns_last=4)
    watch(Phase.STEP, 8)
    watch(Phase.BACKWARD, 8)
    page.close()
    lines = [
        Begun(**json.loads(line)) for line in (tmp_path / "phases.jsonl").read_text().splitlines()
    ]
    assert [(begun.rank, begun.pid, begun.phase, begun.step) for begun in lines] == [
        *(
            (1, os.getpid(), "update", 7),
            (1, os.getpid(), "step", 8),
            (1, os.getpid(), "backward", 8),
        )
    ]
    assert [begun.mono_ns for begun in lines] == sorted(begun.mono_ns for begun in lines)
    assert (lines[1].stall_ns, lines[1].payload_bytes) == (3, 1000)
    # the one that is being written is none yet
    assert (lines[2].captured_step, lines[2].capture_ns) == (6, 24)
    assert lines[0].capture_ns == 0
