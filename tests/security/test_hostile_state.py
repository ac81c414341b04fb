"""A training that comes back to a memory or a bucket which somebody has rewritten: every checksum
is right, and what stands there would run code. None of it is run, and nothing is removed."""

from __future__ import annotations

import dataclasses
import pickle
from contextlib import closing
from pathlib import Path

import pytest
import xxhash

from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot
from keepstep.edge.store.manifest import FileSum
from keepstep.edge.store.store import Store
from keepstep.model.snapshot import SlotState, Stamp
from tests.edge.torch.pickles.hostile import marking
from tests.security.training import Training, stored

pytestmark = pytest.mark.timeout(200)


def rewrite_slot(path: Path, hostile: bytes) -> Stamp | None:
    """A sealed slot, of the same step and the same tensors, whose objects are those bytes. None
    where it is not sealed."""
    with closing(Slot(MEMORY, path)) as slot:
        header = slot.header()
        if header.state is not SlotState.SEALED:
            return None
        layout, text = slot.manifest(header), bytes(slot.manifest_text(header))
        end = header.payload_bytes
        slot.begin(
            header.job_hash, header.rank, header.world_size, header.incarnation, header.stamp
        )
        room = end - layout.objects_offset
        slot.payload[layout.objects_offset : end] = hostile.ljust(room, b"\0")
        slot.seal(slot.write_table(end, text), header.layout_hash.hex(), header.loss, 1)
        assert slot.verify()[0].stamp == header.stamp, "to the checksums all is well"
    return header.stamp


def rewritten(training: Training, mark: Path) -> dict[Path, Stamp]:
    """Train, and be killed in step 4; all that was sealed in memory would make `mark` then."""
    training.start(10, held=4)
    training.hold()
    training.process.kill()
    training.end()
    slots = sorted((training.room / "arena").rglob("slot-*"))
    stamps = {path: rewrite_slot(path, pickle.dumps(marking(mark))) for path in slots}
    return {path: stamp for path, stamp in stamps.items() if stamp is not None}


def test_a_rewritten_memory_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    training = Training(tmp_path / "1", str(tmp_path / "store"), KEEPSTEP_GRACE_S="300")
    slots = rewritten(training, mark)
    before = {path: path.read_bytes() for path in slots}
    assert before
    code, said = training.train(10)
    assert not mark.exists(), "what stood in the memory was run"
    assert code != 0 and "posix.mkdir" in said and "UntrustedError" in said, said
    assert {path: path.read_bytes() for path in slots} == before, "nobody removes it"
    training.lose()


def test_a_rewritten_bucket_runs_nothing(tmp_path: Path) -> None:
    mark, store = tmp_path / "mark", tmp_path / "store"
    training = Training(tmp_path / "1", str(store))
    code, said = training.train(3)
    assert code == 0 and stored(store) == [2], said
    training.lose()
    (manifest,) = Store(store).list_checkpoints().checkpoints
    (place,) = store.glob("step-*")
    hostile = pickle.dumps(marking(mark))
    sums = dict(manifest.files)
    (place / ".metadata").write_bytes(hostile)
    checksum = xxhash.xxh3_64_hexdigest(hostile)
    sums[".metadata"] = FileSum(len(hostile), sums[".metadata"].block_bytes, (checksum,))
    (place / "keepstep.json").write_bytes(dataclasses.replace(manifest, files=sums).to_bytes())
    before = {path: path.read_bytes() for path in place.iterdir()}
    assert Store(store).verify(2), "to the checksums all is well"
    code, said = training.train(5)
    assert not mark.exists(), "what stood in the bucket was run"
    assert code != 0 and "posix.mkdir" in said and "UntrustedError" in said, said
    assert {path: path.read_bytes() for path in before} == before, "nobody removes it"
