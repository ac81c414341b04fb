"""Parts: what the nodes of a job tell each other in the store while they write one checkpoint
together.

    survey-<node>-<attempt>.json   what each rank of a node has to write: names, kinds, digests;
                                   no data
    part-<node>-<attempt>.json     what that node wrote, once every byte of it was read back

Comes in: values. Goes out: sealed JSON, and the values again, or why they are not what was asked
for. Never reads or writes a file.

Invariant: every file of an attempt carries its number in the name, and these two carry the whole
attempt inside, so what an earlier try left, or one that goes on somewhere unknown, is never taken
for a part of this one. With a secret both are signed: what they say is signed again in the
manifest, by the leader, which has read no data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from keepstep.edge.store.manifest import (
    FORMAT_VERSION,
    FileSum,
    metrics_from_json,
    metrics_to_json,
    seal,
    sums_from_json,
    sums_to_json,
    unseal,
)
from keepstep.edge.store.signer import Sign, Signer, sign_of
from keepstep.errors import IdentityError
from keepstep.model.checkpoint import CheckpointAttempt
from keepstep.model.decoding import (
    a_count,
    a_file_name,
    a_list,
    a_text,
    an_object,
    counts,
    decoding,
)
from keepstep.model.layout import Shard


def head(attempt: CheckpointAttempt, node: int) -> dict[str, Any]:
    """What every such file begins with: the format, and whose it is."""
    return {
        "format": FORMAT_VERSION,
        "job": attempt.job,
        "step": attempt.stamp.step,
        "epoch": attempt.stamp.epoch,
        "attempt": attempt.number,
        "ranks": list(attempt.ranks),
        "node": node,
    }


@dataclass(frozen=True, slots=True)
class Sketch:
    """A value as other nodes need to know it. Equal sketches are equal bytes, so that one of them
    is enough.

    `dtype` is None for what is no tensor. `path` are the keys on the way to it, which its name
    alone does not tell.
    """

    path: tuple[str | int, ...] = field(compare=False)
    digest: str
    bytes: int
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    shard: Shard | None = None

    @property
    def offsets(self) -> tuple[int, ...] | None:
        return self.shard.offsets if self.shard else None


Survey = Mapping[int, Mapping[str, Sketch]]  # by rank and name


def survey_to_bytes(
    attempt: CheckpointAttempt, node: int, survey: Survey, signer: Signer | None = None
) -> bytes:
    holders: dict[tuple[str, tuple[str | int, ...], Sketch], list[int]] = {}
    for rank, sketches in survey.items():
        for name, sketch in sketches.items():
            holders.setdefault((name, sketch.path, sketch), []).append(rank)
    values = [
        [
            name,
            path,
            s.digest,
            s.bytes,
            s.dtype,
            s.shape,
            [s.shard.global_shape, s.shard.offsets] if s.shard else None,
            ranks,
        ]
        for (name, path, s), ranks in holders.items()
    ]
    return seal({**head(attempt, node), "values": values}, sign=sign_of(signer, "survey"))


def survey_from_bytes(
    raw: bytes, where: str, attempt: CheckpointAttempt, node: int, signer: Signer | None = None
) -> Survey:
    """Raises DamageError when it is torn or forged, IdentityError when it is another attempt's."""
    survey: dict[int, dict[str, Sketch]] = {rank: {} for rank in attempt.ranks_of(node)}
    body = _body(raw, where, attempt, node, sign_of(signer, "survey"))
    with decoding(where):
        for name, path, digest, size, dtype, shape, shard, ranks in a_list(body["values"]):
            sketch = Sketch(
                path=tuple(map(_a_key, a_list(path))),
                digest=a_text(digest),
                bytes=a_count(size),
                dtype=None if dtype is None else a_text(dtype),
                shape=counts(shape),
                shard=Shard(*map(counts, a_list(shard))) if shard else None,
            )
            for rank in counts(ranks):
                survey[rank][a_text(name)] = sketch
    return survey


def _a_key(plain: Any) -> str | int:
    return plain if isinstance(plain, str) else a_count(plain)


@dataclass(frozen=True, slots=True)
class PartItem:
    """Where a rank's value, or its box of one, lies."""

    rank: int
    name: str
    offsets: tuple[int, ...] | None
    file: str
    at: int
    bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """What a node wrote. `metrics` and `fingerprint` are those of its first rank."""

    metrics: Mapping[str, float]
    fingerprint: Mapping[str, Any]
    files: Mapping[str, FileSum]
    items: tuple[PartItem, ...]


def part_to_bytes(
    attempt: CheckpointAttempt, node: int, part: CheckpointPart, signer: Signer | None = None
) -> bytes:
    body = {
        "metrics": metrics_to_json(part.metrics),
        "fingerprint": dict(part.fingerprint),
        "files": sums_to_json(part.files),
        "items": [[i.rank, i.name, i.offsets, i.file, i.at, i.bytes] for i in part.items],
    }
    return seal({**head(attempt, node), **body}, sign=sign_of(signer, "part"))


def part_from_bytes(
    raw: bytes, where: str, attempt: CheckpointAttempt, node: int, signer: Signer | None = None
) -> CheckpointPart:
    """Raises DamageError when it is torn or forged, IdentityError when it is another attempt's."""
    body = _body(raw, where, attempt, node, sign_of(signer, "part"))
    with decoding(where):
        return CheckpointPart(
            metrics=metrics_from_json(body["metrics"]),
            fingerprint=an_object(body["fingerprint"]),
            files=sums_from_json(body["files"], signed=signer is not None),
            items=tuple(_items(a_list(body["items"]))),
        )


def _items(rows: Iterable[Any]) -> Iterable[PartItem]:
    for rank, name, offsets, file, at, size in rows:
        yield PartItem(
            rank=a_count(rank),
            name=a_text(name),
            offsets=None if offsets is None else counts(offsets),
            file=a_file_name(file),
            at=a_count(at),
            bytes=a_count(size),
        )


def _body(
    raw: bytes, where: str, attempt: CheckpointAttempt, node: int, sign: Sign | None
) -> dict[str, Any]:
    body = unseal(raw, where, sign)
    for key, expected in head(attempt, node).items():
        if body.get(key) != expected:
            raise IdentityError(
                f"{where}: expected {key} {expected!r}, found {body.get(key)!r}: it belongs "
                "to another attempt"
            )
    return body
