"""Attempts: the ranks that a launcher has started together, told from those that it started before.

torchrun keeps one store over its restarts (torch 2.13, github.com/pytorch/pytorch/issues/135712): a
rank that is early finds there the address of a peer that was killed. Its count of restarts does not
tell attempts apart, for every node has a count of its own. So rank 0 takes a number from the store,
and tells it to each life of a rank that asks until all of them have it.

Comes in: what `init_process_group` is given. Goes out: the same, with a store for this attempt.
Decides nothing about who is alive. Invariant: all ranks of one attempt get the same store, and find
nothing in it that ranks of another have written.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

LOOK_EVERY_S = 0.02


def with_own_store(given: dict[str, Any]) -> dict[str, Any]:
    """What `init_process_group` is to be given instead. Blocks until all ranks are there, where the
    launcher keeps its store over restarts; `keepstep run` makes one for each."""
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not is_kept or "KEEPSTEP_ATTEMPT" in os.environ or given.get("store") is not None:
        return given
    rest = {**given}
    place, timeout = rest.pop("init_method", None), rest.get("timeout") or default_pg_timeout
    met = rendezvous(
        place or "env://", rest.get("rank", -1), rest.get("world_size", -1), timeout=timeout
    )
    store, rank, size = next(met)
    store.set_timeout(timeout)
    own = store_of_attempt(store, rank, size, timeout)
    return {**rest, "store": own, "rank": rank, "world_size": size}


def store_of_attempt(store: Any, rank: int, size: int, within: timedelta) -> PrefixStore:
    """Blocks until all `size` ranks are there. Raises DistStoreError when they do not come."""
    store = PrefixStore("keepstep/attempts", store)
    if rank == 0:
        attempt = str(store.add("count", 1))
        _tell_all(store, attempt, set(range(1, size)), within)
    else:
        answer = f"answers/{rank}/{store.add(f'lives/{rank}', 1)}"
        store.wait([answer], within)
        attempt = store.get(answer).decode()
        store.set(f"{attempt}/knows/{rank}", "1")
    return PrefixStore(f"{attempt}/store", store)


def _tell_all(store: Any, attempt: str, missing: set[int], within: timedelta) -> None:
    """The last life that the store knows of a rank may be one of an attempt before: it is answered,
    and its successor, too."""
    answered: dict[int, int] = {}
    deadline = time.monotonic() + within.total_seconds()
    while True:
        for rank in missing:
            life = store.add(f"lives/{rank}", 0)
            if life != answered.get(rank, 0):
                store.set(f"answers/{rank}/{life}", attempt)
                answered[rank] = life
        missing = {r for r in missing if not store.check([f"{attempt}/knows/{r}"])}
        if not missing:
            return
        if time.monotonic() > deadline:
            raise DistStoreError(
                f"keepstep.init_process_group: expected all ranks within {within}, found that "
                f"ranks {sorted(missing)[:8]} have not come"
            )
        time.sleep(LOOK_EVERY_S)
