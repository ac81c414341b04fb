"""A directory that is measured, full, or gives back other bytes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from keepstep.edge.preflight import disk
from keepstep.edge.preflight.disk import BLOCK_BYTES, block, measure_disk


def test_it_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    figures = measure_disk(tmp_path, 4 * BLOCK_BYTES, 2, 3)
    assert (len(figures.writes), len(figures.syncs), figures.wrong_at) == (2, 3, None)
    assert min(figures.writes) > 0 and min(figures.syncs) > 0
    assert list(tmp_path.iterdir()) == []


def test_other_bytes_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.pread

    def flipped(fd: int, size: int, at: int) -> bytes:
        data = bytearray(read(fd, size, at))
        if at == 2 * BLOCK_BYTES:
            data[77] ^= 1
        return bytes(data)

    monkeypatch.setattr(disk.os, "pread", flipped)
    assert measure_disk(tmp_path, 4 * BLOCK_BYTES, 2, 1).wrong_at == 2 * BLOCK_BYTES


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk.os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        measure_disk(tmp_path, BLOCK_BYTES, 1, 1)
    assert list(tmp_path.iterdir()) == []


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(disk.os, "pwrite", lambda fd, data, at: write(fd, data[:100_000], at))
    assert measure_disk(tmp_path, 2 * BLOCK_BYTES, 1, 1).wrong_at is None


def test_blocks_are_all_different() -> None:
    blocks = [block(index) for index in range(50)]
    assert len(set(blocks)) == 50 and {len(each) for each in blocks} == {BLOCK_BYTES}
