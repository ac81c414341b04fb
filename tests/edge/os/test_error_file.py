"""Last words: what a program's error was and where, as torch's own reader of the file understands
it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from keepstep import errors
from keepstep.edge.os.error_file import (
    VARIABLE,
    last_words,
    read_error_file,
    write_error_file,
)
from keepstep.model.launch import ErrorReport


def failing(what: str) -> ValueError:
    try:
        raise ValueError(what)
    except ValueError as error:
        return error


def test_what_is_written_is_read_and_torch_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    write_error_file(failing("no"), {VARIABLE: str(path)})
    words = read_error_file(str(path))
    assert (words.message, words.path) == ("ValueError: no", str(path))
    assert words.place.startswith("test_error_file.py:") and words.place.endswith(" in failing")
    failure = ProcessFailure(0, 1, 1, str(path))
    assert (
        failure.timestamp > 0
        and isinstance(failure.message, dict)
        and failure.message["message"] == "ValueError: no"
    )
    assert list(tmp_path.iterdir()) == [path]


def test_what_somebody_has_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    write_error_file(failing("first"), {VARIABLE: str(path)})
    write_error_file(failing("second"), {VARIABLE: str(path)})
    assert read_error_file(str(path)).message == "ValueError: first"


def test_nobody_to_write_for_and_no_place_to_write_to(tmp_path: Path) -> None:
    write_error_file(failing("no"), {})
    write_error_file(failing("no"), {VARIABLE: str(tmp_path / "gone" / "error.json")})
    assert list(tmp_path.iterdir()) == []


def test_half_a_file_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    for text in ('{"message": ', "[]", '{"message": {}}'):
        path.write_text(text)
        assert read_error_file(str(path)) == ErrorReport()
    path.write_text('{"message": "as old ones were"}')
    assert read_error_file(str(path)).message == "as old ones were"
    assert read_error_file(str(tmp_path / "none")) == ErrorReport()


class ConfigError(Exception):
    """Somebody else's."""


@pytest.mark.parametrize(
    ("kind", "is_refusal"),
    [
        (errors.ConfigError, True),
        (errors.MemoryBudgetError, True),
        (errors.KeeperError, False),
        (ConfigError, False),
    ],
)
def test_what_keepstep_refuses_until_a_person_acts_is_known_as_that(
    tmp_path: Path, kind: type[Exception], is_refusal: bool
) -> None:
    path = tmp_path / "error.json"
    write_error_file(kind("slots: expected 2\nfound 1"), {VARIABLE: str(path)})
    assert read_error_file(str(path)).is_refusal == is_refusal


@pytest.mark.parametrize(
    ("kind", "is_stop"),
    [
        (errors.StoppedError, True),
        (errors.WrongNumbersError, True),
        (errors.CorruptionError, False),
        (errors.DeviceError, False),
        (errors.ConfigError, False),
    ],
)
def test_what_ends_the_job_for_a_person_to_decide_is_known_as_that(
    tmp_path: Path, kind: type[Exception], is_stop: bool
) -> None:
    path = tmp_path / "error.json"
    write_error_file(kind("silent corruption"), {VARIABLE: str(path)})
    assert read_error_file(str(path)).is_stop == is_stop


WRITE = """
import os, subprocess, sys
from keepstep import errors
from keepstep.edge.os.error_file import write_error_file
error = errors.WrongNumbersError("of a child")
if sys.argv[1:]:
    subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
    error = errors.StoppedError("of the rank")
write_error_file(error, os.environ)
"""


def write(path: Path, *words: str) -> int:
    """As a rank, which leads its session; with words it first starts a child that writes, too."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITE, *words],
        env={**os.environ, VARIABLE: str(path)},
        start_new_session=True,
    )
    assert process.wait() == 0
    return process.pid


def test_words_of_what_a_rank_has_started_do_not_end_the_job_of_a_killed_rank(
    tmp_path: Path,
) -> None:
    """An evaluation that stops itself is no word of the rank's."""
    path = tmp_path / "error.json"
    child = write(path)
    assert last_words(str(path), child, -9).is_stop, "its own words count however it ends"
    words = last_words(str(path), child + 1, -9)
    assert words.message.startswith("WrongNumbersError: of a child") and not words.is_stop
    assert last_words(str(path), child + 1, 1).is_stop, "a shell is the rank of what it starts"


def test_a_ranks_own_words_take_the_place_of_those_of_what_it_has_started(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    rank = write(path, WRITE)
    words = last_words(str(path), rank, 1)
    assert words.message.startswith("StoppedError: of the rank") and words.writer == rank


def test_what_torch_has_written_for_a_rank_stays(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text('{"message": {"message": "ValueError: torch", "extraInfo": {}}}')
    write(path, WRITE)
    assert read_error_file(str(path)).message == "ValueError: torch"
