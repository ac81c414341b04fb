"""Inventory: what a node tells of what it holds for others, or keeps of ranks that have moved.

Comes in: what rests here and is proven, the slots of ranks that lived here. Goes out: one report
for the keeper that leads.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from keepstep.edge.shm.slot import ranks_in, readable_headers
from keepstep.model.mesh import Mesh
from keepstep.model.messages.peers import InventoryReport
from keepstep.model.restore_sources import HeldShare, HeldSnapshot
from keepstep.model.snapshot import SlotHeader, SlotState, Stamp
from keepstep.ports import Memory
from keepstep.runtime.replication.encode import SnapshotSizes, sizes_of_header
from keepstep.runtime.replication.held import HeldSnapshots


def inventory_of(
    memory: Memory, job_dir: Path, job_hash: bytes, held: HeldSnapshots, mesh: Mesh
) -> InventoryReport:
    """`held`: proven. What ranks that live here hold they prove, and tell in the vote."""
    size = mesh.world_size
    moved = [(h.rank, h) for h in _of_moved(memory, job_dir, job_hash, mesh)]
    snapshots = {*held.snapshots(size), *(HeldSnapshot(rank, h.stamp) for rank, h in moved)}
    shares = {HeldShare(rank, h.stamp, h.share) for rank, h in moved if h.share is not None}
    return InventoryReport(
        mesh.version,
        tuple(sorted(snapshots)),
        tuple(held.coded(size)),
        tuple(sorted({*shares, *held.shares(size)})),
    )


def _of_moved(memory: Memory, job_dir: Path, job_hash: bytes, mesh: Mesh) -> Iterator[SlotHeader]:
    """The headers of sealed slots of ranks that lived here and live elsewhere now."""
    here = mesh.ranks_of(mesh.node)
    for rank in ranks_in(memory, job_dir):
        if rank in here:
            continue
        for header in readable_headers(memory, job_dir, rank):
            is_of_job = (header.world_size, header.job_hash) == (mesh.world_size, job_hash)
            if is_of_job and header.state is SlotState.SEALED:
                yield header._replace(rank=rank)


def own_sizes(memory: Memory, job_dir: Path, rank: int, stamp: Stamp) -> SnapshotSizes | None:
    """Of a snapshot of one of this node's own ranks, None when it is not sealed here."""
    for header in readable_headers(memory, job_dir, rank):
        if (header.state, header.stamp) == (SlotState.SEALED, stamp):
            return sizes_of_header(header, memory.block_bytes)
    return None
