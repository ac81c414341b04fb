"""Slowness: from its step on a rank computes for nothing, or has a quota, once in all its lives."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from keepstep.edge.probes import cgroups
from keepstep.model.snapshot import Phase
from keepstep.testing.faults import parse
from keepstep.testing.injector import FaultPlan
from keepstep.testing.lines import Lines
from keepstep.testing.slowness import Slowness, enter_quota, leave_quota


def plan(home: Path, *faults: str) -> FaultPlan:
    return FaultPlan(tuple(map(parse, faults)), 5, home / "attempts", home, (), None)


def said(home: Path) -> list[tuple[int, str]]:
    return [(line["fault"], line["what"]) for line in Lines(home / "attempts").new()]


def burnt_ms(hand: Slowness, step: int, phase: Phase = Phase.FORWARD) -> float:
    began_s = time.thread_time()
    hand(phase, step)
    return 1e3 * (time.thread_time() - began_s)


def test_from_its_step_on_every_step_computes_for_longer(tmp_path: Path) -> None:
    asked = plan(tmp_path, "slow:rank=1,step=3,factor=1.5", "kill:step=2", "slow:rank=0,step=1")
    hand = Slowness(asked, 1, step_ms=60)
    assert burnt_ms(hand, 2) < 10 and said(tmp_path) == []
    assert burnt_ms(hand, 3, Phase.UPDATE) < 10
    assert burnt_ms(hand, 3) >= 30 and burnt_ms(hand, 4) >= 30
    assert said(tmp_path) == [(0, "about to"), (0, "did")]
    assert burnt_ms(Slowness(asked, 1, step_ms=60), 5) < 10, "another life"
    assert burnt_ms(Slowness(asked, 2, step_ms=60), 5) < 10, "another rank"


@pytest.mark.parametrize(
    ("controllers", "mount", "files", "quota"),
    [
        ("0::/j\n", "cgroup2 {} cgroup2 rw", (), {"cpu.max": "30000 100000"}),
        (
            "2:cpu:/j\n",
            "cgroup {} cgroup rw,cpu",
            ("cpu.cfs_quota_us", "cpu.cfs_period_us"),
            {"cpu.cfs_quota_us": "30000", "cpu.cfs_period_us": "100000"},
        ),
    ],
)
def test_a_quota_is_written_as_the_kernel_wants_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    controllers: str,
    mount: str,
    files: tuple[str, ...],
    quota: dict[str, str],
) -> None:
    root, process = tmp_path / "cgroup", tmp_path / "proc" / "7"
    own = root / "j" / "keepstep-drill-7"
    for directory in (own, process):
        directory.mkdir(parents=True)
    for name in files:
        (own / name).write_text("-1")
    (root / "j" / "cpu.stat").write_text("nr_throttled 0\n")
    (process / "cgroup").write_text(controllers)
    (tmp_path / "mounts").write_text(mount.format(root) + " 0 0\n")
    monkeypatch.setattr(cgroups, "PROC", tmp_path / "proc")
    monkeypatch.setattr(cgroups, "MOUNTS", tmp_path / "mounts")
    assert enter_quota(7, 0.3) == own
    assert {name: (own / name).read_text() for name in quota} == quota
    assert (own / "cgroup.procs").read_text() == "7"
    leave_quota(7, own)
    assert not (root / "j" / "cgroup.procs").exists(), "not this process's"


def test_where_there_is_no_cgroup_it_cannot_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "PROC", tmp_path / "nothing")
    hand = Slowness(plan(tmp_path, "cpu-quota:rank=0,step=1"), 0, step_ms=1)
    hand(Phase.FORWARD, 1)
    assert said(tmp_path) == [(0, "about to"), (0, "cannot")]
    notes: list[Any] = [json.loads(line) for line in (tmp_path / "attempts").open()]
    assert "expected a cgroup with a processor quota" in notes[-1]["why"]
