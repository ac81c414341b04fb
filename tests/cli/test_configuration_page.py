"""`docs/configuration.md` says what the table of options says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from keepstep.cli.configuration_page import page
from keepstep.cli.parameters import from_options
from keepstep.config.option import (
    Check,
    Directory,
    Option,
    Topic,
    Unset,
    option,
    options_of,
)
from keepstep.config.table import OPTIONS, Options

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == page(OPTIONS), "run `make docs`"


@pytest.mark.parametrize("found", OPTIONS, ids=lambda found: found.name)
def test_each_option_has_a_row_below_its_topic(found: Option) -> None:
    sections = page(OPTIONS).split("\n## ")
    [section] = [each for each in sections if each.startswith(found.topic.value + "\n")]
    [row] = [line for line in section.splitlines() if line.startswith(f"| `{found.name}` |")]
    assert row.count(" | ") == 4 and found.help in row


def test_a_topic_without_options_has_no_section() -> None:
    jobs = [option for option in OPTIONS if option.topic is Topic.JOB]
    assert page(jobs).count("\n## ") == 1


@dataclass(frozen=True, slots=True)
class Longer(Options[Unset, Directory]):
    """The table with one more option."""

    tries: int | Unset = option(
        default=3,
        check=Check("1 or more", lambda value: value > 0),
        topic=Topic.FAILURES,
        help="Try this often.",
        example=4,
        metavar="N",
    )


def test_an_added_field_is_an_option_everywhere() -> None:
    options = options_of(Longer)
    assert [found.name for found in options] == [*(o.name for o in OPTIONS), "tries"]
    assert "| `tries` | 1 or more | `4` | 3 | Try this often. |" in page(options)
    assert from_options(options)[-1].name == "tries"
    assert (options[-1].variable, options[-1].flag) == ("KEEPSTEP_TRIES", "--tries")
