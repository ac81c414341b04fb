"""Checkpoint: from the store into live objects.

The other road of restore: DCP's planner reshards where the world has changed, so it may come from a
job of another size. Everything is read, verified and checked before the first live tensor changes.
"""

from __future__ import annotations

from keepstep.edge.store.store import Store
from keepstep.edge.torch.dcp.read import read_checkpoint
from keepstep.edge.torch.restore import apply, check_kinds
from keepstep.edge.torch.state import LOADERS, RNG, Protected, kind_of, parameters_of


def load(url: str, step: int, rank: int, world_size: int, protected: Protected) -> list[str]:
    """Load checkpoint `step`. Returns remarks. Raises DamageError, StoreError, LayoutError; changes
    nothing when it raises."""
    store = Store(url)
    check_kinds(protected, store.read_manifest(step).fingerprint)
    parameters = {
        name: dict(enumerate(parameters_of(o)))
        for name, o in protected.objects.items()
        if kind_of(o) == "optimizer"
    }
    free = [
        name for name, value in protected.objects.items() if kind_of(value) == "stateful"
    ] + list(protected.values)
    free.append(LOADERS)
    loaded = read_checkpoint(
        store, step, rank, world_size, protected.tree(), params=parameters, free=free
    )
    remarks = []
    if loaded.manifest.world_size != world_size:
        # one rank's random states on all ranks would make their noise the same
        loaded.tree.pop(RNG)
        others = [name for name in loaded.unmapped if not name.startswith(f"{RNG}.")]
        remarks.append(
            f"the checkpoint is of {loaded.manifest.world_size} ranks, this job has {world_size}: "
            "random states stay as the program seeded them"
            + (f"; values of rank 0 serve all for {', '.join(others)}" if others else "")
        )
    return remarks + apply(protected, loaded.tree)
