"""What the torch tests share: a slot to save into and to load from, and the bytes of a state as the
only oracle."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.edge.os.threads import run_acts
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch import restore
from keepstep.edge.torch.capture import TensorCopy
from keepstep.edge.torch.numbers.copied import KnownBad
from keepstep.edge.torch.state import Protected, State
from keepstep.model.snapshot import Stamp
from keepstep.model.units import KIB


class Room:
    """One slot, written as the session writes it and read as a stranger reads it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.slot: Slot | None = None

    def begin(self, state: State, turn: int = 0, known_bad: KnownBad | None = None) -> TensorCopy:
        """A copy whose moving part is taken; the caller does the rest, at its own pace. `turn`: how
        many there were before. `known_bad`: see `TensorCopy`."""
        if self.slot is not None:
            self.slot.close()
        self.slot = Slot.create(MEMORY, self._path, state.payload_bytes, 64 * KIB)
        self.slot.begin(bytes(16), 0, 1, 1, Stamp(0, 1))
        copy = TensorCopy(state, self.slot, turn=turn, known_bad=known_bad)
        copy.copy_moving()
        return copy

    def seal(self, copy: TensorCopy) -> None:
        assert not copy.moved, f"torn: {copy.moved}"
        manifest = json.dumps(copy.state.layout.to_json()).encode()
        copy.slot.seal(
            copy.slot.write_table(copy.state.payload_bytes, manifest, copy.sums),
            copy.state.layout.hash(),
            0.0,
            wall_ns=1,
        )

    def save(self, **stateful: Any) -> None:
        self.save_from(Protected.of(stateful, lazy=True))

    def save_from(self, protected: Protected) -> None:
        copy = self.begin(protected.gather())
        run_acts(copy.copy_still())
        self.seal(copy)

    def load(self, **stateful: Any) -> Protected:
        """Load and prove; returns what was protected, for its `values`."""
        protected = Protected.of(stateful, lazy=True)
        self.load_into(protected)
        return protected

    def load_into(self, protected: Protected) -> None:
        with_slot = Slot(MEMORY, self._path)
        try:
            header, layout = with_slot.verify()
            restore.apply(protected, restore.open_snapshot(protected, with_slot, header, layout))
            assert restore.prove(protected, with_slot, header, layout) == []
        finally:
            with_slot.close()


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    made = Room(tmp_path / "slot-0")
    yield made
    if made.slot is not None:
        made.slot.close()


def bytes_of(value: Any) -> Any:
    """Everything that makes a state what it is, comparable with ==: tensors by type, shape, strides
    and bytes."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            parts = value.detach().to_sparse_coo().coalesce()
            return (
                str(value.layout),
                tuple(value.shape),
                bytes_of(parts.indices()),
                bytes_of(parts.values()),
            )
        flat = value.detach().resolve_conj().resolve_neg().contiguous()
        return (
            str(value.dtype),
            tuple(value.shape),
            value.stride(),
            ctypes.string_at(flat.data_ptr(), flat.nbytes),
        )
    if isinstance(value, Mapping):
        return {k: bytes_of(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [bytes_of(v) for v in value]
    return value


@pytest.fixture
def snapshot_bytes() -> Callable[[Any], Any]:
    return bytes_of


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


class Holder:
    """A Stateful of the user's own: keeps whatever it is given, by reference."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state["held"]
