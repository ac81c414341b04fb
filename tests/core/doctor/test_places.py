"""Directories that are missing, full, of the wrong kind, or somebody else's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from keepstep.core.doctor.defect import Grade
from keepstep.model.units import GIB, MIB
from tests.core.doctor.sane_machine import SANE, found_by, only_defect, with_facts


@pytest.mark.parametrize(
    ("changes", "check", "grade", "words"),
    [
        ({"arena.nearest": "/dev"}, "arena-writable", Grade.BROKEN, "not there"),
        ({"arena.refusal": "Read-only file system"}, "arena-writable", Grade.BROKEN, "remount,rw"),
        ({"arena.filesystem": "ext4"}, "arena-in-memory", Grade.WARNING, "is ext4"),
        ({"arena.filesystem": None}, "arena-in-memory", Grade.UNKNOWN, "file system"),
        (
            {"arena.total_bytes": 64 * MIB, "arena.free_bytes": 64 * MIB},
            *("arena-size", Grade.BROKEN, "--shm-size=131072m"),
        ),
        (
            {"arena.total_bytes": 32 * GIB, "arena.free_bytes": 32 * GIB},
            *("arena-size", Grade.WARNING, "size=131072m"),
        ),
        ({"arena.total_bytes": 63 * GIB}, "arena-size", Grade.WARNING, "63.0 GiB of 256.0 GiB"),
        ({"arena.free_bytes": 8 * GIB}, "arena-free", Grade.WARNING, "keepstep clean"),
        ({"arena.free_bytes": MIB}, "arena-free", Grade.BROKEN, "1.0 MiB of 128.0 GiB free"),
        ({"arena.free_bytes": None}, "arena-free", Grade.UNKNOWN, "free"),
        ({"arena.free_files": 10}, "arena-free", Grade.WARNING, "10 more files"),
        ({"arena.mode": 0o777}, "arena-owner", Grade.BROKEN, "mode 777"),
        ({"arena.owner": 7}, "arena-owner", Grade.BROKEN, "user 7"),
        ({"arena.mode": None}, "arena-owner", Grade.UNKNOWN, "owner"),
        ({"wanted.user_dir_refusal": "is a link"}, "arena-owner", Grade.BROKEN, "is a link"),
        ({"state.refusal": "Permission denied"}, "state-directory", Grade.BROKEN, "STATE_DIR"),
        ({"state.free_bytes": 0}, "state-directory", Grade.BROKEN, "0 B free"),
        ({"temporary.refusal": "No space"}, "temporary-directory", Grade.BROKEN, "TMPDIR"),
        ({"temporary.free_bytes": 90 * MIB}, "temporary-directory", Grade.WARNING, "90.0 MiB"),
        ({"temporary.free_bytes": MIB}, "temporary-directory", Grade.BROKEN, "1.0 MiB"),
        ({"temporary.free_bytes": None}, "temporary-directory", Grade.UNKNOWN, "free"),
        (
            {"temporary.options": frozenset({"noexec"})},
            *("temporary-directory", Grade.WARNING, "remount,exec /tmp"),
        ),
        ({"store.refusal": "Permission denied"}, "store-directory", Grade.BROKEN, "not start"),
        ({"store.free_bytes": 9 * GIB}, "store-directory", Grade.WARNING, "9.0 GiB of 8.8 TiB"),
        ({"store.free_bytes": MIB}, "store-directory", Grade.BROKEN, "1.0 MiB of 8.8 TiB"),
        ({"store.free_bytes": None}, "store-directory", Grade.UNKNOWN, "free"),
        ({"store.free_files": 3}, "store-directory", Grade.WARNING, "3 more files"),
        ({"store.filesystem": "tmpfs"}, "store-directory", Grade.WARNING, "lost with the machine"),
        ({"store.filesystem": "overlay"}, "store-directory", Grade.WARNING, "docker run -v"),
        ({"store.filesystem": "ext4"}, "store-directory", Grade.WARNING, "other nodes do not see"),
        ({"store.options": frozenset({"soft"})}, "store-directory", Grade.WARNING, "remount,hard"),
    ],
)
def test_a_defect_is_named(changes: dict[str, Any], check: str, grade: Grade, words: str) -> None:
    defect = only_defect(changes, check)
    assert defect.grade is grade and words in f"{defect.found} {defect.why} {defect.fix}"


@pytest.mark.parametrize(
    "changes",
    [
        {"store": None},
        {"store.filesystem": "ext4", "wanted.nodes": 1},  # its own disk is the only one
        {"arena.options": frozenset({"noexec", "nosuid"})},  # as Docker mounts it
        {"arena.owner": 1000, "arena.mode": 0o755},
        # ramfs, and file systems without a count of files
        {"arena.filesystem": "ramfs", "arena.total_bytes": 0, "arena.free_bytes": 0},
        {"store.total_bytes": 0, "store.free_bytes": 0, "store.free_files": 0},
    ],
)
def test_what_is_in_order_is_not_named(changes: dict[str, Any]) -> None:
    facts = with_facts(changes)
    checks = ("arena-writable", "arena-in-memory", "arena-size", "arena-free")
    for check in (*checks, "arena-owner", "store-directory"):
        assert found_by(check, facts) == []


def test_a_path_is_quoted_in_a_remedy() -> None:
    arena = replace(SANE.arena, path="/my arena", nearest="/my arena", refusal="no")
    (defect,) = found_by("arena-writable", with_facts({"arena": arena}))
    assert "'/my arena'" in defect.fix
