"""A whole training on a device: steps are captured, none is skipped for an error, and a killed run
ends in the bits of an undisturbed one. Skipped without CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.started import ended

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.mark.parametrize("fused", ["0", "1"])
def test_a_killed_run_ends_in_the_bits_of_an_undisturbed_one(tmp_path: Path, fused: str) -> None:
    calm = ended("trained", tmp_path, "calm", FUSED=fused)
    assert calm.returncode == 0 and "12 steps captured, 0 skipped" in calm.stderr, calm.stderr
    killed = ended("trained", tmp_path, "killed", FUSED=fused, DIES_AT="7")
    assert killed.returncode == -9, killed.stderr
    second = ended("trained", tmp_path, "killed", FUSED=fused)
    assert second.returncode == 0, second.stderr
    began, hashed = second.stdout.splitlines()
    assert int(began.split()[-1]) in (5, 6), "at most one step is lost"
    assert hashed == calm.stdout.splitlines()[-1]
