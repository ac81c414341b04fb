"""Devices: in the order in which ranks take them, and none where there is no driver."""

from __future__ import annotations

from pathlib import Path

from keepstep.edge.probes.devices import visible_devices


def test_devices_are_those_that_ranks_see(tmp_path: Path) -> None:
    for bus in ("0000:17:00.0", "0000:65:00.0"):
        (tmp_path / bus).mkdir()
    assert visible_devices({}, tmp_path) == ["0", "1"]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "1, GPU-5c"}, tmp_path) == ["1", "GPU-5c"]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path / "no driver") == []
