"""`keepstep placement`: the JSON others read, and a sentence for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from keepstep.cli.placement import placement
from keepstep.errors import ConfigError

app = typer.Typer()
app.command()(placement)


def asked(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, ConfigError)
    return str(result.exception)


def test_the_json() -> None:
    answer = asked("--nodes", "4", "--policy", "copies:2", "--k", "3")
    assert list(answer)[:5] == ["policy", "groups", "holders", "bytes_per_node_ratio", "survival"]
    assert answer["policy"] == "copies:2"
    assert answer["groups"] == [[0, 1], [2, 3]]
    assert answer["holders"] == {"0": [0, 1], "1": [1, 0], "2": [2, 3], "3": [3, 2]}
    assert (answer["bytes_per_node_ratio"], answer["two_slots_ratio"]) == (2.0, 4.0)
    assert answer["survival"] == pytest.approx({"1": 1.0, "2": 4 / 6, "3": 0.0})


@pytest.mark.parametrize("policy", ["none", "copies:3", "parity:4", "rs:4+2"])
def test_every_policy_answers(policy: str) -> None:
    answer = asked("--nodes", "12", "--policy", policy)
    assert answer["policy"] == policy and set(answer["survival"]) == {str(k) for k in range(1, 9)}
    assert all(answer["holders"][str(node)][0] == node for node in range(12))


def test_there_are_no_more_losses_than_nodes() -> None:
    assert list(asked("--nodes", "2")["survival"]) == ["1", "2"]


def test_racks_by_number_list_and_file(tmp_path: Path) -> None:
    by_number = asked("--nodes", "8", "--racks", "2")
    assert by_number["racks"] == {"rack-0": [0, 1, 2, 3], "rack-1": [4, 5, 6, 7]}
    assert by_number["groups"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    names = ["a", "b"] * 4
    (tmp_path / "racks").write_text("\n".join(names) + "\n")
    by_list, by_file = (
        asked("--nodes", "8", "--racks", ",".join(names)),
        asked("--nodes", "8", "--racks", str(tmp_path / "racks")),
    )
    assert by_list == by_file and by_list["racks"] == {"a": [0, 2, 4, 6], "b": [1, 3, 5, 7]}


def test_auto_says_what_it_chose_and_why() -> None:
    answer = asked("--nodes", "16", "--policy", "auto", "--free-gib", "100", "--snapshot-gib", "30")
    assert (
        answer["policy"] == "parity:3"
        and "copies:2 needs 120.0 GiB a node of 100.0 GiB free" in answer["why"]
    )


def test_what_cannot_be_is_said() -> None:
    assert "expected none, copies:M" in refused("--nodes", "4", "--policy", "raid")
    assert "expected at least 6 nodes, found 4" in refused("--nodes", "4", "--policy", "rs:4+2")
    assert "rack-0 of 4" in refused("--nodes", "4", "--racks", "1")
    assert "expected 1 to 4 racks" in refused("--nodes", "4", "--racks", "5")
    assert "each of 4 nodes, found 2" in refused("--nodes", "4", "--racks", "a,b")
    assert "--free-gib" in refused("--nodes", "4", "--policy", "auto")


def test_the_table_shows_groups_and_chances() -> None:
    result = CliRunner().invoke(
        app, ["--nodes", "5", "--policy", "copies:2"], catch_exceptions=False
    )
    assert (
        "ring: 2 3 4" in result.stdout
        and "60.00%" in result.stdout
        and "2 x its snapshot" in result.stdout
    )
