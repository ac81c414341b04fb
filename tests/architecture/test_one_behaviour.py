"""One behaviour: what the swarm judges is the product's own code, and no word names two classes."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "keepstep"

# What belongs to a real process alone: its main, its threads, its environment, its sockets.
PROCESS_MAINS = {
    "keepstep.runtime.agent.pod_replacing",
    "keepstep.runtime.agent.process",
    "keepstep.runtime.agent.supervisor",
    "keepstep.runtime.keeper.open_links",
    "keepstep.runtime.keeper.process",
    "keepstep.runtime.persister.process",
    "keepstep.runtime.rank.device_clock",  # the swarm has no device
    "keepstep.runtime.rank.device_pace",
    "keepstep.runtime.rank.driven_rank",
    "keepstep.runtime.rank.driver",
    "keepstep.runtime.rank.entrance",
    "keepstep.runtime.rank.last_step",
    "keepstep.runtime.rank.process_world",
    *(
        f"keepstep.runtime.rank.job{name}"
        for name in (
            "",
            ".checkpoint_requests",
            ".entry",
            ".optimizer_hooks",
            ".phases",
            ".process_hooks",
            ".reports",
            ".step_loop",
        )
    ),
    "keepstep.runtime.rank.job.buddy_check",  # its other side is torch
    "keepstep.runtime.rank.session",
    "keepstep.runtime.rank.standby",
    "keepstep.runtime.rank.step",
    "keepstep.runtime.rank.step_clock",
    "keepstep.runtime.rank.step_measure",
    "keepstep.runtime.rank.step_numbers",
    # Runs on the program's own thread, among its collectives.
    "keepstep.runtime.rank.calibration",
    "keepstep.runtime.rank.doubt",
    "keepstep.runtime.rank.takes_back",
    "keepstep.runtime.rank.numbers_journal",
    "keepstep.runtime.rank.job.local_steps",
    "keepstep.runtime.rank.job.micro_batches",
    "keepstep.runtime.rank.job.partial_sums",
    # Served to people and monitors; decides nothing.
    "keepstep.runtime.agent.metrics",
    # Tests machines before a job, and is no part of one.
    *(
        f"keepstep.runtime.preflight{name}"
        for name in (
            *("", ".child", ".fleet", ".living", ".local_checks", ".meeting", ".process"),
            *(".request", ".rounds"),
        )
    ),
}
RUN_SEEDS = """
import json, sys
from keepstep.sim.protocol.swarm import run
for seed in range(3):
    run(seed)
print(json.dumps(sorted(name for name in sys.modules if name.startswith("keepstep."))))
"""
MIN_METHODS = 3  # a class with fewer is no behaviour to speak of

Class = tuple[str, str]  # module, name


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def classes() -> dict[Class, ast.ClassDef]:
    return {
        (module_of(path), node.name): node
        for path in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    """The modules of keepstep that a run of the swarm loads."""
    found = subprocess.run(
        [sys.executable, "-c", RUN_SEEDS], capture_output=True, text=True, check=True
    )
    return set(json.loads(found.stdout))


def test_a_swarm_run_loads_every_module_of_the_runtime(loaded: set[str]) -> None:
    runtime = {module_of(path) for path in (SOURCE / "runtime").rglob("*.py")}
    assert runtime - loaded == PROCESS_MAINS


def test_a_swarm_run_loads_the_wire(loaded: set[str]) -> None:
    wire = {module_of(path) for path in (SOURCE / "core" / "wire").rglob("*.py")}
    assert wire - loaded == set()


def test_no_class_of_the_simulation_implements_what_the_product_does() -> None:
    found = classes()
    methods = {
        name: {f.name for f in node.body if isinstance(f, ast.FunctionDef)}
        for name, node in found.items()
    }
    public = {name: {m for m in own if not m.startswith("_")} for name, own in methods.items()}
    protocols = {
        name
        for name, node in found.items()
        if any("Protocol" in ast.unparse(base) for base in node.bases)
    }
    product = [
        name
        for name, own in public.items()
        if name[0].startswith(("keepstep.runtime.", "keepstep.core."))
        and name not in protocols
        and len(own) >= MIN_METHODS
    ]
    twins = [
        (name, twin)
        for twin, own in public.items()
        if twin[0].startswith("keepstep.sim.protocol.")
        for name in product
        if public[name] <= own
    ]
    assert twins == []


def test_no_two_modules_define_a_class_of_the_same_name() -> None:
    """Ports are Protocols, and some have the name of what they stand for."""
    homes = defaultdict(list)
    for module, name in classes():
        homes[name].append(module)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}
