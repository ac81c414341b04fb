"""Checkpoint: from the store into live objects.

The other road of restore: a checkpoint is resharded by DCP's planner where the world has changed, so it may come from a job
of another size. Everything is read, verified and checked before the first live tensor changes.
"""

from __future__ import annotations

from keepstep.edge.torch.state import Protected


def load(url: str, step: int, rank: int, world_size: int, protected: Protected) -> list[str]:
    """Load checkpoint `step`. Returns remarks. Raises DamageError, StoreError, LayoutError; changes nothing when it raises."""
    raise NotImplementedError
