"""What a slot is made for: room for the manifest that comes, and hardly more."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from keepstep.config import resolve
from keepstep.edge.torch.live_state import TorchState
from keepstep.edge.torch.state import Protected

LAYERS = 100


def text_bytes(state: TorchState) -> int:
    return len(json.dumps(state.gather().layout.to_json(), separators=(",", ":")))


def test_many_tensors_take_no_multiple_of_their_manifest(tmp_path: Path) -> None:
    """Each page of a slot is touched when it is made: 9,600 tensors had 5.5 MiB for 1.2."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    settings = resolve(None, {"KEEPSTEP_STATE_DIR": str(tmp_path)}, "room")
    state = TorchState(Protected({"model": model, "optimizer": optimizer}), 0, 1, settings)
    before = state.coming_bytes()[1]
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    now, wanted = state.coming_bytes()[1], text_bytes(state)
    assert wanted <= 1.5 * before, "it has to grow at the first step"
    assert wanted <= now <= 1.2 * wanted
