"""Witnesses: which tests are to notice a change of a module, and whether they do.

Comes in: a change in the copy of the tree. Goes out: the test that noticed. They come in rounds,
the cheapest first. The first round is the file of tests named after the module (where there is
none, the smallest that import it), with few examples, as far as it comes in a few seconds. The
later ones are those tests that execute the changed place, the quickest of each file first, of ever
more files; and seeds of the swarm. The first test that fails ends a round; there one that waits or
computes for far too long has failed, too. What fails without a change is no witness.

Invariant: who looks at a change is settled before it is made. A changed line has another name, and
a test that fails reaches nothing.
"""

from __future__ import annotations

import ast
import json
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.reach import PRODUCT, SWARM, Reach, Witness
from tests.mutants.sample import Mutant
from tests.mutants.warm import Ended, Say, Warm

SEEDS = ("", "0:6", "6:20")  # of each round
SWARM_LIMIT_S = 400.0
ROUNDS = len(SEEDS)
FILES = (3, 10, 40)  # that are looked at in each round; in the first where none has the name
WITHIN_S = (0.0, 40.0, 90.0)  # of tests that were measured, for each round
NO_WITNESSES = ("architecture", "processes", "gpu", "security", "swarm", "wheel", "mutants")
FIRST_LIMIT_S = 5.0  # of computing
START_S, FILE_S = 20.0, 2.0  # of computing, until tests begin: at most, and more for each file
GUESSED_S = 5.0  # that a test takes whose time is not known
BUSY_RATIO = 10.0  # more examples, and slower ones
HANGS_RATIO, HANGS_S = 40.0, 100.0  # by the clock, on a busy machine: the longer one of the two


@dataclass(frozen=True, slots=True)
class Panel:
    """Who is to look at one change."""

    files: list[str]
    chosen: list[Witness] | None  # None: all tests in these files
    seeds: str = ""  # of the swarm; empty: none


class Witnesses:
    """What is to notice changes of the copy at `tree`."""

    def __init__(self, tree: Path, warm: Warm, reach: Reach, home: Path) -> None:
        self._tree = tree
        self._warm = warm
        self._reach = reach
        paths = [each for each in (tree / "tests").rglob("test_*.py") if _is_witness(each, tree)]
        self._sizes = {str(each.relative_to(tree)): each.stat().st_size for each in paths}
        self._importing = _importing(tree, self._sizes)
        self._kept = home / "no-witnesses.json"
        self._no_witnesses = set(json.loads(self._kept.read_text()) if self._kept.exists() else ())

    def panel(self, mutant: Mutant, turn: int) -> Panel:
        """Of a round. Asked while the copy is without the change."""
        if turn == 0:
            return Panel(self._first(mutant.module), None)
        chosen = self._of(mutant, turn)
        files = list(dict.fromkeys(each.file for each in chosen))
        return Panel(files, chosen, SEEDS[turn] if self._reach.by_swarm(mutant) else "")

    def notice(self, panel: Panel) -> str | None:
        """Which of its tests fails first, as the copy is now."""
        if panel.chosen is None:
            return self._failing(panel.files, None, FIRST_LIMIT_S, "reach", False)
        took_s = sum(each.took_s for each in panel.chosen)
        limit_s = START_S + FILE_S * len(panel.files) + BUSY_RATIO * took_s
        found = None
        if panel.files:
            found = self._failing(panel.files, panel.chosen, limit_s, "witness")
        if found or not panel.seeds:
            return found
        ended = self._warm.module(SWARM, ("--seeds", panel.seeds), SWARM_LIMIT_S)
        return None if ended.well else f"{SWARM} --seeds {panel.seeds}"

    def unsound(self, noticed: Iterable[str]) -> set[str]:
        """Those that fail without a change, too: no witnesses from now on."""
        chosen = [Witness(each, 0.0) for each in sorted(noticed) if not each.startswith(SWARM)]
        wrong: set[str] = set()
        while chosen:
            files = list(dict.fromkeys(each.file for each in chosen))
            limit_s = START_S + (FILE_S + HANGS_S) * len(files)
            found = self._failing(files, chosen, limit_s, "witness")
            if found is None:
                break
            wrong.add(found)
            chosen = [each for each in chosen if found not in (each.test, each.file)]
        self._no_witnesses |= wrong
        self._kept.write_text(json.dumps(sorted(self._no_witnesses)))
        return wrong

    def _failing(
        self,
        files: list[str],
        chosen: list[Witness] | None,
        limit_s: float,
        profile: str,
        endless_is_failure: bool = True,
    ) -> str | None:
        """The first test that fails; `chosen`: None for all but those that are no witnesses."""

        def plugin(say: Say) -> _Chosen:
            return _Chosen(chosen, self._no_witnesses, say)

        ended = self._warm.pytest(["-x", *files], plugin, limit_s, profile)
        if ended.well or not (ended.in_time or endless_is_failure):
            return None
        return _culprit(ended) or files[0]

    def _first(self, module: Path) -> list[str]:
        nearest = self._files(module, FILES[0])
        return nearest[:1] if _is_named_after(nearest[0], module) else nearest

    def _of(self, mutant: Mutant, turn: int) -> list[Witness]:
        """Of a later round; those that no earlier one of these has."""
        before = {each for earlier in range(1, turn) for each in self._of(mutant, earlier)}
        files = self._files(mutant.module, FILES[turn])
        self._reach.learn(files, mutant.module)
        found, at_import = self._reach.of(mutant, files)
        used = self._reach.used(mutant.module, files) if at_import else set()
        left: dict[str, list[Witness]] = {name: [] for name in files}
        for each in sorted(found, key=lambda one: (one.test not in used, one.took_s)):
            if each not in before and each.test not in self._no_witnesses:
                left[each.file].append(each)
        return _within(WITHIN_S[turn], list(left.values()))

    def _files(self, module: Path, most: int) -> list[str]:
        """Of tests, the nearest first: the one of that name, those that import it, its room, what
        is built on it; of these the smallest first."""
        inside = module.relative_to(PRODUCT)
        importing = self._importing.get(".".join(("keepstep", *inside.with_suffix("").parts)), [])
        room = f"tests/{inside.parent}/"

        def distance(name: str) -> tuple[bool, bool, bool, bool, int]:
            return (
                not _is_named_after(name, module),
                name not in importing,
                not name.startswith(room),
                not name.startswith("tests/runtime/"),
                self._sizes[name],
            )

        return sorted(self._sizes, key=distance)[:most]


