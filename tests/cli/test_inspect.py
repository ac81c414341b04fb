"""`keepstep inspect`: what is proven is said, what is damaged is named."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from keepstep.coding.checksum import BLOCK_BYTES
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot
from keepstep.edge.store.manifest import Manifest
from keepstep.edge.store.store import Store
from keepstep.model.checkpoint import CheckpointName
from keepstep.model.units import PAGE_BYTES

THREE_BLOCKS = 3 * BLOCK_BYTES // 4  # floats


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


def test_intact_slots(machine: Any) -> None:
    machine.slot("demo", 0, 0, 7, THREE_BLOCKS)
    machine.slot("demo", 1, 0, 7)
    document = machine.json("inspect")
    assert document["damaged"] == 0
    [job] = document["jobs"]
    assert [(s["rank"], s["step"], s["proof"], s["blocks"]) for s in job["slots"]] == [
        (0, 7, "intact", 3),
        (1, 7, "intact", 1),
    ]
    result = machine.run("inspect")
    assert result.exit_code == 0 and result.stdout.count("intact") == 2


def test_a_flipped_bit_is_found_and_named(machine: Any) -> None:
    machine.slot("demo", 0, 0, 6, THREE_BLOCKS)
    path = machine.slot("demo", 0, 1, 7, THREE_BLOCKS)
    flip(path, PAGE_BYTES + BLOCK_BYTES + 12345, bit=5)
    result = machine.run("inspect")
    assert result.exit_code == 1
    assert (
        f"{path}: step 7 of rank 0 damaged: block 1" in result.stdout
        and "expected" in result.stdout
    )
    document = machine.json("inspect", "--job", "demo", code=1)
    assert document["damaged"] == 1
    assert [(s["slot"], s["proof"]) for s in document["jobs"][0]["slots"]] == [
        (0, "intact"),
        (1, "damaged"),
    ]
    assert "block 1" in document["jobs"][0]["slots"][1]["why"]
    assert machine.run("inspect", "--no-verify").exit_code == 0  # nobody looked


@pytest.mark.parametrize("seed", range(20))
def test_any_flipped_bit_of_a_snapshot_is_found(machine: Any, seed: int) -> None:
    path = machine.slot("demo", 0, 0, 7)
    slot = Slot(MEMORY, path)
    header = slot.header()
    slot.close()
    table = PAGE_BYTES + slot.capacity
    manifest = table + PAGE_BYTES
    rng = random.Random(seed)
    written = [
        range(PAGE_BYTES),
        range(PAGE_BYTES, PAGE_BYTES + header.payload_bytes),
        range(table, table + 8),
    ]
    flip(
        path,
        rng.choice(rng.choice([*written, range(manifest, manifest + header.manifest_bytes)])),
        rng.randrange(8),
    )
    assert machine.run("inspect").exit_code == 1


def test_a_slot_that_was_never_sealed_is_no_damage(machine: Any) -> None:
    path = machine.slot("demo", 0, 0, 7)
    slot = Slot(MEMORY, path)
    slot.begin(bytes(16), 0, 1, 2, slot.header().stamp)
    slot.close()
    [found] = machine.json("inspect")["jobs"][0]["slots"]
    assert (found["state"], found["proof"]) == ("writing", "unproven")


def test_a_slot_held_by_its_writer_is_busy_and_not_damaged(machine: Any) -> None:
    slot = Slot(MEMORY, machine.slot("demo", 0, 0, 7))
    assert slot.lock(exclusive=True)
    assert [s["proof"] for s in machine.json("inspect")["jobs"][0]["slots"]] == ["busy"]
    slot.close()


def test_no_lock_is_left_on_a_slot(machine: Any) -> None:
    path = machine.slot("demo", 0, 0, 7)
    machine.run("inspect")
    slot = Slot(MEMORY, path)
    assert slot.lock(exclusive=True)
    slot.close()


def test_tensors(machine: Any) -> None:
    machine.slot("demo", 0, 0, 7)
    [slot] = machine.json("inspect", "--tensors", "--no-verify")["jobs"][0]["slots"]
    assert slot["proof"] == "unproven"
    assert slot["tensors"] == [
        {
            "name": "model.weight",
            "dtype": "float32",
            "shape": [1024],
            "nbytes": 4096,
            "stride": None,
            "shard": None,
            "offset": 0,
        }
    ]
    text = machine.run("inspect", "--tensors").stdout
    assert "model.weight" in text and "[1024]" in text


def test_copies_and_parities_are_proven_behind_a_nodes_own_slots(machine: Any) -> None:
    machine.slot("demo", 0, 0, 7)
    machine.slot("demo", 2, 1, 7, shelf="held")
    parity = machine.slot("demo", 0, 0, 7, shelf="parity")
    [job] = machine.json("inspect")["jobs"]
    found = [(s["kind"], s["rank"], s["slot"], s["step"], s["proof"]) for s in job["slots"]]
    assert found == [
        ("own", 0, 0, 7, "intact"),
        ("copy", 2, 1, 7, "intact"),
        ("parity", 0, 0, 7, "intact"),
    ]
    assert [
        len(s["tensors"]) for s in machine.json("inspect", "--tensors")["jobs"][0]["slots"]
    ] == [1, 0, 0]
    flip(parity, PAGE_BYTES + 77)
    result = machine.run("inspect")
    assert result.exit_code == 1 and f"{parity}: step 7 of rank 0 damaged: block 0" in result.stdout
    assert [s["proof"] for s in machine.json("inspect", code=1)["jobs"][0]["slots"]] == [
        "intact",
        "intact",
        "damaged",
    ]


def test_memory_of_nobody(machine: Any) -> None:
    assert machine.json("inspect") == {"jobs": [], "damaged": 0}


# -- a store


def write_checkpoint(store: Store, step: int, data: bytes) -> None:
    with store.draft(CheckpointName(step)) as draft:
        with draft.open("__0_0.distcp") as file:
            file.write(data)
        draft.publish(
            Manifest("demo", step, 1, {"loss": 0.25}, 1_700_000_000_000_000_000, {}, draft.files)
        )


def test_checkpoints_are_listed_and_proven(machine: Any, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    for step in (9, 19):
        write_checkpoint(store, step, bytes(5000))
    document = machine.json("inspect", "--store", str(tmp_path / "store"))
    assert document["damaged"] == 0
    assert [(c["step"], c["proof"], c["bytes"], c["metrics"]) for c in document["checkpoints"]] == [
        (19, "intact", 5000, {"loss": 0.25}),
        (9, "intact", 5000, {"loss": 0.25}),
    ]
    assert set(document["checkpoints"][0]) == {
        *(
            "step",
            "url",
            "proof",
            "why",
            "job",
            "world_size",
            "bytes",
            "files",
            "metrics",
            "wall_ns",
        ),
    }
    result = machine.run("inspect", "--store", str(tmp_path / "store"), "--no-verify")
    assert result.exit_code == 0 and result.stdout.count("unproven") == 2


def test_damage_in_a_store_is_named_and_what_is_unfinished_is_not_damage(
    machine: Any, tmp_path: Path
) -> None:
    store = Store(tmp_path / "store")
    for step in (9, 19, 29):
        write_checkpoint(store, step, bytes(5000))
    flip(tmp_path / "store" / "step-000000000019" / "__0_0.distcp", 4321)
    (tmp_path / "store" / "step-000000000029" / "__0_0.distcp").unlink()
    (tmp_path / "store" / "step-000000000039").mkdir()
    document = machine.json("inspect", "--store", str(tmp_path / "store"), code=1)
    assert [(c["step"], c["proof"]) for c in document["checkpoints"]] == [
        (39, "unfinished"),
        (29, "damaged"),
        (19, "damaged"),
        (9, "intact"),
    ]
    assert document["damaged"] == 2
    result = machine.run("inspect", "--store", str(tmp_path / "store"))
    assert result.exit_code == 1
    assert (
        "step-000000000019/__0_0.distcp: block 0" in result.stdout
        and "found no file" in result.stdout
    )


def test_the_runs_before_the_newest_one_are_told_of(machine: Any, tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    store = Store(place)
    write_checkpoint(store, 9, bytes(5000))
    assert machine.json("inspect", "--store", place)["other_runs"] == []
    for step in (19, 29):
        assert store.begin_run() is not None
        write_checkpoint(store, step, bytes(5000))
    document = machine.json("inspect", "--store", place)
    assert [c["step"] for c in document["checkpoints"]] == [29]
    assert document["other_runs"] == [f"{place}/run-000002", place]
    told = "".join(machine.run("inspect", "--store", place, "--no-verify").stdout.split("\n"))
    assert f"{place}/run-000002" in told


def test_a_store_and_a_job_are_two_questions(machine: Any, tmp_path: Path) -> None:
    assert machine.run("inspect", "--store", str(tmp_path), "--job", "demo").exit_code == 2
    assert machine.run("inspect", "--store", "nosuch://place").exit_code == 2
    missing = tmp_path / "missing"
    for json in ([], ["--json"]):
        nowhere = machine.run("inspect", "--store", str(missing), *json)
        assert nowhere.exit_code == 2 and f"expected a directory, found none at '{missing}'" in (
            nowhere.stderr.replace("\n", "")
        )
    (tmp_path / "empty").mkdir()
    empty = machine.run("inspect", "--store", str(tmp_path / "empty"))
    assert empty.exit_code == 0 and "There is no checkpoint." in empty.stdout


@pytest.mark.parametrize("words", [[], ["-v"], ["--verify"], ["--tensors"]])
def test_nothing_is_broken_at_80_columns(
    machine: Any, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    machine.slot("demo", 1000, 0, 99_999_998, THREE_BLOCKS)
    machine.slot("demo", 1000, 1, 99_999_999, THREE_BLOCKS)
    machine.slot("demo", 1000, 0, 99_999_997, shelf="held")
    result = machine.run("inspect", *words)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80, result.stdout
    assert "…" not in result.stdout
    lines = [line.split() for line in result.stdout.splitlines()]
    for number in ("1000", "99999997", "99999998", "99999999"):
        assert any(number in line for line in lines), result.stdout


def test_checkpoints_are_whole_at_80_columns(
    machine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    place = tmp_path / "store"
    for step in (99_999_998, 99_999_999):
        write_checkpoint(Store(place), step, bytes(5000))
    text = machine.run("inspect", "--store", str(place)).stdout
    rows = [line for line in text.splitlines() if str(place) not in line]
    assert max(map(len, rows)) <= 80 and "…" not in text
    for step in ("99999998", "99999999"):
        [row] = [row.split() for row in rows if row.split()[:1] == [step]]
        assert row[-1] == "intact", text


@pytest.mark.parametrize("odd", ["[/x]", "\x1b]0;pwned\x07"])
def test_names_in_a_store_neither_end_the_command_nor_reach_the_terminal(
    machine: Any, tmp_path: Path, odd: str
) -> None:
    store = Store(tmp_path / "bucket")
    job = odd if odd.isprintable() else "a"  # no other is a job's in a manifest
    made = Manifest(job, 7, 1, {f"loss{odd}": 1.0}, 1, {}, {})
    directory = Path(store.path(made.name))
    directory.mkdir(parents=True)
    (directory / "keepstep.json").write_bytes(made.to_bytes())
    result = machine.run("inspect", "--store", str(store.root))
    assert result.exit_code == 0 and "loss" in result.stdout
    assert "\x1b" not in result.stdout and "\x07" not in result.stdout
