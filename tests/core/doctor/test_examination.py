"""All checks together."""

from __future__ import annotations

from keepstep.core.doctor.defect import DoctorCheck, Grade, broken, silence, warning
from keepstep.core.doctor.examination import CHECKS, examine
from tests.core.doctor.sane_machine import SANE, with_facts


def test_a_sane_machine_is_silent() -> None:
    found = examine(SANE)
    assert [result for result in found.results if result.defects] == []
    assert found.is_fit


def test_every_check_has_a_name_of_its_own() -> None:
    names = [check.name for check in CHECKS]
    assert len(names) == len(set(names)) == len(examine(SANE).results) >= 25


def test_only_what_breaks_makes_a_machine_unfit() -> None:
    assert examine(with_facts({"memory.overcommit": 2})).is_fit
    assert examine(with_facts({"memory.overcommit": None})).is_fit
    unfit = examine(with_facts({"software.torch": None, "memory.overcommit": 2}))
    assert not unfit.is_fit
    assert [check for check, _ in unfit.of_grade(Grade.BROKEN)] == ["torch"]
    assert [check for check, _ in unfit.of_grade(Grade.WARNING)] == ["overcommit"]


def test_a_check_answers_in_defects() -> None:
    check = DoctorCheck("any", lambda facts: iter([broken("a", "b", "c"), warning("a", "b", "c")]))
    assert [defect.grade for defect in check.judge(SANE)] == [Grade.BROKEN, Grade.WARNING]
    assert (silence("a").grade, silence("a").fix) == (Grade.UNKNOWN, "")
