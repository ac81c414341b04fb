"""Whoever can write to the bucket changes a checkpoint and mends all that says what it was: with a
secret no such one is taken, its place is told, and nobody starts afresh instead."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash

from keepstep.config import resolve
from keepstep.edge.store.draft import MANIFEST
from keepstep.edge.store.job_store import open_job_store
from keepstep.edge.store.manifest import FileSum, seal
from keepstep.edge.store.runs import begin_run
from keepstep.edge.store.signer import MAC_LETTERS
from keepstep.edge.store.store import Store
from keepstep.edge.torch.dcp.tree import RankState
from keepstep.edge.torch.dcp.write import publish, survey, write_part
from keepstep.errors import DamageError
from keepstep.model.checkpoint import CheckpointAttempt
from keepstep.model.snapshot import Stamp
from tests.security.training import Training, command, inspect, stored

SECRET = "a secret of sixteen and more bytes"
ANOTHER = "another secret of as many bytes"
FORGED = "expected it signed with this job's secret"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the checkpoints of steps 1 and 3, signed by a real job whose secret is in its
    program alone."""
    room = tmp_path_factory.mktemp("made")
    training = Training(room / "1", str(room / "store"), IN_CODE=SECRET)
    code, said = training.train(4, EVERY="2")
    assert code == 0 and stored(room / "store") == [3, 1], said
    return room / "store"


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    """One of its own for each attack."""
    return Path(shutil.copytree(made, tmp_path / "store"))


def places(store: Path) -> list[Path]:
    """The directories of the checkpoints, newest first."""
    return sorted(store.glob("step-*"), reverse=True)


def said_in(place: Path) -> dict[str, Any]:
    said: dict[str, Any] = json.loads((place / MANIFEST).read_bytes())
    del said["xxh3_64"]
    return said


def poison(place: Path, keep_signature: bool = True) -> None:
    """Another tensor, right sums of its file, a right sum of the manifest; and the signature that
    was there."""
    state = {"weights": torch.zeros(1000)}
    dcp.load(state, checkpoint_id=place)
    old = state["weights"].numpy().tobytes()
    (path,) = (path for path in place.glob("__*") if old in path.read_bytes())
    content = path.read_bytes().replace(old, torch.full((1000,), 666.0).numpy().tobytes())
    path.write_bytes(content)
    manifest = Store(place.parent).read_manifest(_step(place))
    size = manifest.files[path.name].block_bytes
    blocks = [content[at : at + size] for at in range(0, len(content), size)]
    sums = FileSum(len(content), size, tuple(map(xxhash.xxh3_64_hexdigest, blocks)))
    files = {**manifest.files, path.name: sums}
    before = said_in(place)
    said = json.loads(dataclasses.replace(manifest, files=files).to_bytes())
    del said["xxh3_64"]
    for name, about in said["files"].items():
        about["hmac_sha256"] = before["files"][name]["hmac_sha256"]
    signature = before["hmac_sha256"]
    (place / MANIFEST).write_bytes(seal(said, 1, (lambda _: signature) if keep_signature else None))
    assert Store(place.parent).verify(_step(place)), "to the checksums all is well"


def _step(place: Path) -> int:
    return int(place.name.split("-")[1])


def strip(place: Path) -> None:
    said = said_in(place)
    del said["hmac_sha256"]
    (place / MANIFEST).write_bytes(seal(said, 1))


