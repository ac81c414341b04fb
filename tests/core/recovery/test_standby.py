"""Standby: of a command line, what a process that stands by would run: as the interpreter does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.recovery.standby import can_become, program_of

WORDS = st.lists(st.text("abc-.=1", min_size=1, max_size=5), max_size=4)


@given(st.sampled_from([[], ["-u"]]), WORDS)
def test_a_script_and_its_words_are_what_is_run(option: list[str], words: list[str]) -> None:
    """However the words are kept: messages bring tuples."""
    program = ["train.py", *words]
    assert program_of([*option, *program]) == program_of((*option, *program)) == program
    module = ["-m", "pkg.train", *words]
    assert program_of((*option, *module)) == module
    assert can_become(("python", *option, *program), "python")
    assert not can_become(("bash", *option, *program), "python")


@pytest.mark.parametrize(
    "words", [(), ("-u",), ("-m",), ("-c", "x"), ("-u", "-O", "x.py"), ("-X", "dev", "x.py")]
)
def test_other_options_and_no_program_are_none(words: tuple[str, ...]) -> None:
    assert program_of(words) == [] and not can_become(("python", *words), "python")
