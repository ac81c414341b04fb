"""Every public name is in the reference, says what it takes, gives and raises, and has an example
that runs."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import keepstep
import keepstep.ray
from keepstep.edge.torch.loader import Loader
from keepstep.errors import KeepstepError
from keepstep.integrations.marks import Marks, mlflow_mark, tensorboard_mark, wandb_mark
from keepstep.model.messages.keeper_rank import CheckpointDone

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SHOWN = re.findall(r"^::: ([\w.]+)", PAGE, re.MULTILINE)
NOT_FOR_PROGRAMS = {"announce", "changed"}  # what the rank tells its session
NOTHING = {None, "None", inspect.Signature.empty}


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Functions and methods, by the name under which an example would use them."""
    for name in ("protect", "prebuilt", "init_process_group"):
        yield name, getattr(keepstep, name)
    yield "keepstep.ray.run", keepstep.ray.run
    for name, value in vars(keepstep.Job).items():
        if inspect.isfunction(value) and not name.startswith("_") and name not in NOT_FOR_PROGRAMS:
            yield f"job.{name}", value
    yield "to_env", keepstep.Config.to_env
    yield "data.epochs", Loader.epochs
    for function in (wandb_mark, tensorboard_mark, mlflow_mark):
        yield function.__name__, function
    yield "marks.look", Marks.look


PUBLIC = dict(public())


def has_section(function: Callable[..., Any], heading: str) -> bool:
    return re.search(rf"^{heading}:$", inspect.cleandoc(function.__doc__ or ""), re.M) is not None


def raised_in(function: Callable[..., Any]) -> bool:
    """Whether its own lines raise."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return any(isinstance(node, ast.Raise) for node in ast.walk(tree))


@pytest.mark.parametrize("name", PUBLIC)
def test_it_says_what_it_takes_gives_and_raises(name: str) -> None:
    function = PUBLIC[name]
    signature = inspect.signature(function)
    takes = [each for each in signature.parameters if each not in ("self", "nameless")]
    assert has_section(function, "Args") == bool(takes)
    for taken in takes:
        assert re.search(rf"\n\s+{taken}: ", function.__doc__ or ""), f"{taken} is not told"
    gives = signature.return_annotation not in NOTHING
    assert (has_section(function, "Returns") or has_section(function, "Yields")) == gives
    if raised_in(function):
        assert has_section(function, "Raises")


@pytest.mark.parametrize("name", PUBLIC)
def test_it_has_an_example(name: str) -> None:
    if name == "keepstep.ray.run":
        assert name in (ROOT / "examples" / "ray" / "train.py").read_text()
    else:
        assert any(re.search(rf"\b{re.escape(name)}\(", example) for example in EXAMPLES)


@pytest.mark.parametrize("name", sorted(set(keepstep.__all__) - {"__version__"}))
def test_it_is_in_the_reference(name: str) -> None:
    value = getattr(keepstep, name)
    whole = f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, type) and issubclass(value, KeepstepError):
        assert "keepstep.errors" in SHOWN and value.__doc__
    else:
        assert whole in SHOWN or whole.replace(".settings.", ".") in SHOWN


@pytest.mark.parametrize("value", [Loader, CheckpointDone])
def test_what_a_job_gives_is_in_the_reference(value: type) -> None:
    assert f"{value.__module__}.{value.__qualname__}" in SHOWN and value.__doc__


# What the integrations are made of, and no program names; the libraries' own hooks.
PARTS = {
    "Boundary",
    "TrainerPosition",
    "TrainerSteps",
    "LightningProgress",
    "PlacedLoader",
    "TrlState",
    "trl_components",
}
HOOKS = {"get_train_dataloader", "should_continue_training"}
INTEGRATIONS = sorted((ROOT / "src/keepstep/integrations").glob("[a-z]*.py"))
PAGES = "".join(page.read_text() for page in (ROOT / "docs/integrations").glob("*.md")) + PAGE
Defined = ast.ClassDef | ast.FunctionDef


def defined(body: list[ast.stmt]) -> Iterator[Defined]:
    for node in body:
        if isinstance(node, Defined) and not node.name.startswith("_"):
            yield node


@pytest.mark.parametrize("path", INTEGRATIONS, ids=lambda path: path.stem)
def test_what_an_integration_offers_is_in_the_reference(path: Path) -> None:
    """Read, not imported: the libraries need not be here."""
    for node in defined(ast.parse(path.read_text()).body):
        if node.name in PARTS:
            continue
        assert f"keepstep.integrations.{path.stem}.{node.name}" in SHOWN, node.name
        assert ast.get_docstring(node) and re.search(rf"\b{node.name}\b", PAGES), node.name
        if isinstance(node, ast.FunctionDef):
            continue  # see PUBLIC
        for method in defined(node.body):
            if method.name in HOOKS or method.name.startswith("on_"):
                continue
            assert isinstance(method, ast.FunctionDef) and ast.get_docstring(method), method.name
            is_nothing = isinstance(method.returns, ast.Constant) and method.returns.value is None
            assert ("Returns:" in str(ast.get_docstring(method))) != is_nothing, method.name
        made = next((m for m in node.body if getattr(m, "name", "") == "__init__"), None)
        if isinstance(made, ast.FunctionDef):
            for taken in made.args.args[1:]:
                assert f"{taken.arg}: " in str(ast.get_docstring(made)), taken.arg


def test_properties_have_an_example() -> None:
    properties = [n for n, value in vars(keepstep.Job).items() if isinstance(value, property)]
    assert properties
    for name in properties:
        assert any(f"job.{name}" in example for example in EXAMPLES), name
        assert vars(keepstep.Job)[name].__doc__


def test_the_examples_run_as_one_program(tmp_path: Path) -> None:
    (tmp_path / "arena").mkdir()
    program = tmp_path / "reference.py"
    program.write_text("\n".join(EXAMPLES))
    places = {
        "KEEPSTEP_ARENA_DIR": str(tmp_path / "arena"),
        "KEEPSTEP_STATE_DIR": str(tmp_path / "state"),
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, **places},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
