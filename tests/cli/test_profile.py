"""`keepstep profile`: of a job's real pages."""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from keepstep.core.pacing.schedule import Cost, Reserve, plan
from keepstep.edge.shm.collective_profile_page import (
    PLAN_FILE,
    CollectiveProfileWriter,
    profile_path,
)
from keepstep.edge.shm.memory import MEMORY
from keepstep.model.units import MIB, MS_NS

TOLD = {
    **{
        "open_because": "",
        "mu": 0.9,
        "alpha_ns": 100_000,
        "bytes_per_s": 100_000_000,
        "reserve_bytes": 800_000,
    },
    **{"chunk_bytes": 200_000, "least_bytes": 4096, "step_bytes": 5 * MIB, "late": 0},
}


def trains(machine: Any, ranks: int, steps: int = 25, seed: int = 1) -> Path:
    """A step: 40 ms idle, 100 ms a collective, 30 ms idle, 60 ms another, 20 ms idle; rank r is 5 r
    ms ahead in the second idle span."""
    rng = random.Random(seed)
    job_dir: Path = machine.settings_of("demo").job_dir
    for rank in range(ranks):
        machine.rank("demo", rank, [7], world_size=4)
        now_ns = [10**12]
        page = CollectiveProfileWriter(MEMORY, profile_path(job_dir, rank), lambda at=now_ns: at[0])
        for step in range(steps + 1):
            page.step(step)
            for idle_ms, busy_ms in [(40, 100), (30 - 5 * rank, 60 + 5 * rank), (20, 0)]:
                now_ns[0] += round(rng.gauss(idle_ms, 0.3) * MS_NS)
                if busy_ms:
                    page.began()
                    now_ns[0] += busy_ms * MS_NS
                    page.ended()
        page.close()
    return job_dir


def test_the_document(machine: Any) -> None:
    job_dir = trains(machine, 2)
    (job_dir / PLAN_FILE).write_text(json.dumps(TOLD))
    found = machine.json("profile")
    assert set(found) == {"job", "ranks", "step_ns", "idle", "told", "plan"}
    assert found["job"] == "demo" and found["told"] == TOLD
    assert [
        (r["rank"], r["profile"]["collectives"], len(r["profile"]["spans"])) for r in found["ranks"]
    ] == [(0, 2, 3), (1, 2, 3)]
    idle = [round(end / MS_NS) - round(begin / MS_NS) for begin, end in found["idle"]]
    assert idle == pytest.approx([40, 25, 20], abs=2)  # what all ranks leave
    spans = [end - begin for begin, end in found["idle"]]
    expected = plan(spans, 1, 5 * MIB, Reserve(800_000, 4), Cost(100_000, 100_000_000), 0.9, 4096)
    assert found["plan"]["why"] == expected.why and len(found["plan"]["chunks"]) == len(
        expected.chunks
    )


def test_the_picture_for_a_terminal(machine: Any) -> None:
    job_dir = trains(machine, 1)
    (job_dir / PLAN_FILE).write_text(json.dumps(TOLD))
    text = machine.run("profile", "--job", "demo").stdout
    lines = text.splitlines()
    assert lines[0] == "demo"
    bar = next(line for line in lines if line.startswith("rank 0")).split()[-1]
    assert set(bar) == {"\u2588", "\u00b7"} and bar[0] == bar[-1] == "\u00b7"
    assert abs(bar.count("\u00b7") / len(bar) - 90 / 250) < 0.03
    copies = next(line for line in lines if line.startswith("copies"))[10:]
    assert "\u2593" in copies and all(
        bar[cell] == "\u00b7" for cell, mark in enumerate(copies) if mark == "\u2593"
    )
    assert "Link: 100 us and 95.4 MiB/s" in text and "Plan: 5.0 MiB in " in text
    assert text.rstrip().endswith("Copies go while the network is idle.")


def test_the_picture_for_a_slide(machine: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    job_dir = trains(machine, 2)
    (job_dir / PLAN_FILE).write_text(json.dumps(TOLD))
    path = tmp_path / "out.svg"
    result = machine.run("profile", "--plot", str(path))
    assert result.exit_code == 0, result.output
    elements = list(ElementTree.parse(path).iter())
    texts = {e.text for e in elements if e.tag.endswith("text")}
    assert {"rank 0", "rank 1", "copies", "collectives", "idle"} <= texts
    drawn = {e.get("id"): sum(c.tag.endswith("path") for c in e.iter()) for e in elements}
    assert drawn["copies-0"] == len(machine.json("profile")["plan"]["chunks"])
    assert drawn["rank 1-0"] == 1 and drawn["rank 1-1"] == 3  # busy but for three idle spans


def test_before_anything_is_planned_or_known(machine: Any) -> None:
    trains(machine, 1, steps=2)
    text = machine.run("profile").stdout
    assert "no step was seen yet" in text and "has not planned" in text
    found = machine.json("profile")
    assert (found["plan"], found["told"], found["step_ns"], found["ranks"][0]["profile"]) == (
        None,
        None,
        0,
        None,
    )


def test_why_it_is_not_interleaved(machine: Any) -> None:
    job_dir = trains(machine, 1)
    (job_dir / PLAN_FILE).write_text(
        json.dumps({**TOLD, "open_because": "no collective was seen", "late": 3})
    )
    text = machine.run("profile").stdout
    assert "Copies are not interleaved: no collective was seen." in text
    assert "3 blocks waited too long" in text


def test_a_job_that_tells_nothing_and_no_job(machine: Any) -> None:
    result = machine.run("profile")
    assert (
        result.exit_code == 2 and "expected a job that has memory here, found none" in result.stderr
    )
    machine.rank("demo", 0, [7])
    result = machine.run("profile")
    assert (
        result.exit_code == 2
        and "expected ranks of 'demo' that record their collectives, found none" in result.stderr
    )
    assert machine.run("profile", "--plot", "out.gif").exit_code == 2
