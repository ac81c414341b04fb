"""Tree: what others need to know of a value, found without numpy, which torch can do without."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import xxhash

from keepstep.edge.torch.dcp.tree import Value, raw_bytes

TENSORS = [
    torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
    torch.tensor(1.5, dtype=torch.bfloat16),
    torch.tensor([float("nan"), -0.0]),
    torch.empty(0, 3, dtype=torch.int8),
    torch.tensor([True, False]),
    torch.randn(4, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda t: str(t.dtype))
def test_a_sketch_is_of_the_bytes(tensor: torch.Tensor) -> None:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    assert bytes(raw_bytes(tensor.contiguous())) == raw
    sketch = Value(("x",), tensor).sketch()
    assert (sketch.digest, sketch.bytes) == (xxhash.xxh3_128_hexdigest(raw), len(raw))


def test_a_sketch_needs_no_numpy() -> None:
    program = """
import sys
sys.modules["numpy"] = None  # as where it is not installed
import torch
from keepstep.edge.torch.dcp.tree import Value
print(Value(("x",), torch.arange(5.0)).sketch().digest)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    expected = Value(("x",), torch.arange(5.0)).sketch().digest
    assert (run.returncode, run.stdout.strip()) == (0, expected), run.stderr
