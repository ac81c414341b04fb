"""Layout: where each tensor of a state lies inside a slot's payload.

Comes in: names, dtypes and shapes in state order. Goes out: byte offsets, a hash, a JSON form that
describes a slot without keepstep's memory of it. The tree around the tensors (dicts, lists,
numbers, arbitrary Python values) is pickled with an index in each tensor's place and lies in the
last segment, `OBJECTS`, whose size differs from step to step.

Invariant: segments do not overlap, are aligned to 64 bytes, and lie in ascending order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keepstep.model.decoding import (
    a_count,
    a_list,
    a_text,
    an_object,
    counts,
    decoding,
    from_json,
)
from keepstep.model.units import round_up

ALIGN_BYTES = 64
OBJECTS = "<objects>"


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a larger tensor: its full shape and where this part begins (a DTensor's local
    part)."""

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor is, before it has a place. `stride` is None for a contiguous tensor (in
    elements otherwise)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    stride: tuple[int, ...] | None = None
    shard: Shard | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """A tensor's bytes: contiguous, row-major (or in `stride` order), at `offset` of the
    payload."""

    spec: TensorSpec
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.spec.nbytes


@dataclass(frozen=True, slots=True)
class Layout:
    """All segments of one rank's state. `objects_offset` is where the pickled tree begins."""

    segments: tuple[Segment, ...]
    objects_offset: int

    def hash(self) -> str:
        """Equal for two states exactly when every tensor has the same name, type, shape and
        place."""
        text = json.dumps([_to_json(s) for s in self.segments], separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {
            "objects_offset": self.objects_offset,
            "segments": [_to_json(s) for s in self.segments],
        }


def lay_out(specs: Sequence[TensorSpec]) -> Layout:
    """Give each tensor its place, in order."""
    segments, cursor = [], 0
    for spec in specs:
        segments.append(Segment(spec, cursor))
        cursor = round_up(cursor + spec.nbytes, ALIGN_BYTES)
    return Layout(tuple(segments), cursor)


def _to_json(segment: Segment) -> dict[str, Any]:
    # By hand: `asdict` takes ten times as long, and the trainer waits.
    spec, shard = segment.spec, segment.spec.shard
    box = None
    if shard is not None:
        box = {"global_shape": shard.global_shape, "offsets": shard.offsets}
    tensor = {
        "name": spec.name,
        "dtype": spec.dtype,
        "shape": spec.shape,
        "nbytes": spec.nbytes,
        "stride": spec.stride,
        "shard": box,
    }
    return {"spec": tensor, "offset": segment.offset}


def layout_from_text(text: bytes, where: str) -> Layout:
    """The inverse of `Layout.to_json`, as JSON. Raises DamageError, naming `where` it is, when it
    is no layout."""
    with decoding(where):
        data = an_object(from_json(text))
        segments = tuple(
            Segment(_spec(an_object(s["spec"])), a_count(s["offset"]))
            for s in map(an_object, a_list(data["segments"]))
        )
        layout = Layout(segments, a_count(data["objects_offset"]))
        _check_places(layout)
    return layout


def _spec(data: dict[str, Any]) -> TensorSpec:
    shard = data["shard"]
    return TensorSpec(
        name=a_text(data["name"]),
        dtype=a_text(data["dtype"]),
        shape=counts(data["shape"]),
        nbytes=a_count(data["nbytes"]),
        stride=None if data["stride"] is None else counts(data["stride"]),
        shard=None
        if shard is None
        else Shard(counts(shard["global_shape"]), counts(shard["offsets"])),
    )


def _check_places(layout: Layout) -> None:
    """Raises ValueError when tensors lie in each other, or behind where the tree begins."""
    end = 0
    for segment in layout.segments:
        if segment.offset < end:
            raise ValueError(f"{segment.spec.name} begins at {segment.offset}, before {end}")
        end = segment.end
    if layout.objects_offset < end:
        raise ValueError(f"the tree begins at {layout.objects_offset}, before {end}")


def difference(live: Layout, saved: Layout, limit: int = 5) -> list[str]:
    """How two layouts differ, one sentence a tensor, the first `limit` of them."""
    now = {s.spec.name: s.spec for s in live.segments}
    then = {s.spec.name: s.spec for s in saved.segments}
    lines = []
    for name in sorted(now.keys() | then.keys()):
        if not _alike(now.get(name), then.get(name)):
            lines.append(f"{name}: saved {_words(then.get(name))}, live {_words(now.get(name))}")
    more = len(lines) - limit
    return lines if more <= 0 else [*lines[:limit], f"and {more} more"]


def _alike(one: TensorSpec | None, other: TensorSpec | None) -> bool:
    if one is None or other is None:
        return False
    return (one.dtype, one.shape, one.shard) == (other.dtype, other.shape, other.shard)


def _words(spec: TensorSpec | None) -> str:
    if spec is None:
        return "nothing"
    part = (
        f", part of {list(spec.shard.global_shape)} at {list(spec.shard.offsets)}"
        if spec.shard
        else ""
    )
    return f"{spec.dtype}{list(spec.shape)}{part}"
