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
    DeviceError,
    IdentityError,
    KeeperError,
    KeepstepError,
    LayoutError,
    MemoryBudgetError,
    PeerLost,
    StoreError,
    UnsavedError,
    UntrustedError,
    WrongNumbersError,
)

if TYPE_CHECKING:
    from keepstep.edge.torch.groups import init_process_group
    from keepstep.edge.torch.prebuilt import prebuilt
    from keepstep.runtime.rank.session import Job, protect

__version__ = "0.2.0"
__all__ = [
    "Config",
    "ConfigError",
    "DamageError",
    "DeviceError",
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
    "WrongNumbersError",
    "__version__",
    "init_process_group",
    "prebuilt",
    "protect",
]


def __getattr__(name: str) -> Any:
    if name in ("Job", "protect", "prebuilt", "init_process_group"):
        from keepstep.edge.os.needs import check_torch

        check_torch(f"keepstep.{name}")
    if name in ("Job", "protect"):
        from keepstep.runtime.rank import session

        return getattr(session, name)
    if name == "init_process_group":
        from keepstep.edge.torch.groups import init_process_group

        return init_process_group
    if name == "prebuilt":
        from keepstep.edge.torch.prebuilt import prebuilt

        return prebuilt
    raise AttributeError(f"module 'keepstep' has no attribute {name!r}")
