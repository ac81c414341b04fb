"""Processes that are in the way, and things that this one may not do."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.core.doctor.defect import Grade
from keepstep.model.machine_facts import KeeperTrace
from tests.core.doctor.sane_machine import found_by, only_defect, with_facts


@pytest.mark.parametrize(
    ("changes", "check", "grade", "words"),
    [
        ({"processes.load": 30.0}, "load", Grade.WARNING, "30.0 processes"),
        ({"processes.load": None}, "load", Grade.UNKNOWN, "load"),
        ({"processes.zombies": 500}, "zombies", Grade.WARNING, "500 processes are dead"),
        ({"processes.zombies_of_init": 9}, "init", Grade.WARNING, "has not waited for 9"),
        ({"processes.init": "sleep"}, "init", Grade.WARNING, "docker run --init"),
        ({"processes.init": "python3"}, "init", Grade.WARNING, "process 1 is python3"),
        ({"processes.init": None}, "init", Grade.UNKNOWN, "process 1"),
        (
            {"processes.ignored_signals": frozenset({"SIGCHLD"})},
            *("ignored-signals", Grade.BROKEN, "trap - CHLD"),
        ),
        (
            {"processes.ignored_signals": frozenset({"SIGTERM"})},
            *("ignored-signals", Grade.WARNING, "preemption"),
        ),
        (
            {"processes.blocked_signals": frozenset({"SIGTERM"})},
            *("ignored-signals", Grade.WARNING, "preemption"),
        ),
        (
            {"processes.blocked_signals": frozenset({"SIGCHLD"})},
            *("ignored-signals", Grade.WARNING, "SIGCHLD is blocked"),
        ),
        ({"processes.pidfd_refusal": "ENOSYS"}, "pidfd", Grade.BROKEN, "seccomp"),
        ({"processes.may_nice_session": False}, "autogroup", Grade.WARNING, "autogroup_enabled=0"),
        ({"processes.ptrace_scope": 1}, "ptrace", Grade.WARNING, "sysctl -w kernel.yama"),
        ({"processes.ptrace_scope": 3}, "ptrace", Grade.WARNING, "reboot"),
        (
            {"processes.keepers": (KeeperTrace(7, "lost", False), KeeperTrace(8, "whole", True))},
            *("orphaned-keepers", Grade.WARNING, "kill 7"),
        ),
    ],
)
def test_a_defect_is_named(changes: dict[str, Any], check: str, grade: Grade, words: str) -> None:
    defect = only_defect(changes, check)
    assert defect.grade is grade and words in f"{defect.found} {defect.why} {defect.fix}"


def test_one_core_is_few() -> None:
    changes = {"processes.cpus": 1, "cgroup.cpu_cores": None}
    assert "taskset" in only_defect(changes, "cores").fix


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"processes.may_nice_session": False, "processes.has_autogroup": False}, "autogroup"),
        ({"processes.ptrace_scope": 1, "processes.may_trace": True}, "ptrace"),
        ({"processes.ptrace_scope": None}, "ptrace"),  # a kernel without Yama
        ({"processes.ignored_signals": frozenset({"SIGHUP"})}, "ignored-signals"),  # nohup
        *(({"processes.init": name}, "init") for name in ("tini", "bash", "docker-init")),
    ],
)
def test_what_is_in_order_is_not_named(changes: dict[str, Any], check: str) -> None:
    assert found_by(check, with_facts(changes)) == []
