"""Manifest: whatever lies there under a right checksum, it is a manifest or a DamageError."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given
from hypothesis import strategies as st

from keepstep.edge.store.checked_file import VerifiedFile
from keepstep.edge.store.draft import MANIFEST
from keepstep.edge.store.manifest import FileSum, Manifest, manifest_from_bytes, seal
from keepstep.edge.store.owner import OWNER, OwnerRecord, read_owner
from keepstep.edge.store.parts import part_from_bytes, survey_from_bytes
from keepstep.edge.store.store import Store
from keepstep.errors import DamageError, IdentityError, StoreError
from keepstep.model.checkpoint import CheckpointAttempt, CheckpointName
from keepstep.model.snapshot import Stamp

WHOLE = Manifest(
    job="j",
    step=3,
    world_size=2,
    metrics={"loss": 0.5},
    wall_ns=7,
    fingerprint={"model": "gpt"},
    files={".metadata": FileSum(9, 4, ("0" * 16, "1" * 16, "2" * 16))},
)
NAME = CheckpointName(3)
ATTEMPT = CheckpointAttempt("j", Stamp(3, 1), 7, (1, 1))
ODD: list[Any] = [
    None,
    True,
    -1,
    1.5,
    1 << 63,
    10**400,
    "",
    "x",
    "../x",
    [],
    [1],
    [[]],
    {},
    {"a": 1},
]
trees = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=12,
)


def spots(plain: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to each value in a tree."""
    found = [way] if way else []
    keys = plain if isinstance(plain, dict) else range(len(plain) if isinstance(plain, list) else 0)
    for key in keys:
        found += spots(plain[key], (*way, key))
    return found


def text() -> dict[str, Any]:
    body: dict[str, Any] = json.loads(WHOLE.to_bytes())
    del body["xxh3_64"]
    return body


@pytest.mark.parametrize("way", spots(text()), ids=lambda way: "/".join(map(str, way)))
def test_an_odd_value_or_none_at_all_is_damage_or_makes_a_manifest(way: tuple[Any, ...]) -> None:
    for odd in [*ODD, "missing"]:
        body = text()
        inner = body
        for key in way[:-1]:
            inner = inner[key]
        if odd == "missing":
            del inner[way[-1]]
        else:
            inner[way[-1]] = odd
        try:
            read = manifest_from_bytes(seal(body), "here")
        except (DamageError, StoreError):
            continue
        assert manifest_from_bytes(read.to_bytes(), "here") == read


@pytest.mark.parametrize(
    ("way", "odd"),
    [
        (["step"], True),
        (["step"], "3"),
        (["world_size"], 0),
        (["job"], None),
        (["metrics", "loss"], "much"),
        (["files"], {"../../x": {"bytes": 0, "block_bytes": 4, "xxh3_64": []}}),
        (["files", ".metadata", "block_bytes"], 0),
        (["files", ".metadata", "bytes"], 99),
        (["files", ".metadata", "xxh3_64"], "0123"),
    ],
)
def test_what_no_writer_says_is_damage(way: list[str], odd: Any) -> None:
    body = text()
    inner = body
    for key in way[:-1]:
        inner = inner[key]
    inner[way[-1]] = odd
    with pytest.raises(DamageError, match="here: not as it was written"):
        manifest_from_bytes(seal(body), "here")


@given(st.dictionaries(st.sampled_from(["format", *text(), "items", "values"]), trees))
def test_any_object_is_read_or_refused(body: dict[str, Any]) -> None:
    for raw in (seal(body), seal({**body, "format": 1})):
        with_errors = (DamageError, StoreError, IdentityError)
        for read in (
            lambda raw: manifest_from_bytes(raw, "here"),
            lambda raw: survey_from_bytes(raw, "here", ATTEMPT, 0),
            lambda raw: part_from_bytes(raw, "here", ATTEMPT, 0),
        ):
            try:
                read(raw)
            except with_errors:
                continue


