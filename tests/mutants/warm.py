"""Warm: runs tests, or the swarm, in a fork of a process that has imported what takes long.

Comes in: a copy of the tree, and what to run there. Goes out: what it said, line by line, and
whether it ended well. The fork imports the product and the tests from the copy as it is now;
nothing of them is ever imported here. Limits are of computing time, and of the clock for what
waits for something that never comes: then whatever it started ends with it.
"""

from __future__ import annotations

import compileall
import contextlib
import gc
import importlib
import os
import py_compile
import resource
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import Phase, settings

SLOW_IMPORTS = (
    "hypothesis.strategies",
    "numpy",
    "pytest_timeout",
    "torch",
    "fsspec",
    "typer.testing",
    "rich.console",
    "cryptography.hazmat.primitives.ciphers.aead",
    "prometheus_client",
)
CLOCK_RATIO = 20  # of the clock's limit to that of computing
GRACE_S = 5  # at the hard limit the kernel sends SIGKILL, which says nothing of the cause
MEMORY_BYTES = 8 << 30  # of data: etcd maps a file that is larger
PYTEST = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")

# That an example fails is enough: the smallest one is for who mends it.
PHASES = (Phase.explicit, Phase.generate)
settings.register_profile("witness", derandomize=True, deadline=None, database=None, phases=PHASES)
settings.register_profile("reach", settings.get_profile("witness"), max_examples=10)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Ended:
    well: bool
    in_time: bool
    said: tuple[str, ...]


class Warm:
    """Runs what stands in the copy at `tree`."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        # by their bytes: a change and its undoing have the same length, in the same second
        compileall.compile_dir(
            tree / "src", quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH
        )
        self._environ = {"PYTHONPATH": str(tree / "src")}
        at = subprocess.run(
            [sys.executable, "-c", "import keepstep; print(keepstep.__file__)"],
            cwd=tree,
            env=os.environ | self._environ,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        if not at.startswith(str(tree)):
            raise SystemExit(f"{sys.executable} imports {at.strip()} instead of the copy in {tree}")
        for name in SLOW_IMPORTS:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        gc.collect()
        gc.freeze()  # pytest collects garbage often, and looks at none of this again

    def pytest(
        self,
        arguments: Sequence[str],
        plugin: Callable[[Say], object],
        limit_s: float,
        profile: str = "witness",
    ) -> Ended:
        """`profile`: hypothesis's, one of those above."""

        def run(say: Say) -> bool:
            os.environ["HYPOTHESIS_PROFILE"] = profile
            code = pytest.main([*PYTEST, *arguments], [plugin(say)])
            return code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)

        return self.run(run, limit_s)

    def module(self, name: str, arguments: Sequence[str], limit_s: float) -> Ended:
        return self.run(lambda _: run_module(name, arguments), limit_s)

    def run(self, run: Callable[[Say], bool], limit_s: float) -> Ended:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            well = False
            try:
                os.close(read)
                self._settle(limit_s)
                well = run(lambda line: _say(write, line))
            finally:
                os._exit(0 if well else 1)
        os.close(write)
        said, in_time = _heard(read, pid, CLOCK_RATIO * limit_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # it, or what it has left
        status = os.waitpid(pid, 0)[1]
        in_time &= not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGXCPU
        return Ended(status == 0, in_time, said)

    def _settle(self, limit_s: float) -> None:
        os.setsid()
        os.chdir(self._tree)
        seconds = int(limit_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + GRACE_S))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        os.environ |= self._environ
        null = os.open(os.devnull, os.O_RDWR)
        for each in range(3):
            os.dup2(null, each)
        for name in [each for each in sys.modules if each.split(".")[0] in ("tests", "keepstep")]:
            del sys.modules[name]
        sys.path[:0] = [str(self._tree), str(self._tree / "src")]


def run_module(name: str, arguments: Sequence[str]) -> bool:
    """`python -m name`, and whether its exit code is 0."""
    sys.argv = [name, *arguments]
    try:
        runpy.run_module(name, run_name="__main__")
    except SystemExit as end:
        return not end.code
    return True


def _say(write: int, line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(write, f"{line}\n".encode())


def _heard(read: int, pid: int, within_s: float) -> tuple[tuple[str, ...], bool]:
    """What it says until it ends, and whether it did so in time. Its own children may hold the pipe
    for longer."""
    os.set_blocking(read, False)
    pidfd = os.pidfd_open(pid)
    heard = b""
    ends_s = time.monotonic() + within_s
    over = in_time = False
    while not over:
        left_s = max(0.0, ends_s - time.monotonic())
        ready, _, _ = select.select([read, pidfd], [], [], left_s)
        in_time = bool(ready)
        over = pidfd in ready or not ready
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(read, 1 << 16):
                heard += piece
            if not over:  # it has closed its end
                in_time = bool(select.select([pidfd], [], [], left_s)[0])
                over = True
    os.close(read)
    os.close(pidfd)
    return tuple(heard.decode().splitlines()), in_time
