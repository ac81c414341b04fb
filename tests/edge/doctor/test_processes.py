"""Processes, signals and keepers, read from /proc."""

from __future__ import annotations

import json
import os
import signal

import pytest

from keepstep.edge.doctor import processes
from keepstep.edge.doctor.processes import SYS_PTRACE, read_processes
from keepstep.edge.os.processes import KEEPER_MODULE
from keepstep.model.machine_facts import KeeperTrace
from tests.edge.doctor.fake_machine import FakeMachine


def keeper(job: str) -> str:
    said = json.dumps({"job": job, "arena_dir": "/dev/shm"})
    return f"python\0-m\0{KEEPER_MODULE}\0{said}\0"


def test_counts(machine: FakeMachine) -> None:
    machine.process(50, "Z", 1)
    machine.process(51, "Z", 40)
    machine.write("/proc/52/cmdline", "")  # which has just ended
    found = read_processes(machine.host)
    assert (found.zombies, found.zombies_of_init, found.init) == (2, 1, "systemd")
    assert (found.load, found.tasks, found.cpus) == (0.5, 700, 8)


def test_signals_and_capabilities(machine: FakeMachine) -> None:
    mask = 1 << (signal.SIGCHLD - 1) | 1 << (signal.SIGPIPE - 1)
    machine.change("/proc/self/status", "SigIgn:\t0000000001001000", f"SigIgn:\t{mask:016x}")
    machine.change("/proc/self/status", "CapEff:\t0000000000000000", f"CapEff:\t{SYS_PTRACE:x}")
    found = read_processes(machine.host)
    assert found.ignored_signals == {"SIGCHLD", "SIGPIPE"} and found.may_trace
    assert found.blocked_signals == set()


def test_keepers_with_and_without_memory(machine: FakeMachine) -> None:
    below = machine.root / "dev/shm" / f"keepstep-{os.getuid()}"
    (below / "whole").mkdir(parents=True)
    (below / "ends~ending-72").mkdir()
    for pid, job in ((70, "lost"), (71, "whole"), (72, "ends")):
        machine.process(pid, cmdline=keeper(job))
    machine.process(73, cmdline=f"grep\0{KEEPER_MODULE}\0")
    assert read_processes(machine.host).keepers == (
        KeeperTrace(70, "lost", False),
        KeeperTrace(71, "whole", True),
        KeeperTrace(72, "ends", True),
    )


def test_a_keeper_that_is_just_ending_is_none(machine: FakeMachine) -> None:
    machine.process(70, cmdline=keeper("ends"))
    machine.calls["pause"] = lambda seconds: (machine.root / "proc/70/cmdline").unlink()
    assert read_processes(machine.host).keepers == ()


@pytest.mark.parametrize(
    "said", ["[" * 100_000, "[]", '{"job": 1}', '{"job": "j", "arena_dir": "a\\u0000"}', "{"]
)
def test_a_command_line_that_only_looks_like_a_keepers_is_none(
    machine: FakeMachine, said: str
) -> None:
    machine.process(70, cmdline=f"python\0-m\0{KEEPER_MODULE}\0{said}\0")
    machine.process(71, cmdline=keeper("lost"))
    assert read_processes(machine.host).keepers == (KeeperTrace(71, "lost", False),)


def test_nothing_of_another_users_is_parsed(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may start a process here says on its command line what they like."""
    machine.process(70, cmdline=keeper("theirs"))
    parsed: list[str] = []
    monkeypatch.setattr(processes, "from_json", parsed.append)
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    assert read_processes(machine.host).keepers == () and parsed == []


def test_a_kernel_without_sessions_and_yama(machine: FakeMachine) -> None:
    (machine.root / "proc/sys/kernel/sched_autogroup_enabled").unlink()
    (machine.root / "proc/sys/kernel/yama/ptrace_scope").unlink()
    found = read_processes(machine.host)
    assert not found.has_autogroup and found.ptrace_scope is None
