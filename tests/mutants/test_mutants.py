"""Mutants: what is known of tests is of these tests and of this code, and time that is over is not
taken for a test that failed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cosmic_ray")
pytest.importorskip("coverage")

from tests.mutants import witnesses
from tests.mutants.reach import PRODUCT, SEEDS, Reach, Witness
from tests.mutants.sample import Mutant, names_of
from tests.mutants.warm import Ended, Warm
from tests.mutants.witnesses import Panel, panel_of

MODULE, TEST = PRODUCT / "core" / "a.py", "tests/core/test_a.py"


class FakeWarm:
    """Runs a file of tests, in which one test reaches every line of the module."""

    def __init__(self, tree: Path, home: Path) -> None:
        self.tree, self.home = tree, home
        self.learnt: list[str] = []

    def pytest(
        self, names: Sequence[str], plugin: Callable[[Any], object], limit_s: float, profile: str
    ) -> Ended:
        [name] = names
        self.learnt.append(name)
        text = (self.tree / MODULE).read_text()
        lines = names_of(MODULE, text.splitlines())
        keys = [hashlib.blake2b(each.encode(), digest_size=6).hexdigest() for each in lines]
        found = {
            "digest": hashlib.sha256((self.tree / name).read_bytes()).hexdigest(),
            "modules": {str(MODULE): hashlib.sha256(text.encode()).hexdigest()[:12]},
            "tests": [(f"{name}::test_it", 0.1)],
            "reached": {str(MODULE): dict.fromkeys(keys, "1")},
        }
        (self.home / (name.replace("/", "+") + ".json")).write_text(json.dumps(found))
        return Ended(True, True, ())


class Room:
    """A product of one module, and its tests."""

    def __init__(self, home: Path) -> None:
        self.tree, self.home = home / "tree", home / "reach"
        self.home.mkdir()
        (self.home / f"swarm {SEEDS}.json").write_text("{}")
        self.write(MODULE, "def one() -> int:\n    return 1\n")
        self.write(Path(TEST), "def test_it() -> None: ...\n")
        self.warm = FakeWarm(self.tree, self.home)

    def write(self, path: Path, text: str) -> None:
        (self.tree / path).parent.mkdir(parents=True, exist_ok=True)
        (self.tree / path).write_text(text)

    def who(self) -> list[Witness]:
        """Reaches the module's second line, by what a run finds that begins now."""
        reach = Reach(self.tree, self.warm, self.home)  # type: ignore[arg-type]
        reach.learn([TEST], MODULE)
        return reach.of(Mutant(MODULE, "core/NumberReplacer", 0, 2, "its place"), [TEST])[0]


def test_what_a_file_of_tests_reaches_is_learnt_once_until_it_or_the_module_changes(
    tmp_path: Path,
) -> None:
    room = Room(tmp_path)
    expected = [Witness(f"{TEST}::test_it", 0.1)]
    assert room.who() == room.who() == expected and len(room.warm.learnt) == 1
    room.write(MODULE, "def one() -> int:\n    return 2 - 1\n")
    assert room.who() == room.who() == expected and len(room.warm.learnt) == 2
    room.write(Path(TEST), "def test_it() -> None: assert True\n")
    assert room.who() == expected and len(room.warm.learnt) == 3


def test_who_noticed_before_looks_alone() -> None:
    assert panel_of(f"{TEST}::test_it[a::b]").files == [TEST]
    assert panel_of(TEST) == Panel([TEST], None)
    assert panel_of("keepstep.sim.protocol.swarm --seeds 0:6") == Panel([], [], "0:6")


@pytest.mark.parametrize(("ends", "well", "in_time"), [(True, True, True), (False, False, False)])
def test_time_that_is_over_is_told_from_a_test_that_failed(
    ends: bool, well: bool, in_time: bool, tmp_path: Path
) -> None:
    def work(say: Callable[[str], None]) -> bool:
        while not ends:
            pass
        return True

    warm = Warm.__new__(Warm)  # without importing all that tests need
    warm._tree, warm._environ = tmp_path, {}
    ended = warm.run(work, 0.9)
    assert (ended.well, ended.in_time) == (well, in_time)


@pytest.mark.parametrize("is_property", [False, True])
def test_a_test_that_never_ends_has_failed(
    is_property: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where hypothesis holds what ends it for an example like others."""
    head = "@given(st.integers())\ndef test_it(n):" if is_property else "def test_it():"
    (tmp_path / "test_a.py").write_text(
        "from hypothesis import given, settings\n"
        "from hypothesis import strategies as st\n\n"
        "settings.load_profile('witness')\n\n\n"
        f"{head}\n    while True:\n        pass\n"
    )
    monkeypatch.setattr(witnesses, "HANGS_S", 0.5)
    warm = Warm.__new__(Warm)
    warm._tree, warm._environ = tmp_path, {}
    chosen = [Witness("test_a.py::test_it", 0.0)]
    ended = warm.pytest(["test_a.py"], lambda say: witnesses._Chosen(chosen, set(), say), 30.0)
    assert not ended.well and ended.in_time
    assert ended.said == ("?test_a.py::test_it", "!test_a.py::test_it")
