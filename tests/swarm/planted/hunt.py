"""Hunt: runs seeds with one bug planted until something is violated.

A bug is planted in a process of its own, before anything of the package is imported there:
`python -m tests.swarm.planted.hunt 0:200 NAME` compiles the module's source with the bug in it, and
prints a line of JSON: the seed that found it, and what was violated. It begins with the seed that
is written down for that bug, if one of these is. Without a name nothing is planted; `--as NAME`
runs the jobs that are hunted for that bug without it.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from tests.swarm.planted.bugs import Bug, bug_called

REPOSITORY = Path(__file__).parents[3]
MAX_SEEDS = 200


@dataclass(frozen=True, slots=True)
class Hunt:
    """How it ended. `seed`: the first that found something; None: none of them did. `runs`: how
    many were made."""

    seed: int | None
    wrong: str
    runs: int
    took_s: float

    @property
    def checker(self) -> str:
        """Whose property was violated first."""
        return self.wrong.partition(":")[0]


def hunt(
    name: str | None = None, first: int = 0, end: int = MAX_SEEDS, planted: bool = True
) -> Hunt:
    """With that bug planted, in a process of its own. None: with none; `planted`: else without it,
    in the same jobs."""
    command = [sys.executable, "-m", "tests.swarm.planted.hunt", f"{first}:{end}"]
    began_s = time.monotonic()
    done = subprocess.run(
        command + ([] if planted else ["--as"]) + ([] if name is None else [name]),
        cwd=REPOSITORY,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    seed, wrong, runs = json.loads(done.stdout)
    return Hunt(seed, wrong, runs, time.monotonic() - began_s)


class _Planted(SourceFileLoader):
    """Loads the module with the bug in it; never from, or into, a file of byte code."""

    def __init__(self, bug: Bug) -> None:
        super().__init__(bug.module_name, str(bug.path))
        self._source = bug.planted_source()

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec")


class _Planter(MetaPathFinder):
    """Finds one module, before anybody else does."""

    def __init__(self, bug: Bug) -> None:
        self._name = bug.module_name
        self._loader = _Planted(bug)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.util.spec_from_loader(fullname, self._loader)


def plant(bug: Bug) -> None:
    """From now on that module has the bug. It must not have been imported yet."""
    assert bug.module_name not in sys.modules, f"{bug.module_name} was imported before"
    sys.meta_path.insert(0, _Planter(bug))


def main() -> None:
    span, *names = sys.argv[1:]
    first, end = map(int, span.split(":"))
    is_planted = "--as" not in names
    bugs = [bug_called(name) for name in names if name != "--as"]
    if is_planted:
        for bug in bugs:
            plant(bug)
    # only now: it imports the package
    from keepstep.sim.protocol.job.plan import RunPlan
    from keepstep.sim.protocol.swarm import run

    own = {name: value for bug in bugs for name, value in bug.plan.items()}
    known = {bug.seed for bug in bugs}
    seeds = sorted(range(first, end), key=lambda seed: seed not in known)
    for runs, seed in enumerate(seeds, 1):
        wrong = run(seed, RunPlan(**own) if own else None).wrong
        if wrong is not None:
            print(json.dumps([seed, wrong, runs]))
            return
    print(json.dumps([None, "", end - first]))


if __name__ == "__main__":
    main()
