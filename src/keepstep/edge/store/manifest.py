"""Manifest: what a checkpoint is, and JSON that guards itself.

Comes in: values. Goes out: bytes that begin with the checksum of all the rest, and the values
again, or DamageError. Never touches a filesystem.

Invariant: no bit of a sealed text may change without `unseal` refusing it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from keepstep.errors import DamageError, StoreError
from keepstep.model.checkpoint import CheckpointName, Timeline
from keepstep.model.decoding import (
    a_count,
    a_file_name,
    a_list,
    a_number,
    a_text,
    an_object,
    decoding,
    from_json,
    number_to_json,
)

FORMAT_VERSION = 1

# A sealed text begins with the digest of all that follows these bytes, so that no bit of it is left
# out.
_SEAL = re.compile(rb'\{"xxh3_64": "([0-9a-f]{16})",\n')


def seal(body: Mapping[str, Any], indent: int | None = None) -> bytes:
    """A JSON object with its checksum in front."""
    text = json.dumps(body, indent=indent, allow_nan=False)
    rest = text[1:].lstrip("\n").encode()  # without the opening brace, which the seal brings
    return b'{"xxh3_64": "%s",\n%s' % (xxhash.xxh3_64_hexdigest(rest).encode(), rest)


def unseal(raw: bytes, where: str) -> dict[str, Any]:
    """The inverse of `seal`. Raises DamageError if one bit is not as written or what was sealed is
    no object of ours, StoreError on a newer format."""
    found_seal = _SEAL.match(raw)
    if found_seal is None:
        raise DamageError(
            f"{where}: expected JSON that begins with its checksum, found {raw[:32]!r}"
        )
    found = xxhash.xxh3_64_hexdigest(raw[found_seal.end() :])
    if found != found_seal[1].decode():
        raise DamageError(
            f"{where}: block 0: expected xxh3_64 {found_seal[1].decode()}, found {found}"
        )
    with decoding(where):
        body = an_object(from_json(raw))
        version = a_count(body["format"])
    if version != FORMAT_VERSION:
        raise StoreError(f"{where}: expected manifest format {FORMAT_VERSION}, found {version}")
    return body


@dataclass(frozen=True, slots=True)
class FileSum:
    """A file's size and the xxh3_64 of each of its blocks (the last one may be short)."""

    bytes: int
    block_bytes: int
    xxh3_64: tuple[str, ...]

    def __post_init__(self) -> None:
        blocks = -(-self.bytes // self.block_bytes)
        if len(self.xxh3_64) != blocks:
            raise ValueError(f"expected {blocks} checksums, found {len(self.xxh3_64)}")


def sums_to_json(files: Mapping[str, FileSum]) -> dict[str, Any]:
    return {
        name: {"bytes": f.bytes, "block_bytes": f.block_bytes, "xxh3_64": f.xxh3_64}
        for name, f in files.items()
    }


def sums_from_json(plain: Any) -> dict[str, FileSum]:
    """Raises ValueError, KeyError: to be called while `decoding`."""
    files = {a_file_name(name): an_object(f) for name, f in an_object(plain).items()}
    return {
        name: FileSum(
            bytes=a_count(f["bytes"]),
            block_bytes=a_count(f["block_bytes"], least=1),
            xxh3_64=tuple(map(a_text, a_list(f["xxh3_64"]))),
        )
        for name, f in files.items()
    }


def metrics_to_json(metrics: Mapping[str, float]) -> dict[str, float | str]:
    return {name: number_to_json(value) for name, value in metrics.items()}


def metrics_from_json(plain: Any) -> dict[str, float]:
    """Raises ValueError: to be called while `decoding`."""
    return {name: a_number(value) for name, value in an_object(plain).items()}


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint is: whose, when, and the checksums of its files. `fingerprint` is the
    caller's own. `epoch` computed the step; `attempt` wrote it, in this `timeline`: 0, 0 and None
    in those of earlier versions."""

    job: str
    step: int
    world_size: int
    metrics: Mapping[str, float]
    wall_ns: int
    fingerprint: Mapping[str, Any]
    files: Mapping[str, FileSum]
    epoch: int = 0
    attempt: int = 0
    timeline: Timeline | None = None

    @property
    def name(self) -> CheckpointName:
        return CheckpointName(self.step, self.epoch, self.attempt)

    @property
    def total_bytes(self) -> int:
        return sum(f.bytes for f in self.files.values())

    def to_bytes(self) -> bytes:
        body = {
            "format": FORMAT_VERSION,
            "job": self.job,
            "step": self.step,
            "epoch": self.epoch,
            "attempt": self.attempt,
            "timeline": self.timeline,
            "world_size": self.world_size,
            "metrics": metrics_to_json(self.metrics),
            "wall_ns": self.wall_ns,
            "fingerprint": dict(self.fingerprint),
            "files": sums_to_json(self.files),
        }
        return seal(body, indent=1)


def manifest_from_bytes(raw: bytes, where: str) -> Manifest:
    """The inverse of `Manifest.to_bytes`. Raises DamageError if one bit is not as written or a
    field is none that can be, StoreError on a newer format."""
    body = unseal(raw, where)
    with decoding(where):
        return Manifest(
            job=a_text(body["job"]),
            step=a_count(body["step"]),
            world_size=a_count(body["world_size"], least=1),
            metrics=metrics_from_json(body["metrics"]),
            wall_ns=a_count(body["wall_ns"]),
            fingerprint=an_object(body["fingerprint"]),
            files=sums_from_json(body["files"]),
            epoch=a_count(body.get("epoch", 0)),
            attempt=a_count(body.get("attempt", 0)),
            timeline=_timeline(body.get("timeline")),
        )


def _timeline(plain: Any) -> Timeline | None:
    if plain is None:
        return None
    epoch, step = a_list(plain)
    return Timeline(a_count(epoch), a_count(step, least=-1))