def test_json_that_is_too_deep_is_damage() -> None:
    deep = b'"format": 1, "files": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(DamageError):
        manifest_from_bytes(resealed(deep), "here")


def resealed(rest: bytes) -> bytes:
    return b'{"xxh3_64": "%s",\n%s' % (xxhash.xxh3_64_hexdigest(rest).encode(), rest)


def test_an_odd_manifest_hides_no_other_checkpoint(tmp_path: Path) -> None:
    store = Store(tmp_path)
    draft = store.draft(CheckpointName(3))
    with draft.open("data") as file:
        file.write(b"bytes")
    draft.read_back(["data"])
    draft.publish(Manifest("j", 3, 1, {}, 0, {}, draft.files))
    odd = tmp_path / "step-000000000999"
    odd.mkdir()
    (odd / "keepstep.json").write_bytes(seal({"format": 1, "step": 999}))
    listing = store.list_checkpoints()
    assert [m.step for m in listing.checkpoints] == [3] and listing.damaged == {999}


@pytest.mark.parametrize("kind", ["directory", "pipe", "device", "sparse"])
def test_what_is_no_file_of_ours_is_damage_and_nobody_waits_for_it(
    kind: str, tmp_path: Path
) -> None:
    """Reading a pipe would never end, a device or a huge file would fill the memory."""
    odd = tmp_path / "step-000000000999" / "keepstep.json"
    odd.parent.mkdir()
    match kind:
        case "directory":
            odd.mkdir()
        case "pipe":
            os.mkfifo(odd)
        case "device":
            odd.symlink_to("/dev/zero")
        case _:
            with open(odd, "wb") as file:
                file.truncate(1 << 41)
    listing = Store(tmp_path).list_checkpoints()
    assert listing.damaged == {999} and "keepstep.json: expected" in listing.broken[999]
    odd.rename(tmp_path / OWNER)
    assert read_owner(LocalFileSystem(), str(tmp_path)) == OwnerRecord(None, is_there=True)


@pytest.mark.parametrize("kind", ["a pipe", "another file"])
@pytest.mark.timeout(20)
def test_what_was_looked_at_is_what_is_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write to the store may put something else there between the two."""
    store, manifest = Store(tmp_path), tmp_path / NAME.directory / MANIFEST
    manifest.parent.mkdir()
    manifest.write_bytes(b"the one looked at")
    swapped = []

    def then_swapped(look: Callable[..., Any]) -> Callable[..., Any]:
        def looked(*what: Any, **how: Any) -> Any:
            facts = look(*what, **how)
            if not swapped:
                swapped.append(kind)
                manifest.unlink()
                os.mkfifo(manifest) if kind == "a pipe" else manifest.write_bytes(b"another")
            return facts

        return looked

    monkeypatch.setattr(LocalFileSystem, "info", then_swapped(LocalFileSystem.info))
    monkeypatch.setattr(os, "fstat", then_swapped(os.fstat))
    assert store.read_small(NAME, MANIFEST) == b"the one looked at" and swapped


@pytest.mark.timeout(20)
def test_a_pipe_in_a_files_place_is_damage_of_its_blocks(tmp_path: Path) -> None:
    store = Store(tmp_path)
    draft = store.draft(NAME)
    with draft.open("data") as file:
        file.write(b"bytes")
    opened = VerifiedFile(store.place(NAME, "data"), draft.files["data"])
    path = Path(store.path(NAME, "data"))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DamageError, match="expected a file, found a pipe"):
        opened.read_block(0)


@pytest.mark.timeout(20)
def test_no_more_is_read_than_the_file_said_it_has(tmp_path: Path) -> None:
    """What a kernel's file tells is not known by its size, and may never end."""
    store, manifest = Store(tmp_path), tmp_path / NAME.directory / MANIFEST
    manifest.parent.mkdir()
    manifest.symlink_to("/proc/self/status")
    assert store.read_small(NAME, MANIFEST) == b""
