"""`docs/configuration.md` says what the table of options says."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.cli.configuration_page import page
from keepstep.config.option import Option, Topic
from keepstep.config.table import OPTIONS

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == page(OPTIONS), "run `make docs`"


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_each_option_has_a_row_below_its_topic(option: Option) -> None:
    sections = page(OPTIONS).split("\n## ")
    [section] = [found for found in sections if found.startswith(option.topic.value + "\n")]
    [row] = [line for line in section.splitlines() if line.startswith(f"| `{option.name}` |")]
    assert row.count(" | ") == 4 and option.help in row


def test_a_topic_without_options_has_no_section() -> None:
    jobs = [option for option in OPTIONS if option.topic is Topic.JOB]
    assert page(jobs).count("\n## ") == 1
