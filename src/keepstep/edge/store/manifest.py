"""Manifest: what a checkpoint is, and JSON that guards itself.

    {"xxh3_64": "<of all behind this line>",
    "hmac_sha256": "<of all behind this line>",     where there is a secret to sign with
     "format": 1, ...}

Comes in: values. Goes out: bytes that begin with the checksum of all the rest, and the values
again, or DamageError. Never touches a filesystem.

Invariant: no bit of a sealed text may change without `unseal` refusing it. With a secret it does so
whoever changed it, and nothing of a text is looked at before its signature is right.
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from keepstep.edge.store.signer import MAC_LETTERS, Sign, Signer, sign_of
from keepstep.errors import DamageError, StoreError
from keepstep.model.checkpoint import CheckpointName, Timeline
from keepstep.model.decoding import (
    a_count,
    a_file_name,
    a_list,
    a_name,
    a_number,
    a_text,
    an_object,
    decoding,
    from_json,
    number_to_json,
)

FORMAT_VERSION = 1

# A sealed text begins with the digest of all that follows these bytes, so that no bit of it is left
# out; what a signature is over begins behind that one, in the same way.
_SEAL = re.compile(rb'\{"xxh3_64": "([0-9a-f]{16})",\n')
_SIGNATURE = re.compile(rb'"hmac_sha256": "([0-9a-f]{%d})",\n' % MAC_LETTERS)


def seal(body: Mapping[str, Any], indent: int | None = None, sign: Sign | None = None) -> bytes:
    """A JSON object with its checksum in front, and the signature where somebody signs."""
    text = json.dumps(body, indent=indent, allow_nan=False)
    rest = text[1:].lstrip("\n").encode()  # without the opening brace, which the seal brings
    if sign is not None:
        rest = b'"hmac_sha256": "%s",\n%s' % (sign(rest).encode(), rest)
    return b'{"xxh3_64": "%s",\n%s' % (xxhash.xxh3_64_hexdigest(rest).encode(), rest)


def unseal(raw: bytes, where: str, sign: Sign | None = None) -> dict[str, Any]:
    """The inverse of `seal`. `sign`: whose signature it must bear; None: whether it bears one
    matters to nobody. Raises DamageError if one bit is not as written, it was not signed so or what
    was sealed is no object of ours, StoreError on a newer format."""
    found_seal = _SEAL.match(raw)
    if found_seal is None:
        raise DamageError(
            f"{where}: expected JSON that begins with its checksum, found {raw[:32]!r}"
        )
    rest = raw[found_seal.end() :]
    found = xxhash.xxh3_64_hexdigest(rest)
    if found != found_seal[1].decode():
        raise DamageError(
            f"{where}: block 0: expected xxh3_64 {found_seal[1].decode()}, found {found}"
        )
    if sign is not None:
        _check_signature(rest, where, sign)
    with decoding(where):
        body = an_object(from_json(raw))
        version = a_count(body["format"])
    if version != FORMAT_VERSION:
        raise StoreError(f"{where}: expected manifest format {FORMAT_VERSION}, found {version}")
    return body


def _check_signature(rest: bytes, where: str, sign: Sign) -> None:
    found = _SIGNATURE.match(rest)
    if found is None or not hmac.compare_digest(found[1], sign(rest[found.end() :]).encode()):
        raise DamageError(
            f"{where}: expected it signed with this job's secret, found "
            f"{'no signature' if found is None else 'another signature'}: forged, or written "
            "before the job had this secret. Remove it; or, if you know who wrote it, say once "
            "that it is this job's: --adopt (KEEPSTEP_ADOPT=1)"
        )


@dataclass(frozen=True, slots=True)
class FileSum:
    """A file's size and the xxh3_64 of each of its blocks (the last one may be short). `macs`:
    theirs, None where nobody signs, or where whoever reads has not asked for a signature."""

    bytes: int
    block_bytes: int
    xxh3_64: tuple[str, ...]
    macs: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        blocks = -(-self.bytes // self.block_bytes)
        for sums in (self.xxh3_64, self.macs):
            if sums is not None and len(sums) != blocks:
                raise ValueError(f"expected {blocks} checksums, found {len(sums)}")


def sums_to_json(files: Mapping[str, FileSum]) -> dict[str, Any]:
    return {
        name: {
            "bytes": f.bytes,
            "block_bytes": f.block_bytes,
            "xxh3_64": f.xxh3_64,
            **({} if f.macs is None else {"hmac_sha256": f.macs}),
        }
        for name, f in files.items()
    }


def sums_from_json(plain: Any, signed: bool = False) -> dict[str, FileSum]:
    """`signed`: it was, so each file has MACs. Raises ValueError, KeyError: to be called while
    `decoding`."""
    files = {a_file_name(name): an_object(f) for name, f in an_object(plain).items()}
    return {
        name: FileSum(
            bytes=a_count(f["bytes"]),
            block_bytes=a_count(f["block_bytes"], least=1),
            xxh3_64=tuple(map(a_text, a_list(f["xxh3_64"]))),
            macs=tuple(map(a_text, a_list(f["hmac_sha256"]))) if signed else None,
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

    def to_bytes(self, signer: Signer | None = None) -> bytes:
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
        return seal(body, indent=1, sign=sign_of(signer, "manifest"))


def manifest_from_bytes(raw: bytes, where: str, signer: Signer | None = None) -> Manifest:
    """The inverse of `Manifest.to_bytes`. Raises DamageError if one bit is not as written, it was
    not this signer that signed it or a field is none that can be, StoreError on a newer format."""
    body = unseal(raw, where, sign_of(signer, "manifest"))
    with decoding(where):
        return Manifest(
            job=a_name(body["job"]),
            step=a_count(body["step"]),
            world_size=a_count(body["world_size"], least=1),
            metrics=metrics_from_json(body["metrics"]),
            wall_ns=a_count(body["wall_ns"]),
            fingerprint=an_object(body["fingerprint"]),
            files=sums_from_json(body["files"], signed=signer is not None),
            epoch=a_count(body.get("epoch", 0)),
            attempt=a_count(body.get("attempt", 0)),
            timeline=_timeline(body.get("timeline")),
        )


def _timeline(plain: Any) -> Timeline | None:
    if plain is None:
        return None
    epoch, step = a_list(plain)
    return Timeline(a_count(epoch), a_count(step, least=-1))
