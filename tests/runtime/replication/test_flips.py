"""Bits that flip at rest in what other nodes hold: each is found, none is ever given to anybody,
and the damaged side is made whole again.

More of them than the suite has time for: FLIPS=1000 pytest tests/runtime/replication/test_flips.py.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from keepstep.edge.shm.memory import MEMORY
from keepstep.edge.shm.slot import Slot, slot_paths
from keepstep.errors import DamageError
from keepstep.model.snapshot import SlotState
from keepstep.testing.cluster import KeeperCluster, wait_for

FLIPS = int(os.environ.get("FLIPS", "12"))


def turn_one_bit(path: Path, rng: random.Random) -> None:
    """In bytes that are in use: header, payload, table or manifest."""
    slot = Slot(MEMORY, path)
    header = slot.header()
    assert header.state is SlotState.SEALED
    slot.close()
    at = rng.choice([rng.randrange(4096), 4096 + rng.randrange(header.payload_bytes)])
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << rng.randrange(8))]))


def whole(path: Path, step: int) -> bool:
    try:
        slot = Slot(MEMORY, path)
    except (DamageError, OSError):
        return False
    try:
        header, _ = slot.verify_bytes()
        return header.stamp.step == step
    except (DamageError, LookupError):
        return False
    finally:
        slot.close()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("policy", "nodes"), [("copies:2", 2), ("parity:3", 3)])
def test_every_flip_at_rest_is_found_and_mended(tmp_path: Path, policy: str, nodes: int) -> None:
    rng = random.Random(f"{policy}/7")
    with KeeperCluster(tmp_path, nodes, policy, scrub_every_s=0.05) as cluster:
        cluster.resume()
        cluster.train(0, 3)
        for _ in range(FLIPS):
            node = rng.randrange(nodes)
            directory = cluster.machines[node].settings.job_dir
            held = (
                [(directory / "held", 1 - node)]
                if policy == "copies:2"
                else [(directory / "parity", node)]
            )
            root, rank = rng.choice([*held, (directory, node)])
            path = next(p for p in slot_paths(MEMORY, root, rank) if whole(p, 3))
            turn_one_bit(path, rng)
            # Found by scrubbing, or by its owner's next comparison: either way it is made whole
            # again, which nothing else would do.
            wait_for(
                lambda r=root, k=rank: any(whole(p, 3) for p in slot_paths(MEMORY, r, k)),
                cluster.story,
            )
        for machine in cluster.machines:
            machine.kill_ranks()
        cluster.replace(0)
        offer = cluster.resume()  # which compares every restored byte
        assert (offer.source, offer.step) == ("memory", 3)
