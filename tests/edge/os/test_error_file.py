"""Last words: what a program's error was and where, as torch's own reader of the file understands
it."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from keepstep import errors
from keepstep.edge.os.error_file import VARIABLE, read_error_file, write_error_file
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
