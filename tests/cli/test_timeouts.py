"""`keepstep timeouts`: every limit with what it is for, and an order that cannot be is refused in a
sentence."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from keepstep.cli.main import app


def asked(*arguments: str) -> dict[str, object]:
    result = CliRunner().invoke(app, ["timeouts", "--json", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    found: dict[str, object] = json.loads(result.stdout)
    return found


def limits(answer: dict[str, object]) -> dict[str, float]:
    rows = answer["limits"]
    assert isinstance(rows, list)
    return {row["name"]: row["seconds"] for row in rows}


def test_by_default_limits_are_learnt() -> None:
    answer = asked()
    assert answer["learns"] is True and "link_dead" not in limits(answer)
    assert (
        limits(answer)["stopped"],
        limits(answer)["late"],
        limits(answer)["asleep"],
        limits(answer)["busy"],
    ) == (6, 10, 120, 600)


def test_one_number_sets_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPSTEP_HANG_AFTER_S", "300")
    answer = asked("--nodes", "4")
    assert answer["learns"] is False
    assert (limits(answer)["asleep"], limits(answer)["busy"], limits(answer)["link_dead"]) == (
        300,
        300,
        10,
    )
    assert limits(asked("--hang-after-s", "20"))["busy"] == 20, (
        "an option is stronger than the environment"
    )


def test_the_order_is_shown_with_its_reasons() -> None:
    result = CliRunner().invoke(app, ["timeouts"], catch_exceptions=False)
    assert "before" in result.stdout and "because" in result.stdout and "floors" in result.stdout
    order = asked("--nodes", "2")["relations"]
    assert isinstance(order, list) and all(row["shorter_s"] <= row["longer_s"] for row in order)


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_every_limit_that_the_order_names_is_there_and_in_use(nodes: str) -> None:
    answer = asked("--nodes", nodes)
    order = answer["relations"]
    assert isinstance(order, list)
    named = {
        word.removeprefix("2 x ")
        for row in order
        for side in ("shorter", "longer")
        for word in row[side].split(" + ")
    }
    assert named <= limits(answer).keys() and all(limits(answer).values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--nodes", "2", "--hang-after-s", "8"],
            "error: deadlines: expected link_dead + look (11 s) below asleep (8 s)",
        ),
        (["--hang-after-s", "1e308"], "found 1e+308"),
        (
            ["--hang-after-s", "1"],
            "error: hang_after_s: expected seconds, 4 to 31536000, found 1.0",
        ),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["timeouts", *arguments])
    assert result.exit_code == 2 and message in result.stderr
