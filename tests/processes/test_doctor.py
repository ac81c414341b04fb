"""Defects planted into the real machine, in namespaces and shells of their own, and mended by the
very command that `keepstep doctor` names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)

ARENA = "$KEEPSTEP_ARENA_DIR"
LOOPBACK_UP = "ip link set lo up"
TWO_ENDS = "ip link add eth7 type veth peer name eth8"
DOCTOR = f"{sys.executable} -m keepstep.cli.main doctor $OPTIONS --json"
IN_NAMESPACES = ["unshare", "--mount", "--net", "--uts", "--propagation", "private"]


@dataclass(frozen=True)
class Planted:
    """plant: shell commands. fix: a pattern for the part of the remedy that is then run, in the
    same shell. answers: what is put into it for what it leaves open. options: the doctor's."""

    check: str
    plant: str
    fix: str
    answers: tuple[tuple[str, str], ...] = ()
    options: str = ""


DEFECTS = [
    Planted("open-files", "ulimit -Sn 100", r"ulimit -n \d+"),
    Planted("file-size", "ulimit -Sf 100000", r"ulimit -f unlimited"),
    Planted("address-space", "ulimit -Sv 8000000", r"ulimit -v unlimited"),
    Planted("processor-time", "ulimit -St 1000", r"ulimit -t unlimited"),
    Planted("core-dumps", "ulimit -Sc unlimited", r"ulimit -c 0"),
    Planted("ignored-signals", "trap '' CHLD", r"trap - CHLD"),
    Planted("ignored-signals", "trap '' TERM", r"trap - TERM"),
    Planted(
        "arena-writable",
        f"umount {ARENA}; rmdir {ARENA}",
        r"mkdir -p \S+ && mount -t tmpfs tmpfs [^ ,]+",
    ),
    Planted(
        "arena-writable",
        f"mount -t tmpfs -o ro,mode=1777 tmpfs {ARENA}",
        r"mount -o remount,rw \S+ && chmod 1777 \S+",
    ),
    Planted(
        "arena-in-memory", f"umount {ARENA}; chmod 1777 {ARENA}", r"mount -t tmpfs tmpfs [^ ,]+"
    ),
    Planted(
        "arena-size",
        f"mount -t tmpfs -o size=64m,mode=1777 tmpfs {ARENA}",
        r"mount -o remount,size=\d+m [^ ,]+",
    ),
    Planted(
        "arena-free",
        f"mount -t tmpfs -o nr_inodes=50,mode=1777 tmpfs {ARENA}",
        r"mount -o remount,nr_inodes=1m \S+",
    ),
    Planted("arena-owner", f"chmod 777 {ARENA}", r"chown root \S+ && chmod 1777 \S+"),
    Planted(
        "temporary-directory",
        "mkdir -p $TMPDIR && mount -t tmpfs -o noexec tmpfs $TMPDIR",
        r"mount -o remount,exec [^ ,]+",
    ),
    Planted("loopback", "ip link set lo down", r"ip link set lo up"),
    Planted("backlog", "sysctl -qw net.core.somaxconn=8", r"sysctl -w net.core.somaxconn=\d+"),
    Planted(
        "ports",
        'sysctl -qw net.ipv4.ip_local_port_range="60000 60100"',
        r"sysctl -w net.ipv4.ip_local_port_range=.*",
    ),
    Planted(
        "interfaces",
        f"{TWO_ENDS}; ip link set eth8 up; ip link set eth7 mtu 576 up",
        r"ip link set eth7 mtu 1500",
    ),
    Planted(
        "host-name",
        "hostname nowhere-at-all; echo 127.0.0.1 localhost > $HOME/hosts; "
        "mount --bind $HOME/hosts /etc/hosts",
        r"echo ADDRESS nowhere-at-all >> /etc/hosts",
        answers=(("ADDRESS", "10.9.8.7"),),
        options="--nnodes 2 --wait 5",
    ),
    Planted("internal-variables", "export KEEPSTEP_AGENT=1", r"unset KEEPSTEP_AGENT"),
    Planted("chosen-interfaces", "export GLOO_SOCKET_IFNAME=no0", r"unset GLOO_SOCKET_IFNAME"),
    Planted("rank-variables", "export RANK=0", r"unset RANK"),
    Planted("debugging-variables", "export CUDA_LAUNCH_BLOCKING=1", r"unset CUDA_LAUNCH_BLOCKING"),
    Planted("python", "export PYTHONOPTIMIZE=1", r"unset PYTHONOPTIMIZE"),
    Planted(
        "secret", "export KEEPSTEP_SECRET=abababababababababab", r'export KEEPSTEP_SECRET="[^"]+"'
    ),
    Planted(
        "left-memory",
        f"mkdir -m 700 {ARENA}/keepstep-$(id -u) {ARENA}/keepstep-$(id -u)/dead",
        r"keepstep clean --job dead",
        answers=(("keepstep clean", f"{sys.executable} -m keepstep.cli.main clean --yes"),),
    ),
]


def may_unshare() -> bool:
    return (
        subprocess.run([*IN_NAMESPACES, "true"], capture_output=True, check=False).returncode == 0
    )


def named_by(answer: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for defect in json.loads(answer)["defects"]:
        found.setdefault(defect["check"], []).append(defect)
    return found


class Shell:
    """A shell in namespaces of its own, with an arena and directories of its own."""

    def __init__(self, at: Path, options: str) -> None:
        for name in ("arena", "home", "tmp"):
            (at / name).mkdir()
        self._environ = {
            **{name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ},
            "KEEPSTEP_ARENA_DIR": str(at / "arena"),
            "HOME": str(at / "home"),
            "TMPDIR": str(at / "tmp"),
            "OPTIONS": options,
        }

    def run(self, *commands: str) -> str:
        """The document that the commands print."""
        ready = f"mount -t tmpfs -o mode=1777 tmpfs {ARENA}; mount -t sysfs sys /sys; {LOOPBACK_UP}"
        script = "\n".join((ready, *commands))
        done = subprocess.run(
            [*IN_NAMESPACES, "bash", "-c", script],
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        begin = done.stdout.find("{")
        assert begin >= 0, done.stderr
        return done.stdout[begin:]


@pytest.mark.everyday
@pytest.mark.skipif(not may_unshare(), reason="needs namespaces of its own (unshare), as root has")
@pytest.mark.parametrize(
    "planted", DEFECTS, ids=[f"{number}-{each.check}" for number, each in enumerate(DEFECTS)]
)
def test_a_defect_is_named_and_its_remedy_works(planted: Planted, tmp_path: Path) -> None:
    shell = Shell(tmp_path, planted.options)
    before = named_by(shell.run(planted.plant, DOCTOR))
    assert planted.check in before
    (remedy,) = {
        found[0]
        for defect in before[planted.check]
        if (found := re.search(planted.fix, defect["fix"])) is not None
    }
    for word, answer in planted.answers:
        remedy = remedy.replace(word, answer)
    after = named_by(shell.run(planted.plant, f"{{ {remedy}; }} > /dev/null", DOCTOR))
    assert planted.check not in after


@pytest.mark.everyday
@pytest.mark.skipif(not may_unshare(), reason="needs namespaces of its own (unshare), as root has")
def test_what_is_planted_is_not_there_without_it(tmp_path: Path) -> None:
    named = named_by(Shell(tmp_path, "").run(DOCTOR))
    assert {planted.check for planted in DEFECTS} & named.keys() <= {"host-name"}
