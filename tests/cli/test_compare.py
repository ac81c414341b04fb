"""`keepstep compare`: what differs is named, what cannot be read is no difference, and a save that
wrote what was there before is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.cli import compare
from keepstep.cli.progress_bar import bytes_bar
from keepstep.coding.checksum import BLOCK_BYTES
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot
from keepstep.edge.store.store import Store
from keepstep.edge.torch.dcp.tree import RankState
from keepstep.model.units import MIB
from tests.edge.torch.dcp.one_node import write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

THREE_BLOCKS = 3 * BLOCK_BYTES // 4  # floats
MOST_GROWTH_BYTES = 64 * MIB


def change(path: Path, offset: int) -> None:
    """Flip a bit and seal the slot anew: no damage, but another state."""
    slot = Slot(MEMORY, path)
    header = slot.header()
    layout, text = slot.manifest(header), slot.manifest_text(header)
    slot.begin(header.job_hash, header.rank, header.world_size, header.incarnation, header.stamp)
    slot.payload[offset] ^= 1
    sealed = slot.write_table(header.payload_bytes, text)
    slot.seal(sealed, layout.hash(), header.loss, header.sealed_wall_ns)
    slot.close()


def save(place: Path, step: int, *, weight: float, frozen: float = 1.0, lr: float = 0.1) -> None:
    tree = {
        "model": {"weight": torch.full((50, 20), weight), "frozen": torch.full((7,), frozen)},
        "lr": lr,
    }
    write_checkpoint(Store(place), step, "demo", [RankState(0, tree)], {}, {})


def test_two_steps_of_a_rank_in_memory(machine: Any) -> None:
    machine.slot("demo", 0, 0, 0, THREE_BLOCKS)
    path = machine.slot("demo", 0, 1, 0, THREE_BLOCKS)
    assert machine.run("compare", str(path), str(path.with_name("slot-0"))).exit_code == 0
    change(path, 2 * BLOCK_BYTES + 5)
    document = machine.json("compare", str(path.with_name("slot-0")), str(path), code=1)
    assert document["is_equal"] is False
    [weight] = [t for t in document["tensors"] if t["verdict"] == "different"]
    assert weight["name"] == "model.weight"
    assert (weight["difference"]["values"], weight["difference"]["differing"]) == (THREE_BLOCKS, 1)
    result = machine.run("compare", str(path.with_name("slot-0")), str(path))
    assert result.exit_code == 1
    assert result.stdout.startswith("Different:") and "model.weight" in result.stdout


def test_steps_are_named_by_job_rank_and_step(machine: Any) -> None:
    for rank in (0, 1):
        for index, step in enumerate((6, 7)):
            machine.slot("demo", rank, index, step)
    document = machine.json("compare", "demo:1@6", "demo:1", code=1)
    assert "step 6 of rank 1" in document["a"] and "step 7 of rank 1" in document["b"]
    assert machine.json("compare", "demo:0@6", "demo:1@6")["is_equal"] is True
    for word, said in (
        ("demo@6", "expected one rank, demo:RANK, found ranks [0, 1]"),
        ("demo:0@9", "expected one of the steps in memory (6, 7)"),
        ("demo:5@6", "expected a sealed slot of rank 5"),
        ("nosuch", "expected a slot, a job with memory or a store"),
    ):
        result = machine.run("compare", word, "demo:0")
        assert result.exit_code == 2 and said in result.stderr.replace("\n", " "), result.stderr


def test_a_damaged_block_is_not_a_difference(machine: Any) -> None:
    paths = [machine.slot("demo", 0, index, 7, THREE_BLOCKS) for index in (0, 1)]
    with open(paths[1], "r+b") as file:
        file.seek(4096 + BLOCK_BYTES + 12)
        file.write(b"\xff")
    result = machine.run("compare", *map(str, paths))
    assert result.exit_code == 2
    assert f"{paths[1]}: step 7 of rank 0 damaged: block 1" in result.stderr


def test_a_slot_is_locked_while_it_is_read_and_free_after(machine: Any) -> None:
    paths = [machine.slot("demo", 0, index, 7) for index in (0, 1)]
    slot = Slot(MEMORY, paths[0])
    assert slot.lock(exclusive=True)
    result = machine.run("compare", *map(str, paths))
    assert result.exit_code == 2 and "found one being written" in result.stderr
    slot.unlock()
    assert machine.run("compare", *map(str, paths)).exit_code == 0
    assert slot.lock(exclusive=True)
    slot.close()


# -- a store


def test_two_checkpoints(machine: Any, tmp_path: Path) -> None:
    place = tmp_path / "store"
    save(place, 9, weight=1.0)
    save(place, 19, weight=1.5)
    document = machine.json("compare", f"{place}@9", f"{place}@19", code=1)
    assert {t["name"]: t["verdict"] for t in document["tensors"]} == {
        "keepstep.tree": "equal",
        "lr": "equal",
        "model.frozen": "equal",
        "model.weight": "different",
    }
    [weight] = [t for t in document["tensors"] if t["difference"]]
    assert weight["difference"]["max_abs"] == 0.5
    assert weight["difference"]["drift"] == pytest.approx(0.5)
    directory = Store(place).url(9)
    assert machine.json("compare", directory, f"{place}@9")["is_equal"] is True
    assert machine.run("compare", f"{place}@8", str(place)).exit_code == 2


def test_a_slot_beside_the_checkpoint_of_its_step(machine: Any, tmp_path: Path) -> None:
    machine.slot("demo", 0, 0, 3)
    values = torch.tensor([3] * 4096, dtype=torch.uint8).view(torch.float32)
    tree = {"model": {"weight": values}, "lr": 0.1}
    write_checkpoint(Store(tmp_path / "store"), 3, "demo", [RankState(0, tree)], {}, {})
    document = machine.json("compare", "demo@3", str(tmp_path / "store"))
    assert [t["name"] for t in document["tensors"]] == ["model.weight"]
    result = machine.run("compare", "demo", str(tmp_path / "store"))
    assert "values beside the tensors are not compared" in result.stdout


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"weight": 1.0}, "identical bytes"),
        ({"weight": 1.0, "lr": 0.2}, "identical tensors"),
    ],
)
def test_a_save_that_wrote_old_weights(
    machine: Any, tmp_path: Path, second: dict[str, float], said: str
) -> None:
    place = tmp_path / "store"
    save(place, 9, weight=1.0)
    save(place, 19, **second)
    save(place, 29, weight=2.0)
    result = machine.run("compare", str(place))
    assert result.exit_code == 1
    told = result.stdout.replace("\n", " ")
    assert "1 of 2 saves brought nothing new" in told
    assert "warning: step 9 and step 19 have" in told and said in told
    document = machine.json("compare", str(place), code=1)
    [[first, last]] = document["histories"]
    assert first["unchanged"] == ["model.frozen", "model.weight"]
    assert (last["unchanged"], last["tensors"], last["warning"]) == (["model.frozen"], 2, "")


def test_a_history_that_moves(machine: Any, tmp_path: Path) -> None:
    place = tmp_path / "store"
    save(place, 9, weight=1.0)
    assert "only one state" in machine.run("compare", str(place)).stdout
    save(place, 19, weight=2.0)
    result = machine.run("compare", str(place))
    assert result.exit_code == 0
    assert "1 of 2 tensors unchanged: model.frozen" in result.stdout
    for rank in (0, 1):
        for index, step in enumerate((6, 7)):
            machine.slot("demo", rank, index, step)
    histories = machine.json("compare", "demo")["histories"]
    assert [[each["to_step"] for each in history] for history in histories] == [[7], [7]]
    assert machine.run("compare", "demo@7").exit_code == 2


def test_checkpoints_of_a_job_with_a_secret(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "store", 9, weight=1.0)
    monkeypatch.setenv("KEEPSTEP_SECRET", "of this job")
    result = machine.run("compare", str(tmp_path / "store"), str(tmp_path / "store"))
    assert result.exit_code == 2, "nobody signed it"


# -- its memory

GROWTH = """
import resource, sys
from keepstep.cli.compare import findings_of
from keepstep.cli.compared_state import state_named
import torch

