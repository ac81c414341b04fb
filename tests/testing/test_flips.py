"""Flips: a thousand single bits of a slot, each of them found; and the same bit turned twice is as
before."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot
from keepstep.errors import DamageError
from keepstep.model.layout import TensorSpec, lay_out
from keepstep.model.snapshot import Stamp
from keepstep.testing.flips import draw_in_file, draw_in_slot, regions, sealed_slots

FLIPS = 1000


def seal(path: Path, step: int, payload: bytes) -> None:
    layout = lay_out([TensorSpec("weight", "uint8", (len(payload),), len(payload))])
    slot = Slot.create(MEMORY, path, len(payload) + 10_000, 4096)
    slot.begin(bytes(16), 0, 1, 1, Stamp(step, 1))
    slot.payload[: len(payload)] = payload
    manifest = b'{"objects_offset": 0, "segments": []}'
    slot.seal(slot.write_table(len(payload), manifest), layout.hash(), 0.5, wall_ns=1)
    slot.close()


def is_proven(path: Path) -> bool:
    try:
        slot = Slot(MEMORY, path)
    except DamageError:
        return False
    try:
        slot.verify()
        return True
    except DamageError:
        return False
    finally:
        slot.close()


def test_a_thousand_flips_are_a_thousand_found(tmp_path: Path) -> None:
    path, rng = tmp_path / "slot-0", random.Random(7)
    seal(path, 3, rng.randbytes(50_000))
    before = path.read_bytes()
    met: Counter[str] = Counter()
    for _ in range(FLIPS):
        flip = draw_in_slot(path, rng)
        flip.turn()
        assert not is_proven(path), f"not found: {flip}"
        flip.turn()
        met[flip.region] += 1
    assert is_proven(path) and path.read_bytes() == before
    assert (
        set(met) == {"header", "payload", "checksum table", "manifest"}
        and min(met.values()) > FLIPS // 8
    ), met


def test_only_bits_in_use_are_turned(tmp_path: Path) -> None:
    path = tmp_path / "slot-0"
    seal(path, 3, bytes(50_000))
    payload = regions(path)["payload"]
    assert len(payload) == 50_000 < Slot(MEMORY, path).capacity
    empty = tmp_path / "slot-1"
    Slot.create(MEMORY, empty, 100, 100).close()
    with pytest.raises(LookupError, match="no sealed snapshot"):
        regions(empty)


def test_sealed_slots_newest_first(tmp_path: Path) -> None:
    paths = [tmp_path / f"slot-{i}" for i in range(4)]
    for path, step in zip(paths, (5, 7, 6), strict=False):
        seal(path, step, b"some bytes")
    Slot.create(MEMORY, paths[3], 100, 100).close()
    (tmp_path / "slot-4").write_bytes(b"no slot at all")
    assert sealed_slots([*paths, tmp_path / "slot-4", tmp_path / "slot-5"]) == [
        paths[1],
        paths[2],
        paths[0],
    ]


def test_a_flip_in_a_file_changes_one_bit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    flip = draw_in_file(path, random.Random(1))
    flip.turn()
    assert sum(byte.bit_count() for byte in path.read_bytes()) == 1
    assert path.read_bytes()[flip.offset] == 1 << flip.bit
