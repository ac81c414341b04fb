"""Checkpoint: from the store into live objects.

The other road of restore: DCP's planner reshards where the world has changed, so it may come from a
job of another size. Everything is read, verified and checked before the first live tensor changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from keepstep.edge.store.store import Store
from keepstep.edge.torch.beside import learning
from keepstep.edge.torch.dcp.read import read_checkpoint
from keepstep.edge.torch.fits import buffer_names, check_kinds, growth
from keepstep.edge.torch.parts import kind_of, parameters_of
from keepstep.edge.torch.plan import BESIDE
from keepstep.edge.torch.restore import Unpacked, apply
from keepstep.edge.torch.state import LOADERS, RNG, Protected
from keepstep.edge.torch.tree import local_part, named_tensors
from keepstep.model.units import counted


def load(store: Store, step: int, rank: int, world_size: int, protected: Protected) -> list[str]:
    """Load checkpoint `step` of the newest run. Returns remarks. Raises DamageError, StoreError,
    LayoutError; changes nothing when it raises."""
    store = store.as_taken()
    about = store.read_manifest(step).fingerprint
    check_kinds(protected, about)
    parts = protected.parts()
    parameters = {
        name: dict(enumerate(_parameters(protected, name, part, about)))
        for name, part in parts.items()
        if isinstance(part, torch.optim.Optimizer)
    }
    free = [
        *(name for name, part in parts.items() if kind_of(part) in ("stateful", "generator")),
        *protected.values,
        BESIDE,
        LOADERS,
    ]
    template = protected.tree()
    template[BESIDE] = {**template[BESIDE], "gradients": dict(learning(parts))}
    loaded = read_checkpoint(
        store,
        step,
        rank,
        world_size,
        template,
        params=parameters,
        free=free,
        grown_names=buffer_names(protected.about()) | buffer_names(about),
        vocabulary=protected.vocabulary(),
    )
    remarks = []
    if loaded.manifest.world_size != world_size:
        # one rank's random states on all ranks would make their noise the same
        loaded.tree.pop(RNG)
        others = [name for name in loaded.unmapped if not name.startswith(f"{RNG}.")]
        remarks.append(
            f"the checkpoint is of {counted(loaded.manifest.world_size, 'rank')}, this job has "
            f"{world_size}: random states stay as the program seeded them"
            + (f"; values of rank 0 serve all for {', '.join(others)}" if others else "")
        )
    opened = Unpacked(loaded.tree, about, _same(loaded.tree), are_plain=True)
    return remarks + apply(protected, opened)


def _same(tree: Mapping[str, Any]) -> dict[int, int]:
    """See `Refill`: which of the loaded tensors were one when they were saved."""
    shared = tree.get(BESIDE, {}).get("shared", {})
    if not shared:
        return {}
    tensors = dict(named_tensors(tree))
    return {
        local_part(tensors[name]).data_ptr(): local_part(tensors[first]).data_ptr()
        for name, first in shared.items()
        if name in tensors and first in tensors
    }


def _parameters(
    protected: Protected, name: str, optimizer: torch.optim.Optimizer, about: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The optimizer's parameters as it will have them once it is loaded."""
    wanted = growth(protected, name, about)
    added = [] if wanted is None else [t for group in wanted.added for t in group]
    return parameters_of(optimizer) + added
