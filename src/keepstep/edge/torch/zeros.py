"""Zeros: tensors of zeros that take no memory before somebody writes them.

A restored gradient that its update had used is all zeros, and most programs give it up unread. The
kernel gives memory page by page as it is first touched, which takes longer than any copy.
"""

from __future__ import annotations

import mmap

import torch

from keepstep.model.units import MIB

LAZY_BYTES = MIB  # a smaller one is made quicker than a map


def zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """As torch's. A large one cannot be resized."""
    is_usual = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    if tensor.device.type != "cpu" or not is_usual or tensor.nbytes < LAZY_BYTES:
        return torch.zeros_like(tensor)
    like = torch.empty_like(tensor, device="meta")  # with the strides that torch gives it
    # private: a forked data loader must not share them
    region = mmap.mmap(-1, like.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    storage = torch.frombuffer(region, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=like.dtype).set_(storage, 0, like.shape, like.stride())
