"""Naming: the same command is the same job, anything else is another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keepstep.config import resolve
from keepstep.runtime.job_name import default_job, job_hash

ARGV = ["train.py", "--size", "small"]


@pytest.mark.parametrize(
    "argv", [ARGV, [os.path.abspath("train.py")], ["train.py", "--lr", "3e-4"], ["train.py", "x"]]
)
def test_the_same_script_in_the_same_place_is_the_same_job(
    argv: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = default_job(ARGV)
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert default_job(argv) == first


def test_another_script_is_another_job() -> None:
    assert default_job(["other/train.py", *ARGV[1:]]) != default_job(ARGV)


def test_another_directory_is_another_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = default_job(["/x/train.py"])
    monkeypatch.chdir(tmp_path)
    assert default_job(["/x/train.py"]) != here


@pytest.mark.parametrize(
    "script", ["train.py", "", "-c", "/a/" + "x" * 200 + ".py", "we ird/na me!.py", ".py", "..."]
)
def test_every_name_is_one_a_configuration_takes(script: str) -> None:
    name = default_job([script])
    assert resolve({"job": name}, {"HOME": "/h"}, "unused").job == name
    assert default_job([]).startswith("interactive-")


def test_the_script_can_be_recognized() -> None:
    assert default_job(["/home/me/train_gpt.py"]).startswith("train_gpt-")


def test_a_slot_s_owner_is_job_and_user() -> None:
    assert len(job_hash("a", 0)) == 16
    assert len({job_hash("a", 0), job_hash("b", 0), job_hash("a", 1), job_hash("a\0", 1)}) == 4
