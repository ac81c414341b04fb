"""A change leads from one document to the next, here and in the page's script."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keepstep.dashboard
from keepstep.dashboard.delta import changed, difference

SCRIPT = Path(keepstep.dashboard.__file__).parent / "page" / "page.js"
NAMES = st.sampled_from(["0", "1", "2", "10", "a", "b", "constructor", "toString"])
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.sampled_from([0.5, -1.25, 1e-7, 1e22]),  # no 1.0, which is 1 to JavaScript
    st.text(max_size=3),
    st.lists(st.integers(0, 2), max_size=2),
)
DOCUMENTS = st.recursive(
    st.dictionaries(NAMES, VALUES, max_size=4),
    lambda below: st.dictionaries(NAMES, st.one_of(VALUES, below), max_size=4),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """To a reader of JSON, to whom True is not 1."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


@given(DOCUMENTS, DOCUMENTS)
def test_a_change_leads_from_one_to_the_other(before: Any, after: Any) -> None:
    kept = json.dumps(before)
    change = difference(before, after)
    assert same(changed(before, change), after)
    assert json.dumps(before) == kept
    assert (change == {}) == same(before, after)


@given(DOCUMENTS, DOCUMENTS, DOCUMENTS)
def test_changes_follow_each_other(first: Any, second: Any, third: Any) -> None:
    halfway = changed(first, difference(first, second))
    assert same(changed(halfway, difference(second, third)), third)


def test_one_of_many_ranks_costs_one_of_many() -> None:
    before = {"ranks": {str(rank): {"done": 7, "doing": "forward"} for rank in range(1000)}}
    after = {"ranks": {**before["ranks"], "3": {"done": 8, "doing": "forward"}}}
    assert difference(before, after) == {"ranks": {"3": {"done": [8]}}}


needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def run_script(code: str, given_: Any) -> Any:
    """What JavaScript makes of a value, with the page's script as `page`."""
    program = f"""
const page = require({json.dumps(str(SCRIPT))});
const given = JSON.parse(require("fs").readFileSync(0, "utf8"));
process.stdout.write(JSON.stringify(({code})(given, page)));
"""
    ran = subprocess.run(
        ["node", "-e", program],
        input=json.dumps(given_),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@needs_node
@settings(max_examples=5, deadline=None)
@given(st.lists(st.tuples(DOCUMENTS, DOCUMENTS), min_size=40, max_size=40))
def test_the_page_does_the_same(pairs: list[tuple[Any, Any]]) -> None:
    asked = [[before, difference(before, after)] for before, after in pairs]
    found = run_script("(g, page) => g.map(([b, c]) => page.apply(b, c))", asked)
    assert all(same(got, after) for got, (_, after) in zip(found, pairs, strict=True))
