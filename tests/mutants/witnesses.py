"""Witnesses: which tests are to notice a change of a module, and whether they do.

Comes in: a copy of the tree, and a change in it. Goes out: the test that noticed. They come in
rounds, the cheapest first: the tests named after the module; the others that import it, and a few
seeds of the swarm; its room, and more seeds; the tests of the rooms that build on it. Each runs in
a fork of this process, which has imported what takes long and nothing of the product.

A round's limit is one of computing time: on a busy machine the clock tells no endless loop.
"""

from __future__ import annotations

import ast
import compileall
import contextlib
import os
import py_compile
import resource
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies  # noqa: F401  what takes long
import numpy  # noqa: F401
import pytest
import pytest_timeout  # noqa: F401
from hypothesis import Phase, settings

PRODUCT = Path("src/keepstep")
SWARM = "keepstep.sim.protocol.swarm"
ROUNDS = 4
SOME, MORE = "0:6", "6:40"  # seeds of the swarm
# What builds on a room finds what the room's own tests do not look at.
BUILT_ON = {"core": "tests/runtime", "edge": "tests/runtime", "runtime": "tests/sim"}
NO_WITNESSES = ("processes", "gpu", "security", "mutants")  # slow, or real machines
HANGS_S = 300  # by the clock: what waits for something that never comes
PYTEST = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", f"--timeout={HANGS_S}")
LIMITS_S = (20, 60, 300, 1200)  # of computing, for each round
MEMORY_BYTES = 8 << 30  # of data: etcd maps a file that is larger

# That an example fails is enough: the smallest one is for who mends it.
PHASES = (Phase.explicit, Phase.generate)
settings.register_profile("witness", derandomize=True, deadline=None, database=None, phases=PHASES)

Command = tuple[str, ...]


class Witnesses:
    """What is to notice changes of the copy at `tree`."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._sound: dict[tuple[Command, int], bool] = {}
        # by their bytes: a change and its undoing have the same length, in the same second
        compileall.compile_dir(
            tree / "src", quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH
        )
        self._importing = _importing(tree)
        self._environ = {
            "PYTHONPATH": str(tree / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HYPOTHESIS_PROFILE": "witness",
        }
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

    def of(self, module: Path, number: int) -> Iterator[Command]:
        """Those of a round."""
        inside = module.relative_to(PRODUCT)
        room = Path("tests") / inside.parent
        own = str(room / f"test_{inside.name}")
        while not (self._tree / room).is_dir():
            room = room.parent
        simulated = inside.parts[0] in ("core", "runtime")
        dotted = ".".join(("keepstep", *inside.with_suffix("").parts))
        importing = self._importing.get(dotted, [])
        if number == 0 and (self._tree / own).exists():
            yield ("pytest", own)
        if number == 1:
            if simulated:
                yield (SWARM, "--seeds", SOME)
            others = [each for each in importing if each != own]
            if others:
                yield ("pytest", *others)
        if number == 2:
            if simulated:
                yield (SWARM, "--seeds", MORE)
            yield ("pytest", str(room), *(f"--ignore={each}" for each in {own, *importing}))
        if number == 3:
            yield ("pytest", BUILT_ON[inside.parts[0]])

    def noticed(self, command: Command, number: int) -> str | None:
        """Which test fails with the change that the tree has now."""
        passes, failed = self._run(command, LIMITS_S[number])
        return None if passes else failed or " ".join(command)

    def sound(self, noticed: str, command: Command, number: int) -> bool:
        """Whether it passes without a change; what does not is no witness."""
        alone = ("pytest", noticed) if "::" in noticed else command
        if (alone, number) not in self._sound:
            self._sound[alone, number] = self._run(alone, LIMITS_S[number])[0]
        return self._sound[alone, number]

    def _run(self, command: Command, limit_s: int) -> tuple[bool, str]:
        """(whether all passes, the first test that fails)."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(read)
                code = self._witness(command, limit_s, write)
            finally:
                os._exit(code)
        os.close(write)
        with open(read) as pipe:
            failed = pipe.readline().strip()
        return os.waitpid(pid, 0)[1] == 0, failed

    def _witness(self, command: Command, limit_s: int, write: int) -> int:
        os.chdir(self._tree)
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        os.environ |= self._environ
        null = os.open(os.devnull, os.O_RDWR)
        for each in range(3):
            os.dup2(null, each)
        for name in [each for each in sys.modules if each.split(".")[0] in ("tests", "keepstep")]:
            del sys.modules[name]
        sys.path[:0] = [str(self._tree), str(self._tree / "src")]
        if command[0] == "pytest":
            code = pytest.main([*PYTEST, *command[1:]], [_Tell(write)])
            return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code
        sys.argv = list(command)
        try:
            runpy.run_module(command[0], run_name="__main__")
        except SystemExit as end:
            return int(bool(end.code))
        return 0


class _Tell:
    """Says which test is the first to fail."""

    def __init__(self, write: int) -> None:
        self._write = write

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with contextlib.suppress(OSError):
                os.write(self._write, f"{report.nodeid}\n".encode())


def _importing(tree: Path) -> dict[str, list[str]]:
    """Which files of tests import a module."""
    found: dict[str, list[str]] = {}
    for path in sorted((tree / "tests").rglob("test_*.py")):
        name = path.relative_to(tree)
        if name.parts[1] in NO_WITNESSES:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keepstep."):
                files = found.setdefault(str(node.module), [])
                if str(name) not in files:
                    files.append(str(name))
    return found
