"""Saved: a state that rests somewhere, as tensors whose bytes are read when they are asked for.

Comes in: a slot's proven payload. Goes out: for each name what it is, and how its bytes are read.
Whoever reads gets proven bytes or DamageError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from keepstep.edge.shm.proven_payload import ProvenPayload
from keepstep.errors import DamageError
from keepstep.model.comparison import VALUE, TensorBox, TensorKind
from keepstep.model.layout import OBJECTS, Segment

ReadInto = Callable[[int, memoryview], None]  # fill with the bytes from that offset on


@dataclass(frozen=True, slots=True)
class SavedPart:
    """A box of a tensor. Its bytes are read as if it were contiguous, row by row."""

    box: TensorBox
    read_into: ReadInto


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor, or a value's pickled bytes, in the parts in which it was saved."""

    kind: TensorKind
    parts: tuple[SavedPart, ...]

    @property
    def nbytes(self) -> int:
        """Of what was saved of it here."""
        itemsize = 1 if self.kind.is_value else getattr(torch, self.kind.dtype).itemsize
        return itemsize * sum(part.box.count for part in self.parts)


@dataclass(frozen=True, slots=True)
class SavedState:
    """`what`: how a sentence names it. `has_values`: whether each value has its own name."""

    what: str
    step: int
    tensors: Mapping[str, SavedTensor]
    has_values: bool = True


def slot_state(payload: ProvenPayload) -> SavedState:
    """What a rank's slot has. Raises DamageError when the layout does not fit the payload."""
    header, layout = payload.header, payload.layout
    nbytes = header.payload_bytes - layout.objects_offset
    tensors = {s.spec.name: _of_segment(payload, s) for s in layout.segments}
    if nbytes < 0:
        raise DamageError(f"{payload.path}: the layout reaches behind the payload")
    tensors[OBJECTS] = value(nbytes, partial(_read_at, payload, layout.objects_offset))
    what = f"{header.stamp} of rank {header.rank} in {payload.path}"
    return SavedState(what, header.stamp.step, tensors, has_values=False)


def value(nbytes: int, read_into: ReadInto) -> SavedTensor:
    """Pickled bytes."""
    return SavedTensor(
        TensorKind(VALUE, (nbytes,)), (SavedPart(TensorBox((0,), (nbytes,)), read_into),)
    )


def dtype_named(name: str, where: str) -> torch.dtype:
    """Raises DamageError when torch has no such type."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise DamageError(f"{where}: expected a type of torch's, found {name!r}")
    return found


def _of_segment(payload: ProvenPayload, segment: Segment) -> SavedTensor:
    spec = segment.spec
    where = f"{payload.path}: {spec.name}"
    box = TensorBox((0,) * len(spec.shape), spec.shape)
    whole = spec.shape
    if spec.shard is not None:
        box, whole = TensorBox(spec.shard.offsets, spec.shape), spec.shard.global_shape
    nbytes = box.count * dtype_named(spec.dtype, where).itemsize
    fits = len(whole) == len(box.shape) == len(box.offsets)
    if nbytes != spec.nbytes or segment.end > payload.header.payload_bytes or not fits:
        raise DamageError(
            f"{where}: expected {nbytes} bytes of {spec.dtype}{list(spec.shape)} within the "
            f"payload, found {spec.nbytes} at {segment.offset}"
        )
    part = SavedPart(box, partial(_read_at, payload, segment.offset))
    return SavedTensor(TensorKind(spec.dtype, whole), (part,))


def _read_at(payload: ProvenPayload, at: int, offset: int, target: memoryview) -> None:
    payload.read_into(at + offset, target)
