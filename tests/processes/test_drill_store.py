"""Drills of the store: it refuses, is slow, hangs and fails; training goes on, and ends in the same
state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keepstep.edge.store.store import Store
from keepstep.testing.faults import STORE_KINDS
from tests.processes.test_drill import prove

pytestmark = pytest.mark.timeout(180)

FOR_MS = 1500
STEPS = 200


def rough_drill(work: Path, *faults: str) -> dict[str, Any]:
    return prove(work, *faults, nproc=2, launcher="run", steps=STEPS, more=("--step-ms", "30"))


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, so that the undisturbed run is paid for once."""
    return tmp_path_factory.mktemp("drills")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.everyday] if kind == "store-flaky" else [])
        for kind in STORE_KINDS
    ],
)
def test_training_goes_on_whatever_the_store_does(work: Path, kind: str) -> None:
    """Also where a rank dies meanwhile: it comes back from memory."""
    report = rough_drill(work, f"{kind}:step=20,for={FOR_MS}", "kill:rank=1,step=24,phase=update")
    assert report["sources"] == ["memory"] and report["restarts"] == 1
    assert report["half_checkpoints"] == [] and report["left_over"] == []
    store = Store(work / "store" / report["job"])
    checkpoints = store.list_checkpoints().checkpoints
    assert checkpoints and store.verify(checkpoints[0].name).step > 20
    evidence = report["faults"][0]["evidence"]
    assert "met with it" in evidence and "meanwhile" in evidence and "read back" in evidence


def test_a_training_that_ends_before_the_store_heals_is_stored_all_the_same(work: Path) -> None:
    report = prove(work, "store-refuses:step=7,for=2000", nproc=2, launcher="run", steps=12)
    store = Store(work / "store" / report["job"])
    assert [manifest.step for manifest in store.list_checkpoints().checkpoints] == [11]
