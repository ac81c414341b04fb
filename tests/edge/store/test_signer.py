"""Signed stores: what nobody signed with the job's secret is neither taken nor acted on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from keepstep.edge.store.draft import MANIFEST
from keepstep.edge.store.manifest import (
    FileSum,
    Manifest,
    manifest_from_bytes,
    seal,
    unseal,
)
from keepstep.edge.store.owner import OWNER, StoreUser, owner_record
from keepstep.edge.store.parts import (
    part_from_bytes,
    part_to_bytes,
    survey_from_bytes,
    survey_to_bytes,
)
from keepstep.edge.store.runs import RUN, begin_run
from keepstep.edge.store.signer import MAC_LETTERS, Signer
from keepstep.edge.store.store import Store
from keepstep.errors import DamageError, IdentityError
from keepstep.model.checkpoint import CheckpointName
from tests.edge.store.test_manifest import WHOLE
from tests.edge.store.test_parts import ATTEMPT, PART, SURVEY
from tests.edge.store.test_store import SMALL, steps, write

OURS, THEIRS = Signer("a secret of this job's"), Signer("a secret of another's")
MACS = {name: replace(f, macs=("0" * MAC_LETTERS,) * 3) for name, f in WHOLE.files.items()}
SIGNED = replace(WHOLE, files=MACS)
SIGNED_PART = replace(
    PART, files={name: replace(f, macs=("0" * MAC_LETTERS,) * 3) for name, f in PART.files.items()}
)
FORGED = "expected it signed with this job's secret, found"


def of(place: Path, job: str = "test", adopts: bool = False, signer: Signer | None = OURS) -> Store:
    return Store(place / "store", user=StoreUser(job, adopts), signer=signer)


def manifest_of(place: Path, step: int) -> Path:
    return place / "store" / CheckpointName(step).directory / MANIFEST


def forge(path: Path, change: Callable[[dict[str, Any]], object], signer: Signer | None) -> None:
    """Another text in its place, with the right checksum, and the signature that is at hand."""
    body = json.loads(path.read_bytes())
    said = {name: value for name, value in body.items() if name not in ("xxh3_64", "hmac_sha256")}
    change(said)
    if signer is None and "hmac_sha256" in body:
        path.write_bytes(seal(said, 1, lambda _: str(body["hmac_sha256"])))
    else:
        path.write_bytes(seal(said, 1, None if signer is None else signer.words("manifest")))


words = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=4)


@given(words, st.sampled_from(["manifest", "part"]), st.data())
def test_whatever_is_changed_a_signature_holds_it(
    said: dict[str, Any], kind: str, data: st.DataObject
) -> None:
    sign = OURS.words(kind)
    raw = seal({**said, "format": 1}, sign=sign)
    assert unseal(raw, "here", sign)["format"] == 1 == unseal(raw, "here")["format"]
    other = data.draw(words)
    changed = seal({**other, "format": 1}, sign=lambda _: json.loads(raw)["hmac_sha256"])
    if other != said or list(other) != list(said):
        with pytest.raises(DamageError, match=f"here: {FORGED} another"):
            unseal(changed, "here", sign)
    for wrong in (OURS.words("survey"), THEIRS.words(kind)):
        with pytest.raises(DamageError, match=f"here: {FORGED} another.*--adopt"):
            unseal(raw, "here", wrong)


def test_every_bit_and_cut_of_a_signed_manifest_is_guarded() -> None:
    raw = SIGNED.to_bytes(OURS)
    assert manifest_from_bytes(raw, "here", OURS) == SIGNED
    for bit in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        rest = bytes(damaged).partition(b"\n")[2]
        mended = b'{"xxh3_64": "%s",\n%s' % (xxhash.xxh3_64_hexdigest(rest).encode(), rest)
        for forged in (bytes(damaged), mended):
            if forged != raw:
                with pytest.raises(DamageError):
                    manifest_from_bytes(forged, "here", OURS)
    for length in range(len(raw)):
        with pytest.raises(DamageError):
            manifest_from_bytes(raw[:length], "here", OURS)


@pytest.mark.parametrize("letters", [0, 1, MAC_LETTERS - 1, MAC_LETTERS + 1])
def test_a_signature_of_another_length_is_none(letters: int) -> None:
    body = {"format": 1}
    sign = OURS.words("manifest")
    with pytest.raises(DamageError, match=f"{FORGED} no signature"):
        unseal(seal(body, sign=lambda rest: (sign(rest) + "0")[:letters]), "here", sign)


def test_nothing_is_parsed_before_the_signature_is_right() -> None:
    """The sentence is the signature's, whatever lies behind it."""
    rest = b'"format": 2, "files": ' + b"[" * 100_000
    raw = b'{"xxh3_64": "%s",\n%s' % (xxhash.xxh3_64_hexdigest(rest).encode(), rest)
    with pytest.raises(DamageError, match=FORGED):
        manifest_from_bytes(raw, "here", OURS)


