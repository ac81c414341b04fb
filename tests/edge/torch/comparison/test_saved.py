"""What a slot says it has: a shard is a part of the whole, and what does not fit is damage."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.proven_payload import ProvenPayload
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch.comparison.saved import slot_state
from keepstep.errors import DamageError
from keepstep.model.comparison import TensorBox, TensorKind
from keepstep.model.layout import OBJECTS, Layout, Segment, Shard, TensorSpec, lay_out
from keepstep.model.snapshot import Stamp

SPEC = TensorSpec("w", "bfloat16", (2, 3), 12, shard=Shard((8, 3), (4, 0)))
OBJECTS_BYTES = 77


@pytest.fixture
def read(tmp_path: Path) -> Iterator[Callable[[Layout], ProvenPayload]]:
    opened: list[Slot] = []

    def payload(layout: Layout) -> ProvenPayload:
        nbytes = lay_out([SPEC]).objects_offset + OBJECTS_BYTES
        slot = Slot.create(MEMORY, tmp_path / "slot-0", nbytes, 4096)
        opened.append(slot)
        slot.begin(bytes(16), 0, 1, 1, Stamp(7, 1))
        slot.payload[:nbytes] = bytes(range(nbytes))
        text = json.dumps(layout.to_json()).encode()
        slot.seal(slot.write_table(nbytes, text), layout.hash(), 0.5, wall_ns=1)
        return ProvenPayload(slot)

    yield payload
    for slot in opened:
        slot.close()


def test_a_shard_and_the_values(read: Callable[[Layout], ProvenPayload]) -> None:
    state = slot_state(read(lay_out([SPEC])))
    assert state.tensors["w"].kind == TensorKind("bfloat16", (8, 3))
    [part] = state.tensors["w"].parts
    assert part.box == TensorBox((4, 0), (2, 3))
    found = bytearray(5)
    part.read_into(3, memoryview(found))
    assert found == bytes(range(3, 8))
    values = state.tensors[OBJECTS]
    assert values.kind.is_value and values.kind.shape == (OBJECTS_BYTES,)
    values.parts[0].read_into(2, memoryview(found))
    assert found == bytes(range(66, 71))


@pytest.mark.parametrize(
    "layout",
    [
        Layout((Segment(replace(SPEC, nbytes=11), 0),), 64),
        Layout((Segment(replace(SPEC, dtype="nn"), 0),), 64),
        Layout((Segment(SPEC, 135),), 147),
        Layout((), 200),
        Layout((Segment(replace(SPEC, shard=Shard((8,), (4,))), 0),), 64),
    ],
)
def test_what_does_not_fit_the_payload_is_damage(
    layout: Layout, read: Callable[[Layout], ProvenPayload]
) -> None:
    with pytest.raises(DamageError):
        slot_state(read(layout))
