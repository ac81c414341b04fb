"""Tree: what others need to know of a value, found without numpy, which torch can do without; and
what is one object in the tree is one again."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
import xxhash
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from keepstep.edge.torch.dcp.tree import Value, grown, outline, raw_bytes

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


def test_what_is_one_object_under_several_names_is_so_again() -> None:
    """The learning rate that all groups of an optimizer share, say: who changes it by one name
    changes it for all."""
    shared, other, value = torch.tensor(0.1), torch.tensor(0.1), {3, 4}
    tree = {
        "groups": [{"lr": shared, "step": 7}, {"lr": shared, "step": 7}, {"lr": other}],
        "kept": {"lr": shared, "seen": value, "also": value},
    }
    leaves, _ = flatten_state_dict(tree)
    shape = outline(tree, (), leaves, {})
    again = grown(shape, leaves, None)
    assert again == tree and list(again) == list(tree)
    copies = {name: copy.deepcopy(leaf) for name, leaf in leaves.items()}  # as they are read
    found = grown(shape, copies, None)
    rates = [group["lr"] for group in found["groups"]]
    assert rates[0] is rates[1] is found["kept"]["lr"] and rates[2] is not rates[0]
    assert found["kept"]["seen"] is found["kept"]["also"]
    assert found["groups"][1]["step"] == 7
