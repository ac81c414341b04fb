"""Zeros: like torch's own, but for the memory they do not take."""

from __future__ import annotations

import os

import pytest
import torch

from keepstep.edge.torch.zeros import LAZY_BYTES, zeros_like

LARGE = LAZY_BYTES // 4 + 3


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3),
        torch.ones(0),
        torch.ones(LARGE),
        torch.ones(2, LARGE, dtype=torch.bfloat16),
        torch.ones(LARGE, 2).t(),
        torch.ones(LARGE, 4)[:, ::2],
        torch.ones(1, 4, 512, 512).to(memory_format=torch.channels_last),
        torch.ones(LARGE, dtype=torch.complex64).conj(),
        torch.ones(1).expand(LARGE),
        torch.eye(3).to_sparse(),
    ],
    ids=lambda t: f"{t.dtype}{list(t.shape)}",
)
def test_zeros_are_torch_s(tensor: torch.Tensor) -> None:
    mine, theirs = zeros_like(tensor), torch.zeros_like(tensor)
    assert torch.equal(mine.to_dense(), theirs.to_dense())
    assert (mine.dtype, mine.layout, mine.is_conj()) == (
        theirs.dtype,
        theirs.layout,
        theirs.is_conj(),
    )
    if mine.layout is torch.strided:
        assert mine.stride() == theirs.stride() and not mine._is_view()


def test_zeros_are_written_and_nobody_else_s() -> None:
    mine, other = (zeros_like(torch.ones(LARGE)) for _ in range(2))
    child = os.fork()
    if not child:
        mine[0] = 7  # one number: after a fork torch has no threads
        os._exit(0)
    os.waitpid(child, 0)
    mine[:2] += 1
    assert mine.sum() == 2 and other.sum() == 0
