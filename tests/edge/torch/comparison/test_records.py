"""A checkpoint's tensors, read from its records piece by piece, against DCP's own load."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from keepstep.edge.store.store import Store
from keepstep.edge.torch.comparison import records
from keepstep.edge.torch.comparison.records import Record, checkpoint_state
from keepstep.edge.torch.dcp.tree import RankState
from keepstep.errors import DamageError
from keepstep.model.comparison import TensorBox, TensorKind
from keepstep.model.layout import Shard
from tests.edge.torch.dcp.one_node import write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

PIECE_BYTES = 13  # of no type's size


def tree(seed: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(40, 30, generator=generator)
    return {
        "model": {
            "weight": values,
            "half": values.bfloat16(),
            "eighth": values.to(torch.float8_e4m3fn),
            "sixteenth": values.abs().to(torch.uint16),
            "turned": values.t(),
            "view": values[3:7, 2:5],
            "complex": torch.complex(values, values).conj(),
            "count": torch.tensor(7),
            "mask": values > 0,
            "none": torch.zeros(0, 3),
        },
        "lr": 0.25,
    }


def read(state: Any, name: str) -> bytes:
    found = b""
    for part in state.tensors[name].parts:
        count = part.box.count
        itemsize = getattr(torch, state.tensors[name].kind.dtype).itemsize
        for at in range(0, count * itemsize, PIECE_BYTES):
            piece = bytearray(min(PIECE_BYTES, count * itemsize - at))
            part.read_into(at, memoryview(piece))
            found += piece
    return found


def raw(tensor: torch.Tensor) -> bytes:
    plain = tensor.resolve_conj().contiguous().view(-1)
    return bytes(plain.view(torch.uint8).tolist())


def test_every_tensor_as_it_was(tmp_path: Path) -> None:
    store, given = Store(tmp_path / "store"), tree()
    manifest = write_checkpoint(store, 5, "demo", [RankState(0, given)], {}, {})
    state = checkpoint_state(store, manifest)
    for name, tensor in given["model"].items():
        kind = state.tensors[f"model.{name}"].kind
        assert kind == TensorKind(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        assert read(state, f"model.{name}") == raw(tensor), name
    assert state.tensors["lr"].kind.is_value
    assert state.step == 5


def test_a_plain_tensor_is_never_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, given = Store(tmp_path / "store"), tree()
    manifest = write_checkpoint(store, 5, "demo", [RankState(0, given)], {}, {})
    state = checkpoint_state(store, manifest)
    loaded: list[Any] = []
    whole = torch.load
    monkeypatch.setattr(
        records.torch, "load", lambda file, **how: loaded.append(file) or whole(file, **how)
    )
    for name in ("weight", "half", "eighth", "sixteenth", "count", "mask"):
        read(state, f"model.{name}")
    assert loaded == []
    read(state, "model.turned")
    assert len(loaded) == 1


def test_shards_are_the_parts_of_one_tensor(tmp_path: Path) -> None:
    store, whole = Store(tmp_path / "store"), torch.arange(60.0).view(10, 6)
    states = []
    for rank, rows in enumerate((whole[:4], whole[4:])):
        local = rows.clone()
        shard = Shard((10, 6), (4 * rank, 0))
        states.append(RankState(rank, {"w": local, "seed": rank}, {id(local): shard}))
    manifest = write_checkpoint(store, 5, "demo", states, {}, {})
    found = checkpoint_state(store, manifest).tensors["w"]
    assert found.kind.shape == (10, 6)
    assert sorted(part.box.offsets for part in found.parts) == [(0, 0), (4, 0)]
    assert read(checkpoint_state(store, manifest), "w") == raw(whole)


def test_a_ranks_own_values_stand_under_their_plain_names(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    states = [RankState(rank, {"noise": torch.full((3,), float(rank))}) for rank in (0, 1)]
    manifest = write_checkpoint(store, 5, "demo", states, {}, {})
    of_all = checkpoint_state(store, manifest).tensors
    assert {"noise", "ranks.0.noise", "ranks.1.noise"} <= of_all.keys()
    own = checkpoint_state(store, manifest, rank=1)
    assert read(own, "noise") == raw(torch.ones(3))
    assert not [name for name in own.tensors if name.startswith("ranks.")]


def test_a_flipped_bit_is_damage_and_no_difference(tmp_path: Path) -> None:
    store, given = Store(tmp_path / "store"), tree()
    manifest = write_checkpoint(store, 5, "demo", [RankState(0, given)], {}, {})
    [path] = Path(store.url(manifest.name)).glob("*.distcp")
    data = bytearray(path.read_bytes())
    data[data.index(raw(given["model"]["weight"])) + 100] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamageError, match="block 0"):
        read(checkpoint_state(store, manifest), "model.weight")


def test_a_record_that_names_code_runs_none(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    named = type("Evil", (), {"__reduce__": lambda self: (Path.touch, (touched,))})()
    file = io.BytesIO()
    torch.save({"tensor": torch.zeros(3), "more": named}, file)
    info = _StorageInfo("__0_0.distcp", 0, len(file.getvalue()))
    record = Record(file, info, torch.float32, TensorBox((0,), (3,)), "w")  # type: ignore[arg-type]
    with pytest.raises(DamageError, match="no tensor"):
        record.read_into(0, memoryview(bytearray(12)))
    assert not touched.exists()


@pytest.mark.parametrize(
    ("offsets", "sizes", "length"),
    [
        ((0, 0), (40, 1 << 40), None),
        ((1, 0), (40, 30), None),
        ((-1, 0), (40, 30), None),
        ((0, 0), (40, -30), None),
        ((0,), (1200,), None),
        ((0, 0), (40, 30), 4799),
        ((0, 0), (40, 30), -1),
    ],
)
def test_a_part_that_cannot_be_where_it_is_said_to_be_is_damage(
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    length: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By whoever can write to the store: else memory is taken for a row of what is claimed."""
    store = Store(tmp_path / "store")
    manifest = write_checkpoint(store, 5, "demo", [RankState(0, tree())], {}, {})
    honest = records.CheckpointReader.read_metadata

    def forged(reader: Any) -> Any:
        metadata = honest(reader)
        name = "model.weight"
        [chunk] = metadata.state_dict_metadata[name].chunks
        info = metadata.storage_data.pop(MetadataIndex(name, chunk.offsets))
        chunk.offsets, chunk.sizes = offsets, sizes
        info.length = info.length if length is None else length
        metadata.storage_data[MetadataIndex(name, offsets)] = info
        return metadata

    monkeypatch.setattr(records.CheckpointReader, "read_metadata", forged)
    with pytest.raises(DamageError, match="not what DCP writes"):
        checkpoint_state(store, manifest)


@pytest.mark.parametrize("begin", [0, 4])
def test_a_record_with_more_memory_than_the_tensor_has(begin: int) -> None:
    file, tensor = io.BytesIO(), torch.arange(10.0)[begin : begin + 3]
    torch.save(tensor, file)
    info = _StorageInfo("__0_0.distcp", 0, len(file.getvalue()))
    box = TensorBox((0,), (3,))
    record = Record(file, info, torch.float32, box, "w")  # type: ignore[arg-type]
    found = bytearray(12)
    record.read_into(0, memoryview(found))
    assert found == raw(tensor)


def test_what_torch_loads_is_what_is_read(tmp_path: Path) -> None:
    """DCP reads the same file on its own way."""
    store, given = Store(tmp_path / "store"), tree()
    manifest = write_checkpoint(store, 5, "demo", [RankState(0, given)], {}, {})
    wanted: Mapping[str, Any] = {"model": {"weight": torch.zeros(40, 30)}}
    torch_dcp.load(wanted, checkpoint_id=store.url(manifest.name))
    found = read(checkpoint_state(store, manifest), "model.weight")
    assert found == raw(wanted["model"]["weight"])
