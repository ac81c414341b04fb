"""Meeting: under a foreign launcher with several nodes (torchrun, srun), how their keepers learn of each other.

The ranks have a process group already; over it each tells where its node's keeper listens, and each hands its keeper the whole mesh. Under
`keepstep run` the agents do this. Never guesses: without a process group it says what is missing.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from itertools import groupby
from typing import TYPE_CHECKING, Any

from keepstep.edge.machine import address_towards
from keepstep.errors import ConfigError
from keepstep.model.mesh import Member, Mesh

if TYPE_CHECKING:
    from keepstep.config import Settings
    from keepstep.runtime.capturing import Identity
    from keepstep.runtime.link import Link


def meet(link: Link, settings: Settings, who: Identity) -> None:
    """All ranks call it. Raises ConfigError, KeeperError."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        raise ConfigError(
            f"protect() with several nodes (LOCAL_WORLD_SIZE={who.local_world_size} of WORLD_SIZE={who.world_size}) expected "
            "torch.distributed.init_process_group() before it, found none: the nodes' keepers have to hear of each other"
        )
    host = settings.host or address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))
    host, port, incarnation = link.listen_at(host)
    mine = (host, port, incarnation, settings.rack, settings.secret or secrets.token_hex(32), time.time_ns())
    found: list[Any] = [None] * who.world_size
    distributed.all_gather_object(found, mine)
    nodes = [(key, len(list(ranks))) for key, ranks in groupby(found, key=lambda one: one[:4])]
    if len({key for key, _ in nodes}) != len(nodes):
        raise ConfigError(f"expected the ranks of a node in a row, found nodes in the order {[key[:2] for key, _ in nodes]}")
    members = tuple(Member(i, at[0], at[1], at[2], ranks, at[3]) for i, (at, ranks) in enumerate(nodes))
    node = next(i for i, (key, _) in enumerate(nodes) if key == mine[:4])
    # Rounds grow with every start, on whatever machine rank 0 is; its secret is everybody's.
    link.take_part(Mesh(found[0][5] // 1_000_000, node, members, found[0][4]))
