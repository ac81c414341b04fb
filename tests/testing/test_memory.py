"""Memory in words: stamps, states, pins, damage, and what is committed."""

from __future__ import annotations

from pathlib import Path

from keepstep.edge.shm.horizon_page import HorizonPage
from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot, slot_path
from keepstep.model.horizon import Horizon
from keepstep.model.snapshot import Stamp
from keepstep.testing.crew import CrewPlace
from keepstep.testing.memory import in_words


def test_what_lies_there(tmp_path: Path) -> None:
    place = CrewPlace(tmp_path / "job", tmp_path / "journal")
    (place.job_dir / "rank-00001").mkdir(parents=True)
    assert list(in_words([place])) == ["node 0: nothing is committed between nodes"]
    page = HorizonPage(MEMORY, place.job_dir)
    page.write(Horizon(2, committed=Stamp(3, 1), target=Stamp(4, 2)))
    page.close()
    slots = [
        Slot.create(MEMORY, slot_path(place.job_dir, 1, index), 5000, 500) for index in range(3)
    ]
    slots[0].begin(bytes(16), 1, 2, 1, Stamp(4, 2))
    slots[1].lock(exclusive=False)
    slots[2].path.write_bytes(b"no slot")
    horizon, own = in_words([place])
    assert "epoch 2, committed step 3" in horizon and "to be protected step 4" in horizon
    assert (
        own.startswith("node 0: rank-00001: slot-0 writing step 4")
        and "slot-1 empty" in own
        and "pinned, slot-2 cannot be read" in own
    )
    for slot in slots:
        slot.close()
