"""Ranks with CUDA devices tell of no rhythm, because a collective's future ends when it has been
queued. Skipped without CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from keepstep.edge.torch.membership import Membership
from keepstep.edge.torch.process_groups import TorchGroups
from tests.runtime.fakes import FakeExecutor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def test_no_page_is_made_so_copies_are_not_held_back_for_a_rhythm_that_is_not_the_network_s(
    tmp_path: Path,
) -> None:
    groups = TorchGroups(Membership(), FakeExecutor(), [], False)
    groups.record_profile(tmp_path / "rank-00000" / "rhythm")
    groups.close()
    assert not list(tmp_path.iterdir())