def test_what_nodes_say_of_an_attempt_is_signed() -> None:
    survey = survey_to_bytes(ATTEMPT, 1, SURVEY, OURS)
    part = part_to_bytes(ATTEMPT, 1, SIGNED_PART, OURS)
    assert survey_from_bytes(survey, "here", ATTEMPT, 1, OURS) == SURVEY
    assert part_from_bytes(part, "here", ATTEMPT, 1, OURS) == SIGNED_PART
    assert part_from_bytes(part, "here", ATTEMPT, 1) == PART, "nobody asks: no MACs"
    unsigned = part_to_bytes(ATTEMPT, 1, PART)
    for raw in (unsigned, part_to_bytes(ATTEMPT, 1, SIGNED_PART, THEIRS), survey):
        with pytest.raises(DamageError, match=FORGED):
            part_from_bytes(raw, "here", ATTEMPT, 1, OURS)
    with pytest.raises(DamageError, match=FORGED):
        survey_from_bytes(survey_to_bytes(ATTEMPT, 1, SURVEY), "here", ATTEMPT, 1, OURS)


def test_a_block_under_the_same_checksum_is_not_the_same_block(tmp_path: Path) -> None:
    """XXH3 has collisions for who wants some: here the sums are those of the forged bytes."""
    store = of(tmp_path)
    written = write(store, 3, {"a": b"alpha", "b": b"beta"})
    assert store.verify(3) == written
    (tmp_path / "store" / written.name.directory / "a").write_bytes(b"omega")
    sums = written.files["a"]
    found = replace(sums, xxh3_64=(xxhash.xxh3_64_hexdigest(b"omega"),))
    changed = replace(written, files={**written.files, "a": found})
    manifest_of(tmp_path, 3).write_bytes(changed.to_bytes(OURS))
    with pytest.raises(DamageError, match="a: block 0: expected the bytes that were signed"):
        store.verify(3)
    with pytest.raises(DamageError, match="forged"):
        store.open(store.read_manifest(3), "a").read()
    assert store.intact(3) is None
    assert Store(tmp_path / "store").verify(3).step == 3, "without a secret the checksum is all"


@given(st.lists(st.binary(max_size=30), max_size=6), st.integers(1, 20))
def test_macs_do_not_know_in_which_pieces_a_file_was_written(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], block_bytes: int
) -> None:
    store = Store(tmp_path_factory.mktemp("pieces"), block_bytes=block_bytes, signer=OURS)
    with store.draft(CheckpointName(1)) as draft:
        with draft.open("a") as file:
            for piece in pieces:
                file.write(piece)
        whole = b"".join(pieces)
        expected = []
        for at in range(0, len(whole), block_bytes):
            mac = OURS.block()
            mac.update(whole[at : at + block_bytes])
            expected.append(mac.letters())
        assert draft.files["a"].macs == tuple(expected)
        draft.read_back(["a"])


def test_a_reader_without_the_secret_reads_what_was_signed(tmp_path: Path) -> None:
    write(of(tmp_path), 3, SMALL)
    reader = Store(tmp_path / "store")
    assert steps(reader) == [3] and reader.verify(3).files["a"].macs is None


@pytest.mark.parametrize("signer", [None, THEIRS])
def test_what_is_not_signed_is_damaged_and_who_adopts_takes_it(
    signer: Signer | None, tmp_path: Path
) -> None:
    write(of(tmp_path, signer=signer), 3, SMALL)
    assert of(tmp_path, signer=signer).begin_run() is not None
    write(of(tmp_path, signer=signer).follow(), 5, SMALL)
    with pytest.raises(DamageError, match=f"{RUN}: {FORGED}"):
        of(tmp_path).look()
    adopting = of(tmp_path, adopts=True)
    assert adopting.look().usable == [5]
    assert adopting.as_taken().verify(5).step == 5
    assert adopting.follow().published() == (), "nothing is removed on its word"
    adopting.claim()
    write(of(tmp_path).follow(), 7, SMALL)
    found = of(tmp_path).look()
    assert found.usable == [7] and FORGED in found.damaged[5], "the run is its own; once is enough"
    assert [m.step for m in of(tmp_path).follow().published()] == [7]


