"""What variables ask for, and which of them cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.edge.doctor.settings import Asked, read_settings
from tests.edge.doctor.fake_machine import FakeMachine


def read(machine: FakeMachine, store: str | None = None, **variables: str) -> Asked:
    return read_settings(machine.host, {**machine.environ, **variables}, 1, store)


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("KEEPSTEP_ARENA", "/x", "no option of keepstep: KEEPSTEP_ARENA_DIR is one"),
        ("KEEPSTEP_SLOTS", "many", "expected int, found 'many'"),
        ("KEEPSTEP_SLOTS", "99", "expected 0 (choose) or 1 to 8, found 99"),
        ("KEEPSTEP_REDUNDANCY", "twice", "found 'twice'"),
        ("KEEPSTEP_SECRET", "short", "expected at least 16 bytes, found 5 bytes"),
    ],
)
def test_a_variable_that_cannot_be(
    variable: str, text: str, words: str, machine: FakeMachine
) -> None:
    asked = read(machine, **{variable: text, "KEEPSTEP_METRICS_PORT": "9100"})
    (problem,) = asked.wanted.problems
    assert problem.startswith(variable) and problem.count(variable) <= 2 and words in problem
    assert asked.wanted.metrics_port == 9100, "the others are read"


def test_all_that_is_wrong_is_told_at_once(machine: FakeMachine) -> None:
    asked = read(machine, KEEPSTEP_SLOTS="many", KEEPSTEP_X="1", KEEPSTEP_LOG="loud")
    assert len(asked.wanted.problems) == 3


def test_what_only_all_of_them_show(machine: FakeMachine) -> None:
    asked = read(machine, KEEPSTEP_ARENA_DIR=f"/{'a' * 200}")
    assert "socket path" in asked.wanted.problems[0]


@pytest.mark.parametrize(
    ("url", "directory", "package"),
    [
        ("/mnt/store", Path("/mnt/store"), None),
        ("file:///mnt/store", Path("/mnt/store"), None),
        ("s3://bucket/run", None, "s3fs"),
        ("gs://bucket/run", None, "gcsfs"),
        ("ftp://host/run", None, None),
    ],
)
def test_stores(
    url: str, directory: Path | None, package: str | None, machine: FakeMachine
) -> None:
    asked = read(machine, store=url)
    assert (asked.store, asked.wanted.store_package) == (directory, package)
    assert read(machine, KEEPSTEP_STORE=url).store == directory


def test_of_a_secret_only_its_strength_is_kept(machine: FakeMachine) -> None:
    asked = read(machine, KEEPSTEP_SECRET="abcabcabcabcabcabc")
    assert asked.wanted.secret_characters == 3
    assert "abcabc" not in repr(asked)
    assert read(machine).wanted.secret_characters is None


def test_variables_of_others_and_those_handed_down(machine: FakeMachine) -> None:
    asked = read(machine, RANK="1", AWS_SECRET_ACCESS_KEY="x", KEEPSTEP_AGENT="7")
    assert asked.wanted.environ == {"RANK": "1"}
    assert asked.wanted.internal == ("KEEPSTEP_AGENT",) and asked.wanted.problems == ()
