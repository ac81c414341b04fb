"""Preflights of real machines: four nodes of a lab, sound ones and such with defects in what the
operating system and libraries give them; one machine alone; nodes that die half-way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.preflight import (
    NODES,
    PLANTS,
    PREFLIGHT,
    WANTED,
    begin,
    begin_planted,
    named,
    outcome,
)
from keepstep.testing.lab import Lab
from keepstep.testing.network import why_no_namespaces
from tests.processes.waiting import until

pytestmark = pytest.mark.timeout(400)

LONGEST_S = 60.0  # on an idle machine
PATIENCE_S = 240.0


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    if why_not := why_no_namespaces():
        pytest.skip(why_not)
    with Lab(NODES, tmp_path, namespaces=True) as lab:
        yield lab


def test_four_sound_nodes_pass_within_a_minute(lab: Lab) -> None:
    begun_s = time.monotonic()
    documents = [outcome(process) for process in begin(lab)]
    took_s = time.monotonic() - begun_s
    assert [document["findings"] for document in documents] == [[]] * NODES
    assert [document["node"] for document in documents] == list(range(NODES))
    for document in documents:
        checks = [set(node["checks"].values()) for node in document["nodes"]]
        assert checks == [{"ok", "skipped"}] * NODES, "only the GPU is skipped"
        assert len(document["figures"]) == 9
    assert took_s < LONGEST_S * max(1.0, os.getloadavg()[0] / 2), took_s


def test_every_planted_defect_is_named_where_it_is_and_nothing_else(
    lab: Lab, tmp_path: Path
) -> None:
    processes = begin_planted(lab, tmp_path)
    documents = [outcome(process) for process in processes]
    for document in documents:
        # four nodes measure their memory on the cores that all of them share: now and then the slow
        # one is not slower than that
        by_chance = {("memory-speed", 1)}
        assert named(document) | by_chance == WANTED, document["findings"]
        assert document["exit_code"] == 1
    found = {finding["check"]: finding["found"] for finding in documents[0]["findings"]}
    assert "it sends slowly with every sound partner" in found["network"]
    assert "numpy differs" in found["same-software"]
    assert "its clock is 300." in found["clocks"] or "its clock is 299." in found["clocks"]


def test_a_node_that_is_killed_half_way_is_told_and_nobody_hangs(lab: Lab) -> None:
    """SIGKILL after it has taken its seat."""
    processes = begin(lab, options=("--only", "static,memory,network"))
    seated = [lab.state_dir(node) for node in lab.seats]
    assert all(place.is_dir() for place in seated)
    until(lambda: children_of(processes[2].pid), "that it checks itself", PATIENCE_S)
    os.killpg(processes[2].pid, signal.SIGKILL)
    for node in (0, 1, 3):
        document = outcome(processes[node])
        assert document["exit_code"] == 2
        assert [finding["nodes"] for finding in document["findings"]] == [[2]]
        assert document["nodes"][2]["checks"]["memory"] == "unknown"
    processes[2].communicate(timeout=PATIENCE_S)


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


# -- one machine


def alone(tmp_path: Path, *options: str, plant: str = "") -> subprocess.CompletedProcess[str]:
    environ = {
        **os.environ,
        "KEEPSTEP_STATE_DIR": str(tmp_path),
        "PYTHONPATH": str(PLANTS),
        "PLANT": plant,
    }
    return subprocess.run(
        [*PREFLIGHT, *options], env=environ, capture_output=True, text=True, timeout=PATIENCE_S
    )


@pytest.mark.everyday
def test_one_machine_is_tested_alone_and_remembers(tmp_path: Path) -> None:
    first = alone(tmp_path, "--skip", "static", "--nproc-per-node", "2")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "This machine is fit: 7 checks, 0 defects, 0 without an answer" in first.stdout
    assert max(len(line) for line in first.stdout.splitlines() if line[:4] != "note") <= 80
    assert "ring " in first.stdout and "no fleet to compare with" in first.stdout
    history = json.loads((tmp_path / "preflight.json").read_text())
    assert history["checks"]["memory"]["runs"] == 1 and len(history["losses"]) == 1
    again = alone(tmp_path, "--only", "training", plant="loss")
    assert again.returncode == 1
    assert "its loss is another one than before" in again.stdout


@pytest.mark.parametrize(
    ("plant", "check", "words"),
    [
        ("memory", "memory", "memory gave back 0x"),
        ("products", "products", "gave another product: 1 elements"),
    ],
)
def test_a_machine_alone_names_what_needs_no_fleet(
    tmp_path: Path, plant: str, check: str, words: str
) -> None:
    done = alone(tmp_path, "--only", f"{check},memory-speed", plant=plant)
    assert done.returncode == 1 and f"bad      {check}: " in done.stdout
    assert words in done.stdout
    assert alone(tmp_path, "--only", f"{check},memory-speed").returncode == 0


def test_what_is_slow_is_looked_at_again_and_named_if_it_still_is(tmp_path: Path) -> None:
    limited = ("--only", "disk", "--floor", "disk-sync=4e8")
    done = alone(tmp_path, *limited, plant="disk-once")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "was-slow").exists()
    done = alone(tmp_path, *limited, plant="disk")
    assert done.returncode == 1 and "bad      disk: disk-sync is" in done.stdout
    assert "the floor is 400.0 ms; measured twice" in " ".join(done.stdout.split())


def test_a_short_time_is_spent_on_what_found_something(tmp_path: Path) -> None:
    for _ in range(2):
        alone(tmp_path, "--only", "disk,memory-speed", "--floor", "disk-sync=0")
    done = alone(tmp_path, "--only", "disk,memory-speed", "--within", "0", "--json")
    assert json.loads(done.stdout)["nodes"][0]["checks"] == {}
    history = json.loads((tmp_path / "preflight.json").read_text())["checks"]
    longest_s = max(record["took_ms"] / record["runs"] / 1000 for record in history.values())
    done = alone(
        tmp_path, "--only", "disk,memory-speed", "--within", f"{longest_s + 0.01}", "--json"
    )
    assert "disk" in json.loads(done.stdout)["nodes"][0]["checks"]


def test_ended_by_a_signal_it_leaves_no_process(tmp_path: Path) -> None:
    environ = {**os.environ, "KEEPSTEP_STATE_DIR": str(tmp_path)}
    process = subprocess.Popen(
        [*PREFLIGHT, "--only", "memory", "--memory", "8g"], env=environ, stderr=subprocess.DEVNULL
    )
    children = until(lambda: children_of(process.pid), "that it checks something", PATIENCE_S)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 130
    # they are killed, or see by themselves that nobody waits
    left = [Path(f"/proc/{child}") for child in children]
    until(lambda: not any(map(Path.exists, left)), "that nothing of it is left", PATIENCE_S)
