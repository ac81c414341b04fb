"""Versions that are too old."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.core.doctor.defect import Grade
from tests.core.doctor.sane_machine import found_by, only_defect, with_facts


@pytest.mark.parametrize(
    ("changes", "check", "grade", "words"),
    [
        ({"software.system": "Darwin"}, "kernel", Grade.BROKEN, "the system is Darwin"),
        ({"software.kernel": "4.18.0-553.el8"}, "kernel", Grade.BROKEN, "pidfds"),
        ({"software.kernel": "5.10.0-30-amd64"}, "kernel", Grade.WARNING, "5.14"),
        ({"software.kernel": "strange"}, "kernel", Grade.UNKNOWN, "version"),
        ({"software.python": (3, 9)}, "python", Grade.BROKEN, "Python is 3.9"),
        ({"software.is_64_bit": False}, "python", Grade.BROKEN, "32 bits"),
        ({"software.asserts": False}, "python", Grade.WARNING, "PYTHONOPTIMIZE"),
        ({"software.torch": None}, "torch", Grade.BROKEN, "pip install 'keepstep[torch]'"),
        ({"software.torch": "2.5.1+cu121"}, "torch", Grade.BROKEN, "torch is 2.5.1+cu121"),
        ({"software.torch": "2.6.0"}, "torch", Grade.WARNING, "start anew"),
        ({"software.torch": "nightly"}, "torch", Grade.UNKNOWN, "nightly"),
        ({"software.has_user_name": False}, "user-name", Grade.WARNING, "export USER"),
    ],
)
def test_a_defect_is_named(changes: dict[str, Any], check: str, grade: Grade, words: str) -> None:
    defect = only_defect(changes, check)
    assert defect.grade is grade and words in f"{defect.found} {defect.why} {defect.fix}"


@pytest.mark.parametrize("version", ["2.10.0", "2.13.0+cpu", "3.0.0.dev20270101"])
def test_newer_ones_of_torch_are_in_order(version: str) -> None:
    assert found_by("torch", with_facts({"software.torch": version})) == []
