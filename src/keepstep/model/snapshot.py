"""Snapshots: what a slot says about itself, and what a rank says about itself.

Values only; `edge/shm/slot.py` and `edge/shm/status_page.py` put them into memory that outlives the
trainer. What is made, compared and looked up at every look into that memory is a named tuple: a
frozen dataclass takes several times as long for each of the three.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from keepstep.model.bounds import Count, StepNumber
from keepstep.model.shares import Share


class SlotState(IntEnum):
    EMPTY = 0
    WRITING = 1
    SEALED = 2


class Phase(IntEnum):
    """What a rank is doing. The trainer's own phases are told by whoever knows them (the drill's
    job does)."""

    STARTING = 0
    RESTORE = 1
    FORWARD = 2
    BACKWARD = 3
    UPDATE = 4
    CAPTURE = 5
    SEAL = 6
    PERSIST = 7
    STEP = 8
    DONE = 9
    EVALUATE = 10


class Stamp(NamedTuple):
    """Which state: the last completed step, and the epoch (life of the whole job) that computed it.

    Two ranks' snapshots belong together only when both are equal: after a restart the same step is
    computed again, and mixing both computations would be a state that never was.
    """

    step: StepNumber
    epoch: Count

    def __str__(self) -> str:
        return f"step {self.step}"

    def is_abandoned(self, back_to: Stamp | None, before_epoch: int | None = None) -> bool:
        """Whether it is given up when all go back to that stamp (None: to something that is not in
        memory). `before_epoch`: they have, with that epoch, and what is of it is not."""
        is_newer = back_to is None or self > back_to
        return is_newer and (before_epoch is None or self.epoch < before_epoch)


class SlotView(NamedTuple):
    """A slot as the chooser sees it, and as its rank's page tells of it. `share`: see `Share`; None
    when the snapshot has nothing to do with other ranks. `digest`: of what other ranks' snapshots
    of that stamp hold, too (core/detection/replicas.py); 0 where none was taken."""

    state: SlotState
    stamp: Stamp
    pinned: bool = False
    share: Share | None = None
    digest: int = 0


class SlotHeader(NamedTuple):
    """A slot's first page. `sequence` grows with every change, so a reader knows whether it moved
    meanwhile. `lacking`: a bitmap of the payload blocks that are not in this file, whatever its
    state; the table has the checksums of those, too. `is_digested`: of some of those it has digests
    instead, for they never left a device; `share` says then whose they are equal to.
    `replica_group`, `digest`: as in `RankStatus` and `SlotView`."""

    state: SlotState
    sequence: int
    job_hash: bytes
    layout_hash: bytes
    rank: int
    world_size: int
    incarnation: int
    stamp: Stamp
    payload_bytes: int
    manifest_bytes: int
    block_bytes: int
    block_count: int
    table_checksum: int
    manifest_checksum: int
    sealed_wall_ns: int
    loss: float
    share: Share | None = None
    lacking: bytes = b""
    replica_group: int = 0
    digest: int = 0
    is_digested: bool = False


class RankStatus(NamedTuple):
    """One rank's page: the facts other ranks, the keeper and `keepstep status` read.

    `decided_step` is the newest step for which the rank chose to capture or to skip: what it does
    not hold by then, it will never hold. `collective` counts the collectives it has entered, while
    its groups are keepstep's. `span_steps`: how many steps a capture takes
    (core/resume/cadence.py). `share_plan`: by which ranks share snapshots, as far as this one knows
    (core/redundancy/shares.py); 0: none. `kept_bytes`: what its newest snapshot takes in its own
    slot. `replica_group` is equal for ranks whose digests may be compared, 0 for none. Steps are -1
    before the first one. Times are CLOCK_MONOTONIC nanoseconds.
    """

    rank: int
    world_size: int
    pid: int
    incarnation: int
    epoch: int
    phase: Phase
    step: int
    completed_step: int
    decided_step: int
    captured_steps: int
    skipped_steps: int
    torn_steps: int
    stall_ns_total: int
    stall_ns_last: int
    step_ns_last: int
    copy_ns_last: int
    seal_ns_last: int
    payload_bytes: int
    updated_mono_ns: int
    loss: float
    slots: tuple[SlotView, ...]
    collective: int = 0
    span_steps: int = 1
    share_plan: int = 0
    kept_bytes: int = 0
    replica_group: int = 0
