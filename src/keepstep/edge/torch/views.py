"""Views: payload bytes as tensors, and copies in both directions.

Host tensors that are contiguous go by memcpy between addresses; everything else by torch's own
`copy_` into or out of a tensor laid over the payload.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from keepstep.edge.shm import memory
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch.tree import by_address
from keepstep.model.layout import Segment


def overlay(slot: Slot, segment: Segment) -> torch.Tensor:
    """A tensor over the segment's bytes, shaped as it was saved. It is valid until the slot is
    closed or overwritten."""
    spec = segment.spec
    dtype = getattr(torch, spec.dtype)
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=dtype)
    flat = torch.frombuffer(
        slot.payload, dtype=dtype, count=spec.nbytes // dtype.itemsize, offset=segment.offset
    )
    return flat.view(spec.shape)


def clone(slot: Slot, segment: Segment) -> torch.Tensor:
    """A private tensor with the saved bytes and the saved strides."""
    spec = segment.spec
    source = overlay(slot, segment)
    if spec.stride is None:
        made = torch.empty_like(source)
        memory.copy_to_fresh(made.data_ptr(), source.data_ptr(), spec.nbytes)
        return made
    return torch.empty_strided(spec.shape, spec.stride, dtype=source.dtype).copy_(source)


def write(slot: Slot, segment: Segment, tensor: torch.Tensor, non_blocking: bool = False) -> None:
    """Copy a tensor into its segment. The GIL is released while bytes move."""
    if not segment.spec.nbytes:
        return
    if by_address(tensor):
        memory.copy(slot.payload_address + segment.offset, tensor.data_ptr(), segment.spec.nbytes)
    else:
        with torch.no_grad():
            overlay(slot, segment).copy_(tensor, non_blocking=non_blocking)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in host memory, one after the other: itself where it is so."""
    if by_address(tensor):
        return tensor
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def in_pieces(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, one after the other, on the device where it is: any part of them can be had by
    itself."""
    flat = tensor.detach()
    if not flat.is_contiguous() or flat.is_conj() or flat.is_neg():
        flat = on_host(tensor)
    return flat.reshape(-1).view(torch.uint8)


def differing(
    slot: Slot, segments: Sequence[Segment], tensors: Sequence[torch.Tensor]
) -> list[str]:
    """The segments whose bytes are not the tensors' bytes, each by its name and in what it
    differs."""
    wrong = []
    for segment, tensor in zip(segments, tensors, strict=True):
        if not segment.spec.nbytes:
            continue
        host = on_host(tensor)
        if host.nbytes != segment.spec.nbytes or not memory.equal(
            slot.payload_address + segment.offset, host.data_ptr(), segment.spec.nbytes
        ):
            wrong.append(f"{segment.spec.name}: {_difference(overlay(slot, segment), host)}")
    return wrong


def _difference(saved: torch.Tensor, live: torch.Tensor) -> str:
    """Two tensors whose bytes differ, in words: how many values, and the first of them."""
    if saved.shape != live.shape or saved.dtype != live.dtype:
        return f"saved as {saved.dtype}{list(saved.shape)}, live is {live.dtype}{list(live.shape)}"
    rows = [
        t.reshape(-1).view(torch.uint8).reshape(t.numel(), t.element_size()) for t in (saved, live)
    ]
    differs = (rows[0] != rows[1]).any(dim=1)
    first = int(differs.nonzero()[0])
    values = [t.reshape(-1)[first].item() for t in (saved, live)]
    return (
        f"{int(differs.sum())} of {saved.numel()} values differ, first number {first}: saved "
        f"{values[0]!r}, live {values[1]!r}"
    )
