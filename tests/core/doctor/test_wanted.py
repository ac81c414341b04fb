"""Options and variables that contradict each other, and what dead jobs left."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.core.doctor.defect import Grade
from keepstep.model.machine_facts import LeftMemory
from keepstep.model.units import GIB
from tests.core.doctor.sane_machine import found_by, only_defect, with_facts


@pytest.mark.parametrize(
    ("changes", "check", "grade", "words"),
    [
        ({"wanted.problems": ("KEEPSTEP_X: no",)}, "options", Grade.BROKEN, "KEEPSTEP_X: no"),
        ({"wanted.internal": ("KEEPSTEP_AGENT",)}, "internal-variables", Grade.WARNING, "unset"),
        ({"wanted.metrics_port": 9100}, "option-packages", Grade.BROKEN, "keepstep[metrics]"),
        (
            {"wanted.block_mac": "on", "software.packages": frozenset()},
            *("option-packages", Grade.BROKEN, "keepstep[secure]"),
        ),
        (
            {"wanted.encrypt": True, "software.packages": frozenset()},
            *("option-packages", Grade.BROKEN, "KEEPSTEP_ENCRYPT"),
        ),
        (
            {"wanted.redundancy": "rs:4+2", "software.packages": frozenset()},
            *("option-packages", Grade.BROKEN, "keepstep[rs]"),
        ),
        (
            {"wanted.store": "s3://bucket/run", "wanted.store_package": "s3fs"},
            *("option-packages", Grade.BROKEN, "s3://... needs s3fs"),
        ),
        ({"wanted.secret_characters": None}, "secret", Grade.WARNING, "openssl rand"),
        (
            {"wanted.secret_characters": None, "wanted.encrypt": True},
            *("secret", Grade.BROKEN, "no secret"),
        ),
        ({"wanted.secret_characters": 3}, "secret", Grade.WARNING, "3 different characters"),
        ({"wanted.environ": {"RANK": "0"}}, "rank-variables", Grade.BROKEN, "WORLD_SIZE is not"),
        ({"wanted.environ": {"WORLD_SIZE": "2"}}, "rank-variables", Grade.BROKEN, "RANK is not"),
        (
            {"wanted.environ": {"RANK": "2", "WORLD_SIZE": "2"}},
            *("rank-variables", Grade.BROKEN, "RANK=2 and WORLD_SIZE=2"),
        ),
        (
            {"wanted.environ": {"CUDA_LAUNCH_BLOCKING": "1"}},
            *("debugging-variables", Grade.WARNING, "unset CUDA_LAUNCH_BLOCKING"),
        ),
        (
            {"wanted.left": (LeftMemory("old", 3 * GIB),)},
            *("left-memory", Grade.WARNING, "keepstep clean --job old"),
        ),
    ],
)
def test_a_defect_is_named(changes: dict[str, Any], check: str, grade: Grade, words: str) -> None:
    defect = only_defect(changes, check)
    assert defect.grade is grade and words in f"{defect.found} {defect.why} {defect.fix}"


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"wanted.secret_characters": None, "wanted.nodes": 1}, "secret"),
        ({"wanted.environ": {"RANK": "1", "WORLD_SIZE": "2"}}, "rank-variables"),
        ({"wanted.environ": {"CUDA_LAUNCH_BLOCKING": "0"}}, "debugging-variables"),
        ({"wanted.redundancy": "copies:2", "software.packages": frozenset()}, "option-packages"),
    ],
)
def test_what_is_in_order_is_not_named(changes: dict[str, Any], check: str) -> None:
    assert found_by(check, with_facts(changes)) == []


def test_the_password_of_a_store_is_not_told() -> None:
    changes = {"wanted.store": "s3://me:hunter2@bucket/run", "wanted.store_package": "s3fs"}
    defect = only_defect(changes, "option-packages")
    assert "hunter2" not in f"{defect.found} {defect.why} {defect.fix}"
