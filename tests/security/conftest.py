"""What several of the tests here attack."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.testing.rough_store import RoughStore


@pytest.fixture
def rough(tmp_path: Path) -> Iterator[RoughStore]:
    """A store that behaves as the test says."""
    with RoughStore(tmp_path / "store") as store:
        yield store
