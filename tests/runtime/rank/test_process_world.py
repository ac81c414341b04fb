"""What a rank's world takes from its machine."""

from __future__ import annotations

import pytest
import torch

from keepstep.edge.torch.state import Protected
from keepstep.runtime.rank import process_world

PLACES = {torch.device("cuda", 0): "0000:3b:00.0", torch.device("cuda", 1): None}


@pytest.mark.parametrize(("number", "expected"), [(0, 7), (1, None), (None, None)])
def test_slots_get_their_pages_from_the_node_of_the_state_s_device(
    monkeypatch: pytest.MonkeyPatch, number: int | None, expected: int | None
) -> None:
    device = None if number is None else torch.device("cuda", number)
    monkeypatch.setattr(process_world, "cuda_device", lambda parts: device)
    monkeypatch.setattr(process_world, "place_on_bus", PLACES.get)
    monkeypatch.setattr(process_world, "node_near", {"0000:3b:00.0": 7}.get)
    protected = Protected.of({"model": torch.nn.Linear(2, 2)}, lazy=True)
    assert process_world.numa_node_of(protected) == expected
