"""`keepstep simulate` and `keepstep plan`: what they print, as people and as programs read it, and
what they refuse."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from keepstep.cli.main import app
from tests.sim.economics.test_replay import EVENTS as JOURNAL

CLUSTER = """
nodes = 8
gpus_per_node = 4
state_gb = 80
iteration_s = 10
memory_gb = 64
network_gbps = 100
store_gbps = 10
detection_s = 10
restart_s = 120
in_process_restart_s = 15
replacement_s = 600

[[failures]]
name = "crash"
scope = "rank"
per_day = 3

[[failures]]
name = "machine"
scope = "node"
per_node_day = 0.1
"""


def asked(*words: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, words, env={"COLUMNS": "250"})
    assert result.exit_code == code, result.output
    return result


def answer(*words: str) -> Any:
    return json.loads(asked(*words, "--json").stdout)


def refused(*words: str) -> str:
    return str(asked(*words, code=2).stderr)


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    (tmp_path / "mine.toml").write_text(CLUSTER)
    return str(tmp_path / "mine.toml")


def test_the_published_figure_has_eight_points_for_three_systems() -> None:
    runs = answer("simulate", "--preset", "gemini-fig15")["runs"]
    assert len(runs) == 24 and {run["policy"] for run in runs} == {"gemini", "highfreq", "strawman"}
    at_8 = {run["policy"]: run["effective_ratio"] for run in runs if run["failures_per_day"] == 8}
    assert at_8 == pytest.approx({"gemini": 0.952, "highfreq": 0.714, "strawman": 0.387}, abs=0.01)


def test_other_points_of_the_figure() -> None:
    runs = answer("simulate", "--preset", "gemini-fig15", "--failures-per-day", "3,5")["runs"]
    assert [run["failures_per_day"] for run in runs] == [3, 3, 3, 5, 5, 5]
    thousand = {
        run["policy"]: run
        for run in answer("simulate", "--preset", "gemini-fig15", "--nodes", "1000")["runs"]
    }
    assert {name: run["failures_per_day"] for name, run in thousand.items()} == dict.fromkeys(
        thousand, 15.0
    )
    ratios = {name: run["effective_ratio"] for name, run in thousand.items()}
    assert ratios == pytest.approx({"gemini": 0.91, "highfreq": 0.588, "strawman": 0.0}, abs=0.01)


def test_a_cluster_from_a_file(cluster: str) -> None:
    found = answer(
        "simulate",
        cluster,
        "--policies",
        "store:1h,copies:2,copies:2/in-process/spares:2",
        "--seeds",
        "5",
        "--gpu-hour-cost",
        "2",
    )
    assert [run["policy"] for run in found["runs"]] == [
        "store:1h",
        "copies:2",
        "copies:2/in-process/spares:2",
    ]
    store, copies, best = found["runs"]
    assert store["effective_ratio"] < copies["effective_ratio"] < best["effective_ratio"] < 1
    for run in found["runs"]:
        spread = run["effective_ratio_spread"]
        assert (
            spread["least"] <= spread["median"] <= spread["most"]
            and spread["low"] < run["effective_ratio"] < spread["high"]
        )
        shares = (
            run["effective_ratio"] + run["lost_ratio"] + run["down_ratio"] + run["stalled_ratio"]
        )
        assert shares == pytest.approx(1) and run["failures_per_day"] == pytest.approx(3.8)
    assert best["gpu_hours"] == 10 * 4 * 720 and best["cost"] == 2 * best["gpu_hours"]
    assert copies["memory_bytes"] == 40e9 and store["memory_ratio"] == 0 < copies["memory_ratio"]


def test_the_same_seeds_give_the_same_answer(cluster: str) -> None:
    words = "simulate", cluster, "--policies", "copies:2", "--seeds", "2"
    assert answer(*words) == answer(*words) != answer(*words, "--first-seed", "2")


def test_the_usual_policies_are_compared_when_none_is_named(cluster: str) -> None:
    result = asked("simulate", cluster, "--seeds", "2", "--days", "5")
    for policy in ("store:3h", "store:max", "copies:2", "parity:4", "copies:2/in-process/spares:"):
        assert policy in result.stdout
    assert "8 nodes, 32 GPUs, 3.8 failures a day, 5 days, 2 seeds" in result.stdout


def test_what_does_not_fit_is_left_out_and_said_unless_it_was_asked_for(cluster: str) -> None:
    Path(cluster).write_text(CLUSTER.replace("memory_gb = 64", "memory_gb = 30"))
    result = asked("simulate", cluster, "--seeds", "1", "--json")
    assert "parity:4" in [run["policy"] for run in json.loads(result.stdout)["runs"]]
    assert "left out: copies:2: expected at most 27.9 GiB a node" in result.stderr
    assert "found a need of 37.3 GiB" in refused("simulate", cluster, "--policies", "copies:2")


def test_other_sizes_and_rates_of_a_cluster(cluster: str) -> None:
    found = answer(
        "simulate",
        cluster,
        "--policies",
        "store:1h",
        "--seeds",
        "1",
        "--nodes",
        "16",
        "--failures-per-day",
        "12",
    )
    assert found["cluster"]["nodes"] == 16 and found["runs"][0][
        "failures_per_day"
    ] == pytest.approx(12)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("simulate",),
            "expected a file or --preset NAME (p4d-16, p4d-1000, llama3-16384, gpus-100k), "
            "found neither",
        ),
        (("simulate", "--preset", "p4d"), "found 'p4d'; did you mean 'p4d-16'?"),
        (("simulate", "no-such.toml"), "expected a file that can be read, found 'no-such.toml'"),
        (("simulate", "--preset", "p4d-16", "--policies", "raid:5"), "expected none, copies:M"),
        (("simulate", "--preset", "p4d-16", "--seeds", "0"), "1 or more seeds, found 30 and 0"),
        (
            ("simulate", "--preset", "p4d-16", "--failures-per-day", "-2"),
            "expected numbers of 0 or more, such as 3,5, found '-2'",
        ),
        (
            ("simulate", "--preset", "p4d-16", "--failures-per-day", "2,3"),
            "expected one value, except with --preset gemini-fig15, found 2,3",
        ),
        (("simulate", "--preset", "gemini-fig15", "--nodes", "many"), "found 'many'"),
        (
            ("simulate", "--preset", "gemini-fig15", "--policies", "copies:2"),
            "compares gemini, highfreq, strawman, found 'copies:2'",
        ),
        (
            ("simulate", "--preset", "gemini-fig15", "--nodes", "2.5"),
            "expected whole numbers of 1 or more, found '2.5'",
        ),
        (
            ("simulate", "--preset", "p4d-16", "--gpu-hour-cost", "-1"),
            "--gpu-hour-cost: expected 0 or more, found -1",
        ),
        (
            ("simulate", "--preset", "p4d-16", "--plot", "figure.pdf"),
            "expected a file that ends in .svg, .html, .png, found 'figure.pdf'",
        ),
        (
            ("simulate", "--preset", "p4d-16", "--plot", "no/such/figure.svg"),
            "expected a directory, found no 'no/such'",
        ),
        (
            ("plan", "--preset", "p4d-16", "--failures-per-day", "-1"),
            "--failures-per-day: expected 0 or more, found -1",
        ),
        (("plan", "--preset", "p4d-16", "--nodes", "0"), "nodes: expected 1 or more, found 0"),
    ],
)
def test_what_cannot_be_is_said(words: tuple[str, ...], expected: str) -> None:
    assert expected in refused(*words)


def test_both_a_file_and_a_preset_and_what_is_no_toml(cluster: str, tmp_path: Path) -> None:
    assert "found both" in refused("simulate", cluster, "--preset", "p4d-16")
    (tmp_path / "bad.toml").write_text("nodes = = 3")
    assert "expected TOML in" in refused("plan", str(tmp_path / "bad.toml"))


@pytest.mark.parametrize(
    ("preset", "texts"),
    [
        ("p4d-16", {"copies:2", "store:max", "useful", "redone", "100%", "Where the time goes"}),
        ("gemini-fig15", {"gemini", "highfreq", "strawman", "failures a day", "100%"}),
    ],
)
def test_a_figure(preset: str, texts: set[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    svg, html, png = (tmp_path / f"figure.{suffix}" for suffix in ("svg", "html", "png"))
    for path in (svg, html, png):
        asked("simulate", "--preset", preset, "--seeds", "2", "--plot", str(path))
    found = {e.text for e in ElementTree.parse(svg).iter() if e.tag.endswith("text")}
    assert texts <= found, "its text is text"
    page = html.read_text()
    assert svg.read_text()[svg.read_text().index("<svg") :] in page
    references = re.findall(r'(?:href|src)="([^"]*)"', page)
    assert all(reference.startswith("#") for reference in references), "it needs nothing else"
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_same_numbers_make_the_same_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    once, again = tmp_path / "once.svg", tmp_path / "again.svg"
    for path in (once, again):
        asked("simulate", "--preset", "p4d-16", "--seeds", "2", "--plot", str(path))
    assert once.read_bytes() == again.read_bytes()


def test_a_figure_without_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "figure.svg"
    message = refused("simulate", "--preset", "gemini-fig15", "--plot", str(path))
    assert "pip install 'keepstep[plot]'" in message and not path.exists()


def test_a_plan_says_what_and_why(cluster: str) -> None:
    found = answer("plan", cluster)
    assert found["redundancy"] == "copies:2" and found["policy"].startswith(
        "copies:2/in-process/spares:"
    )
    assert (
        found["store_interval_s"]["chosen"] > 0
        and found["memory_bytes"] == 40e9
        and 6 <= len(found["why"]) <= 14
    )
    assert found["effective_ratio"] <= max(
        candidate["effective_ratio"] for candidate in found["candidates"]
    )
    assert "rs:8+2" in found["refused"], "ten nodes are needed, there are eight"
    shown = asked("plan", cluster, "--all").stdout
    assert (
        shown.splitlines()[0] == found["policy"]
        and found["why"][1] in shown
        and "to the store a day" in shown
    )


def test_a_plan_for_a_hundred_thousand_gpus() -> None:
    found = answer("plan", "--preset", "gpus-100k")
    assert (
        found["redundancy"] == "copies:2"
        and found["spares"] == found["spares_p99"] > 1
        and found["effective_ratio"] > 0.9
    )


def test_the_failures_of_a_real_job_are_met_by_other_policies(cluster: str, tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    journal.write_text("".join(event.to_line() for event in JOURNAL))
    found = answer("simulate", cluster, "--replay", str(journal), "--policies", "copies:2,store:1h")
    assert found["happened"]["redone_steps"] == 2 and len(found["happened"]["failures"]) == 2
    assert found["cluster"]["nodes"] == 2 and [run["failures"] for run in found["runs"]] == [2, 2]
    assert "as it happened" in asked("simulate", cluster, "--replay", str(journal)).stdout
    journal.write_text("")
    assert "expected the journal of a job that trained, found 0 events" in refused(
        "simulate", cluster, "--replay", str(journal)
    )
