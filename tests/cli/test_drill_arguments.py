"""Which drill a command line asks for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli.drill_arguments import (
    TAIL_STEPS,
    DrillArguments,
    build_drill,
    checked_faults,
)
from keepstep.errors import ConfigError
from keepstep.testing.conductor import Drill
from keepstep.testing.faults import parse

KILL = DrillArguments(fault=["kill:step=5"])


def asked(arguments: DrillArguments) -> Drill:
    return build_drill(arguments, checked_faults(arguments), Path("/w"))


def test_one_fault_and_nothing_else_said() -> None:
    assert asked(KILL) == Drill(work=Path("/w"), faults=(parse("kill:step=5"),))


def test_every_argument_arrives() -> None:
    arguments = DrillArguments(
        fault=["kill-node:node=1,step=5"],
        nproc=3,
        nodes=4,
        policy="copies:2",
        rate="1gbit",
        loopback=True,
        steps=9,
        seed=7,
        rdzv_backend="etcd",
        store=Path("/s"),
        arena_dir=Path("/a"),
        width=8,
        step_ms=1.5,
        persist_every=2,
    )
    assert asked(arguments) == Drill(
        work=Path("/w"),
        nproc=3,
        steps=9,
        seed=7,
        width=8,
        step_ms=1.5,
        persist_every=2,
        launcher="run",
        store=Path("/s"),
        arena_dir=Path("/a"),
        faults=(parse("kill-node:node=1,step=5"),),
        nodes=4,
        policy="copies:2",
        rate_bits_per_s=10**9,
        namespaces=False,
        etcd=True,
    )


def test_a_campaign_is_as_long_as_its_faults_need() -> None:
    found = asked(DrillArguments(random=20, seed=3, steps=1))
    assert len(found.faults) == 20
    assert found.steps == max(fault.step for fault in found.faults) + TAIL_STEPS
    assert asked(DrillArguments(random=20, seed=3)).faults == found.faults
    assert {f.kind for f in asked(DrillArguments(random=20, kinds="stop")).faults} <= {
        "stop",
        "kill",  # what causes a restore
    }


def test_a_soak_has_no_faults_yet() -> None:
    assert asked(DrillArguments(soak=60.0)).faults == ()


@pytest.mark.parametrize(
    ("change", "step_ms"),
    [({}, 20), ({"nodes": 2}, 150), ({"step_ms": 3.0, "nodes": 2}, 3)],
)
def test_how_long_a_step_takes(change: dict[str, Any], step_ms: float) -> None:
    assert asked(replace(KILL, **change)).step_ms == step_ms


def test_a_soak_on_one_node_has_longer_steps() -> None:
    assert asked(DrillArguments(soak=9)).step_ms == 50
    assert asked(DrillArguments(soak=9, nodes=2)).step_ms == 150


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (DrillArguments(), "expected --fault .*, --random N or --soak S, found none"),
        (replace(KILL, random=3), "expected one of them, found several"),
        (DrillArguments(random=3, soak=1), "expected one of them, found several"),
        (replace(KILL, fault=["kill:step=60"]), r"expected step= below 60 \(--steps\)"),
        (replace(KILL, fault=["kill:rank=2,step=1"]), r"expected rank= below 2 \(--nproc\)"),
        (replace(KILL, fault=["kill-node:node=0,step=1"]), "expected more than one node"),
        (replace(KILL, rdzv_backend="etcd"), "--rdzv-backend: expected c10d, or etcd with more"),
        (replace(KILL, rdzv_backend="zeus"), "--rdzv-backend: expected c10d.* found zeus"),
        (replace(KILL, launcher="walk"), "--launcher: expected one of run, torchrun, plain"),
        (replace(KILL, nodes=2, launcher="torchrun"), "--launcher: expected run with --nodes 2"),
        (replace(KILL, launcher="plain"), "--nproc: expected 1 with --launcher plain, found 2"),
        (replace(KILL, nproc=0, fault=[]), "expected --fault"),
        (DrillArguments(soak=1, nproc=0), "--nproc: expected at least 1, found 0"),
        (DrillArguments(soak=-1), "--soak: expected seconds, 0 to 31536000, found -1"),
        (DrillArguments(soak=float("inf")), "--soak: expected seconds, .*, found inf"),
        (replace(KILL, policy="raid:5"), "expected none, copies:M"),
        (replace(KILL, rate="fast"), "rate: expected a number and kbit, mbit or gbit"),
    ],
)
def test_what_cannot_be(arguments: DrillArguments, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        checked_faults(arguments)
