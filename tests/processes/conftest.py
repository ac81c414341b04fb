"""Real processes take long: `make test` walks each road once, by the tests that are marked
`everyday`; `make soak` has all others. A job fills the machine: where tests run side by side, these
run one after the other, and begin first.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before what is not asked for is left out by its marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.xdist_group("processes"))
        if item.get_closest_marker("everyday") is None:
            item.add_marker(pytest.mark.soak)
    items.sort(key=lambda item: HERE not in item.path.parents)
