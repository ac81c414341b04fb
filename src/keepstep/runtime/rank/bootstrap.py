"""Meeting: under a foreign launcher (torchrun, srun, or none), which ranks share a node, and how
the nodes' keepers learn of each other.

The ranks have a process group already; over it each tells where its node's keeper listens, and each
hands its keeper the whole mesh. Under `keepstep run` the agents do this. Never guesses: without a
process group it says what is missing.

Invariant: all ranks decide from the same gathered list, so they agree, or all of them raise the
same error.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.edge.os.machine import address_towards
from keepstep.errors import ConfigError
from keepstep.model.mesh import Member, Mesh
from keepstep.model.units import MS_NS

if TYPE_CHECKING:
    from keepstep.config import Settings
    from keepstep.runtime.rank.capture import Identity
    from keepstep.runtime.rank.keeper_client import Link

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Told:
    """What a rank says of its node's keeper. `fresh_secret` is for those who have none of their
    own, which never travels."""

    job: str
    host: str
    port: int
    incarnation: int
    rack: str | None
    own_secret: bool
    fresh_secret: str
    round: int

    @property
    def keeper(self) -> tuple[str, int, int]:
        return (self.host, self.port, self.incarnation)


def process_group() -> Any:
    """`torch.distributed` when it has a process group, else None."""
    distributed: Any = sys.modules.get("torch.distributed")
    return (
        distributed
        if distributed is not None and distributed.is_available() and distributed.is_initialized()
        else None
    )


def place_in_world(environ: Mapping[str, str]) -> tuple[int, int]:
    """(rank, world size) without a process group. Raises ConfigError in a Slurm step that has not
    said how its tasks belong together."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1" and not {"RANK", "WORLD_SIZE"} <= set(environ):
        raise ConfigError(
            f"protect() in a Slurm step of {tasks} tasks expected "
            "torch.distributed.init_process_group() before it, or RANK and WORLD_SIZE "
            "(0 and 1, and a KEEPSTEP_JOB each, for tasks that have nothing to do with each "
            "other), found neither"
        )
    return int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))


def count_here(arena_dir: Path) -> int:
    """How many ranks keep their slots in this memory: nobody has said so. All ranks call it. Raises
    ConfigError."""
    try:
        at = arena_dir.stat()
    except FileNotFoundError:
        raise ConfigError(
            f"arena_dir: expected a directory, found nothing at {arena_dir}"
        ) from None
    # two containers of one machine are two nodes
    memory = (BOOT_ID.read_text(), at.st_dev, at.st_ino)
    return _gather(memory).count(memory)


def meet(link: Link, settings: Settings, who: Identity) -> None:
    """All ranks call it. Raises ConfigError, KeeperError."""
    if process_group() is None:
        raise ConfigError(
            f"protect() with several nodes (LOCAL_WORLD_SIZE={who.local_world_size} of "
            f"WORLD_SIZE={who.world_size}) expected "
            "torch.distributed.init_process_group() before it, found none: the nodes' "
            "keepers have to hear of each other"
        )
    host, port, incarnation, newest_round = link.listen_at(_own_host(settings.host, os.environ))
    # Rounds begin at the time, as the agents' do, and whatever the clocks say grow past any that a
    # keeper has lived.
    round_ = max(time.time_ns() // MS_NS, newest_round + 1)
    own_secret = settings.secret is not None
    mine = Told(
        settings.job,
        host,
        port,
        incarnation,
        settings.rack,
        own_secret,
        "" if own_secret else secrets.token_hex(32),
        round_,
    )
    link.take_part(mesh_of(_gather(mine), who.rank, settings.secret))


def mesh_of(told: Sequence[Told], rank: int, own_secret: str | None) -> Mesh:
    """The mesh as this rank's node sees it, from what all ranks said, in their order. Raises
    ConfigError."""
    _check(told)
    nodes = [(keeper, list(ranks)) for keeper, ranks in groupby(told, key=lambda one: one.keeper)]
    if len({keeper for keeper, _ in nodes}) != len(nodes):
        order = [f"{host}:{port}" for (host, port, _), _ in nodes]
        raise ConfigError(
            "expected the ranks of a node in a row (with srun: --distribution=block), found "
            f"them on {', '.join(order)}"
        )
    members = tuple(
        Member(i, at[0], at[1], at[2], len(ranks), ranks[0].rack)
        for i, (at, ranks) in enumerate(nodes)
    )
    node = next(i for i, (keeper, _) in enumerate(nodes) if keeper == told[rank].keeper)
    return Mesh(max(one.round for one in told), node, members, own_secret or told[0].fresh_secret)


def _check(told: Sequence[Told]) -> None:
    jobs = sorted({one.job for one in told})
    if len(jobs) > 1:
        raise ConfigError(
            f"job: expected one name on all nodes, found {' and '.join(jobs)}; set KEEPSTEP_JOB"
        )
    for name, has in {
        "secret": [one.own_secret for one in told],
        "rack": [one.rack is not None for one in told],
    }.items():
        if len(set(has)) > 1:
            raise ConfigError(
                f"{name}: expected one for all nodes or for none, found one for rank "
                f"{has.index(True)}, none for {has.index(False)}"
            )


def _own_host(configured: str | None, environ: Mapping[str, str]) -> str:
    """Where other nodes find this one: on the way to where the ranks met. All ranks call it."""
    host = configured or _towards(environ.get("MASTER_ADDR", ""))
    others = [other for other in _gather(host) if not _is_loopback(other)]
    if configured is None and others and _is_loopback(host):
        # the machine they met on knows its own name as loopback, as Debian's do
        return _towards(others[0])
    return host


def _towards(host: str) -> str:
    if not host:
        raise ConfigError(
            "host: expected KEEPSTEP_HOST, the address at which other nodes reach this one, "
            "or MASTER_ADDR; found neither"
        )
    try:
        return address_towards(host)
    except OSError as error:
        raise ConfigError(
            f"host: expected a way to {host}, found none ({error.strerror}); set KEEPSTEP_HOST"
        ) from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _gather(mine: Any) -> list[Any]:
    """What every rank says, in their order."""
    distributed = process_group()
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, mine)
    return found
