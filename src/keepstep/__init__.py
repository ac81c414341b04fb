"""keepstep: every training step survives.

    job = keepstep.protect(model=model, optimizer=optimizer)
    for step in job.steps(1000):
        train_one()

Importing this package imports neither torch nor numpy; `protect` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keepstep.config import Config
from keepstep.errors import (
    ConfigError,
    DamageError,
    IdentityError,
    KeeperError,
    KeepstepError,
    LayoutError,
    MemoryBudgetError,
    PeerLost,
    StoreError,
    UnsavedError,
    UntrustedError,
)

if TYPE_CHECKING:
    from keepstep.edge.torch.groups import init_process_group
    from keepstep.runtime.rank.session import Job, protect

__version__ = "0.1.0"
__all__ = [
    "Config",
    "ConfigError",
    "DamageError",
    "IdentityError",
    "Job",
    "KeeperError",
    "KeepstepError",
    "LayoutError",
    "MemoryBudgetError",
    "PeerLost",
    "StoreError",
    "UnsavedError",
    "UntrustedError",
    "__version__",
    "init_process_group",
    "protect",
]


def __getattr__(name: str) -> Any:
    if name in ("Job", "protect", "init_process_group"):
        from keepstep.edge.os.needs import check_torch

        check_torch(f"keepstep.{name}")
    if name in ("Job", "protect"):
        from keepstep.runtime.rank import session

        return getattr(session, name)
    if name == "init_process_group":
        from keepstep.edge.torch.groups import init_process_group

        return init_process_group
    raise AttributeError(f"module 'keepstep' has no attribute {name!r}")
