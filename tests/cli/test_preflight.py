"""`keepstep preflight`: what it prints, its exit codes, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import keepstep.cli.preflight
from keepstep.cli.main import app
from keepstep.cli.preflight import parse_floors, parse_size, same_reading, static_reading
from keepstep.core.doctor.examination import examine
from keepstep.core.preflight.catalogue import CHECKS, RING, SAME
from keepstep.core.preflight.judgement import FleetEvidence, judge
from keepstep.errors import ConfigError
from keepstep.model.machine_facts import ProcessLimit
from keepstep.model.messages.preflight import CheckOutcome
from keepstep.runtime.preflight.process import PreflightEnd
from tests.core.doctor.sane_machine import with_facts
from tests.core.preflight.fleets import PLANTS, MadeFleet, healthy, says

FLEET = ("--nnodes", "4", "--rdzv-endpoint", "127.0.0.1:1", "--host", "127.0.0.1")


@pytest.fixture(autouse=True)
def sane(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    facts = with_facts({})
    monkeypatch.setattr(keepstep.cli.preflight, "read_machine", lambda *asked: facts)
    monkeypatch.setenv("KEEPSTEP_STATE_DIR", str(tmp_path))


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Callable[[FleetEvidence, int], list[Any]]:
    """Let the preflight end with this evidence; what it was asked for."""

    def end(evidence: FleetEvidence, node: int = 0) -> list[Any]:
        asked: list[Any] = []

        def run(*given: Any) -> PreflightEnd:
            asked.append(given)
            return PreflightEnd(node, evidence, judge(evidence))

        monkeypatch.setattr(keepstep.cli.preflight, "run_preflight", run)
        return asked

    return end


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["preflight", *words])


def planted(defect: str, node: int = 2) -> MadeFleet:
    fleet = healthy(4)
    PLANTS[defect][1](fleet, node)
    return fleet


@pytest.mark.parametrize("nodes", [1, 4, 200])
def test_the_table_fits_and_ends_in_one_line(ends: Any, nodes: int) -> None:
    ends(healthy(nodes).evidence())
    result = run()
    assert result.exit_code == 0, result.output
    head, *rows, last = [line for line in result.stdout.splitlines() if line[:4] != "note"]
    assert head.split() == ["check", "nodes", "figure", "median", "worst"]
    assert all(len(line) <= 80 for line in [head, *rows])
    what = "This machine is fit: " if nodes == 1 else f"{nodes} nodes are fit: "
    assert last.startswith(what) and last.endswith("0 defects, 0 without an answer")


def test_a_defect_is_named_with_node_reason_and_remedy(ends: Any) -> None:
    ends(planted("slow disk").evidence())
    result = run()
    assert result.exit_code == 1
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("bad ")]
    assert line.startswith("bad      disk: node 2 (host2): disk-write is ")
    assert "; checkpoints and logs wait for it" in line and ". Fix: look at the disk" in line
    (row,) = [line for line in result.stdout.splitlines() if line.startswith("disk ")]
    assert " 1/4 bad " in row and "(node 2)" in row
    assert "4 nodes are not fit: " in result.stdout


def test_no_answer_is_exit_code_2(ends: Any) -> None:
    evidence = healthy(3).evidence()
    readings = {n: tuple(r for r in g if r.check != RING) for n, g in evidence.readings.items()}
    ends(replace(evidence, readings=readings))
    result = run()
    assert result.exit_code == 2 and "unknown  ring: node 0 (host0): " in result.stdout
    assert "3 nodes are not known to be fit" in result.stdout


def test_own_is_about_this_node_alone(ends: Any) -> None:
    evidence = planted("another loss", node=2).evidence()
    for node in range(4):
        ends(evidence, node)
        assert run("--own").exit_code == (1 if node == 2 else 0)
        assert run().exit_code == 1


def test_the_document(ends: Any) -> None:
    ends(planted("slow memory", node=1).evidence(), 3)
    result = run("--json")
    document = json.loads(result.stdout)
    assert result.exit_code == document["exit_code"] == 1 and document["fit"] is False
    assert set(document) == {"fit", "exit_code", "node", "nodes", "figures", "findings", "notes"}
    assert document["node"] == 3 and len(document["nodes"]) == 4
    assert document["nodes"][1]["checks"]["memory-speed"] == "bad"
    assert document["nodes"][0]["checks"]["memory-speed"] == "ok"
    assert set(document["figures"]["memory-speed"]["nodes"]) == {"0", "1", "2", "3"}
    assert document["figures"]["memory-speed"]["unit"] == "B/s"
    (finding,) = document["findings"]
    assert (finding["check"], finding["nodes"], finding["hosts"]) == (
        "memory-speed",
        [1],
        ["host1"],
    )
    assert finding["found"] and finding["why"] and finding["fix"]


def test_what_a_node_says_cannot_move_the_cursor(ends: Any) -> None:
    fleet = healthy(3)
    says("disk", "\x1b[2J\nfit: all\r")(fleet, 0)
    ends(fleet.evidence())
    assert "\x1b" not in run().stdout and "\r" not in run().stdout


def test_options_reach_the_request(ends: Any, tmp_path: Path) -> None:
    asked = ends(healthy(4).evidence())
    words = ["--memory", "2g", "--dir", str(tmp_path), "--within", "9", "--floor", "link-speed=1e9"]
    run(*FLEET, "--node-rank", "3", "--skip", "disk,ring", *words)
    request, place = asked[0][:2]
    assert (request.nodes, request.node_rank, request.within_s) == (4, 3, 9)
    assert request.efforts.memory_bytes == 2 << 30 and request.efforts.directory == tmp_path
    assert request.skip == {"disk", "ring"} and request.floors == {"link-speed": 10**9}
    assert (place.endpoint, place.job) == (("127.0.0.1", 1), "preflight")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nnodes", "2"], "--rdzv-endpoint: expected host:port at which the 2 nodes meet"),
        (["--nnodes", "2", "--node-rank", "2", *FLEET[2:]], "--node-rank: expected 0 to 1"),
        (["--only", "memory,disks"], "found 'disks'"),
        (["--only", "disk,network"], "found 'network', which needs several nodes (--nnodes)"),
        (["--only", "ring"], "found 'ring', which needs several ranks"),
        (["--only", "disk", "--skip", "disk"], "--skip: expected to leave a check that can run"),
        (["--skip", "no"], "--skip: expected some of static"),
        (["--memory", "lots"], "--memory: expected a size such as 64m or 4g, found 'lots'"),
        (["--memory", "1k"], "expected at least 1m"),
        (["--dir", "/no/such/place"], "--dir: expected a directory"),
        (["--floor", "link-speed"], "--floor: expected FIGURE=NUMBER"),
        (["--floor", "speed=1"], "--floor: expected one of training-step"),
        (["--nproc-per-node", "0"], "--nproc-per-node: expected 1 to"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], said: str) -> None:
    result = run(*words)
    assert result.exit_code == 2 and said in " ".join(result.output.split())


def test_a_gpu_that_was_asked_for_and_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, ends: Any
) -> None:
    ends(healthy(1).evidence())
    assert run("--only", "pcie").exit_code == 0
    monkeypatch.setattr(
        keepstep.cli.preflight, "read_machine", lambda *asked: with_facts({"gpus.on_bus": 0})
    )
    result = run("--only", "pcie")
    assert result.exit_code == 2 and "'pcie', which needs a GPU, and there" in result.output


@pytest.mark.parametrize("text", ["x=nan", "x=-1", "x=inf", "x=", "=1"])
def test_floors_are_numbers_of_known_figures(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_floors([text])


def test_sizes() -> None:
    assert parse_size("--memory", "64m") == 64 << 20 and parse_size("--memory", "3G") == 3 << 30
    assert parse_size("--memory", "2097152") == 2 << 20


def test_the_doctors_checks_are_one_reading() -> None:
    assert static_reading(examine(with_facts({}))).outcome is CheckOutcome.OK
    warned = static_reading(examine(with_facts({"limits.open_files": ProcessLimit(1024, 4096)})))
    assert (warned.outcome, warned.found) == (CheckOutcome.OK, "warnings: open-files")
    low = {"limits.open_files": ProcessLimit(100, 4096)}
    broken = static_reading(examine(with_facts(low)))
    assert broken.outcome is CheckOutcome.BAD
    assert broken.found == "open-files: a process may have 100 files open"
    assert broken.fix.startswith("ulimit -n 4096") and broken.why
    two = static_reading(examine(with_facts({**low, "software.torch": None})))
    assert two.found.count(";") == 1 and "keepstep doctor has the others" in two.fix


def test_versions_are_what_must_be_the_same() -> None:
    environ = {"NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "eth0", "KEEPSTEP_SECRET": "s"}
    reading = same_reading(with_facts({"software.torch": "2.9.9"}), environ)
    traits = {trait.name: trait.value for trait in reading.traits}
    assert (reading.check, traits["torch"]) == (SAME, "2.9.9") and traits["python"]
    assert traits["NCCL's and gloo's variables"] == "NCCL_DEBUG=INFO"
    assert all(check.why and check.fix for check in CHECKS)