def panel_of(noticed: str) -> Panel:
    """Who noticed a change before, alone."""
    if noticed.startswith(SWARM):
        return Panel([], [], noticed.split()[-1])
    witness = Witness(noticed, GUESSED_S)
    return Panel([witness.file], [witness] if "::" in noticed else None)


def _is_named_after(test: str, module: Path) -> bool:
    inside = module.relative_to(PRODUCT)
    return test == str(Path("tests") / inside.parent / f"test_{inside.name}")


def _within(left_s: float, files: list[list[Witness]]) -> list[Witness]:
    """The quickest of each file, then the second ones, and so on while there is time."""
    chosen: list[Witness] = []
    for each in zip_longest(*files):
        for witness in each:
            if witness is not None and (not chosen or witness.took_s <= left_s):
                chosen.append(witness)
                left_s -= witness.took_s
    return chosen


def _limit_s(witness: Witness) -> float:
    return max(HANGS_S, HANGS_RATIO * witness.took_s)


def _culprit(ended: Ended) -> str | None:
    """Who failed, or ran when all ended."""
    failed = [line[1:] for line in ended.said if line.startswith("!")]
    began = [line[1:] for line in ended.said if line.startswith("?")]
    return (failed or began[-1:] or [None])[0]


class _Chosen:
    """Runs these alone, in this order, and tells of each that it begins or fails."""

    def __init__(self, chosen: list[Witness] | None, without: set[str], say: Say) -> None:
        self._order = None if chosen is None else {e.test: at for at, e in enumerate(chosen)}
        self._limits_s = {each.test: _limit_s(each) for each in chosen or ()}
        self._without = without
        self._say = say

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        order = self._order
        if order is None:
            items[:] = [each for each in items if each.nodeid not in self._without]
        else:
            items[:] = [each for each in items if each.nodeid in order]
            items.sort(key=lambda each: order[each.nodeid])
        for each in items:
            limit = pytest.mark.timeout(self._limits_s.get(each.nodeid, HANGS_S))
            each.add_marker(limit, append=False)

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool:
        """One that is late has failed, and nothing more comes of it: hypothesis would look for
        another example that does not end, and no limit would end that one."""

        def late(*_: object) -> None:
            self._say(f"!{item.nodeid}")
            os._exit(1)

        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, settings.timeout)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> bool:
        signal.setitimer(signal.ITIMER_REAL, 0)
        return True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._say(f"!{report.nodeid}")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._say(f"?{nodeid}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._say(f"!{report.nodeid}")
            os._exit(1)  # what it would clean up, nobody needs

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        os._exit(0 if exitstatus in (0, pytest.ExitCode.NO_TESTS_COLLECTED) else 1)


def _is_witness(path: Path, tree: Path) -> bool:
    return path.relative_to(tree).parts[1] not in NO_WITNESSES


def _importing(tree: Path, names: Iterable[str]) -> dict[str, list[str]]:
    """Which files of tests import a module."""
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        for node in ast.walk(ast.parse((tree / name).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keepstep."):
                files = found.setdefault(str(node.module), [])
                if name not in files:
                    files.append(name)
    return found
