"""`keepstep dashboard`: which job it shows, and where."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

import keepstep.cli.dashboard
import keepstep.dashboard.serving
from keepstep.config import resolve
from keepstep.dashboard.serving import address_of, serve_for_agent
from keepstep.edge.os.journal import FileJournal, read_journal
from keepstep.errors import ConfigError


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The first document of each page that was served while the command waited."""
    found: list[dict[str, Any]] = []
    served: list[Any] = []
    serve_job = keepstep.dashboard.serving.serve_job

    def serve(*arguments: Any) -> Any:
        served.append(serve_job(*arguments))
        return served[-1]

    monkeypatch.setattr(keepstep.dashboard.serving, "serve_job", serve)
    monkeypatch.setattr(
        keepstep.cli.dashboard, "_wait", lambda: found.append(first_document(served[-1]))
    )
    return found


def first_document(served: Any) -> dict[str, Any]:
    connection = HTTPConnection("127.0.0.1", served.address.port, timeout=60)
    connection.request("GET", "/live")
    with closing(connection.getresponse()) as answer:
        while not (line := answer.readline()).startswith(b"data: "):
            assert line
    document: dict[str, Any] = json.loads(line.removeprefix(b"data: "))["whole"]
    return document


@contextmanager
def writing(path: Path, who: str) -> Iterator[FileJournal]:
    journal = FileJournal(path, who)
    yield journal
    journal.close()


def test_a_job_that_runs(machine: Any, shown: list[dict[str, Any]]) -> None:
    machine.rank("demo", 0, [7, 8])
    machine.journal("demo").record("resumed", "afresh", source="fresh", step=-1, epoch=1)
    result = machine.run("dashboard", "demo")
    assert result.exit_code == 0, result.output
    assert "The dashboard of demo is at http://127.0.0.1:" in result.output
    [page] = shown
    assert (page["job"], page["state"], page["horizon"]["step"]) == ("demo", "training", 8)
    assert list(page["ranks"]) == ["0"] and page["run"]["number"] == 1
    assert page["account"]["goodput"] is not None


def test_without_a_name_the_newest_that_is_over(machine: Any, shown: list[dict[str, Any]]) -> None:
    with writing(machine.settings_of("past").journal_path, "keeper") as journal:
        journal.record("rank-joined", "rank 5 of 6", rank=5, pid=3)
        journal.record("job-over", "all 6 ranks ended well", ok=True)
    assert machine.run("dashboard").exit_code == 0
    [page] = shown
    assert (page["job"], page["state"], page["ranks"]) == ("past", "ended", {})
    assert page["run"]["ranks"]["5"]["lives"] == 1 and page["run"]["is_over"]


def test_one_account_over_the_journals_of_all_nodes(
    machine: Any, shown: list[dict[str, Any]], tmp_path: Path
) -> None:
    for node in range(3):
        with writing(tmp_path / f"node-{node}" / "far" / "journal.jsonl", "keeper") as journal:
            journal.record("keeper-started", "has it", adopted_slots=0)
            journal.record("rank-joined", f"rank {node} of 3", rank=node, pid=3)
    with writing(tmp_path / "node-0" / "far" / "journal.jsonl", "keeper") as journal:
        journal.record("resumed", "afresh", source="fresh", step=-1, epoch=1)
        journal.record("job-over", "all ended well", ok=True)
    result = machine.run("dashboard", "--journals", str(tmp_path))
    assert result.exit_code == 0 and "far, 3 journals, is at" in result.output
    [page] = shown
    assert list(page["run"]["ranks"]) == ["0", "1", "2"] and len(page["runs"]) == 1
    assert {line["who"] for line in page["run"]["log"].values()} == {
        f"keeper (node-{node})" for node in range(3)
    }
    assert page["account"]["parts"]["starting"] >= 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["dashboard"], "JOB: expected a job with a journal"),
        (["dashboard", "none"], "expected one of 0 known jobs"),
        (["dashboard", "--address", "train.py"], "dashboard_address: expected a port"),
        (["dashboard", "--journals", "/nowhere"], "JOB: expected the name of a job below"),
        (["dashboard", "x", "--journals", "/nowhere"], "expected journals of 'x' below /nowhere"),
    ],
)
def test_what_cannot_be_shown_is_told(words: list[str], told: str, machine: Any) -> None:
    if "--address" in words:
        machine.journal("demo").record("plan", "something")
    result = machine.run(*words)
    assert result.exit_code == 2 and told in " ".join(result.output.split())


def test_others_need_a_token(
    machine: Any, shown: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.journal("demo").record("plan", "something")
    result = machine.run("dashboard", "--address", "0.0.0.0:0")
    assert result.exit_code == 2 and shown == []
    assert "or a dashboard_token, found" in " ".join(result.output.split())
    monkeypatch.setenv("KEEPSTEP_DASHBOARD_TOKEN", "short")
    assert "expected at least 16 bytes, found 5 bytes" in machine.run("dashboard").output


# -- the agent's


def test_an_agent_serves_it_where_it_is_wanted(machine: Any) -> None:
    settings = machine.settings_of("demo")
    with writing(settings.journal_path, "agent") as journal:
        assert serve_for_agent(settings, journal) is None
        wanted = resolve({"job": "demo", "dashboard": True}, {}, "demo")
        served = serve_for_agent(wanted, journal)
        assert served is not None
        served.close()
    [told] = read_journal(settings.journal_path)
    assert (told.kind, told.why) == (
        "dashboard-served",
        f"the dashboard, for this user and root: {served.url}",
    )


def test_naming_an_address_turns_it_on(machine: Any) -> None:
    named = resolve({"dashboard_address": "127.0.0.1:0"}, {}, "demo")
    with writing(machine.settings_of("demo").journal_path, "agent") as journal:
        served = serve_for_agent(named, journal)
        assert served is not None
        served.close()
    open_to_all = resolve({"dashboard_address": "0.0.0.0:0"}, {}, "demo")
    with pytest.raises(ConfigError, match="or a dashboard_token"):
        address_of(open_to_all)