def test_a_manifest_of_other_words_is_damaged_whoever_signed_them(tmp_path: Path) -> None:
    write(of(tmp_path), 3, SMALL)
    write(of(tmp_path), 5, SMALL)
    path, good = manifest_of(tmp_path, 5), manifest_of(tmp_path, 5).read_bytes()
    changes: list[Callable[[dict[str, Any]], object]] = [
        lambda said: said.update(job="another"),
        lambda said: said.update(metrics={"loss": 0.0}),
        lambda said: said.update(timeline=[9, -1]),
        lambda said: said["files"].pop("a"),
        lambda said: said["files"]["a"].pop("hmac_sha256"),
    ]
    for change in changes:
        for signer in (None, THEIRS):
            path.write_bytes(good)
            forge(path, change, signer)
            found = of(tmp_path).look()
            assert found.usable == [3] and FORGED in found.damaged[5]
            assert not found.unfinished, "what was never published would allow a fresh start"
    path.write_bytes(manifest_of(tmp_path, 3).read_bytes())
    assert "expected the manifest of step-000000000005" in of(tmp_path).look().damaged[5]


def test_a_checkpoint_of_another_job_with_the_same_secret_is_not_taken(tmp_path: Path) -> None:
    of(tmp_path).claim()
    write(of(tmp_path, "b"), 5, SMALL, job="b")
    assert of(tmp_path).look().usable == []
    with pytest.raises(DamageError, match="expected a checkpoint of job test, found one of 'b'"):
        of(tmp_path).read_manifest(5)
    record = tmp_path / "store" / OWNER
    record.write_bytes(owner_record("test", ["b"]))
    assert of(tmp_path).look().usable == [], "nobody signed that it was adopted"
    record.write_bytes(owner_record("test", ["b"], OURS))
    assert of(tmp_path).look().usable == [5]


def test_a_record_that_nobody_signed_still_keeps_others_out(tmp_path: Path) -> None:
    of(tmp_path, "b", signer=None).claim()
    with pytest.raises(IdentityError, match="found those of 'b'"):
        of(tmp_path).claim()
    (tmp_path / "store" / OWNER).unlink()
    write(of(tmp_path, "b", signer=None), 5, SMALL, job="b")
    with pytest.raises(IdentityError, match="found those of 'b'"):
        of(tmp_path).claim()


def test_another_job_s_store_is_called_that_whatever_signed_it(tmp_path: Path) -> None:
    theirs = of(tmp_path, "b", signer=THEIRS)
    theirs.claim()
    write(theirs, 3, SMALL, job="b")
    assert theirs.begin_run() is not None
    for refused in (of(tmp_path).look, of(tmp_path).begin_run):
        with pytest.raises(IdentityError, match="found those of 'b'"):
            refused()


def test_a_run_that_somebody_else_has_begun_is_not_followed(tmp_path: Path) -> None:
    store = of(tmp_path)
    write(store, 3, SMALL)
    begin_run(store._fs, store._base, 7)
    for look in (store.look, store.follow, store.begin_run):
        with pytest.raises(DamageError, match=f"run-000007/{RUN}: {FORGED} no signature"):
            look()
    begin_run(store._fs, store._base, 7, OURS)
    (tmp_path / "store" / "run-000008").mkdir()
    record = tmp_path / "store" / "run-000007" / RUN
    record.rename(tmp_path / "store" / "run-000008" / RUN)
    with pytest.raises(DamageError, match="expected the record of run 8, found that of 7"):
        store.look()


def test_a_signed_manifest_without_macs_is_none() -> None:
    raw = Manifest("j", 3, 1, {}, 0, {}, {"a": FileSum(1, 4, ("0" * 16,))}).to_bytes(OURS)
    with pytest.raises(DamageError, match="hmac_sha256"):
        manifest_from_bytes(raw, "here", OURS)
