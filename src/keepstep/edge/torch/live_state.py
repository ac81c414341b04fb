"""Live state: a PyTorch training as `ports.LiveState`.

Joins what the other modules here do: `state.py` gathers, `capture.py` copies, `restore.py` and
`checkpoint.py` load and prove, `predict.py` says how much an optimizer will add, `page_locks.py`
locks slots where the state is on a CUDA device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch

from keepstep.config import Settings
from keepstep.edge.os.collector import collector_paused
from keepstep.edge.os.machine import proof_threads
from keepstep.edge.shm.slot import Slot
from keepstep.edge.torch import capture, predict, restore
from keepstep.edge.torch.copy_plans import CopyPlans
from keepstep.edge.torch.cuda_pages import CudaPages
from keepstep.edge.torch.ddp_buckets import FEWEST_RANKS, Buckets
from keepstep.edge.torch.frozen import FrozenInSlots
from keepstep.edge.torch.numbers.copied import KnownBad
from keepstep.edge.torch.numbers.plain_numbers import UPDATED_BY, bad_numbers
from keepstep.edge.torch.page_locks import PageLocks
from keepstep.edge.torch.parts import parameters_of
from keepstep.edge.torch.replicas import ReplicaFinder
from keepstep.edge.torch.state import Protected, State
from keepstep.edge.torch.still import StillBlocks
from keepstep.errors import StoreError
from keepstep.model.layout import Layout
from keepstep.model.replicas import Replicas
from keepstep.model.snapshot import SlotHeader
from keepstep.model.units import KIB
from keepstep.ports import Gathered, StateCopy

# A tensor of optimizer state costs its alignment, a manifest entry and a place in the tree.
TREE_BYTES_PER_TENSOR = 256
MANIFEST_BYTES_PER_TENSOR = 400  # of a few; of many those that are there tell how long names are
FEW_TENSORS_BYTES = 64 * KIB
TENSORS_PER_PARAMETER = 4  # once the optimizer has its state


class TorchState:
    """What one `protect` was given. `settings`: of the job, which may have a store."""

    def __init__(
        self, protected: Protected, rank: int, world_size: int, settings: Settings
    ) -> None:
        self._protected = protected
        self._rank = rank
        self._world_size = world_size
        self._settings = settings
        self._copies = 0
        self._still = StillBlocks()
        self._frozen = FrozenInSlots()
        self._locks: PageLocks | None = None  # once some of the state is on a device
        self._replicas = ReplicaFinder(rank, world_size)
        if settings.wrong_numbers != "off":
            parts = protected.parts().items()
            protected.known_bad = KnownBad(
                [path for path, part in parts if isinstance(part, UPDATED_BY)],
                protected.parameter_addresses,
                lambda: bad_numbers(protected.parts()),
            )
        self._plans: CopyPlans | None = None  # likewise
        if world_size >= FEWEST_RANKS:
            protected.buckets = Buckets(protected.parts())

    def gather(self) -> State:
        return self._protected.gather()

    def _look_for_devices(self, state: State) -> Set[torch.device]:
        """Those that are copied from."""
        devices = {device for copies in state.copies for device in copies.devices}
        known = frozenset() if self._plans is None else self._plans.devices
        if any(device.type == "cuda" and device not in known for device in devices):
            self._plans = capture.copy_plans(devices)
        return frozenset() if self._plans is None else self._plans.devices

    def copy(
        self,
        gathered: Gathered,
        slot: Slot,
        lacking: frozenset[int] = frozenset(),
        shared: frozenset[int] = frozenset(),
    ) -> StateCopy:
        assert isinstance(gathered, State)
        self._copies += 1
        self._look_for_devices(gathered)
        return capture.TensorCopy(
            gathered,
            slot,
            turn=self._copies,
            locks=self._locks,
            lacking=lacking,
            shared=shared,
            known_bad=self._protected.known_bad,
            plans=self._plans,
            frozen=self._frozen,
            hash_threads=proof_threads(),
        )

    def still_blocks(self, gathered: Gathered, block_bytes: int) -> frozenset[int]:
        assert isinstance(gathered, State)
        return self._still.of(gathered, block_bytes, self._look_for_devices(gathered))

    def replicas(self, gathered: Gathered) -> Replicas | None:
        assert isinstance(gathered, State)
        return self._replicas.find(self._protected, gathered)

    def copy_eagerly(self, names: Sequence[str]) -> None:
        self._protected.eager_names.update(names)

    @collector_paused()
    def coming_bytes(self) -> tuple[int, int, str]:
        state = self._protected.gather()
        coming = [predict.coming_bytes(o) for o in self._protected.optimizers]
        times = TENSORS_PER_PARAMETER if any(coming) else 1
        tensors = len(state.items) * times
        known = sum(nbytes or 0 for nbytes in coming)
        payload = state.payload_bytes + known + TREE_BYTES_PER_TENSOR * tensors
        remark = ""
        if None in coming:
            remark = (
                "; an optimizer's coming state is unknown, its slots may grow after the first step"
            )
        manifest = times * len(json.dumps(state.layout.to_json(), separators=(",", ":")))
        of_few = min(MANIFEST_BYTES_PER_TENSOR * tensors, FEW_TENSORS_BYTES)
        return payload, max(manifest, of_few), remark

    def pin(self, slot: Slot) -> str | None:
        if self._locks is None:
            device = cuda_device(self._protected.parts().values())
            if device is None:
                return None
            self._locks = PageLocks(CudaPages(device))
        return self._locks.lock(slot)

    @collector_paused()
    def load(self, slot: Slot, header: SlotHeader, layout: Layout) -> list[str]:
        opened = restore.open_snapshot(self._protected, slot, header, layout, proof_threads())
        device = cuda_device(self._protected.parts().values())
        if device is None:
            return restore.apply(self._protected, opened)
        if self._locks is not None:
            self._locks.begin_copy(slot)
        try:
            remarks = restore.apply(self._protected, opened)
        finally:  # the copies out of the slot were ordered, and nobody has waited for them
            torch.cuda.synchronize(device)
            if self._locks is not None:
                self._locks.end_copy(slot)
        return remarks

    @collector_paused()
    def differing(self, slot: Slot, header: SlotHeader, layout: Layout) -> list[str]:
        return restore.prove(self._protected, slot, header, layout, proof_threads())

    @collector_paused()
    def load_checkpoint(self, step: int) -> list[str]:
        if self._settings.store is None:
            raise StoreError("a checkpoint was offered, and this rank knows of no store")
        # DCP, which is behind it, takes a second to import: only who reads a store waits for it.
        from keepstep.edge.store.job_store import open_job_store
        from keepstep.edge.torch import checkpoint

        store = open_job_store(self._settings)
        return checkpoint.load(store, step, self._rank, self._world_size, self._protected)

    def device_behind(self) -> Callable[[], bool] | None:
        return None if self._plans is None else self._plans.behind()

    def restoring_bytes(self) -> int:
        gathered = self._protected.gather()
        return restore.private_bytes(self._protected, gathered.layout)

    def caveats(self) -> list[str]:
        return restore.caveats(self._protected)


def cuda_device(parts: Iterable[Any]) -> torch.device | None:
    """The first CUDA device that a protected module, optimizer or tensor is on."""
    for part in parts:
        tensors: Iterable[torch.Tensor] = ()
        if isinstance(part, torch.nn.Module):
            tensors = (*part.parameters(), *part.buffers())
        elif isinstance(part, torch.optim.Optimizer):
            tensors = parameters_of(part)
        elif isinstance(part, torch.Tensor):
            tensors = (part,)
        for tensor in tensors:
            if tensor.device.type == "cuda":
                return tensor.device
    return None
