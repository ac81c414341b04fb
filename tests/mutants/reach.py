"""Reach: which tests execute a line of the product.

Comes in: the copy of the tree, without a change. Goes out: for a place, the tests that execute it,
and how long each of them takes. A file of tests that is asked about runs once under coverage.py,
with a context for each test and fewer examples, until its time for that is over. What was found
stays in a file, and is of use until that file of tests changes, or the module that is asked about.

What runs when a module is imported (constants, declarations, defaults) is reached by every test of
a file that imports it. Tests of real processes, and what they start, are not looked at.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import coverage
import pytest

from tests.mutants.sample import Mutant, names_of
from tests.mutants.warm import Warm, run_module

PRODUCT = Path("src/keepstep")
LEARNS_S, LIMIT_S = 120.0, 1200.0  # of computing: until no test begins anymore, and ends
IMPORT = ""  # the context outside of tests

SWARM, SEEDS = "keepstep.sim.protocol.swarm", "0:20"

Reached = dict[str, dict[str, str]]  # module, line: a number with a bit for each test
Files = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Witness:
    test: str
    took_s: float

    @property
    def file(self) -> str:
        return self.test.split("::")[0]


class Reach:
    """What is known of the tests in the copy at `tree`, kept below `home`."""

    def __init__(self, tree: Path, warm: Warm, home: Path) -> None:
        self._tree = tree
        self._warm = warm
        self._home = home
        self._files: Files = {}
        self._learnt: set[str] = set()  # since this began
        self._modules = {
            str(each.relative_to(tree)): hashlib.sha256(each.read_bytes()).hexdigest()[:12]
            for each in (tree / PRODUCT).rglob("*.py")
        }
        home.mkdir(parents=True, exist_ok=True)
        kept = home / f"swarm {SEEDS}.json"
        if not kept.exists():
            warm.run(lambda _: _swarm_reaches(kept), LIMIT_S)
        self._swarm: Reached = json.loads(kept.read_text())

    def learn(self, files: Iterable[str], module: Path) -> None:
        """What these files of tests reach of a module, if it is not known yet. The copy has to be
        without a change."""
        for name in files:
            if name in self._learnt:
                continue
            kept = self._home / (name.replace("/", "+") + ".json")
            if name not in self._files and kept.exists():
                self._files[name] = json.loads(kept.read_text())
            digest = hashlib.sha256((self._tree / name).read_bytes()).hexdigest()
            if not self._is_of(self._files.get(name), digest, module):
                self._learnt.add(name)
                plugin = partial(_Contexts, kept, digest, self._modules)
                self._warm.pytest([name], lambda _, made=plugin: made(), LIMIT_S, "reach")
                if kept.exists():  # else none of its tests ends in time
                    self._files[name] = json.loads(kept.read_text())

    def _is_of(self, known: dict[str, Any] | None, digest: str, module: Path) -> bool:
        """Whether what is known of a file of tests is of these tests and of this module."""
        if known is None or known["digest"] != digest or "modules" not in known:
            return False
        return bool(known["modules"].get(str(module)) == self._modules[str(module)])

    def of(self, mutant: Mutant, files: Iterable[str]) -> tuple[list[Witness], bool]:
        """(which tests in these files execute its place, whether that is so at import)."""
        keys, inside = self._keys(mutant)
        found = []
        for file in (self._files[name] for name in files if name in self._files):
            mask = _mask(file["reached"].get(str(mutant.module), {}), keys)
            at_import = mask >> len(file["tests"])
            if mask and (at_import or not inside):
                mask = (1 << len(file["tests"])) - 1
            for number, (test, took_s) in enumerate(file["tests"]):
                if mask >> number & 1:
                    found.append(Witness(test, took_s))
        return found, not inside

    def by_swarm(self, mutant: Mutant) -> bool:
        keys, _ = self._keys(mutant)
        return _mask(self._swarm.get(str(mutant.module), {}), keys) > 0

    def used(self, module: Path, files: Iterable[str]) -> set[str]:
        """Which tests in these files call something of a module."""
        text = (self._tree / module).read_text()
        tree = ast.parse(text)
        keys = {
            _key(name)
            for line, name in enumerate(names_of(module, text.splitlines()), 1)
            if _statement(tree, line)[2]
        }
        found = set()
        for file in (self._files[name] for name in files if name in self._files):
            mask = _mask(file["reached"].get(str(module), {}), keys)
            found |= {test for at, (test, _) in enumerate(file["tests"]) if mask >> at & 1}
        return found

    def _keys(self, mutant: Mutant) -> tuple[set[str], bool]:
        """(the lines of its statement, whether it is in a function)."""
        text = (self._tree / mutant.module).read_text()
        first, last, inside = _statement(ast.parse(text), mutant.line)
        names = names_of(mutant.module, text.splitlines())[first - 1 : last]
        return {_key(name) for name in names}, inside


def _mask(reached: dict[str, str], keys: set[str]) -> int:
    mask = 0
    for key in keys & reached.keys():
        mask |= int(reached[key], 16)
    return mask


def _key(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=6).hexdigest()


def _statement(tree: ast.Module, line: int) -> tuple[int, int, bool]:
    """(first line, last line, whether in a function): of the innermost statement at `line`, without
    the block it has."""
    first, last, inside = line, line, False
    smallest = None
    for node in ast.walk(tree):
        if not isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            continue
        begin, end = _span(node)
        if not begin <= line <= end:
            continue
        body = getattr(node, "body", None)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and line >= body[0].lineno:
            inside = True
        if smallest is None or end - begin <= smallest:
            smallest = end - begin
            first, last = begin, end
            if body and line < body[0].lineno:
                last = max(begin, body[0].lineno - 1)
            elif body:
                first = last = line
    return first, last, inside


def _span(node: ast.stmt | ast.ExceptHandler | ast.match_case) -> tuple[int, int]:
    if isinstance(node, ast.match_case):
        return node.pattern.lineno, node.body[-1].end_lineno or 0
    decorators: Iterable[ast.expr] = getattr(node, "decorator_list", ())
    begin = min([node.lineno, *(each.lineno for each in decorators)])
    return begin, node.end_lineno or begin


def _started() -> coverage.Coverage:
    found = coverage.Coverage(
        data_file=None, config_file=False, include=[str(Path.cwd() / PRODUCT / "*")]
    )
    found.start()
    found.switch_context(IMPORT)
    return found


def _reached(found: coverage.Coverage, tree: Path, bits: dict[str, int]) -> Reached:
    """Of each module the lines, and who reached them."""
    found.stop()
    data = found.get_data()
    reached: Reached = {}
    for file in data.measured_files():
        module = Path(file).relative_to(tree)
        names = names_of(module, Path(file).read_text().splitlines())
        lines = reached[str(module)] = {}
        for line, contexts in data.contexts_by_lineno(file).items():
            mask = 0
            for context in contexts:
                mask |= bits.get(context, 0)
            if mask:
                lines[_key(names[line - 1])] = f"{mask:x}"
    return reached


def _swarm_reaches(kept: Path) -> bool:
    tree = Path.cwd()
    found = _started()
    well = run_module(SWARM, ("--seeds", SEEDS))
    kept.write_text(json.dumps(_reached(found, tree, {IMPORT: 1})))
    return well


class _Contexts:
    """Runs each test in a context of its own, and writes down what was reached."""

    def __init__(self, kept: Path, digest: str, modules: dict[str, str]) -> None:
        self._kept, self._digest, self._modules = kept, digest, modules
        self._took_s: dict[str, float] = {}
        self._failed: set[str] = set()
        self._tree = Path.cwd()
        self._coverage = _started()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._coverage.switch_context(item.nodeid)
        result = yield
        self._coverage.switch_context(IMPORT)
        if time.process_time() > LEARNS_S:
            item.session.shouldstop = "what is known now is enough"
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before_s = self._took_s.get(report.nodeid, 0.0)
        self._took_s[report.nodeid] = round(before_s + report.duration, 3)
        if report.outcome != "passed":
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        tests = [each for each in self._took_s if each not in self._failed]
        bits = {IMPORT: 1 << len(tests)} | {test: 1 << at for at, test in enumerate(tests)}
        found = {
            "digest": self._digest,
            "modules": self._modules,
            "tests": [(test, self._took_s[test]) for test in tests],
            "reached": _reached(self._coverage, self._tree, bits),
        }
        self._kept.write_text(json.dumps(found))
        os._exit(0)
