"""Job store: the store of a job as all its processes open it: keeper, persister and ranks.

Comes in: settings. Goes out: a Store whose user is the job, and which signs with the job's own
secret. One that is made anew at each start signs nothing: the next start could not read it.
"""

from __future__ import annotations

from keepstep.config import Settings
from keepstep.edge.store.owner import StoreUser
from keepstep.edge.store.signer import Signer
from keepstep.edge.store.store import Store


def open_job_store(settings: Settings) -> Store:
    """Raises StoreError when no filesystem answers to its URL. Touches nothing yet."""
    assert settings.store is not None
    signer = None if settings.secret is None else Signer(settings.secret)
    return Store(settings.store, user=StoreUser(settings.job, settings.adopt), signer=signer)
