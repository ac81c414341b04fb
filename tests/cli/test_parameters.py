"""A command's parameters are made from tables."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from keepstep.cli.launch_arguments import LaunchArguments
from keepstep.cli.parameters import argument, by_panel, from_arguments, from_options, takes
from keepstep.cli.run import PARAMETERS
from keepstep.config.option import Option
from keepstep.config.table import OPTIONS


@dataclass(frozen=True, slots=True)
class Sample:
    """Arguments of every kind."""

    name: str
    some_count: int = argument(1, "A [count].", panel="B", variable_prefix="PRE_", short="-c")
    wanted: bool = argument(False, "A switch.", panel="A")
    secretly: str | None = argument(None, "A secret.", panel="A", is_hidden=True)


def called(parameters: Any, *words: str, **environ: str) -> Any:
    """What a command with these parameters is given."""
    given: list[dict[str, Any]] = []

    @takes(parameters)
    def command(**values: Any) -> None:
        given.append(values)

    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, words, env=environ)
    return given[0] if given else result


def test_fields_are_options() -> None:
    parameters = from_arguments(Sample)
    assert [p.name for p in parameters] == ["some_count", "wanted", "secretly"]
    assert called(parameters) == {"some_count": 1, "wanted": False, "secretly": None}
    assert called(parameters, "-c", "2", "--wanted", "--secretly", "x") == {
        "some_count": 2,
        "wanted": True,
        "secretly": "x",
    }
    assert called(parameters, PRE_SOME_COUNT="7")["some_count"] == 7
    assert called(parameters, "--some-count", "many").exit_code == 2


def test_the_help_lists_them_by_panel() -> None:
    parameters = by_panel(from_arguments(Sample), ["A", "B"])
    text = called(parameters, "--help", COLUMNS="100").stdout
    assert text.index("A switch.") < text.index("A [count].") and "A secret." not in text


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_an_option_of_a_config_is_a_flag(option: Option) -> None:
    parameters = from_options([option])
    if option.is_secret:
        assert parameters == []
        return
    assert called(parameters) == {option.name: None}
    if option.kind is bool:
        words = [f"--no-{option.flag[2:]}" if option.example is False else option.flag]
    else:
        words = [option.flag, str(option.example)]
    assert called(parameters, *words) == {option.name: option.example}
    text = " ".join(called(parameters, "--help", COLUMNS="500").stdout.split())
    assert option.help in text and f"[default: {option.default_words}]" in text


def test_keepstep_run_takes_all_of_both_tables() -> None:
    names = {p.name for p in PARAMETERS}
    assert names == {f.name for f in fields(LaunchArguments)} | {
        option.name for option in OPTIONS if not option.is_secret
    }