def cut_signature(place: Path) -> None:
    said = said_in(place)
    signature = said.pop("hmac_sha256")[: MAC_LETTERS // 2]
    (place / MANIFEST).write_bytes(seal(said, 1, lambda _: signature))


def swap_steps(place: Path) -> None:
    """All that the older one has, signed, under the newer one's name."""
    older = places(place.parent)[-1]
    shutil.rmtree(place)
    shutil.copytree(older, place)


def rename_job(place: Path) -> None:
    said = said_in(place)
    signature = said.pop("hmac_sha256")
    (place / MANIFEST).write_bytes(seal({**said, "job": "another"}, 1, lambda _: signature))


ATTACKS: dict[str, Callable[[Path], object]] = {
    "a tensor, under its signature": poison,
    "a tensor, unsigned": lambda place: poison(place, keep_signature=False),
    "the signature stripped": strip,
    "the signature cut": cut_signature,
    "an older one's manifest": swap_steps,
    "another job's name": rename_job,
}


def went_on(training: Training) -> list[int]:
    return [event.data["step"] for event in training.events("restored")]


def as_the_job(store: Path, secret: str = SECRET) -> Store:
    """As its keeper and its ranks open it."""
    return open_job_store(resolve({"store": str(store), "job": "t", "secret": secret}, {}, "t"))


@pytest.mark.parametrize("attack", ATTACKS)
def test_it_is_damaged_and_no_rank_reads_it(attack: str, store: Path) -> None:
    newest = places(store)[0]
    ATTACKS[attack](newest)
    told = "expected the manifest of" if attack == "an older one's manifest" else FORGED
    found = as_the_job(store).look()
    assert found.usable == [1] and list(found.damaged) == [3] and not found.unfinished
    assert told in found.damaged[3] and newest.name in found.damaged[3]
    with pytest.raises(DamageError, match=told):
        as_the_job(store).as_taken().read_manifest(3)
    assert [m.step for m in as_the_job(store).published()] == [1], "nobody removes anything for it"


def test_an_older_one_is_taken_and_it_is_told_why(store: Path, tmp_path: Path) -> None:
    newest = places(store)[0]
    poison(newest)
    before = {path: path.read_bytes() for path in newest.iterdir()}
    training = Training(tmp_path / "1", str(store), KEEPSTEP_SECRET=SECRET)
    code, said = training.train(6)
    assert code == 0 and went_on(training) == [1], said  # it compares its weights with its steps
    (event,) = training.events("checkpoint-damaged")
    assert event.data["step"] == 3 and FORGED in event.why and newest.name in event.why
    assert FORGED in said, "and on stderr"
    assert {path: path.read_bytes() for path in newest.iterdir()} == before, "nobody removes it"


def test_where_all_are_forged_nobody_starts(store: Path, tmp_path: Path) -> None:
    for place in places(store):
        rename_job(place)
    training = Training(tmp_path / "1", str(store), KEEPSTEP_SECRET=SECRET)
    code, said = training.train(6)
    assert code != 0 and FORGED in said and "--adopt" in said and not training.events("go")
    assert len(places(store)) == 2


@pytest.mark.parametrize("said", ["survey", "part"])
def test_what_somebody_else_says_of_an_attempt_is_not_signed_by_its_leader(
    said: str, tmp_path: Path
) -> None:
    attempt = CheckpointAttempt("t", Stamp(1, 0), 1, (1,))
    store = as_the_job(tmp_path / "store")
    with store.draft(attempt.name) as draft:
        state = RankState(0, {"model": {"weights": torch.zeros(3)}}, {})
        write_part(draft, attempt, 0, survey(draft, attempt, 0, [state]), {}, {})
        name = attempt.survey_name(0) if said == "survey" else attempt.part_name(0)
        path = Path(store.place(attempt.name, name).path)
        plain = json.loads(path.read_bytes())
        path.write_bytes(
            seal({k: v for k, v in plain.items() if k not in ("xxh3_64", "hmac_sha256")})
        )
        with pytest.raises(DamageError, match=f"{said}-00000-1.json: {FORGED}"):
            publish(draft, attempt, 1)
    assert store.look().usable == []


def test_a_run_that_somebody_else_began_is_no_fresh_start(store: Path) -> None:
    files = Store(store)
    begin_run(files._fs, files._base, 2)
    with pytest.raises(DamageError, match=f"run-000002.*{FORGED}"):
        as_the_job(store).look()


def test_what_another_secret_signed_is_adopted_by_name(store: Path, tmp_path: Path) -> None:
    training = Training(tmp_path / "1", str(store), KEEPSTEP_SECRET=ANOTHER)
    code, said = training.train(6, KEEPSTEP_ADOPT="1")
    assert code == 0 and went_on(training) == [3], said
    found = as_the_job(store, ANOTHER).look()
    assert found.usable == [5] and set(found.damaged) == {3, 1}, "once said is enough"


def test_inspect_asks_for_the_signature_where_it_knows_the_secret(store: Path) -> None:
    words = ("inspect", "--store", str(store), "--verify")
    assert command(*words, KEEPSTEP_SECRET=SECRET)[0] == 0
    poison(places(store)[0])
    assert inspect(str(store))[0] == 0, "to the checksums all is well"
    code, said = command(*words, KEEPSTEP_SECRET=SECRET)
    assert code == 1 and FORGED in said


def test_torch_reads_a_signed_checkpoint_by_itself(store: Path) -> None:
    state = {"weights": torch.zeros(1000)}
    dcp.load(state, checkpoint_id=places(store)[0])
    assert state["weights"].eq(4).all()
