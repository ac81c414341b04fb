"""Ranks with CUDA devices tell of no rhythm, because a collective's future ends when it has been
queued. Skipped without CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.runtime.rank.regroup import Peers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


class NoJournal:
    def record(self, kind: str, why: str, /, **data: Any) -> None: ...


def test_no_page_is_made_so_copies_are_not_held_back_for_a_rhythm_that_is_not_the_network_s(
    tmp_path: Path,
) -> None:
    peers = Peers({}, 0, NoJournal())
    peers.show_rhythm(tmp_path / "rank-00000" / "rhythm")
    peers.close()
    assert not list(tmp_path.iterdir())
