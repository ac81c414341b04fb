"""Told sight: what a rank has seen of a step, as a line of text that keepers hand on unread, and
back.

Comes in: a `Sight`, or a text that somebody sent. Goes out: the other one. Names beyond `NAMES` and
characters beyond `NAME_CHARACTERS` are left out, so that a line is bounded whatever a program calls
its tensors.

Invariant: what fits is given back equal; a text that is no sight raises DamageError and nothing
else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from keepstep.model.decoding import (
    a_count,
    a_list,
    a_number,
    a_text,
    a_whole_number,
    decoding,
    from_json,
    number_to_json,
)
from keepstep.model.numbers import SKETCH_SUMS, Device, Origin, RangeCount, Sight, Sign
from keepstep.model.snapshot import Stamp

NAMES = 4  # of each kind
NAME_CHARACTERS = 100
DIGEST_CHARACTERS = 64
_SIGNS = tuple(Sign)


def to_text(seen: Sight) -> str:
    """One line."""
    origin = seen.origin
    plain = [
        seen.rank,
        seen.role,
        [_SIGNS.index(sign) for sign in seen.signs],
        seen.first_step,
        int(seen.looked),
        None if seen.gave is None else number_to_json(seen.gave),
        seen.gave_bad_at,
        *map(_few, (seen.bad_batch, seen.bad_weights, seen.bad_moments)),
        *map(_few, (seen.bad_gradients, seen.bad_update)),
        None if origin is None else _few((origin.layer, origin.operation, origin.direction)),
        _range_to_plain(seen.narrow),
        seen.digest[:DIGEST_CHARACTERS],
        [number_to_json(value) for value in seen.sketch[:SKETCH_SUMS]],
        None if seen.device is None else [*_few((seen.device.host,)), seen.device.number],
        seen.holds,
        seen.batches,
        seen.skips,
        int(seen.means),
        seen.differs_since,
    ]
    return json.dumps(plain, separators=(",", ":"), ensure_ascii=False)


def from_text(text: str) -> Sight:
    """Raises DamageError."""
    with decoding("what a rank has seen"):
        rank, role, signs, first, looked, gave, bad_at, *rest = a_list(from_json(text))
        *named, origin, narrow, digest, sketch, device, holds, batches, skips, means, since = rest
        batch, weights, moments, gradients, update = map(_names, named)
        return Sight(
            rank=a_count(rank),
            role=a_count(role),
            signs=tuple(_SIGNS[a_count(sign)] for sign in a_list(signs)),
            first_step=a_whole_number(first),
            looked=bool(a_count(looked)),
            gave=None if gave is None else a_number(gave),
            gave_bad_at=None if bad_at is None else a_count(bad_at),
            bad_batch=batch,
            bad_weights=weights,
            bad_moments=moments,
            bad_gradients=gradients,
            bad_update=update,
            origin=None if origin is None else Origin(*_names(origin)),
            narrow=_range(narrow),
            digest=a_text(digest),
            sketch=tuple(map(a_number, a_list(sketch))),
            device=None if device is None else _device(device),
            holds=tuple(map(_stamp, a_list(holds))),
            batches=a_count(batches),
            skips=a_count(skips),
            means=bool(a_count(means)),
            differs_since=None if since is None else a_whole_number(since),
        )


def _few(names: Sequence[str]) -> list[str]:
    return [name[:NAME_CHARACTERS] for name in names[:NAMES]]


def _range_to_plain(narrow: RangeCount | None) -> list[Any] | None:
    if narrow is None:
        return None
    return [*_few((narrow.layer, narrow.dtype)), narrow.values, narrow.over, narrow.under]


def _range(plain: Any) -> RangeCount | None:
    if plain is None:
        return None
    layer, dtype, *counts = a_list(plain)
    values, over, under = map(a_count, counts)
    return RangeCount(a_text(layer), a_text(dtype), values, over, under)


def _device(plain: Any) -> Device:
    host, number = a_list(plain)
    return Device(a_text(host), a_count(number))


def _stamp(plain: Any) -> Stamp:
    step, epoch = a_list(plain)
    return Stamp(a_whole_number(step), a_count(epoch))


def _names(plain: Any) -> tuple[str, ...]:
    return tuple(map(a_text, a_list(plain)))