torch.set_num_threads(1)

def compare(a, b):
    with state_named(a)() as one, state_named(b)() as other:
        return [f.name for f in findings_of(one, other) if f.verdict.name != "EQUAL"]

compare(*sys.argv[1:3])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = compare(*sys.argv[3:5])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024, *found)
"""


def test_memory_does_not_grow_with_the_state(machine: Any) -> None:
    small = [machine.slot("small", 0, index, 0) for index in (0, 1)]
    large = [machine.slot("large", 0, index, 0, 48 * MIB) for index in (0, 1)]  # floats
    change(large[1], 100 * MIB + 3)
    run = subprocess.run(
        [sys.executable, "-c", GROWTH, *map(str, (*small, *large))],
        check=True,
        capture_output=True,
        text=True,
        timeout=110,
    )
    growth, *found = run.stdout.split()
    assert found == ["model.weight"]
    assert int(growth) < MOST_GROWTH_BYTES


def test_a_person_sees_how_far_it_is(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bars = []
    monkeypatch.setattr(compare, "bytes_bar", lambda: bars.append(bytes_bar()) or bars[-1])
    first = machine.slot("demo", 0, 0, 0, THREE_BLOCKS)
    machine.slot("demo", 0, 1, 0, THREE_BLOCKS)
    assert machine.run("compare", str(first), str(first.with_name("slot-1"))).exit_code == 0
    [[task]] = [bar.tasks for bar in bars]
    assert task.completed == task.total >= 4 * THREE_BLOCKS
