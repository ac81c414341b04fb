"""The table of options: each one stands there once, and appears wherever an option must."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic

import pytest

import keepstep
from keepstep.config import Config, Settings, from_environ, from_mapping, resolve
from keepstep.config.option import Check, Directory, Option, Topic, Unset, option, options_of
from keepstep.config.settings import NO_OPTIONS, check
from keepstep.config.table import OPTIONS
from keepstep.errors import ConfigError

SOURCE = Path(keepstep.__file__).parent
each_option = pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)


@dataclass(frozen=True, slots=True)
class Sample(Generic[Unset, Directory]):
    """A table of one option of each kind."""

    count: int | Unset = option(
        default=3,
        check=Check("1 or more", lambda value: value > 0),
        topic=Topic.JOB,
        help="A number.",
        example=4,
    )
    place: Directory | Unset | None = option(
        default=None,
        default_words="nowhere",
        check=Check("a directory", bool),
        topic=Topic.JOB,
        help="A place.",
        example="/x",
    )
    pace_s: float | Unset = option(
        default=lambda environ, job: float(environ.get("PACE", len(job))),
        default_words="the length of the job's name",
        check=Check("a number"),
        topic=Topic.NODES,
        help="A pace.",
        example=2.0,
        is_secret=True,
    )


def test_a_field_is_an_option() -> None:
    count, place, pace = options_of(Sample)
    assert [(o.name, o.kind, o.may_be_none) for o in (count, place, pace)] == [
        ("count", int, False),
        ("place", Path, True),
        ("pace_s", float, False),
    ]
    assert (pace.variable, pace.flag) == ("KEEPSTEP_PACE_S", "--pace-s")
    assert (count.default_in({}, "job"), place.default_in({}, "job")) == (3, None)
    assert (pace.default_in({}, "job"), pace.default_in({"PACE": "7"}, "job")) == (3.0, 7.0)
    assert (count.default_words, place.default_words) == ("3", "nowhere")
    assert "pace_s" not in repr(Sample()), "a secret is not shown"


@each_option
def test_an_option_is_complete(option: Option) -> None:
    assert option.help.endswith(".") and option.help[:1].isalnum()
    assert bool(option.metavar) == (option.kind is not bool)
    assert option.default_words
    assert option.variable not in NO_OPTIONS


def test_every_variable_that_the_docs_name_is_known() -> None:
    """`keepstep run` refused one that docs/gpu.md tells its reader to set."""
    docs = Path(__file__).parents[2] / "docs"
    named = {
        name
        for page in (docs.parent / "README.md", *docs.rglob("*.md"))
        for name in re.findall(r"\bKEEPSTEP_[A-Z0-9_]*[A-Z0-9]\b(?!\*)", page.read_text())
    }
    known = {option.variable for option in OPTIONS} | NO_OPTIONS
    assert named - known == set()


@each_option
def test_its_default_and_its_example_pass_its_check(option: Option) -> None:
    check(option, option.default_in({}, "job"))
    check(option, option.example)
    assert option.example != option.default_in({}, "job")


@each_option
def test_it_is_a_field_of_config_and_settings(option: Option) -> None:
    assert getattr(Config(), option.name) is None
    config = Config(**{option.name: option.example})
    settings = resolve(config, {"HOME": "/h"}, "job")
    assert getattr(settings, option.name) == option.settle(option.example)
    assert Config.__doc__ is not None and f"\n    {option.name}: " in Config.__doc__


@each_option
def test_it_can_be_set_by_code_and_by_a_variable(option: Option) -> None:
    config = Config(**{option.name: option.example})
    assert from_mapping({option.name: option.example}) == config
    [(variable, text)] = config.to_env().items()
    assert variable == option.variable
    assert from_environ({variable: text}) == config


def test_config_and_settings_have_no_other_fields() -> None:
    names = [option.name for option in OPTIONS]
    assert [f.name for f in fields(Config)] == [f.name for f in fields(Settings)] == names


VALUES: tuple[Any, ...] = (
    *(None, True, False, [], b"x", Path("a"), float("inf"), float("nan")),
    *(-1, -0.1, 0, 1, 2, 3.9, 4, 8, 9, 30.5, 65535, 65536),
    *("", " ", "a/b", "x", "x" * 65, "..", "auto", "off", "none", "7", "memory://x", "quiet"),
    *("skip", "tell", "command", "tcp"),
)


@each_option
def test_a_value_is_settled_or_refused_by_name(option: Option) -> None:
    """Whatever code gives: either Settings hold a value of the option's type, or an error names
    option, expected and found."""
    kinds = (int, float) if option.kind is float else (option.kind,)
    refused = 0
    for value in VALUES:
        try:
            check(option, value)
        except ConfigError as error:
            refused += 1
            key, _, rest = str(error).partition(": expected ")
            assert key in (option.name, "policy") and ", found " in rest, value
        else:
            settled = option.settle(value)
            assert isinstance(settled, kinds) or (settled is None and option.may_be_none), value
    assert 0 < refused < len(VALUES)


@each_option
def test_only_none_of_an_option_that_may_be_none_means_a_value(option: Option) -> None:
    if option.may_be_none:
        check(option, None)
    else:
        with pytest.raises(ConfigError):
            check(option, None)


@each_option
def test_its_words_stand_in_the_table_alone(option: Option) -> None:
    """Adding, changing or removing an option touches the table and nothing else."""
    beginning = option.help[:24]
    holders = [path for path in SOURCE.rglob("*.py") if beginning in path.read_text("utf-8")]
    assert holders == [SOURCE / "config" / "table.py"]
