"""A slot and a bucket that a stranger has written: every checksum is right, and reading them must
run nothing, load nothing and remove nothing."""

from __future__ import annotations

import dataclasses
import json
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot
from keepstep.edge.store.manifest import FileSum
from keepstep.edge.store.store import Store
from keepstep.edge.torch import checkpoint, restore
from keepstep.edge.torch.capture import TensorCopy
from keepstep.edge.torch.dcp.format import _rank_state
from keepstep.edge.torch.state import RNG, Protected, State
from keepstep.errors import UntrustedError
from keepstep.model.snapshot import Stamp
from keepstep.model.units import KIB
from tests.edge.torch.conftest import bytes_of
from tests.edge.torch.dcp.one_node import write_checkpoint
from tests.edge.torch.pickles.hostile import LYING, RUNNING, marking
from tests.edge.torch.pickles.own_types import Record, Reducing

STEP = 5


def program(seed: int) -> Protected:
    """A small training, with plain values."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return Protected.of({"model": model, "optimizer": optimizer, "values": [seed]}, lazy=True)


def whole(protected: Protected) -> Any:
    """All of the live state, comparable; the random states have tests of their own."""
    return bytes_of({name: part for name, part in protected.tree().items() if name != RNG})


def slot_of(path: Path, state: State) -> Slot:
    """A slot as a rank seals it."""
    slot = Slot.create(MEMORY, path, state.payload_bytes, 64 * KIB)
    slot.begin(bytes(16), 0, 1, 1, Stamp(STEP, 1))
    copy = TensorCopy(state, slot)
    copy.copy_moving()
    run_acts(copy.copy_still())
    manifest = json.dumps(state.layout.to_json()).encode()
    slot.seal(slot.write_table(state.payload_bytes, manifest), state.layout.hash(), 0.0, wall_ns=1)
    return slot


def hostile_slot(path: Path, last_section: bytes) -> Slot:
    """Whose plain values are those bytes."""
    state = program(1).gather()
    *sections, moving_and_values = state.sections
    moving = moving_and_values[: _end_of_pickle(moving_and_values)]
    return slot_of(path, dataclasses.replace(state, sections=(*sections, moving + last_section)))


def _end_of_pickle(raw: bytes) -> int:
    return 1 + next(at for operation, _, at in pickletools.genops(raw) if operation.name == "STOP")


@pytest.mark.parametrize("name", [*RUNNING, *LYING])
def test_a_hostile_slot_is_refused_and_kept(name: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    raw = RUNNING[name](mark) if name in RUNNING else LYING[name]
    slot = hostile_slot(tmp_path / "slot-0", raw)
    before = bytes(slot.payload)
    live = program(2)
    state = whole(live)
    header, layout = slot.verify()
    with pytest.raises(UntrustedError):
        restore.open_snapshot(live, slot, header, layout)
    assert not mark.exists()
    assert bytes(slot.payload) == before
    assert slot.verify() == (header, layout)
    assert whole(live) == state
    slot.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree.clear(),
        lambda tree: tree.update({"<about>": 7}),
        lambda tree: tree.update({"<about>": {"kinds": 7}}),
    ],
)
def test_a_slot_that_does_not_say_what_it_is_of_is_refused(
    change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    state = program(1).gather()
    tree: dict[str, Any] = {}
    change(tree)
    sections = (pickle.dumps(tree), *state.sections[1:])
    slot = slot_of(tmp_path / "slot-0", dataclasses.replace(state, sections=sections))
    with pytest.raises(UntrustedError):
        restore.open_snapshot(program(2), slot, *slot.verify())
    slot.close()


@pytest.mark.parametrize("name", RUNNING)
def test_who_writes_a_checkpoint_of_a_hostile_slot_runs_nothing(name: str, tmp_path: Path) -> None:
    """And what it has written is refused by who reads it; attributes of a dict are not written."""
    mark = tmp_path / "mark"
    value = b"\x80\x04}\x8c\x06values" + _inside(RUNNING[name](mark)) + b"s."
    slot = hostile_slot(tmp_path / "slot-0", value)
    try:
        _store_of(slot, tmp_path / "store")
    except UntrustedError:
        return
    finally:
        slot.close()
        assert not mark.exists()
    if name != "a state":
        _is_refused(tmp_path / "store", mark)


def _inside(raw: bytes) -> bytes:
    """A pickle's operations, without its beginning and end."""
    begin = 2 if raw[:1] == pickle.PROTO else 0
    if raw[begin : begin + 1] == pickle.FRAME:
        begin += 9
    return raw[begin:-1]


