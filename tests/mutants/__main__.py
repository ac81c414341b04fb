"""Kill rate: how many small wrong changes of the product its tests notice.

    python -m tests.mutants --count 300 --seed 1

Works on a copy of the tree. The tests named after the module run first, then those of its room,
then some seeds of the swarm, and last the tests of the rooms that build on it; the first failure
kills the mutant, and so does taking much longer than without the change. What fails or hangs
without any change is no witness: that ends the run.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.mutants.sample import Mutant, draw

ROOT = Path(__file__).parents[2]
ROOMS = ("core", "runtime", "edge/shm", "edge/net", "edge/store")
PRODUCT = Path("src/keepstep")
SWARM = ("-m", "keepstep.sim.protocol.swarm", "--seeds", "0:40")
PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=no")
# What builds on a room finds what the room's own tests do not look at.
BUILT_ON = {"core": "tests/runtime", "edge": "tests/runtime", "runtime": "tests/sim"}
UNCHANGED_WITHIN_S = 1800
LONGER = 3  # times as long as without a change, and some seconds more, is too long
MORE_S = 10

Command = tuple[str, ...]


def modules() -> list[Path]:
    return [
        module.relative_to(ROOT)
        for room in ROOMS
        for module in sorted((ROOT / PRODUCT / room).rglob("*.py"))
    ]


class Witnesses:
    """What is to notice changes of the copy at `tree`."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._takes_s: dict[Command, float] = {}  # without a change

    def of(self, module: Path) -> Iterator[Command]:
        """The quickest first."""
        inside = module.relative_to(PRODUCT)
        room = Path("tests") / inside.parent
        own = room / f"test_{inside.name}"
        if (self._tree / own).exists():
            yield (*PYTEST, str(own))
        while not (self._tree / room).is_dir():
            room = room.parent
        yield (*PYTEST, str(room))
        yield SWARM
        yield (*PYTEST, BUILT_ON[inside.parts[0]])

    def prepare(self, command: Command) -> None:
        """Try it without a change."""
        if command not in self._takes_s:
            began_s = time.monotonic()
            if not self._passes(command, UNCHANGED_WITHIN_S):
                raise SystemExit(f"{' '.join(command)} fails without any change")
            self._takes_s[command] = time.monotonic() - began_s

    def notices(self, command: Command) -> bool:
        return not self._passes(command, LONGER * self._takes_s[command] + MORE_S)

    def _passes(self, command: Command, within_s: float) -> bool:
        src = str(self._tree / "src")
        environ = {**os.environ, "PYTHONPATH": src, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=self._tree,
                env=environ,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=within_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def judge(mutant: Mutant, tree: Path, witnesses: Witnesses) -> str:
    """A line about it; a survivor's with the change itself."""
    path = tree / mutant.module
    original = path.read_text()
    changed = mutant.code(original)
    began_s = time.monotonic()
    for command in witnesses.of(mutant.module):
        witnesses.prepare(command)
        path.write_text(changed)
        try:
            if witnesses.notices(command):
                took = f"{time.monotonic() - began_s:.0f} s"
                return f"killed   {mutant.name} by {command[-1]} ({took})"
        finally:
            path.write_text(original)
    lines = difflib.unified_diff(original.splitlines(), changed.splitlines(), lineterm="", n=1)
    return "\n    ".join([f"SURVIVED {mutant.name}", *list(lines)[2:]])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="begin with this one of the sample")
    args = parser.parse_args()
    os.chdir(ROOT)
    sample = draw(modules(), args.count, args.seed)[args.first :]
    survived = 0
    with tempfile.TemporaryDirectory(prefix="keepstep-mutants-") as home:
        tree = Path(home) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "build")
        shutil.copytree(ROOT, tree, ignore=ignored)
        witnesses = Witnesses(tree)
        for number, mutant in enumerate(sample, args.first):
            line = judge(mutant, tree, witnesses)
            survived += line.startswith("SURVIVED")
            print(number, line, flush=True)
    rate = 1 - survived / len(sample)
    print(f"{len(sample)} mutants, {survived} survived: {100 * rate:.1f} % were noticed")


if __name__ == "__main__":
    main()