def _store_of(slot: Slot, place: Path) -> Store:
    store = Store(place)
    state, about, _ = _rank_state(slot)
    write_checkpoint(store, STEP, "job", [state], {}, about)
    return store


def _is_refused(place: Path, mark: Path) -> None:
    live = program(2)
    state = whole(live)
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    with pytest.raises(UntrustedError):
        checkpoint.load(Store(place), STEP, 0, 1, live)
    assert not mark.exists()
    assert whole(live) == state
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def _put(place: Path, name: str, content: bytes) -> None:
    """A file of the checkpoint with other content, under a manifest whose checksums are right."""
    store = Store(place)
    manifest = store.read_manifest(STEP)
    (path,) = place.rglob(name)
    path.write_bytes(content)
    block_bytes = manifest.files[name].block_bytes
    blocks = [content[at : at + block_bytes] for at in range(0, len(content), block_bytes)]
    sums = FileSum(len(content), block_bytes, tuple(map(xxhash.xxh3_64_hexdigest, blocks)))
    changed = dataclasses.replace(manifest, files={**manifest.files, name: sums})
    (where,) = place.rglob("keepstep.json")
    where.write_bytes(changed.to_bytes())


@pytest.mark.parametrize("name", [*RUNNING, *LYING])
def test_a_hostile_metadata_in_a_bucket_is_refused(name: str, tmp_path: Path) -> None:
    mark, place = tmp_path / "mark", tmp_path / "store"
    slot = slot_of(tmp_path / "slot-0", program(1).gather())
    _store_of(slot, place)
    slot.close()
    _put(place, ".metadata", RUNNING[name](mark) if name in RUNNING else LYING[name])
    _is_refused(place, mark)


def test_a_hostile_value_in_a_bucket_is_refused(tmp_path: Path) -> None:
    mark, place = tmp_path / "mark", tmp_path / "store"
    slot = slot_of(tmp_path / "slot-0", program(1).gather())
    state, about, _ = _rank_state(slot)
    evil = dataclasses.replace(state, tree={**state.tree, "values": marking(mark)})
    write_checkpoint(Store(place), STEP, "job", [evil], {}, about)
    slot.close()
    _is_refused(place, mark)


def test_what_a_person_trusts_is_taken(tmp_path: Path) -> None:
    """A function that is called, in a list that is empty when the program starts again."""
    values: dict[str, Any] = {"log": [Reducing(1)], "rows": [Record(0.5)]}
    slot = slot_of(tmp_path / "slot-0", Protected.of(values, lazy=True).gather())
    header_and_layout = slot.verify()
    trusted = f"{Reducing.__module__}.rebuilt"
    for words in ([], [trusted]):
        live = Protected.of({"log": [], "rows": []}, lazy=True, trusted=words)
        try:
            opened = restore.open_snapshot(live, slot, *header_and_layout)
        except UntrustedError as refused:
            assert not words
            assert f"KEEPSTEP_TRUSTED_TYPES={trusted}" in str(refused)
        else:
            assert words
            restore.apply(live, opened)
            assert [type(each) for each in live.values["log"]] == [Reducing]
            assert live.values["rows"] == [Record(0.5)]
    slot.close()


def test_an_intact_slot_and_bucket_are_taken(tmp_path: Path) -> None:
    """That it is the hostile part which is refused above."""
    slot = slot_of(tmp_path / "slot-0", program(1).gather())
    _store_of(slot, tmp_path / "store")
    expected = whole(program(1))
    from_memory, from_store = program(2), program(3)
    restore.apply(from_memory, restore.open_snapshot(from_memory, slot, *slot.verify()))
    checkpoint.load(Store(tmp_path / "store"), STEP, 0, 1, from_store)
    slot.close()
    assert whole(from_memory) == whole(from_store) == expected
